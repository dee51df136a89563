"""Matrix products, the operators behind scaled_dot_product_attention, and what cuDNN runs: convolutions, normalization.

Of convolutions, copies are read in sources, and what cuDNN's algorithms need is an estimate.

How many bytes an algorithm needs is known to cuDNN alone, and which one it takes depends on a search or on heuristics.
The estimates are learned, not read: they are what fits nvidia-smi's figures of 260 models of timm that trained in
float32 on an A100 (benchmarks/published/timm.py), and were compared with as many others. Both halves are 1.3 % off at
the median. Nothing was learned about other types, GPUs and dimensions.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memcheck.core import devices, tensors
from memcheck.simulated import scratch
from memcheck.simulated.facts.elementwise import block_copying
from memcheck.simulated.scratch import Facts, OperatorCall, Scratch, Unknown, add, doubt

ONEDNN = "what oneDNN takes in products of 16-bit matrices"
LT_WORKSPACE, LT_WORKSPACE_BYTES = "cublasLt workspace", 2**20  # The default of CUBLASLT_WORKSPACE_SIZE.
SMALL_PRODUCT = 400  # Matrix products with fewer multiplications use a loop instead of BLAS.


def fits_blas(tensor: Tensor) -> bool:
    """Whether BLAS can read the last two dimensions in place, by rows or by columns."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def operands_of(call: OperatorCall) -> list[Tensor]:
    """The two matrices, or batches of them, of a product."""
    if "batch1" in call.arguments:
        return [call.batch1, call.batch2]
    return [call.mat1, call.mat2] if "mat1" in call.arguments else [call.self, call.mat2]


def copies_for_cublas(call: OperatorCall) -> Iterator[Scratch]:
    """cuBLAS needs a copy of an operand whose layout it cannot read, such as an expanded gradient."""
    for operand in operands_of(call):
        if not fits_blas(operand) and not (operand.dim() == 3 and operand.is_contiguous()):
            yield Scratch("operand laid out for cuBLAS", operand.nbytes)
    if call.name == "aten::addmm" and uses_cublas_lt(call) and not call.target.has(devices.LT_WORKSPACE_SHARED):
        yield Scratch(LT_WORKSPACE, LT_WORKSPACE_BYTES, kept=call.target.has(devices.LT_WORKSPACE_KEPT))


def uses_cublas_lt(call: OperatorCall) -> bool:
    """Whether the product adds a bias as cublasLt's epilogue: addmm_out_cuda_impl."""
    bias, matrix = call.self, call.mat2
    is_bias = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == matrix.shape[1]
    return is_bias and call.beta == 1 and min(matrix.shape) > 1 and call.target.has_workspaces


def copies_for_blas(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """On the CPU, batches of matrices that MKL cannot read are copied and multiplied one by one."""
    left, right = operands_of(call)
    if call.name == "aten::addmm":
        yield from block_copying(call.self, call.outputs[0])
    if left.numel() == 0 or right.numel() == 0:
        if call.name == "aten::baddbmm":
            yield scratch.unlisted(call)
        return
    if not products_are_plain(tensors.dtype_name(left)):
        yield Unknown(ONEDNN)
        return
    if left.dim() == 3 and is_read_in_place(left, right):
        return
    for operand in (left, right):
        if not fits_blas(operand):
            matrices = len(operand) if operand.dim() == 3 else 1
            yield Scratch("matrix laid out for BLAS", operand.nbytes // matrices)


def products_are_plain(dtype: str) -> bool:
    """Whether products of this dtype need no scratch. oneDNN allocates some where it has 16-bit instructions."""
    if dtype == "bfloat16" and torch.backends.mkldnn.is_available():
        return False
    if dtype == "float16" and platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def is_read_in_place(left: Tensor, right: Tensor) -> bool:
    """Whether a batch is read in place: by a plain loop, or as a whole by MKL."""
    if left.shape[2] * left.shape[1] * right.shape[2] < SMALL_PRODUCT:
        return True
    wide = left.dtype in (torch.float32, torch.float64)
    return wide and torch.backends.mkl.is_available() and all(in_rows_or_columns(operand) for operand in (left, right))


def in_rows_or_columns(operand: Tensor) -> bool:
    """Whether MKL can read every matrix of the batch in place."""
    (_, rows, columns), (_, row, column) = operand.shape, operand.stride()
    return (column == 1 and (rows == 1 or row >= columns)) or (row == 1 and (columns == 1 or column >= rows))


PRODUCTS: Facts = {"cpu": copies_for_blas, "cuda": copies_for_cublas, "uses_cublas": True}
PRODUCTS["source"] = "LinearAlgebra.cpp cuda/Blas.cpp"
add("mm", "rows @ square[:, :5]", **PRODUCTS)
add("addmm", "torch.addmm(x.new_ones(5), rows, square[:, :5])", **PRODUCTS)
add("bmm", "batch @ batch.mT", **PRODUCTS)
add("baddbmm", "torch.baddbmm(x.new_ones(1), batch, batch.mT)", **PRODUCTS)
add("addbmm", "torch.addbmm(x.new_ones(1), batch, batch.mT)", uses_cublas=True, source="LinearAlgebra.cpp")


KEYS_OF_A_TILE = 512
EDGE = 64  # Rows and columns of a tile of efficient attention's backward, of heads with up to 64 channels in float32.


def attention_sizes(call: OperatorCall) -> tuple[Tensor, int, int, int]:
    """Returns q, S, T, D."""
    return call.query, call.query.shape[2], call.key.shape[2], call.query.shape[3]


def rows_of_a_tile(queries: int) -> int:
    """The number of queries that a tile of the CPU's flash attention has."""
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def flash_tiles(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Per thread: scores, maxima and sums, and a part of y; in 16 bits a second copy of the scores."""
    q, S, T, D = attention_sizes(call)
    rows, columns = rows_of_a_tile(S), min(T, KEYS_OF_A_TILE)
    wide = torch.promote_types(q.dtype, torch.float32).itemsize
    yield Scratch("tiles", call.target.threads * rows * (columns + 2 + D) * wide)
    if q.element_size() < 4:
        yield Scratch("tiles in 16 bits", call.target.threads * rows * columns * q.element_size())
        if torch.cpu._is_amx_tile_supported():
            yield Unknown("whether flash attention packs keys and values for AMX")


def flash_tiles_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Tiles, a copy of a gradient that is not laid out as y is, and sums that each thread allocates and frees."""
    q, S, T, _ = attention_sizes(call)
    threads, rows, columns = call.target.threads, rows_of_a_tile(S), min(T, KEYS_OF_A_TILE)
    wide = torch.promote_types(q.dtype, torch.float32).itemsize
    if not call.grad_out.transpose(1, 2).is_contiguous():
        yield Scratch("gradient of y, laid out", call.grad_out.nbytes)
    yield Scratch("tiles", threads * 2 * rows * columns * wide)
    if q.element_size() < 4:
        yield Scratch("tiles in 16 bits", threads * 2 * rows * columns * q.element_size())
        yield Unknown(ONEDNN)
    yield Scratch("sums of rows", threads * rows * wide)
    if threads > 1:
        yield scratch.RunDependent(f"how many of {threads} threads have their sums of rows at once")


def flash_splits(call: OperatorCall) -> Iterator[Unknown]:
    """With few queries the keys are divided among blocks of threads, by the number of the GPU's multiprocessors.

    With 256 tiles of queries or more, no existing GPU divides them.
    """
    q, S, T, D = attention_sizes(call)
    keys = 256 if D <= 64 else 128 if D <= 128 else 64
    if q.shape[0] * q.shape[1] * -(-S // 64) < 256 and keys < T:
        yield Unknown("among how many blocks of threads flash attention divides the keys")


def flash_backward(call: OperatorCall) -> Iterator[Scratch]:
    """Copies of y and its gradient unless they are laid out as (B,S,H,D), and dq accumulated in float32.

    If keys and values have fewer heads than queries, their gradients are made for every query's head first.
    """
    q, S, T, D = attention_sizes(call)
    if call.key.shape[1] != q.shape[1]:
        for name in ("dk", "dv"):
            yield Scratch(f"{name} of every head", q.shape[0] * q.shape[1] * T * D * q.element_size())
    for name, tensor in (("gradient of y, laid out", call.grad_out), ("y, laid out", call.out)):
        if not tensor.transpose(1, 2).is_contiguous():
            yield Scratch(name, tensor.nbytes)
    rows = q.shape[0] * q.shape[1] * (-(-S // 128) * 128)
    yield Scratch("sums of rows", rows * 4)
    yield Scratch("dq in float32", rows * (-(-D // 32) * 32 if D <= 192 else 256) * 4)


def efficient_forward(call: OperatorCall) -> Iterator[Scratch]:
    """y is accumulated in float32 if a head does not fit into registers."""
    y = call.outputs[0]
    if y.element_size() < 4 and y.shape[-1] > 128:
        yield Scratch("y in float32", y.numel() * 4)


def efficient_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    is_inner = call.name == "aten::_efficient_attention_backward"
    grad: Tensor = call.arguments["grad_out" if "grad_out" in call.arguments else "grad_out_"]
    if not (grad if is_inner else grad.transpose(1, 2)).is_contiguous():
        yield Scratch("gradient of y, laid out", grad.nbytes)
    if grad.element_size() == 4:
        yield Scratch("gradient of y times y", grad.nbytes)
    yield Scratch("sums of rows", grad.numel() // grad.shape[-1] * 4)
    q, architecture = call.query, call.target.architecture
    if q.dtype != torch.float32 or is_inner or max(q.shape[-1], call.value.shape[-1]) > EDGE or architecture != (8, 0):
        yield Unknown("the workspace of efficient attention's backward")
        return
    # A lock and a tile of dq: workspace_elements_gq in transformers/cuda/mem_eff_attention/kernel_backward.h.
    tiles = q.shape[0] * q.shape[1] * -(-q.shape[2] // EDGE)
    yield Scratch("dq, a tile for each block of threads", tiles * (16 + EDGE * EDGE * 4))


HEADS = "_scaled_dot_product_"
CPU_FLASH: Facts = {"source": "cpu/FlashAttentionKernel.cpp"}
add(f"{HEADS}flash_attention_for_cpu", "ops.{name}(q, q, q)[0]", cpu=flash_tiles, **CPU_FLASH)
add(f"{HEADS}flash_attention_for_cpu_backward", "ops.{forward}(q, q, q)[0]", cpu=flash_tiles_backward, **CPU_FLASH)
CUDA: Facts = {"source": "transformers/cuda/attention.cu transformers/cuda/attention_backward.cu"}
add(f"{HEADS}flash_attention", "ops.{name}(q, q, q)[0]", cuda=flash_splits, **CUDA)
add(f"{HEADS}flash_attention_backward", "ops.{forward}(q, q, q)[0]", cuda=flash_backward, **CUDA)
# The seeds of an unused dropout are CPU tensors.
EFFICIENT: Facts = {"cuda": efficient_forward, "on_host": (2, 3), **CUDA}
add(f"{HEADS}efficient_attention", "ops.{name}(q, q, q, None, True)[0]", **EFFICIENT)
EXAMPLE = "ops._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0, True)[0]"
add("_efficient_attention_forward", EXAMPLE, **EFFICIENT)
add(f"{HEADS}efficient_attention_backward", "ops.{forward}(q, q, q, None, True)[0]", cuda=efficient_backward, **CUDA)
add("_efficient_attention_backward", EXAMPLE, cuda=efficient_backward, **CUDA)
CUDNN = f"{HEADS}cudnn_attention {HEADS}cudnn_attention_backward"
add(CUDNN, "ops.{forward}(q, q, q, None, True)[0]", cuda=doubt(Unknown("the workspace of cuDNN's plan")), **CUDA)


LEARNED = Unknown("what cuDNN's algorithms need in convolutions, of which an estimate is included")


@dataclass(frozen=True)
class Need:
    """The workspace of an algorithm, in multiples of the bytes of the convolution's input and output."""

    inputs: float = 0
    outputs: float = 0


NOTHING = Need()
# As if tensors were laid out anew once, or transformed to twice as much.
ONCE, TWICE, INPUTS_TWICE = Need(1, 1), Need(2, 2), Need(inputs=2)


def needed(call: OperatorCall) -> Need:
    """The workspace that was learned. None was seen in groups, kernels of one point and channels_last."""
    size, is_forward = tuple(call.weight.shape[-2:]), call.name == "aten::convolution"
    if call.groups > 1 or size == (1, 1) or is_channels_last(call):
        return NOTHING
    if call.input.shape[1] <= 4:  # An image.
        return TWICE if not is_forward and size[0] >= 7 and max(call.stride) == 2 else NOTHING
    if max(call.stride) > 1:
        return INPUTS_TWICE
    if size != (3, 3):
        return NOTHING
    return ONCE if is_forward else TWICE


def convolution(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Operands are laid out as cuDNN reads them, and its algorithm has a workspace.

    Depthwise convolutions of 32 bits in channels_first run in a kernel of torch's own: use_cudnn_depthwise.
    """
    x, w, y = call.input, call.weight, call.arguments.get("grad_output", call.outputs[0])
    if 0 in (x.numel(), w.numel(), y.numel()):
        return
    yield from laid_out(call)
    if is_depthwise(call) and not is_channels_last(call):
        if x.element_size() < 4:
            yield Unknown("whether cuDNN runs depthwise convolutions of 16 bits")
        return
    need, search = needed(call), ""
    if call.target.searches:
        sizes = (tuple(x.shape), tuple(w.shape), tuple(call.stride), tuple(call.padding), tuple(call.dilation))
        search = f"{call.name} {x.dtype} {sizes} {call.groups}"
    workspace = int(need.inputs * x.nbytes + need.outputs * y.nbytes) + (w.nbytes if need != NOTHING else 0)
    yield Scratch("cuDNN's workspace, estimated", workspace, search=search)
    yield LEARNED


def laid_out(call: OperatorCall) -> Iterator[Scratch]:
    """Copies of operands that are not contiguous in the convolution's memory format: _convolution, and its backward."""
    like = torch.contiguous_format
    if is_channels_last(call):
        like = torch.channels_last if call.input.dim() == 4 else torch.channels_last_3d
    for name in ("input", "weight", "grad_output"):
        operand = call.arguments.get(name)
        if operand is not None and not operand.is_contiguous(memory_format=like):
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)


def is_channels_last(call: OperatorCall) -> bool:
    """cudnn_conv_suggest_memory_format: the input or the weight is in channels_last."""
    return any(suggests_channels_last(operand) for operand in (call.input, call.weight))


def suggests_channels_last(x: Tensor) -> bool:
    """Tensor::suggest_memory_format, which takes shapes that fit both for contiguous ones."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def is_depthwise(call: OperatorCall) -> bool:
    channels = call.input.shape[1]
    return not call.transposed and call.groups == channels > 1 and call.weight.shape[0] % channels == 0


CONVOLUTION: Facts = {"cuda": convolution, "source": "Convolution.cpp cudnn/Conv_v8.cpp cudnn/ConvShared.cpp"}
CONVOLUTIONS = (
    "F.conv2d(batch[:, None], batch.new_ones(4, 1, 3, 3)), F.conv1d(batch, batch.new_ones(2, batch.shape[1], 3))"
)
add("convolution convolution_backward", CONVOLUTIONS, **CONVOLUTION)


def group_norm(call: OperatorCall) -> Iterator[Scratch]:
    """Factor and summand of each channel; 16 bits also have mean and rstd in float32: GroupNormKernelImplInternal."""
    x, wide = call.input, torch.promote_types(call.input.dtype, torch.float32).itemsize
    if x.dtype.itemsize < 4:
        yield Scratch("mean and rstd in float32", 2 * call.N * call.group * wide)
    if call.HxW != 1 and (call.weight is not None or call.bias is not None):
        yield Scratch("factor and summand of each channel", 2 * call.N * call.C * wide)


def group_norm_backward(call: OperatorCall) -> Iterator[Scratch]:
    """ds, db and c1 (N,C), c2 and c3 (N,G): GroupNormBackwardKernelImplInternal, GroupNorm1dBackward."""
    wide = torch.promote_types(call.input.dtype, torch.float32).itemsize
    if call.HxW != 1:
        yield Scratch("ds and db", 2 * call.N * call.C * wide)
    if call.output_mask[0]:
        yield Scratch("c2 and c3", 2 * call.N * call.group * wide)
        if call.HxW != 1 and call.weight is not None:
            yield Scratch("c1", call.N * call.C * wide)


def copies_in_one_format(call: OperatorCall) -> Iterator[Scratch]:
    """Operands are copied unless they are contiguous in the memory format that the input has."""
    x: Tensor = call.arguments["input" if "input" in call.arguments else "self"]
    like = torch.contiguous_format
    if suggests_channels_last(x):
        like = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    for name in ("input", "self", "grad_out", "grad_output", "indices"):
        operand = call.arguments.get(name)
        if isinstance(operand, Tensor) and not operand.is_contiguous(memory_format=like):
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)


def gradient_in_its_format(call: OperatorCall) -> Iterator[Scratch]:
    """The gradient of the output is copied unless it is contiguous in its own memory format."""
    if not (call.grad_output.is_contiguous() or suggests_channels_last(call.grad_output)):
        yield Scratch("grad output, laid out", call.grad_output.nbytes, first=True)


def batch_norm(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """cuDNN normalizes what has a weight and a bias, in training: _batch_norm_impl_index.

    What it takes in channels_first is too little to be seen in nvidia-smi's figures of timm's models.
    """
    yield from copies_in_one_format(call)
    if call.arguments.get("training", call.arguments.get("train")) and call.weight is not None:
        yield Unknown("the reserve and the workspace of cuDNN's batch norm")
    elif suggests_channels_last(call.input):
        yield Unknown("the partial sums of batch norm in channels_last")


GROUP: Facts = {"source": "group_norm.cpp cuda/group_norm_kernel.cu"}
GROUPS = "F.group_norm(batch, 1, batch.new_ones(batch.shape[1]))"
add("native_group_norm", GROUPS, cuda=group_norm, **GROUP)
add("native_group_norm_backward", GROUPS, cuda=group_norm_backward, **GROUP)
BATCH: Facts = {"cuda": batch_norm, "source": "Normalization.cpp cuda/Normalization.cu cudnn/BatchNorm.cpp"}
add("native_batch_norm native_batch_norm_backward", "F.batch_norm(batch, None, None, training=True)", **BATCH)

POOLING: Facts = {"cuda": copies_in_one_format}
MAXIMA = "F.max_pool2d(batch[None], 2)"
add("max_pool2d_with_indices max_pool2d_with_indices_backward", MAXIMA, source="cuda/DilatedMaxPool2d.cu", **POOLING)
add("avg_pool2d avg_pool2d_backward", "F.avg_pool2d(batch[None], 2)", source="cuda/AveragePool2d.cu", **POOLING)
ADAPTIVE = "F.adaptive_avg_pool2d(batch[None], 3)"
ADAPTIVE_SOURCE = "cuda/AdaptiveAveragePooling.cu"
add("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward", ADAPTIVE, source=ADAPTIVE_SOURCE, **POOLING)

unread = doubt(
    Unknown("whether {} copies what is not contiguous"),
    lambda call: not call.arguments["grad_output" if "grad_output" in call.arguments else "self"].is_contiguous(),
)
RESAMPLED = {"nearest": "UpSampleNearest2d.cu", "bicubic": "UpSampleBicubic2d.cu"}
for kind, source in RESAMPLED.items():
    names = f"upsample_{kind}2d upsample_{kind}2d_backward"
    add(names, f"F.interpolate(batch[None], scale_factor=2, mode='{kind}')", cuda=unread, source=f"cuda/{source}")
BILINEAR = "ops.upsample_bilinear2d(batch[None], [6, 6], False)"
RESAMPLING: Facts = {"source": "cuda/UpSampleBilinear2d.cu"}
add("upsample_bilinear2d", BILINEAR, cuda=scratch.nothing, **RESAMPLING)
add("upsample_bilinear2d_backward", BILINEAR, cuda=gradient_in_its_format, **RESAMPLING)
PADS = "reflection_pad2d reflection_pad2d_backward"
add(PADS, "F.pad(batch[None], (1, 1, 1, 1), mode='reflect')", cuda=unread, source="cuda/ReflectionPad.cu")
PRELU = "_prelu_kernel _prelu_kernel_backward"
add(PRELU, "F.prelu(batch, x.new_ones(1))", cuda=scratch.nothing, source="cuda/ActivationPreluKernel.cu")

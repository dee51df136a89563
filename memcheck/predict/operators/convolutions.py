"""Normalization, pooling, resampling and convolutions on CUDA.

Of convolutions, copies are read in sources, and what cuDNN's algorithms need is an estimate.

How many bytes an algorithm needs is known to cuDNN alone, and which one it takes depends on a search or on heuristics.
The estimates are learned, not read: they are what fits nvidia-smi's figures of 260 models of timm that trained in
float32 on an A100 (benchmarks/published/timm.py), and were compared with as many others. Both halves are 1.3 % off at
the median. Nothing was learned about other types, GPUs and dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memcheck.predict.scratch import Facts, OperatorCall, Scratch, Unknown, add, doubt, nothing

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
EXAMPLE = "F.conv2d(batch[:, None], batch.new_ones(4, 1, 3, 3)), F.conv1d(batch, batch.new_ones(2, batch.shape[1], 3))"
add("convolution convolution_backward", EXAMPLE, **CONVOLUTION)


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
add("upsample_bilinear2d", BILINEAR, cuda=nothing, **RESAMPLING)
add("upsample_bilinear2d_backward", BILINEAR, cuda=gradient_in_its_format, **RESAMPLING)
PADS = "reflection_pad2d reflection_pad2d_backward"
add(PADS, "F.pad(batch[None], (1, 1, 1, 1), mode='reflect')", cuda=unread, source="cuda/ReflectionPad.cu")
PRELU = "_prelu_kernel _prelu_kernel_backward"
add(PRELU, "F.prelu(batch, x.new_ones(1))", cuda=nothing, source="cuda/ActivationPreluKernel.cu")

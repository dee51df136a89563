"""Rules for scratch: what kernels allocate besides their outputs, which no dispatcher sees, on the CPU and on CUDA.

They were read in torch 2.13's kernels. Those of memcheck's operators are in memcheck.predict.scratch_memcheck and
scratch_sequences.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memcheck.core.tensors import dtype_name, tensors_in
from memcheck.predict.allocator import rounded_up
from memcheck.predict.plain_operators import are_plain, takes_nothing
from memcheck.predict.torch_versions import (
    NEWEST_TRIED,
    WORKSPACES_ON_BLACKWELL,
    WORKSPACES_ON_THOR,
    TorchChange,
    Version,
)


@dataclass(frozen=True)
class Target:
    """The device and software for which kernels are predicted."""

    kind: str  # "cpu" or "cuda".
    threads: int = 1
    architecture: tuple[int, int] | None = None  # Compute capability of a GPU: (8, 0).
    torch_version: Version = NEWEST_TRIED
    has_workspaces: bool = True  # False: cuBLAS's workspaces are left out.

    def has(self, change: TorchChange) -> bool:
        return change.is_in(self.torch_version)

    @property
    def cublas_workspace_bytes(self) -> int:
        """The default of CUBLAS_WORKSPACE_CONFIG: :4096:2:16:8, or 32 MiB on newer GPUs."""
        major = self.architecture[0] if self.architecture else 0
        large = {9}
        if self.has(WORKSPACES_ON_BLACKWELL):
            large |= {10, 12}
        if self.has(WORKSPACES_ON_THOR):
            large |= {11}
        return 32 * 2**20 if major in large else (2 * 4096 + 8 * 16) * 2**10


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator on meta tensors, with its result."""

    name: str  # "aten::bmm"
    arguments: dict[str, Any]  # By name.
    outputs: tuple[Tensor, ...]
    target: Target
    is_view: bool = False  # By the schema: every result is a view of an operand that is not modified.
    contents: Callable[[Tensor], Tensor | None] = lambda x: None if x.is_meta else x  # None: they are not known.

    def __getattr__(self, name: str) -> Any:
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Scratch:
    """Memory that a kernel allocates and frees."""

    name: str
    bytes: int
    first: bool = False  # Allocated before the outputs.


class Unknown(str):
    """A sentence about an allocation that shapes do not determine."""


class Unlisted(Unknown):
    """A sentence about an operator without a rule: neither its scratch nor the sizes of its results are known."""


class Varies(Unknown):
    """A sentence about an allocation that differs from run to run."""


class FreedLate(Varies):
    """A sentence about an allocation that another thread may free only after the operator, even after the phase."""


Rule = Callable[[OperatorCall], Iterator[Scratch | Unknown]]


def call_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, target: Target, **more: Any
) -> OperatorCall:
    schema = func._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    outputs = output if isinstance(output, tuple | list) else (output,)
    tensors = tuple(tensor for tensor in outputs if isinstance(tensor, Tensor))
    arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return OperatorCall(schema.name, arguments, tensors, target, is_view(schema), **more)


def is_view(schema: Any) -> bool:
    """Whether every result is a view of an operand that is not modified."""
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def scratch_of(call: OperatorCall) -> list[Scratch | Unknown]:
    """The scratch that is alive at the highest sum of the call, and what is unknown about it."""
    kind, tensors = call.target.kind, list(tensors_in(call.arguments))
    if any(x.layout != torch.strided for x in tensors) and not call.is_view:
        return [] if call.name.removeprefix("aten::") in OF_SPARSE else [unlisted(call)]
    rule = RULES.get((call.name, kind)) or RULES.get((call.name, "any"))
    if rule is not None and (kind != "cpu" or are_plain(tensors)):
        return [part for part in rule(call) if isinstance(part, Unknown) or part.bytes]
    if call.is_view or takes_nothing(call.name, kind, call.arguments, call.outputs):
        return []
    return [unlisted(call)]


def unlisted(call: OperatorCall) -> Unlisted:
    return Unlisted(f"what {call.name} takes beside its outputs")


RULES: dict[tuple[str, str], Rule] = {}
# Of sparse tensors, they take nothing beside their outputs.
OF_SPARSE = ("clone", "_nnz", "dense_dim", "is_coalesced", "sparse_dim")


def rule(kind: str, *names: str) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for operators on "cpu", "cuda" or "any" device."""

    def register(function: Rule) -> Rule:
        RULES.update({(name if "::" in name else f"aten::{name}", kind): function for name in names})
        return function

    return register


def uses_cublas(call: OperatorCall) -> bool:
    """Whether the operator is a matrix product, which needs a cuBLAS workspace on CUDA."""
    return call.name.removeprefix("aten::") in PRODUCTS or call.name in PRODUCTS


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm"}


@rule("any", "_safe_softmax")
def rows_of_nothing(call: OperatorCall) -> Iterator[Scratch]:
    """Rows whose scores are all -inf become zeros. The kernel marks them with one byte per score and one per row."""
    (y,) = call.outputs
    yield Scratch("scores that are -inf, a byte each", y.numel())
    yield Scratch("rows of them alone, a byte each", y.numel() // max(y.shape[call.dim], 1))
    yield Scratch("zero", y.element_size())


@rule("any", "_efficientzerotensor")
def zeros_of_no_memory(call: OperatorCall) -> Iterator[Scratch]:
    """Zeros that a tangent starts from have no memory, and this takes none."""
    yield from ()


ELEMENTWISE = ("add", "sub", "mul", "div", "rsub", "gt", "lt", "ge", "le", "eq", "ne", "add_", "sub_", "mul_", "div_")


# The dtypes of tensors that are made of Python's numbers.
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@rule("cpu", *ELEMENTWISE)
def conversions(call: OperatorCall) -> Iterator[Scratch]:
    """The CPU's elementwise kernels copy operands, and an existing output, that do not have the common type.

    A number from C++ comes as a scalar, and becomes a tensor of 8 bytes.
    """
    operands = [call.arguments[name] for name in ("self", "other")]
    common = torch.result_type(*operands)
    if call.name.startswith("aten::div") and call.arguments.get("rounding_mode") is None:
        common = torch.promote_types(common, torch.get_default_dtype()) if is_whole(common) else common
    if call.name.endswith("_") and call.self.dtype != common:
        yield Scratch("result in the common type", call.self.numel() * common.itemsize)
    for operand in operands:
        if isinstance(operand, Tensor):
            if operand.dtype != common:
                yield Scratch("operand in the common type", operand.numel() * common.itemsize, first=True)
        else:
            own = NUMBERS[type(operand)]
            yield Scratch("number", own.itemsize, first=True)
            if common != own:
                yield Scratch("operand in the common type", common.itemsize, first=True)


@rule("cpu", "clone", "copy_", "_to_copy")
def copies(call: OperatorCall) -> Iterator[Scratch]:
    x = call.arguments.get("src", call.self)
    if isinstance(x, Tensor):
        yield from block_copying(x, call.outputs[0])
    else:
        yield Scratch("number", NUMBERS[type(x)].itemsize, first=True)


def block_copying(x: Tensor, y: Tensor | None = None) -> Iterator[Scratch]:
    """A large transposed matrix x is copied into a contiguous y, by default a new one, block by block in a buffer."""
    is_transposed = x.dim() == 2 and x.stride() == (1, x.shape[0]) and x.numel() >= 60 * 60
    if is_transposed and (y is None or (y.shape == x.shape and y.is_contiguous() and y.dtype == x.dtype)):
        edge = 120 if x.dtype == torch.uint8 else 60
        yield Scratch("block of a transposed matrix", edge * edge * x.element_size())


@rule("cpu", "masked_fill")
def filled_copy(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    if takes_nothing(call.name, "cpu", call.arguments, call.outputs):
        yield from block_copying(call.self, call.outputs[0])
    else:
        yield unlisted(call)


def is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


@rule("cpu", "mean")
def mean_scratch(call: OperatorCall) -> Iterator[Scratch]:
    """The sum is divided in place by the number of terms, which becomes two tensors. 16 bits are summed in float32."""
    (y,) = call.outputs
    wide = torch.promote_types(y.dtype, torch.float32)
    terms = call.self.numel() * wide.itemsize if call.self.dtype != wide else 0
    yield Scratch("sum in float32", y.numel() * wide.itemsize if y.dtype != wide else 0)
    yield Scratch("terms in the type of the sum, or their number", max(terms, 8 + wide.itemsize))


@rule("cpu", "sum")
def sum_scratch(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """A sum in another type than that of its terms copies them first.

    16 bits are summed in float32 if the dimensions of the sum cannot be taken for one.
    """
    x, (y,) = call.self, call.outputs
    is_half, dims = y.is_floating_point() and y.element_size() < 4, call.arguments.get("dim") or range(x.dim())
    in_parts = is_half and dimensions_summed(x, dims) > 1
    if x.dtype != y.dtype:
        yield (
            unlisted(call)
            if is_half and len(dims) > 1
            else Scratch("terms in the type of the sum", x.numel() * y.element_size())
        )
    elif in_parts:
        yield Scratch("terms and sum in float32", (x.numel() + y.numel()) * 4)


def dimensions_summed(x: Tensor, dims: Sequence[int]) -> int:
    """The number of dimensions of the sum, after those that lie one behind the other in memory are taken for one."""
    chosen = [dim % max(x.dim(), 1) for dim in dims]
    found = sorted((x.stride(dim), x.shape[dim]) for dim in chosen if x.shape[dim] != 1)
    steps = itertools.pairwise(found)
    return bool(found) + sum(stride * size != after for (stride, size), (after, _) in steps)


@rule("any", "logsumexp")
def exponentials(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """The largest terms, and the exponentials of the terms less the largest. Integers are converted first.

    If there are hardly more terms than sums, the mask of infinite sums is larger.
    """
    x, (y,) = call.self, call.outputs
    size = x.numel() * y.element_size()
    in_parts = y.element_size() < 4 and dimensions_summed(x, call.dim) > 1
    if call.target.kind == "cpu" and (in_parts or size < y.nbytes + y.numel() + 16):
        yield unlisted(call)
        return
    yield Scratch("terms in the type of the sum", size if x.dtype != y.dtype else 0)
    yield Scratch("largest terms", y.nbytes)
    yield Scratch("exponentials", size)


@rule("cpu", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
def rows_laid_out(call: OperatorCall) -> Iterator[Scratch]:
    """Rows are copied so that they are contiguous."""
    for name in ("self", "grad_output", "output"):
        operand = call.arguments.get(name)
        if operand is not None and not operand.is_contiguous():
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)
            yield from block_copying(operand)


@rule("cpu", "tril", "triu")
def triangle(call: OperatorCall) -> Iterator[Unknown]:
    if not call.self.is_contiguous():
        yield Unknown(f"whether {call.name} copies what is not contiguous")


@rule("cpu", "pow")
def power(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """A number as the base becomes a tensor, unless it is 1. True is not 1 here."""
    if not takes_nothing(call.name, "cpu", call.arguments, call.outputs):
        yield unlisted(call)
    elif not isinstance(call.self, Tensor) and (call.self is True or call.self != 1):
        own, (y,) = NUMBERS[type(call.self)], call.outputs
        yield Scratch("number", own.itemsize)
        yield Scratch("number in the common type", y.element_size() if y.dtype != own else 0)


@rule("cpu", "max", "min")
def max_scratch(call: OperatorCall) -> Iterator[Unknown]:
    """Known along a dimension only. Reductions of all elements have another kernel and another backward."""
    if len(call.outputs) == 1 or not call.self.is_contiguous():
        yield unlisted(call)


@rule("cpu", "scatter")
def scattered(call: OperatorCall) -> Iterator[Scratch]:
    """16-bit values are scattered in 32 bits."""
    if call.self.element_size() < 4 and call.self.is_floating_point():
        yield Scratch("result in float32", call.self.numel() * 4)
    else:
        yield from block_copying(call.self, call.outputs[0])


@rule("cuda", "cumsum")
def scanned(call: OperatorCall) -> Iterator[Unknown]:
    """A library scans a single row."""
    if call.self.numel() == call.self.shape[call.dim]:
        yield Unknown("what the cumulative sum of a single row takes")


@rule("cuda", "native_layer_norm", "native_layer_norm_backward")
def layer_norm(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Operands are laid out; with very many rows the weight's gradient is summed in parts.

    layer_norm_kernel.cu: layer_norm_cuda, layer_norm_backward_cuda and LaunchGammaBetaBackwardCUDAKernel.
    """
    for name in ("input", "grad_out"):
        operand = call.arguments.get(name)
        if operand is not None and not operand.is_contiguous():
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)
    if call.name.endswith("_backward") and call.mean.numel() > MANY_ROWS:
        yield Unknown("the partial sums of layer_norm's backward")


@rule("cuda", "index")
def indexed(call: OperatorCall) -> Iterator[Unknown]:
    """Indices are read in place if they are 64-bit integers; a mask is turned into such indices first."""
    if any(index is not None and index.dtype != torch.int64 for index in call.indices):
        yield Unlisted("what aten::index takes for a mask or 32-bit indices")


@rule("cuda", "_softmax_backward_data")
def softmax_backward(call: OperatorCall) -> Iterator[Scratch]:
    yield Scratch("gradient times probabilities", call.grad_output.nbytes)


def fits_blas(tensor: Tensor) -> bool:
    """Whether BLAS can read the last two dimensions in place, by rows or by columns."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def operands_of(call: OperatorCall) -> list[Tensor]:
    """The two matrices, or batches of them, of a product."""
    if "batch1" in call.arguments:
        return [call.batch1, call.batch2]
    return [call.mat1, call.mat2] if "mat1" in call.arguments else [call.self, call.mat2]


@rule("cuda", "mm", "addmm", "bmm", "baddbmm")
def copies_for_cublas(call: OperatorCall) -> Iterator[Scratch]:
    """cuBLAS needs a copy of an operand whose layout it cannot read, such as an expanded gradient."""
    for operand in operands_of(call):
        if not fits_blas(operand) and not (operand.dim() == 3 and operand.is_contiguous()):
            yield Scratch("operand laid out for cuBLAS", operand.nbytes)


@rule("cpu", "mm", "addmm", "bmm", "baddbmm")
def copies_for_blas(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """On the CPU, batches of matrices that MKL cannot read are copied and multiplied one by one."""
    left, right = operands_of(call)
    if call.name == "aten::addmm":
        yield from block_copying(call.self, call.outputs[0])
    if left.numel() == 0 or right.numel() == 0:
        if call.name == "aten::baddbmm":
            yield unlisted(call)
        return
    if not products_are_plain(dtype_name(left)):
        yield Unknown("what oneDNN takes in products of 16-bit matrices")
        return
    if left.dim() == 3 and taken_in_place(left, right):
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


SMALL_PRODUCT = 400  # Matrix products with fewer multiplications use a loop instead of BLAS.


def taken_in_place(left: Tensor, right: Tensor) -> bool:
    """Whether a batch is read in place: by a plain loop, or as a whole by MKL."""
    if left.shape[2] * left.shape[1] * right.shape[2] < SMALL_PRODUCT:
        return True
    wide = left.dtype in (torch.float32, torch.float64)
    return wide and torch.backends.mkl.is_available() and all(in_rows_or_columns(operand) for operand in (left, right))


def in_rows_or_columns(operand: Tensor) -> bool:
    """Whether MKL can read every matrix of the batch in place."""
    (_, rows, columns), (_, row, column) = operand.shape, operand.stride()
    return (column == 1 and (rows == 1 or row >= columns)) or (row == 1 and (columns == 1 or column >= rows))


@rule("cpu", "_scaled_dot_product_flash_attention_for_cpu")
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


@rule("cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
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
        yield Unknown("what oneDNN takes in products of 16-bit matrices")
    yield Scratch("sums of rows", threads * rows * wide)
    if threads > 1:
        yield Varies(f"how many of {threads} threads have their sums of rows at once")


@rule("cuda", "_scaled_dot_product_flash_attention")
def flash_splits(call: OperatorCall) -> Iterator[Unknown]:
    """With few queries the keys are divided among blocks of threads, by the number of the GPU's multiprocessors.

    With 256 tiles of queries or more, no existing GPU divides them.
    """
    q, S, T, D = attention_sizes(call)
    keys = 256 if D <= 64 else 128 if D <= 128 else 64
    if q.shape[0] * q.shape[1] * -(-S // 64) < 256 and keys < T:
        yield Unknown("among how many blocks of threads flash attention divides the keys")


@rule("cuda", "_scaled_dot_product_flash_attention_backward")
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
    rows = q.shape[0] * q.shape[1] * rounded_up(S, 128)
    yield Scratch("sums of rows", rows * 4)
    yield Scratch("dq in float32", rows * (rounded_up(D, 32) if D <= 192 else 256) * 4)


@rule("cuda", "_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
def efficient_forward(call: OperatorCall) -> Iterator[Scratch]:
    """y is accumulated in float32 if a head does not fit into registers."""
    y = call.outputs[0]
    if y.element_size() < 4 and y.shape[-1] > 128:
        yield Scratch("y in float32", y.numel() * 4)


@rule("cuda", "_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
def efficient_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    is_inner = call.name == "aten::_efficient_attention_backward"
    grad: Tensor = call.arguments["grad_out" if "grad_out" in call.arguments else "grad_out_"]
    if not (grad if is_inner else grad.transpose(1, 2)).is_contiguous():
        yield Scratch("gradient of y, laid out", grad.nbytes)
    if grad.element_size() == 4:
        yield Scratch("gradient of y times y", grad.nbytes)
    yield Scratch("sums of rows", grad.numel() // grad.shape[-1] * 4)
    yield Unknown("the workspace of efficient attention's backward")


@rule("cuda", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
def cudnn_plan(call: OperatorCall) -> Iterator[Unknown]:
    yield Unknown("the workspace of cuDNN's plan")


# Positions of outputs that are CPU tensors on CUDA: the seeds of an unused dropout.
OF_THE_HOST = {"aten::_scaled_dot_product_efficient_attention": (2, 3), "aten::_efficient_attention_forward": (2, 3)}
# From this many elements per result on, CUDA's reductions may take two steps with a buffer.
LONG_REDUCTION, FEW_SUMS = 4096, 8192
# Up to this many rows, layer_norm's backward sums the weight's gradient in one pass.
MANY_ROWS = 64 * 1024


@rule("cuda", "sum", "max", "amax", "mean", "all", "linalg_vector_norm")
def reductions(call: OperatorCall) -> Iterator[Unknown]:
    sums = max(call.outputs[0].numel(), 1)
    if sums < FEW_SUMS and call.self.numel() // sums >= LONG_REDUCTION:
        yield Unknown(f"the buffer of {call.name} over {call.self.numel() // sums} elements")


KEYS_OF_A_TILE = 512


def rows_of_a_tile(queries: int) -> int:
    """The number of queries that a tile of the CPU's flash attention has."""
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def attention_sizes(call: OperatorCall) -> tuple[Tensor, int, int, int]:
    """Returns q, S, T, D."""
    return call.query, call.query.shape[2], call.key.shape[2], call.query.shape[3]


# Up to this many indices, CUDA adds rows without sorting them first.
FEW_INDICES = 3072


@rule("cuda", "embedding_dense_backward")
def embedding_backward(call: OperatorCall) -> Iterator[Unknown]:
    if call.indices.numel() > FEW_INDICES:
        yield Unknown("what sorting the tokens takes in the embedding's backward")

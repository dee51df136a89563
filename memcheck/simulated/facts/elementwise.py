"""Operators that make, copy, join and cut tensors; arithmetic, comparisons, activations and their backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memcheck.simulated.scratch import Facts, OperatorCall, Scratch, Unknown, add, doubt, nothing

# The dtypes of tensors that are made of Python's numbers.
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def copied(call: OperatorCall) -> Iterator[Scratch]:
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


PLAIN_COPIES: Facts = {"everywhere": nothing, "source": "TensorFactories.cpp"}
add("arange", "torch.arange(3)", **PLAIN_COPIES)
add("empty", "torch.empty(3)", **PLAIN_COPIES)
add("full", "torch.full((3,), 2.0)", **PLAIN_COPIES)
add("ones", "torch.ones(3)", **PLAIN_COPIES)
add("zeros", "torch.zeros(3)", **PLAIN_COPIES)
add("scalar_tensor", "torch.scalar_tensor(3.0)", **PLAIN_COPIES)
add("empty_strided", "torch.empty_strided((3,), (1,))", **PLAIN_COPIES)
add("empty_like ones_like rand_like zeros_like", "torch.{name}(x)", **PLAIN_COPIES)
add("full_like", "torch.full_like(x, 2)", **PLAIN_COPIES)
add("new_empty new_ones new_zeros", "x.{name}(x.shape)", **PLAIN_COPIES)
add("new_full", "x.new_full(x.shape, 2)", **PLAIN_COPIES)
add("new_empty_strided", "ops.new_empty_strided(x, (3,), (1,))", **PLAIN_COPIES)
add("randn", "torch.randn(3)", cuda=nothing, source="TensorFactories.cpp cuda/DistributionNormal.cu")
add("randn_like", "torch.randn_like(x)", cuda=nothing, source="TensorFactories.cpp cuda/DistributionNormal.cu")
add("fill_", "(x * 1).fill_(1)", **PLAIN_COPIES)
add("zero_", "(x * 1).zero_()", **PLAIN_COPIES)
add("bernoulli_", "F.dropout(x, 0.3)", **PLAIN_COPIES)
add("set_", "x.new_empty(3).set_(x.detach())", **PLAIN_COPIES)
add("_efficientzerotensor", "torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)", **PLAIN_COPIES)
add("_assert_async", "torch._assert_async(torch.ones(1, dtype=torch.bool, device=x.device))", **PLAIN_COPIES)
add("_local_scalar_dense", "real.sum().item()", **PLAIN_COPIES)
add("promote_types", "torch.promote_types(x.dtype, torch.float32)", **PLAIN_COPIES)

COPIES: Facts = {"cpu": copied, "cuda": nothing, "source": "Copy.cpp cuda/Copy.cu"}
add("clone", "x.clone()", sparse="nothing", **COPIES)
add("copy_", "(x * 1).copy_(x), x.new_empty(x.shape, dtype=torch.float64).copy_(x)", **COPIES)
add("_to_copy", "x.double(), x.bfloat16()", **COPIES)

PARTS: Facts = {**PLAIN_COPIES, "source": "TensorShape.cpp cuda/Shape.cu"}
add("_unsafe_view", "torch.matmul(x, x.new_ones(x.shape[-1], 3))", **PARTS)
add("constant_pad_nd", "F.pad(x, (1, 2))", **PARTS)
add("flip", "x.flip(-1)", **PARTS)
add("select_backward", "x.select(-1, 1)", **PARTS)
add("slice_backward", "x[..., 1:]", **PARTS)
add("cat", "torch.cat([x, x * 2], -1)", **PARTS, operands="one dtype")
add("stack", "torch.stack([x, x * 2])", **PARTS, operands="one dtype")
add("repeat", "x.repeat((2,) * x.dim())", cuda=nothing, source="TensorShape.cpp")
triangle = doubt(Unknown("whether {} copies what is not contiguous"), lambda call: not call.self.is_contiguous())
TRIANGLES: Facts = {"cpu": triangle, "cuda": nothing, "source": "TriangularOps.cpp cuda/TriangularOps.cu"}
add("tril triu", "rows.{name}()", **TRIANGLES)
# Views, of the published rows.
VIEWS: Facts = {"source": "TensorShape.cpp", **PLAIN_COPIES}
add("detach", "x.detach()", sparse="nothing", **VIEWS)
add("expand t transpose view", "x.reshape(-1, 1).t().transpose(0, 1).expand(-1, 3)", **VIEWS)

# Sparse tensors.
add("alias", "torch.ops.aten.alias(x)", sparse="nothing", source="TensorShape.cpp")
SPARSE: Facts = {"sparse": "nothing", "source": "sparse/SparseTensor.cpp"}
add("_indices _values _nnz dense_dim is_coalesced sparse_dim", "sparse.{name}()", **SPARSE)

PROFILER: Facts = {"everywhere": nothing, "source": "torch/csrc/autograd/record_function_ops.cpp"}
NAMES = "profiler::_record_function_enter_new profiler::_record_function_exit"
add(NAMES, "torch.autograd.profiler.record_function('name').__enter__().__exit__(None, None, None)", **PROFILER)


CHUNK = 64 * 1024  # Elements of a tensor that a block of threads takes: kChunkSize in cuda/MultiTensorApply.cuh.


def copies_in_the_common_dtype(call: OperatorCall) -> Iterator[Scratch]:
    """The CPU's elementwise kernels copy operands, and an existing output, that do not have the common type.

    A number from C++ comes as a scalar, and becomes a tensor of 8 bytes.
    """
    operands = [call.arguments[name] for name in ("self", "other")]
    common = torch.result_type(*operands)
    is_whole = not common.is_floating_point and not common.is_complex
    if call.name.startswith("aten::div") and call.arguments.get("rounding_mode") is None and is_whole:
        common = torch.promote_types(common, torch.get_default_dtype())
    if call.name.endswith("_") and call.self.dtype != common:
        yield Scratch("result in the common type", call.self.numel() * common.itemsize)
    for operand in operands:
        if isinstance(operand, Tensor):
            if operand.dtype != common:
                yield Scratch("operand in the common type", operand.numel() * common.itemsize, first=True)
        else:
            yield Scratch("number", NUMBERS[type(operand)].itemsize, first=True)
            if common != NUMBERS[type(operand)]:
                yield Scratch("operand in the common type", common.itemsize, first=True)


def power(call: OperatorCall) -> Iterator[Scratch]:
    """A number as the base becomes a tensor, unless it is 1. True is not 1 here."""
    if not isinstance(call.self, Tensor) and (call.self is True or call.self != 1):
        own, (y,) = NUMBERS[type(call.self)], call.outputs
        yield Scratch("number", own.itemsize)
        yield Scratch("number in the common type", y.element_size() if y.dtype != own else 0)


def filled_copy(call: OperatorCall) -> Iterator[Scratch]:
    yield from block_copying(call.self, call.outputs[0])


ARITHMETIC: Facts = {
    "cpu": copies_in_the_common_dtype,
    "cuda": nothing,
    "source": "aten/src/ATen/TensorIterator.cpp cuda/Loops.cuh",
}
add("add sub mul div", "torch.{name}(x, 2), torch.{name}(x, x.double())", **ARITHMETIC)
add("gt lt ge le eq ne", "torch.{name}(x, 0.5), torch.{name}(x, x.double())", **ARITHMETIC)
add("rsub", "torch.rsub(x, 2)", **ARITHMETIC)
IN_PLACE = "(x * 1).{name}(2.5).{name}(x.double())"
add("add_ sub_", IN_PLACE, **ARITHMETIC)
add("mul_ div_", IN_PLACE, **ARITHMETIC)

PLAIN: Facts = {"everywhere": nothing, "operands": "one dtype", "source": "cuda/Loops.cuh"}
add("abs cos erf exp log neg reciprocal relu rsqrt sgn sigmoid sin sqrt tanh", "torch.{name}(x)", **PLAIN)
add("sigmoid_backward tanh_backward", "torch.{forward}(x)", **PLAIN)
add("threshold threshold_backward", "F.threshold(x, 0.2, 0.0), F.relu(x)", **PLAIN)
ACTIVATIONS = "elu hardsigmoid hardswish hardtanh leaky_relu silu softplus"
add(ACTIVATIONS, "F.{name}(x)", **PLAIN)
add(" ".join(f"{name}_backward" for name in ACTIVATIONS.split()), "F.{forward}(x)", **PLAIN)
add("relu_ sqrt_", "(x * 1).{name}()", **PLAIN)
add(" ".join(f"{name}_" for name in ACTIVATIONS.split() if name != "softplus"), "ops.{name}(x * 1)", **PLAIN)
add("addcdiv addcdiv_ addcmul addcmul_", "(x * 1).{name}(x, x + 1, value=0.5)", **PLAIN)
add("lerp lerp_", "(x * 1).{name}(x * 2, 0.3)", **PLAIN)
add("clamp", "x.clamp(0.2, 0.4)", **PLAIN)
add("clamp_min", "x.clamp_min(0.3)", **PLAIN)
add("maximum minimum", "torch.{name}(x, x * 2)", **PLAIN)
add("where", "torch.where(x > 0.3, x, x * 2)", **PLAIN)
add("masked_fill_", "(x * 1).masked_fill_(x > 0.3, 0.0)", **PLAIN)
OTHERS: Facts = {"cuda": nothing, "operands": "one dtype", "source": "cuda/Loops.cuh"}
add("masked_fill", "x.masked_fill(x > 0.3, 0.0)", cpu=filled_copy, **OTHERS)
add("pow", "x**2, x**3.3, x**x, 2**x", cpu=power, **OTHERS)

# Read in the kernels of CUDA alone.
add("gelu gelu_backward", "F.gelu(x)", cuda=nothing, source="cuda/ActivationGeluKernel.cu")
add("bitwise_and bitwise_or", "torch.{name}(x > 0.3, x > 0.5)", cuda=nothing, source="cuda/BinaryBitwiseOpsKernels.cu")
add("bitwise_not", "~(x > 0.3)", cuda=nothing, source="cuda/UnarySignKernels.cu")
add("log1p", "torch.log1p(x)", cuda=nothing, source="cuda/UnaryLogKernels.cu")
add("xlogy", "torch.xlogy(x, x)", cuda=nothing, source="cuda/BinaryMiscOpsKernels.cu")
add("clamp_min_", "(x * 1).clamp_min_(0.3)", cuda=nothing, source="cuda/TensorCompare.cu")
add("logical_and_", "(x > 0.3).logical_and_(x > 0.5)", cuda=nothing, source="cuda/BinaryLogicalOpsKernels.cu")


def norms(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """A partial sum for each chunk of the longest tensor, of each tensor: foreach_tensor_norm_cuda."""
    tensors: list[Tensor] = call.self
    if call.ord not in (1, 2, math.inf) or len({x.dtype for x in tensors}) > 1 or not tensors[0].is_floating_point():
        yield Unknown("what norms of a list take one by one")
        return
    chunks = max(-(-x.numel() // CHUNK) for x in tensors)
    wide = torch.promote_types(call.outputs[0].dtype, torch.float32).itemsize
    yield Scratch("partial sums", len(tensors) * chunks * wide)


FOREACH: Facts = {"cuda": nothing, "source": "cuda/MultiTensorApply.cuh"}
add("_foreach_add_ _foreach_mul_ _foreach_div_", "torch.{name}([x * 1], 2.0)", **FOREACH)
add("_foreach_addcdiv_ _foreach_addcmul_", "torch.{name}([x * 1], [x], [x], 0.5)", **FOREACH)
add("_foreach_lerp_", "torch.{name}([x * 1], [x], 0.5)", **FOREACH)
add("_foreach_add", "torch._foreach_add([x], [x], alpha=0.5)", **FOREACH)
add("_foreach_norm", "torch._foreach_norm([x, x])", cuda=norms, source="cuda/ForeachReduceOp.cu")
add("_foreach_sqrt", "torch.{name}([x])", **FOREACH)

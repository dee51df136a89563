"""Elementwise operators: arithmetic, comparisons, activations and their backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memcheck.predict.operators.creation import NUMBERS, block_copying
from memcheck.predict.operators.facts import Facts, add, nothing
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

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
add("mul_ div_", IN_PLACE, keeps_number_of_a_view=True, **ARITHMETIC)

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

"""Shared by the operators' tests: the tolerance rule, memory layouts, and functions that run an operator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from memcheck._extension import _C

# The device of the tests' tensors, and the device whose kernels are tested. With --host-cuda they differ: CUDA kernels
# run on CPU tensors.
DEVICE = os.environ.get("MEMCHECK_TEST_DEVICE", "cpu")
KERNELS = "cuda" if "MEMCHECK_TEST_HOST_CUDA" in os.environ else DEVICE
# CUDA kernels are slow on the host.
ON_HOST = KERNELS != DEVICE
HERE = "cuda:0" if DEVICE == "cuda" else DEVICE  # as printed in error messages

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)

# Unit roundoff of a result. 0 for float32 and float64: they are accumulation types, which SUM_UNIT covers.
RESULT_UNIT = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUM_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-24}

Function = Callable[..., Tensor]


def level_marks(level: str) -> list[pytest.MarkDecorator]:
    """Marks of a test at one CPU level, which runs in a process of its own.

    All other tests run at the level of this machine, so its own is for CI.
    """
    marks = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.isolated(MEMCHECK_CPU=level)]
    if level == _C.cpu_level():
        marks.append(pytest.mark.ci)
    return marks


CPU_LEVELS = pytest.mark.parametrize(
    "level", [pytest.param(level, marks=level_marks(level)) for level in _C.cpu_levels()]
)


@dataclass(frozen=True)
class Bound:
    """Scale of rounding errors: the formula in float64 with the absolute value of every term."""

    values: Tensor
    terms: int  # number of terms in the sum
    stored: bool = False  # whether an intermediate is stored in the dtype of the inputs


@dataclass(frozen=True)
class Contract:
    """An operator, its reference, and bounds(grad_y, *inputs) for y and the gradient of every input."""

    function: Function
    reference: Function
    bounds: Callable[..., Sequence[Bound]]


def tolerance(truth: Tensor, bound: Bound, dtype: torch.dtype) -> Tensor:
    """Returns u |truth| + (32 + sqrt(terms)) 2^-24 bound, plus u bound if an intermediate is stored in the dtype."""
    unit = RESULT_UNIT[dtype]
    values = bound.values.to(truth.device)
    allowed = unit * truth.abs() + (32 + math.sqrt(bound.terms)) * SUM_UNIT[dtype] * values
    if bound.stored:
        allowed = allowed + unit * values
    # The spacing of a dtype is constant below its smallest normal number. A truth in the same dtype is rounded, too.
    info = torch.finfo(dtype)
    roundings = 2 if dtype == truth.dtype else 1
    return allowed + roundings / 2 * info.smallest_normal * info.eps


def assert_within(actual: Tensor, truth: Tensor, bound: Bound, name: str = "") -> None:
    assert actual.shape == truth.shape, name
    actual, truth = actual.cpu(), truth.cpu()
    excess = (actual.double() - truth).abs() - tolerance(truth, bound, actual.dtype)
    wrong = (~(excess <= 0)).nonzero()  # NaN is wrong too
    if len(wrong):
        where = tuple(wrong[0].tolist())
        allowed = tolerance(truth, bound, actual.dtype)[where]
        raise AssertionError(
            f"{name}{list(where)} and {len(wrong) - 1} more: got {actual[where]:.9g}, truth {truth[where]:.9g}, "
            f"off by {(actual[where].double() - truth[where]).abs():.3g}, allowed {allowed:.3g}"
        )


def run(function: Function, inputs: Sequence[Tensor], grad_y: Tensor) -> list[Tensor]:
    """Returns y and the gradients of all inputs, with the strides that the operator gave them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def run_truth(reference: Function, inputs: Sequence[Tensor], grad_y: Tensor) -> list[Tensor]:
    """Returns y and the gradients of the reference, in float64 on the CPU."""
    with torch.device("cpu"):
        return run(reference, [x.cpu() for x in doubles(inputs)], grad_y.double().cpu())


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


def assert_contract(
    contract: Contract, inputs: Sequence[Tensor], grad_y: Tensor, *, against_plain: bool = False
) -> list[Tensor]:
    """Asserts that values and gradients are within the tolerance. Returns y and the gradients.

    against_plain: in 16-bit types, the largest error must also be at most twice that of plain PyTorch in that dtype.
    """
    results = run(contract.function, inputs, grad_y)
    truths = run_truth(contract.reference, inputs, grad_y)
    with torch.device("cpu"):
        bounds = contract.bounds(*(x.cpu() for x in doubles([grad_y, *inputs])))
    names = ["y", *(f"gradient of input {i}" for i in range(len(inputs)))]
    for name, result, truth, bound in zip(names, results, truths, bounds, strict=True):
        assert result.dtype == inputs[0].dtype
        assert_within(result, truth, bound, name)
    if against_plain and inputs[0].dtype in HALF_DTYPES:
        plain = run(contract.reference, inputs, grad_y)
        for name, result, other, truth in zip(names, results, plain, truths, strict=True):
            assert largest_error(result, truth) <= 2 * largest_error(other, truth), name
    return results


def largest_error(actual: Tensor, truth: Tensor) -> float:
    """Returns the largest absolute error; NaN counts as infinite."""
    return (actual.double().cpu() - truth.cpu()).abs().nan_to_num(nan=math.inf).max().item() if actual.numel() else 0.0


def same_where_not_finite(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether NaN, infinity and minus infinity are at the same places; finite values do not matter."""

    def kinds(x: Tensor) -> Tensor:
        return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), torch.zeros_like(x)))

    return all(torch.equal(kinds(x), kinds(y)) for x, y in zip(ours, theirs, strict=True))


def same_bits(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(some, others, strict=True)
    )


def same_numbers(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """same_bits; on a GPU up to two units in the last place, of a number or of the sums that it is the difference of:
    nvcc contracts products and sums in each kernel in its own way."""
    if DEVICE != "cuda":
        return same_bits(some, others)
    return all(within_two_units(one, other) for one, other in zip(some, others, strict=True))


def within_two_units(one: Tensor, other: Tensor) -> bool:
    wide = torch.promote_types(one.dtype, torch.float32)
    largest = other.nan_to_num(0, 0, 0).abs().flatten().to(wide).sort().values[-1:]
    allowed = 2 * torch.maximum(unit_in_the_last_place(other), unit_in_the_last_place(largest))
    return bool(((one == other) | ((one.double() - other.double()).abs() <= allowed)).all())


def unit_in_the_last_place(x: Tensor) -> Tensor:
    """The distance between numbers of the dtype of x that are as large as x."""
    return torch.ldexp(torch.full_like(x, torch.finfo(x.dtype).eps, dtype=torch.float64), x.double().frexp()[1] - 1)


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def first_dimension_inside(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def heads_inside(x: Tensor) -> Tensor:
    """Returns (B,H,S,D) as a view of (B,S,H,D), as projections make it; (B,S,R) as a view of (S,B,R)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x


def every_second(x: Tensor, dim: int) -> Tensor:
    """Returns x with stride 2 along dim. NaN lies between the values, so that ignoring the stride is noticed."""
    dim %= x.dim()
    gaps = torch.full_like(x, math.nan)
    both = torch.stack([x, gaps], dim + 1).flatten(dim, dim + 1)
    return both[tuple(slice(None, None, 2) if d == dim else slice(None) for d in range(x.dim()))]


def at_an_offset(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((3,), math.nan), x.flatten(), x.new_full((5,), math.nan)])[3:-5].view_as(x)


def expanded(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, 1).expand_as(x)


# Functions from a dense tensor to one of the same shape with other strides. Expanding changes the values.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": transposed,
    "first dimension inside": first_dimension_inside,
    "heads inside": heads_inside,
    "every second column": lambda x: every_second(x, -1),
    "every second row": lambda x: every_second(x, -2),
    "at an offset": at_an_offset,
    "expanded along the first": lambda x: expanded(x, 0),
    "expanded along the last but one": lambda x: expanded(x, -2),
    "expanded along the last": lambda x: expanded(x, -1),
    "one element": lambda x: x.flatten()[0].expand_as(x),
}


def laid_out(tensors: Sequence[Tensor], layout: str) -> Iterator[list[Tensor]]:
    """Yields the tensors with the layout applied to each one alone, then to all; "dense" only once."""
    change = LAYOUTS[layout]
    for i in range(len(tensors) if layout != "dense" else 0):
        yield [change(x) if i == j else x for j, x in enumerate(tensors)]
    yield [change(x) for x in tensors]


def is_dense(x: Tensor) -> bool:
    """Returns whether x covers every element of a block of memory exactly once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def assert_strides(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Asserts that y is contiguous, and that a gradient has the strides of a dense input, else is contiguous. Strides
    of dimensions of size 1 mean nothing."""
    y, *gradients = results
    assert y.is_contiguous()
    for x, gradient in zip(inputs, gradients, strict=True):
        expected = x.stride() if is_dense(x) else torch.empty(x.shape).stride()
        for size, stride, of_gradient in zip(x.shape, expected, gradient.stride(), strict=True):
            assert size == 1 or of_gradient == stride


def subsets(names: int) -> list[tuple[bool, ...]]:
    """Returns all non-empty choices of inputs that require a gradient."""
    return [mask for mask in product((False, True), repeat=names) if any(mask)]


def run_subset(
    function: Function, inputs: Sequence[Tensor], mask: Sequence[bool], grad_y: Tensor
) -> list[Tensor | None]:
    """Returns the .grad of every input, None where the mask is False."""
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    function(*leaves).backward(grad_y)
    return [leaf.grad for leaf in leaves]


def saved_for_backward(function: Callable[[], Tensor]) -> list[Tensor]:
    """Returns the tensors that autograd saves while the function runs."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return saved


def assert_threads_change_no_bit(
    numbers: Sequence[int], function: Callable[..., Sequence[Tensor]], *arguments: Any
) -> Iterator[int]:
    """Asserts that results have the same bits with so many threads. Yields each number, which is then in use.

    For a process of its own. On few cores threads take turns.
    """
    expected = None
    for threads in numbers:
        torch.set_num_threads(threads)
        results = function(*arguments)
        expected = results if expected is None else expected
        assert same_bits(results, expected)
        yield threads


class NoGradient(torch.autograd.Function):
    """The identity, whose backward returns no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def gradients_moved_by_autograd(
    function: Function, inputs: Sequence[Tensor], grad_y: Tensor, mask: Sequence[bool]
) -> list[int]:
    """Returns the indices of inputs whose .grad is a copy that AccumulateGrad made of the operator's gradient."""
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    written: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if leaf.requires_grad:
            leaf.register_hook(lambda gradient, i=i: written.update({i: gradient.data_ptr()}))
    function(*leaves).backward(grad_y)
    return [i for i, address in written.items() if leaves[i].grad.data_ptr() != address]

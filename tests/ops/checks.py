"""What the operators' tests share: the tolerance rule, layouts in memory, and how an operator is run and asked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from memcheck._extension import _C

# Where tests make their tensors, and whose kernels they test: those of CUDA may run on the CPU's tensors (--host-cuda).
DEVICE = os.environ.get("MEMCHECK_TEST_DEVICE", "cpu")
KERNELS = "cuda" if "MEMCHECK_TEST_HOST_CUDA" in os.environ else DEVICE
# There they take their time.
ON_HOST = KERNELS != DEVICE
HERE = "cuda:0" if DEVICE == "cuda" else DEVICE  # as a tensor there says it

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)

# Rounding a result to its dtype; float32 and float64 are the accumulation type, which the second term covers.
RESULT_UNIT = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUM_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-24}

Function = Callable[..., Tensor]


def level_marks(level: str) -> list[pytest.MarkDecorator]:
    """Marks of a test at one CPU level, which runs in a process of its own.

    All other tests run at the highest level, so this one is for CI.
    """
    marks = [pytest.mark.cpu, pytest.mark.isolated(MEMCHECK_CPU=level)]
    if level != "default":
        marks.append(pytest.mark.slow)
    if level == _C.cpu_levels()[-1] != "default":
        marks.append(pytest.mark.ci)
    return marks


CPU_LEVELS = pytest.mark.parametrize(
    "level", [pytest.param(level, marks=level_marks(level)) for level in _C.cpu_levels()]
)


@dataclass(frozen=True)
class Bound:
    """What rounding errors are in proportion to: the formula in float64 with every term's absolute value."""

    values: Tensor
    terms: int  # that are summed
    stored: bool = False  # an intermediate is held in the dtype of the inputs


@dataclass(frozen=True)
class Contract:
    """An operator, its float64 truth, and bounds(grad_y, *inputs) for y and the gradient of every input."""

    function: Function
    reference: Function
    bounds: Callable[..., Sequence[Bound]]


def tolerance(truth: Tensor, bound: Bound, dtype: torch.dtype) -> Tensor:
    """u |truth| + (32 + sqrt(terms)) 2^-24 bound, and u bound where an intermediate is stored in the dtype."""
    unit = RESULT_UNIT[dtype]
    values = bound.values.to(truth.device)
    allowed = unit * truth.abs() + (32 + math.sqrt(bound.terms)) * SUM_UNIT[dtype] * values
    if bound.stored:
        allowed = allowed + unit * values
    # Below its smallest normal number a dtype's spacing is constant.
    info = torch.finfo(dtype)
    return allowed + info.smallest_normal * info.eps / 2


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
    """y and the gradients as the operator lays them out."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def run_truth(reference: Function, inputs: Sequence[Tensor], grad_y: Tensor) -> list[Tensor]:
    """The same of the reference, in float64, on the CPU."""
    with torch.device("cpu"):
        return run(reference, [x.cpu() for x in doubles(inputs)], grad_y.double().cpu())


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


def assert_contract(
    contract: Contract, inputs: Sequence[Tensor], grad_y: Tensor, *, against_plain: bool = False
) -> list[Tensor]:
    """Values and gradients keep to the tolerance rule. Returns what was computed.

    against_plain: in 16-bit types also to twice the largest error of plain PyTorch in that dtype.
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
    """NaN counts as infinitely wrong."""
    return (actual.double().cpu() - truth).abs().nan_to_num(nan=math.inf).max().item() if actual.numel() else 0.0


def same_bits(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(some, others, strict=True)
    )


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def first_dimension_inside(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def heads_inside(x: Tensor) -> Tensor:
    """(B,H,S,D) as a projection makes it, a view of (B,S,H,D); with fewer dimensions, (B,S,R) as a view of (S,B,R)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x


def every_second(x: Tensor, dim: int) -> Tensor:
    """Between the values there is NaN, for whoever takes strides for granted."""
    dim %= x.dim()
    gaps = torch.full_like(x, math.nan)
    both = torch.stack([x, gaps], dim + 1).flatten(dim, dim + 1)
    return both[tuple(slice(None, None, 2) if d == dim else slice(None) for d in range(x.dim()))]


def at_an_offset(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((3,), math.nan), x.flatten(), x.new_full((5,), math.nan)])[3:-5].view_as(x)


def expanded(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, 1).expand_as(x)


# A dense tensor -> one of the same shape that lies differently. Expanding changes the values.
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
    """The layout for each tensor alone, then for all; all as they are just once."""
    change = LAYOUTS[layout]
    for i in range(len(tensors) if layout != "dense" else 0):
        yield [change(x) if i == j else x for j, x in enumerate(tensors)]
    yield [change(x) for x in tensors]


def is_dense(x: Tensor) -> bool:
    """Every element of a block of memory exactly once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def assert_strides(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """y is contiguous; a gradient lies like its input where that is dense, else it is contiguous."""
    y, *gradients = results
    assert y.is_contiguous()
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.stride() == (x.stride() if is_dense(x) else torch.empty(x.shape).stride())


def subsets(names: int) -> list[tuple[bool, ...]]:
    """Which inputs require a gradient: all choices but none."""
    return [mask for mask in product((False, True), repeat=names) if any(mask)]


def run_subset(
    function: Function, inputs: Sequence[Tensor], mask: Sequence[bool], grad_y: Tensor
) -> list[Tensor | None]:
    """The .grad of every input, None for those that ask for none."""
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    function(*leaves).backward(grad_y)
    return [leaf.grad for leaf in leaves]


def saved_for_backward(function: Callable[[], Tensor]) -> list[Tensor]:
    """What autograd keeps while the function runs."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return saved


class NoGradient(torch.autograd.Function):
    """Passes x on, and hands back no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def gradients_moved_by_autograd(function: Function, inputs: Sequence[Tensor], grad_y: Tensor) -> list[int]:
    """Which inputs' .grad is not the memory that the operator wrote: AccumulateGrad copied it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    written: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        leaf.register_hook(lambda gradient, i=i: written.update({i: gradient.data_ptr()}))
    function(*leaves).backward(grad_y)
    return [i for i, leaf in enumerate(leaves) if leaf.grad.data_ptr() != written[i]]

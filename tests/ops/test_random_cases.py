"""Random cases of every operator: sizes, options, dtypes, strides, values, wanted gradients, threads and budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from ops.checks import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    ON_HOST,
    Contract,
    assert_contract,
    assert_strides,
    assert_within,
    generator,
    run,
    run_subset,
    run_truth,
    same_bits,
    same_where_not_finite,
    subsets,
)
from ops.operators import COMBINATOR, COMPRESSED, LINEAR, LINEAR_L, LINEAR_R, MODES, SOFTPLUS, Operator, Options
from torch import Tensor

import memcheck
from memcheck.ops.reference.combinator import combinator as reference

Sizes = dict[str, int]
# A size is up to 9, so that failures are small, or at a border of tiles and chunks.
BORDERS = (31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
# Smaller bounds are taken as this large: errors of subnormal intermediates are in proportion to no value. In float16
# such an error is 2^-25, and weights of up to 100 multiply it; in float64 it is 2^-1075, and eps divides it.
SMALLEST = {torch.float64: 2.0**-1000, torch.float32: 2.0**-40, torch.bfloat16: 2.0**-40, torch.float16: 2.0**-3}
MOST_ELEMENTS = 1 << 11 if ON_HOST else 1 << 14


# Letters of sizes, an operator, and its options. Each key head has G query heads. Dv is D where there is one width.
OPERATORS: dict[str, tuple[str, Operator, dict[str, Sequence[Any]]]] = {
    "softplus_attention": ("B S T R", SOFTPLUS, {"causal": (True, False)}),
    "linear_attention": ("B Hkv G S T D Dv", LINEAR, {"causal": (True, False)}),
    "compressed_attention": ("B Hkv G S T D", COMPRESSED, {"mode": tuple(MODES), "factor": (1, 2, 3, 8, 40)}),
    "combinator": ("B S E", COMBINATOR, {"low_memory": (False, True)}),
    "linear_r": ("B S E R", LINEAR_R, {}),
    "linear_l": ("B S E R", LINEAR_L, {}),
}


def shapes_of(name: str, n: Sizes) -> Sequence[tuple[int, ...]]:
    """Of the inputs and of y."""
    letters, it, _ = OPERATORS[name]
    sizes: list[int] = []
    for letter in letters.split():
        sizes += [] if letter == "G" else [n["G"] * n["Hkv"], n["Hkv"]] if letter == "Hkv" else [n[letter]]
    return it.shapes(*sizes)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {  # from random numbers of a dtype
    "normal": lambda x: x,
    # In float64, numbers near the smallest: the truth is float64, too.
    "subnormal": lambda x: x * max(torch.finfo(x.dtype).smallest_normal, 2.0**-900),
    "large": lambda x: x * 32,
    "of many sizes": lambda x: x * torch.logspace(-4, 1, max(1, x.numel()))[: x.numel()].view_as(x).to(x.dtype),
    "equal": lambda x: torch.full_like(x, x.flatten()[0].item() if x.numel() else 0.0),
    "zero": torch.zeros_like,
}


@dataclass(frozen=True)
class Case:
    operator: str
    sizes: Sizes
    options: dict[str, Any]
    dtype: torch.dtype
    values: tuple[str, ...]  # of each input and the gradient of y
    layouts: tuple[str, ...]  # of the same
    wanted: tuple[bool, ...]  # inputs that require a gradient
    threads: int = 1
    budget: float = 1.0  # of the peak, which is 1

    @property
    def it(self) -> Operator:
        return OPERATORS[self.operator][1]

    @property
    def contract(self) -> Contract:
        """Of intermediates that are stored in the dtype, if there are any."""
        stores = self.operator in ("compressed_attention", "combinator")
        return self.it.contract(**self.options, **({"dtype": self.dtype} if stores else {}))

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """Returns the inputs and a gradient of y."""
        random = generator()
        shapes = shapes_of(self.operator, self.sizes)
        numbers = [torch.randn(shape, generator=random).to(self.dtype) for shape in shapes]
        *inputs, grad_y = (
            LAYOUTS[layout](VALUES[values](x)) if x.numel() else x
            for x, values, layout in zip(numbers, self.values, self.layouts, strict=True)
        )
        return inputs, grad_y


@st.composite
def random_case(draw: Any, name: str) -> Case:
    letters, _, choices = OPERATORS[name]
    sizes = {letter: draw(st.integers(1, 9)) for letter in letters.split()}
    longest = "T" if "T" in sizes else "S"
    # Not of G: equal terms of more than 100 heads drift further than the rule allows.
    sizes[draw(st.sampled_from([x for x in letters.split()[1:] if x != "G"]))] = draw(st.sampled_from(BORDERS))
    sizes[longest] = draw(st.one_of(st.integers(0, 9), st.sampled_from(BORDERS)))
    options = {option: draw(st.sampled_from(values)) for option, values in choices.items()}
    if "T" in sizes and options.get("causal", options.get("mode") != "not causal"):
        sizes["S"] = min(sizes["S"], sizes["T"])
    for letter in letters.split():
        while sizes[letter] > 1 and max(math.prod(shape) for shape in shapes_of(name, sizes)) > MOST_ELEMENTS:
            sizes[letter] = (sizes[letter] + 1) // 2
    tensors = len(shapes_of(name, sizes))
    dtype = draw(st.sampled_from(DTYPES))
    return Case(
        name,
        sizes,
        options,
        dtype,
        tuple(draw(st.sampled_from(list(VALUES))) for _ in range(tensors)),
        tuple(draw(st.sampled_from(list(LAYOUTS))) for _ in range(tensors)),
        draw(st.sampled_from(subsets(tensors - 1))),
        draw(st.sampled_from((1, 2, 3, 5))),
        draw(st.floats(0.01, 1.2)),
    )


def assert_right(case: Case) -> None:
    """Values within the tolerance, strides, the wanted gradients, and the same bits with other threads."""
    contract, (inputs, grad_y) = case.contract, case.tensors()
    results = run(contract.function, inputs, grad_y)
    truths = run_truth(contract.reference, inputs, grad_y)
    with torch.device("cpu"):
        bounds = contract.bounds(*(x.double().cpu() for x in (grad_y, *inputs)))
    largest = torch.finfo(case.dtype).max
    for place, (result, truth, bound) in enumerate(zip(results, truths, bounds, strict=True)):
        # What the dtype cannot hold may be infinite, or a sum of infinities.
        held = truth.abs() + bound.values.expand_as(truth) < largest
        of_term = replace(bound, values=bound.values.clamp(min=SMALLEST[case.dtype]))
        # The library's products are plain sums, in which the errors of equal terms add up: one for each term.
        if case.dtype == torch.float64 or not case.it.attends:
            of_term = replace(of_term, terms=bound.terms**2)
        if case.dtype == torch.float64:  # the truth is rounded, too
            of_term = replace(of_term, values=2 * of_term.values)
        assert_within(torch.where(held.to(DEVICE), result, 0.0), torch.where(held, truth, 0.0), of_term, str(place))
    assert_strides(results, inputs)
    gradients = run_subset(contract.function, inputs, case.wanted, grad_y)
    expected = [x if wanted else None for x, wanted in zip(results[1:], case.wanted, strict=True)]
    assert same_bits(gradients, expected) or not all(x.isfinite().all() for x in results)
    if case.it.attends:
        threads = torch.get_num_threads()
        torch.set_num_threads(case.threads)
        try:
            again = run(contract.function, inputs, grad_y)
        finally:
            torch.set_num_threads(threads)
        assert same_bits(again, results) or not all(x.isfinite().all() for x in results)


EVERY = pytest.mark.parametrize("name", OPERATORS)
SHARE = 10 if ON_HOST else 250
PRODUCTS = ("combinator", "linear_l", "linear_r")  # Of the library.


@EVERY
def test_results_are_right(name: str) -> None:
    @cases(SHARE)
    @given(random_case(name))
    def check(case: Case) -> None:
        assert_right(case)

    check()


def found(name: str, sizes: str, options: Options, dtype: torch.dtype, values: str, layouts: str, wanted: str) -> Case:
    """A case in words: sizes as B=2, values and layouts of each tensor, a 1 for each gradient that is wanted."""
    numbers = {letter: int(size) for letter, size in (x.split("=") for x in sizes.split())}
    places = tuple(layout.strip() for layout in layouts.split(","))
    return Case(name, numbers, options, dtype, tuple(values.split()), places, tuple(x == "1" for x in wanted))


FOUND = {  # by many random cases
    "scores are so large that their rounding multiplies weights": found(
        "compressed_attention",
        "B=7 Hkv=9 G=6 S=6 T=7 D=7",
        {"mode": "not causal", "factor": 2},
        torch.bfloat16,
        "large large large large",
        "expanded along the last, expanded along the last, dense, expanded along the last",
        "111",
    ),
    "pre-activations overflow, and softplus(-inf) inf is NaN": found(
        "combinator",
        "B=1 S=6 E=31",
        {"low_memory": False},
        torch.float16,
        "large large equal",
        "expanded along the last, expanded along the last, expanded along the last",
        "11",
    ),
    "the gradient of a pre-activation is rounded, too": found(
        "combinator",
        "B=3 S=7 E=3",
        {"low_memory": False},
        torch.float16,
        "equal large normal",
        "dense, dense, dense",
        "11",
    ),
    "gradients of pre-activations are subnormal, and x multiplies them": found(
        "combinator",
        "B=5 S=64 E=9",
        {"low_memory": True},
        torch.float16,
        "large normal large",
        "one element, expanded along the last, one element",
        "11",
    ),
    "a product sums equal rows": found(
        "combinator",
        "B=3 S=64 E=4",
        {"low_memory": False},
        torch.float32,
        "normal normal normal",
        "expanded along the last but one, expanded along the first, expanded along the last but one",
        "01",
    ),
    "means of keys and values are subnormal": found(
        "compressed_attention",
        "B=1 Hkv=2 G=9 S=33 T=32 D=7",
        {"mode": "not causal", "factor": 2},
        torch.float16,
        "equal subnormal subnormal large",
        "dense, dense, expanded along the last, one element",
        "001",
    ),
    "the rounding of a pre-activation of -29 multiplies its softplus": found(
        "combinator",
        "B=3 S=63 E=64",
        {"low_memory": False},
        torch.bfloat16,
        "normal normal normal",
        "expanded along the last, expanded along the last, dense",
        "01",
    ),
    "the gradient of x is the same, whatever strides x has": found(
        "linear_r",
        "B=2 S=2 E=1 R=31",
        {},
        torch.float64,
        "normal normal normal",
        "expanded along the first, dense, dense",
        "10",
    ),
    "the gradient of a weight of one element is the same if it alone is wanted": found(
        "linear_l", "B=6 S=2 E=1 R=1", {}, torch.float32, "normal normal normal", "dense, every second row, dense", "01"
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_cases_that_were_found(case: Case) -> None:
    assert_right(case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_equal_columns_do_not_drift(causal: bool, dtype: torch.dtype) -> None:
    """Of several equal numbers, because the drift depends on their bits."""
    for number in (0.3, 0.541, 1.454, 1.885):
        q, k = (torch.full((1, 1, 1, 600), number * sign, dtype=dtype) for sign in (1, -1))
        v = grad_y = torch.ones(1, 1, 1, 600, dtype=dtype)
        assert_contract(LINEAR.contract(causal=causal), [q, k, v], grad_y)


@pytest.mark.parametrize("low_memory", [False, True])
def test_preactivations_overflow_as_in_plain_pytorch(low_memory: bool) -> None:
    """In float16: y is NaN where a is -inf and b infinite, 0 where only a is -inf, and infinite where b alone is."""
    x = torch.tensor([[60000.0, 60000.0]], dtype=torch.float16)
    of_a = torch.tensor([[-1.0, -1.0], [0.0, 0.0]], dtype=torch.float16)
    for of_b in (of_a, torch.zeros_like(of_a), of_a.flip(0)):
        weight = torch.stack([of_a, of_b])
        ours = run(lambda *leaves: memcheck.combinator(*leaves, low_memory=low_memory), [x, weight], torch.ones_like(x))
        plain = run(reference, [x, weight], torch.ones_like(x))
        assert same_where_not_finite(ours[:1], plain[:1])


def assert_entries_are_apart(case: Case, value: float, tensor: int) -> None:
    """A number that is not finite, in the first batch entry, changes no bit of the others."""
    contract, (inputs, grad_y) = case.contract, case.tensors()
    with_it = [x.clone() for x in (*inputs, grad_y)]
    changed_one = with_it[tensor % len(with_it)]
    if changed_one.numel():
        changed_one[(0, *(size // 2 for size in changed_one.shape[1:]))] = value
    *changed, changed_grad_y = with_it
    one, other = run(contract.function, inputs, grad_y), run(contract.function, changed, changed_grad_y)
    assert same_bits([x[1:] for x in one], [x[1:] for x in other]) or not all(x[1:].isfinite().all() for x in one)


@pytest.mark.parametrize("name", [name for name in OPERATORS if "attention" in name])
def test_a_batch_entry_that_is_not_finite_stays_apart(name: str) -> None:
    @cases(SHARE // 5)
    @given(random_case(name), st.sampled_from((math.nan, math.inf, -math.inf)), st.integers(0, 3))
    def check(case: Case, value: float, tensor: int) -> None:
        assert_entries_are_apart(case, value, tensor)

    check()


def assert_budget_is_kept(case: Case) -> None:
    """Under a budget an operator gives the same bits, or refuses; after a refusal it works as before."""
    contract, (inputs, grad_y) = case.contract, case.tensors()
    with memcheck.track() as memory:
        results = run(contract.function, inputs, grad_y)
    budget = max(1, int(memory.peak_bytes * case.budget))
    with memcheck.track(memory_limit=budget) as limited:
        try:
            again = run(contract.function, inputs, grad_y)
            assert memory.peak_bytes <= budget
        except torch.OutOfMemoryError:
            assert memory.peak_bytes > budget
            again = results
    assert limited.peak_bytes <= budget
    assert same_bits(again, results) or not all(x.isfinite().all() for x in results)
    with memcheck.track() as memory_after:
        run(contract.function, inputs, grad_y)
    assert memory_after.peak_bytes == memory.peak_bytes


@pytest.mark.cpu
@EVERY
def test_budgets_are_kept(name: str) -> None:
    @cases(SHARE // 5)
    @given(random_case(name))
    def check(case: Case) -> None:
        assert_budget_is_kept(case)

    check()

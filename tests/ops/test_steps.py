"""Decoding with a state of sums: what holds for softplus and linear attention alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ops import operators
from ops.checks import DEVICE, DTYPES, KERNELS, LAYOUTS, Function, assert_threads_change_no_bit, same_bits
from ops.operators import Sizes
from ops.test_linear_attention import assert_step_is_right as linear_is_right
from ops.test_softplus_attention import assert_step_is_right as softplus_is_right
from torch import Tensor
from torch.autograd import forward_ad

from memcheck import linear_attention_step, softplus_attention_step
from memcheck.ops.reference import linear_attention as linear_reference
from memcheck.ops.reference import softplus_attention as softplus_reference

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    function: Function
    is_right: Callable[..., None]
    inputs: Callable[..., list[Tensor]]  # from sizes B, T and widths: q of one position, k and v of T
    state: Callable[..., State]  # from B and widths
    widths: Sizes
    y: Callable[..., Sizes]  # the shape, from B and widths

    def call(self, B: int = 3, T: int = 5) -> tuple[list[Tensor], State]:
        return self.inputs(B, T, *self.widths), self.state(B, *self.widths)


STEPS = {
    "softplus_attention_step": Step(
        softplus_attention_step,
        softplus_is_right,
        lambda B, T, R: operators.SOFTPLUS.make(B, 1, T, R)[0],
        lambda B, R: (torch.rand(B, R) + 1, torch.randn(B, R)),
        (35,),
        lambda B, R: (B, 1, R),
    ),
    "linear_attention_step": Step(
        linear_attention_step,
        linear_is_right,
        lambda B, T, D, Dv: operators.LINEAR.make(B, 4, 2, 1, T, D, Dv)[0],
        lambda B, D, Dv: (torch.randn(B, 2, D, Dv), torch.rand(B, 2, D) + 1),
        (35, 20),
        lambda B, D, Dv: (B, 4, 1, Dv),
    ),
}
EVERY = pytest.mark.parametrize("it", STEPS.values(), ids=STEPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [0, 1, 63, 300, 513])
@EVERY
def test_a_step_is_right(it: Step, prompt: int, dtype: torch.dtype) -> None:
    it.is_right(dtype, prompt)


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_of_a_step() -> None:
    def results(it: Step, inputs: list[Tensor]) -> list[Tensor]:
        y, state = it.function(*inputs)
        return [y, *state]

    for it, widths in zip(STEPS.values(), ((200,), (40, 24)), strict=True):
        [*assert_threads_change_no_bit((1, 3, 16), results, it, it.inputs(4, 900, *widths))]


@pytest.mark.glue
@EVERY
def test_autocast_leaves_the_state(it: Step) -> None:
    inputs, _ = it.call()
    with torch.autocast(DEVICE, torch.bfloat16):
        y, state = it.function(*inputs)
        y, state = it.function(*inputs, state)
    assert [x.dtype for x in (y, *state)] == [torch.bfloat16, torch.float32, torch.float32]


def equal_tokens(it: Step) -> tuple[list[Tensor], State]:
    """q, k and v of a token, and its terms of the sums in float64."""
    keys, values = torch.linspace(-3, 3, 8), torch.linspace(0.5, 1.9, 8)
    if it.function is softplus_attention_step:
        weights = softplus_reference.softplus(keys.double())[None]
        return [torch.zeros(1, 1, 8), keys.view(1, 8, 1), values.view(1, 8, 1)], (weights, weights * values.double())
    weights = linear_reference.features(keys.double()).view(1, 1, 8)
    return [x.view(1, 1, 1, 8) for x in (keys, keys, values)], (weights[..., None] * values.double(), weights)


@EVERY
def test_a_state_drifts_by_a_rounding_a_step_and_with_rests_does_not(it: Step) -> None:
    """As documented: rounding errors of a sum of equal terms have one sign. Keys of one step have smaller errors."""
    steps, before, unit = 3000, 200_000, 2.0**-24
    (q, k, v), terms = equal_tokens(it)
    start = tuple((before * x).float() for x in terms)
    truths = [x.double() + steps * term for x, term in zip(start, terms, strict=True)]

    def drifts(state: State) -> list[Tensor]:
        return [((x.double() - truth).abs() / truth).max() for x, truth in zip(state, truths, strict=False)]

    rests = it.function is softplus_attention_step or KERNELS == "cpu"
    plain, with_rests = start, (*start, *map(torch.zeros_like, start))
    for _ in range(steps):
        _, plain = it.function(q, k, v, plain)
        if rests:
            _, with_rests = it.function(q, k, v, with_rests)
    assert 100 * unit < max(drifts(plain)) <= steps * unit
    assert it.function is softplus_attention_step or min(drifts(plain)) > 100 * unit
    if rests:
        assert max(drifts(with_rests)) <= 4 * unit
    if rests and it.function is linear_attention_step:
        assert same_bits([it.function(q, k, v, with_rests)[0]], [it.function(q, k, v, with_rests[:2])[0]])
    sizes = [steps if d == 2 else -1 for d in range(k.dim())]  # k and v have their positions there
    roundings = 4 + (steps // 64 if KERNELS == "cuda" and it.function is linear_attention_step else 0)
    assert max(drifts(it.function(q, k.expand(sizes), v.expand(sizes), start)[1])) <= roundings * unit
    assert len(it.function(q, k, v, state_rest=True)[1]) == 4


@pytest.mark.parametrize("layout", ["transposed", "every second column", "every second row", "at an offset"])
@EVERY
def test_any_strides(it: Step, layout: str) -> None:
    inputs, state = it.call()
    expected_y, expected = it.function(*inputs, state)
    change = LAYOUTS[layout]
    y, new_state = it.function(*map(change, inputs), tuple(map(change, state)))
    assert same_bits([y, *new_state], [expected_y, *expected])
    assert all(x.is_contiguous() for x in (y, *new_state))


@EVERY
def test_the_old_state_stays(it: Step) -> None:
    inputs, state = it.call()
    before = [x.clone() for x in state]
    it.function(*inputs, state)
    assert same_bits(state, before)


@EVERY
def test_nothing(it: Step) -> None:
    """No batch, no width, or no new keys, without which the query reads the unchanged state."""
    for empty in range(2 + len(it.widths)):
        B, T, *widths = (0 if i == empty else size for i, size in enumerate((2, 5, *it.widths)))
        state = it.state(B, *widths)
        y, after = it.function(*it.inputs(B, T, *widths), state)
        assert y.shape == it.y(B, *widths)
        assert [x.shape for x in after] == [x.shape for x in state]
        assert T > 0 or same_bits(after, state)


@pytest.mark.parametrize("wanted", range(5))
@EVERY
def test_no_gradient_is_said(it: Step, wanted: int) -> None:
    inputs, state = it.call()
    [*inputs, *state][wanted].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{it.function.__name__}: has no gradient"):
        it.function(*inputs, state)
    with torch.no_grad():
        it.function(*inputs, state)


@pytest.mark.parametrize("dual", [0, 1, 2])
@EVERY
def test_forward_mode_raises(it: Step, dual: int) -> None:
    inputs, _ = it.call()
    with forward_ad.dual_level():
        inputs[dual] = forward_ad.make_dual(inputs[dual], torch.ones_like(inputs[dual]))
        with pytest.raises(NotImplementedError, match=f"{it.function.__name__}: forward-mode differentiation"):
            it.function(*inputs)

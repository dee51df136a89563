"""Compressed attention that goes on from a state: values, gradients through the state, memory and errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    Bound,
    Contract,
    assert_contract,
    assert_strides,
    assert_within,
    doubles,
    heads_inside,
    largest_error,
    run,
    same_bits,
    saved_for_backward,
)
from ops.test_compressed_attention import contract, make_inputs
from torch import Tensor

from memcheck import (
    CompressedAttentionState,
    compressed_attention,
    compressed_attention_state,
    compressed_attention_step,
)
from memcheck.ops.reference import compressed_attention as reference

# B, H, Hkv, T, D
SHAPE = (2, 4, 2, 50, 20)


def in_pieces(q: Tensor, k: Tensor, v: Tensor, cuts: tuple[int, ...], **options: Any) -> Tensor:
    """y of one call per piece of the sequence, with the state between."""
    state, results = None, []
    for begin, end in zip((0, *cuts), (*cuts, k.shape[2]), strict=True):
        piece = (x[:, :, begin:end] for x in (q, k, v))
        y, state = compressed_attention(*piece, initial_state=state, return_state=True, **options)
        results.append(y)
    return torch.cat(results, 2)


def inputs_of(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    B, H, Hkv, T, D = SHAPE
    return make_inputs(B, H, Hkv, T, T, D, dtype)


CUTS = [(1,), (24, 25), (7, 14, 40), (50,), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("factor", [1, 7, 8])
@pytest.mark.parametrize("cuts", CUTS)
def test_calls_with_a_state_between_equal_one_call(
    cuts: tuple[int, ...], factor: int, strict: bool, dtype: torch.dtype
) -> None:
    """So do all gradients, which flow through the state."""
    options = {"factor": factor, "strict": strict}
    one = contract(factor, "strict" if strict else "causal")
    assert_contract(
        Contract(functools.partial(in_pieces, cuts=cuts, **options), one.reference, one.bounds), *inputs_of(dtype)
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("cuts", CUTS)
def test_16_bits_are_as_accurate_as_plain_pytorch(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """At most twice the error of plain PyTorch; y is within the tolerance."""
    inputs, grad_y = inputs_of(dtype)
    ours = run(functools.partial(in_pieces, cuts=cuts, factor=7), inputs, grad_y)
    plain, truths = (
        run(contract(7).reference, inputs, grad_y),
        run(contract(7).reference, doubles(inputs), grad_y.double()),
    )
    for one, other, truth in zip(ours, plain, truths, strict=True):
        assert largest_error(one, truth) <= 2 * largest_error(other, truth)
    of_y = error_bounds.compressed_attention_bounds(*doubles([grad_y, *inputs]), factor=7)[0]
    assert_within(ours[0], truths[0], Bound(of_y, terms=50, stored=True), "y")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
def test_the_same_bits_if_cut_where_a_block_ends(strict: bool, dtype: torch.dtype) -> None:
    inputs, _ = inputs_of(dtype)
    options = {"factor": 7, "strict": strict}
    whole = compressed_attention(*inputs, **options)
    for cuts in ((7,), (14, 42), (7, 14, 21, 28)):
        assert same_bits([in_pieces(*inputs, cuts=cuts, **options)], [whole])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_is_that_of_a_prompt(dtype: torch.dtype) -> None:
    (q, k, v), _ = inputs_of(dtype)
    _, state = compressed_attention(q, k, v, factor=7, return_state=True)
    of_prompt = compressed_attention_state(k, v, factor=7)
    assert same_bits(state[:4], of_prompt[:4])
    assert state[4:] == of_prompt[4:] == (1, 7)


def test_a_call_for_one_position_is_a_step() -> None:
    (q, k, v), _ = inputs_of()
    state = stepped = compressed_attention_state(k[:, :, :5], v[:, :, :5], factor=7)
    for t in range(5, 20):
        new = [x[:, :, t : t + 1] for x in (q, k, v)]
        y, state = compressed_attention(*new, factor=7, initial_state=state, return_state=True)
        step, stepped = compressed_attention_step(*new, stepped, factor=7)
        assert same_bits([y, *state[:4]], [step, *stepped[:4]])


def test_what_is_returned() -> None:
    (q, k, v), _ = inputs_of()
    whole, lse = compressed_attention(q, k, v, factor=7, return_lse=True)
    y, of_y, state = compressed_attention(q, k, v, factor=7, return_lse=True, return_state=True)
    assert same_bits([y, of_y], [whole, lse])
    assert isinstance(state, CompressedAttentionState)
    before = compressed_attention_state(k[:, :, :7], v[:, :, :7], factor=7)
    later = [x[:, :, 7:] for x in (q, k, v)]
    assert same_bits([compressed_attention(*later, factor=7, initial_state=before)], [whole[:, :, 7:]])
    y, of_y = compressed_attention(*later, factor=7, initial_state=before, return_lse=True)
    assert same_bits([y, of_y], [whole[:, :, 7:], lse[:, :, 7:]])


@pytest.mark.parametrize("cut", [7, 9])
def test_gradients_have_the_strides_of_their_inputs(cut: int) -> None:
    inputs, grad_y = inputs_of()
    inputs = [heads_inside(x) for x in inputs]
    state = compressed_attention_state(inputs[1][:, :, :cut], inputs[2][:, :, :cut], factor=7)
    results = run(functools.partial(compressed_attention, factor=7, initial_state=state), inputs, grad_y)
    assert_strides(results, inputs)


@pytest.mark.cpu
def test_a_sink_counts_once_per_query() -> None:
    (q, k, v), _ = inputs_of(torch.float64)
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    whole = compressed_attention(q, k, v, factor=7, sink=sink)
    torch.testing.assert_close(in_pieces(q, k, v, cuts=(9,), factor=7, sink=sink), whole)
    torch.testing.assert_close(whole, reference.compressed_attention(q, k, v, factor=7, sink=sink))


# ---- autograd and memory


@pytest.mark.cpu
def test_gradgradcheck() -> None:
    inputs, _ = inputs_of(torch.float64)
    leaves = [x[:, :, :15, :3].clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(lambda *x: in_pieces(*x, cuts=(9,), factor=7), leaves, fast_mode=True)


def test_keys_and_values_are_not_kept() -> None:
    inputs, _ = inputs_of()
    q, k, v = leaves = [x.requires_grad_() for x in inputs]
    kept = saved_for_backward(lambda: compressed_attention(*leaves, factor=7, return_state=True)[0])
    blocks = 50 // 7 * q.shape[3] * 4
    assert sum(x.numel() for x in kept) == 2 * q.numel() + 2 * blocks + q.numel() // q.shape[3]
    assert {k.data_ptr(), v.data_ptr()}.isdisjoint(x.data_ptr() for x in kept)


def test_autocast() -> None:
    (q, k, v), _ = inputs_of()
    with torch.autocast(DEVICE, torch.bfloat16):
        y, state = compressed_attention(q, k, v, factor=7, return_state=True)
        y, state = compressed_attention(q, k, v, factor=7, initial_state=state, return_state=True)
    assert [x.dtype for x in (y, *state[:4])] == [torch.bfloat16] * 3 + [torch.float32] * 2


# ---- what is refused


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"factor": 3}, ValueError, "factor must be 7, as that of the state, got 3"),
        ({"causal": False}, ValueError, "initial_state and return_state need causal=True, got causal=False"),
        ({"initial_state": ()}, TypeError, "initial_state must be a CompressedAttentionState or None, got tuple"),
        ({"k": torch.ones(2, 2, 3, 5)}, ValueError, r"v must be .* = \[2, 2, 3, 5\] to match k"),
        ({"q": torch.ones(2, 4, 20, 20)}, ValueError, "q must be .* S <= T, got S = 20 and T = 12"),
        ({"k_sum": torch.ones(2, 2, 3)}, ValueError, r"initial_state.k_sum must be \[2, 2, 20\] to match k"),
        ({"kc": torch.ones(2, 2, 1, 20).double()}, TypeError, "initial_state.kc must be float32 to match k"),
        ({"positions": 7}, ValueError, "initial_state.positions must be from 0 to factor - 1 = 6, got 7"),
    ],
)
def test_a_wrong_state(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 3, 3, 20)
    state = compressed_attention_state(torch.ones(2, 2, 9, 20), torch.ones(2, 2, 9, 20), factor=7)
    state = state._replace(**{name: x for name, x in changed.items() if name in ("k_sum", "kc", "positions")})
    given = {"q": q, "k": k, "v": v, "factor": 7, "initial_state": state}
    given |= {name: x for name, x in changed.items() if name in (*given, "causal")}
    with pytest.raises(kind, match=f"compressed_attention: {message}"):
        compressed_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)

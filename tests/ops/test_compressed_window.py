"""Compressed attention with a window: positions as they are near a query, means of blocks before."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from ops.checks import DTYPES, run, same_bits
from ops.operators import compressed_plan
from ops.test_compressed_attention import make_inputs, pooled_op
from ops.test_compressed_merging import make_more, run_both
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memcheck import (
    compressed_attention,
    compressed_attention_pooled,
    compressed_attention_state,
    compressed_attention_step,
    measure_memory,
)
from memcheck.ops.reference import compressed_attention as reference

FACTORS = [1, 3, 8, 64, 1000]
WINDOWS = [1, 2, 20, 64, 129, 5000]
MODES = {"causal": False, "strict": True}
EVERY_MODE = pytest.mark.parametrize("strict", MODES.values(), ids=MODES)


def visible(S: int, T: int, factor: int, window: int, strict: bool) -> tuple[Tensor, Tensor]:
    """(S,C) and (S,T): which blocks and which positions a query sees, by the definition."""
    C = -(-T // factor)
    blocks, positions = torch.zeros(S, C, dtype=torch.bool), torch.zeros(S, T, dtype=torch.bool)
    for s, t in enumerate(range(T - S, T)):
        begin = max(0, t - window + 1) // factor * factor
        blocks[s, : begin // factor] = True
        positions[s, begin : t + (not strict)] = True
    return blocks, positions


# ---- the reference


@EVERY_MODE
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("factor", FACTORS)
def test_a_query_sees_every_position_once(factor: int, window: int, strict: bool) -> None:
    S, T = 100, 150
    q, kc, k = torch.ones(1, 1, S, 1), torch.ones(1, 1, -(-T // factor), 1), torch.ones(1, 1, T, 1)
    hidden = reference.hidden_from_window(q, kc, k, factor, T, strict, window)
    blocks, positions = visible(S, T, factor, window, strict)
    assert torch.equal(~hidden, torch.cat([blocks, positions], 1))
    seen = blocks.repeat_interleave(factor, 1)[:, :T].int() + positions.int()
    last = torch.arange(T - S, T)[:, None] - int(strict)
    assert torch.equal(seen, (torch.arange(T) <= last).int())
    assert (positions.sum(1) >= torch.arange(T - S, T).clamp(max=window - 1) + 1 - int(strict)).all()
    assert (positions.sum(1) <= window + factor - 1).all()


@pytest.mark.parametrize("function", [compressed_attention, reference.compressed_attention])
@pytest.mark.parametrize("window", [70, 1000])
def test_a_window_of_all_positions_is_softmax_attention(function: Any, window: int) -> None:
    inputs, grad_y = make_inputs(2, 4, 4, 70, 70, 20, torch.float64)
    ours = run(functools.partial(function, factor=8, window=window), inputs, grad_y)
    theirs = run(functools.partial(scaled_dot_product_attention, is_causal=True), inputs, grad_y)
    torch.testing.assert_close(ours, theirs)


# ---- values and gradients


@pytest.mark.parametrize("with_sink", [False, True])
@EVERY_MODE
@pytest.mark.parametrize("factor", [1, 3, 8])
def test_lse_and_sink(factor: int, strict: bool, with_sink: bool) -> None:
    """lse is over blocks and positions, and a query that sees nothing has -inf."""
    (q, k, v, sink), grads = make_more(2, 4, 2, 70, 70, 20, dtype=torch.float64)
    options = {"factor": factor, "window": 11, "strict": strict, "scale": 0.3}
    inputs = [q, k, v, sink if with_sink else None]
    ours = run_both(functools.partial(compressed_attention, **options), inputs, grads)
    theirs = run_both(functools.partial(reference.compressed_attention, **options), inputs, grads)
    torch.testing.assert_close(ours, theirs)
    assert (ours[1] == -math.inf).any() == (strict and not with_sink)


@EVERY_MODE
def test_window_of_keys_that_are_compressed_already(strict: bool) -> None:
    """k and v may be the newest positions alone; kc and vc need no block that no query sees."""
    (q, k, v, sink), grads = make_more(2, 4, 2, 20, 100, 20, dtype=torch.float64)
    first = (80 - 11 + 1) // 7 * 7
    last = (99 - 11 + 1) // 7
    kc, vc = (reference.compress(x, 7) for x in (k, v))
    options = {"factor": 7, "kv_len": 100, "strict": strict, "return_lse": True, "window": 11}
    for begin, blocks in ((0, 15), (first, last), (20, 14)):
        inputs = [x.clone().requires_grad_() for x in (q, kc[:, :, :blocks], vc[:, :, :blocks], sink)]
        near = [x[:, :, begin:].clone().requires_grad_() for x in (k, v)]
        ours = pooled_op(*inputs, *near, **options)
        given = dict(zip(("sink", "k", "v"), (inputs[3], *near), strict=True))
        theirs = reference.compressed_attention_pooled(*inputs[:3], **given, **options)
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(y, [*inputs, *near], grads) for y in (ours, theirs)]
        torch.testing.assert_close(*gradients)


# ---- bits, strides, NaN


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_query_depend_on_what_it_sees_alone(dtype: torch.dtype) -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 300, 300, 40, dtype)
    options = {"factor": 8, "window": 100, "return_lse": True}
    y, lse = compressed_attention(q, k, v, **options)
    for queries, T in ((1, 300), (5, 299), (70, 300), (200, 263)):
        some = compressed_attention(q[:, :, T - queries : T], k[:, :, :T], v[:, :, :T], **options)
        assert same_bits([x[:, :, T - queries : T] for x in (y, lse)], some)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factor", "window", "T"), [(8, 100, 300), (4, 9, 80), (2, 3, 70), (2, 900, 1500)])
def test_bits_do_not_depend_on_a_cut(factor: int, window: int, T: int, dtype: torch.dtype) -> None:
    """Wherever the positions of a state begin, and however many queries a piece has."""
    (q, k, v), _ = make_inputs(1, 2, 1, T, T, 20, dtype)
    options = {"factor": factor, "window": window, "return_lse": True}
    expected = compressed_attention(q, k, v, **options)
    for cut in (T // 2 + 3, T - 12, T - 1):
        *before, state = compressed_attention(*(x[:, :, :cut] for x in (q, k, v)), return_state=True, **options)
        after = compressed_attention(*(x[:, :, cut:] for x in (q, k, v)), initial_state=state, **options)
        assert same_bits([torch.cat(x, 2) for x in zip(before, after, strict=True)], expected)


# ---- states


@EVERY_MODE
@pytest.mark.parametrize("factor", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 5, 20, 1000])
def test_pieces_equal_the_whole(window: int, factor: int, strict: bool) -> None:
    """y, lse, all gradients and the state, whatever the cuts. A state has at most window + factor - 2 positions."""
    (q, k, v, sink), grads = make_more(2, 4, 2, 70, 70, 20, dtype=torch.float64)
    options = {"factor": factor, "window": window, "strict": strict, "return_lse": True}
    inputs = [x.requires_grad_() for x in (q, k, v, sink)]
    whole = compressed_attention(q, k, v, sink=sink, **options)
    expected = torch.autograd.grad(whole, inputs, grads)
    outputs, state = [], None
    for begin, end in itertools.pairwise([0, 1, 8, 8, 9, 40, 70]):
        piece = [x[:, :, begin:end] for x in (q, k, v)]
        *of_piece, state = compressed_attention(*piece, sink=sink, initial_state=state, return_state=True, **options)
        outputs.append(of_piece)
        blocks = max(0, end - window + 1) // factor
        assert [x.shape[2] for x in state[:4]] == [blocks, blocks, end - blocks * factor, end - blocks * factor]
        assert state.k.shape[2] <= window + factor - 2
    joined = [torch.cat(x, 2) for x in zip(*outputs, strict=True)]
    torch.testing.assert_close(joined, list(whole))
    torch.testing.assert_close(torch.autograd.grad(joined, inputs, grads), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 20])
def test_steps(window: int, dtype: torch.dtype) -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 60, 60, 35, dtype)
    options = {"factor": 4, "window": window}
    whole = compressed_attention(q, k, v, **options)
    state = compressed_attention_state(k[:, :, :27], v[:, :, :27], **options)
    rows = []
    for t in [*range(27, 50), slice(50, 60)]:
        new = [x[:, :, t : t + 1] if isinstance(t, int) else x[:, :, t] for x in (q, k, v)]
        y, state = compressed_attention_step(*new, state, **options)
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 2), whole[:, :, 27:])
    of_all = compressed_attention_state(k, v, **options)
    assert same_bits(of_all[:4], state[:4])
    assert of_all[4:] == state[4:] == (4, window)
    y, _ = compressed_attention_step(q[:, :, :9], k[:, :, :9], v[:, :, :9], **options)
    assert same_bits([y], [compressed_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], **options)])


@pytest.mark.glue
@pytest.mark.cpu
def test_opcheck_of_a_step() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 1, 5)
    memory = [x.expand(2, 2, 9, 5).clone() for x in (k, v, k, v)]
    operator, options = torch.ops.memcheck.compressed_attention_window_step, {"factor": 4, "window": 2}
    for place in ((0, 0, 0), (1, 3, 2), (8, 4, 4)):  # the last completes a block
        torch.library.opcheck(operator, (q, k, v, *memory, *place), options)
    for place, message in (
        ((9, 4, 4), "kc must have 1 places from 9 on, got 9"),
        ((-1, 4, 4), "kc must have 1 places from -1 on"),
        ((1, 5, 4), "near_k must have 5 places from 5 on, got 9"),
        ((1, 0, 0), "positions must be from 1 to 4 for factor = 4 and window = 2, got 0"),
        ((0, 0, 5), "positions must be from 0 to 4"),
    ):
        with pytest.raises(ValueError, match=f"compressed_attention_window_step: {message}"):
            operator(q, k, v, *memory, *place, **options)
    with pytest.raises(ValueError, match="near_v must have 2 places from 0 on, got 1"):
        operator(q, k, v, *memory[:3], v, 0, 0, 1, **options)
    with pytest.raises(ValueError, match="q must be one position"):
        operator(q[:, :, :0], k, v, *memory, 0, 0, 0, **options)


# ---- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_pooled_keys_to_the_byte(dtype: torch.dtype) -> None:
    """With no more blocks and positions than queries see, and one query, whose keys several blocks of threads share."""
    for S, B in ((300, 2), (1, 1)):
        (q, k, v), _ = make_inputs(B, 4, 2, S, 3000, 40, dtype)
        first, blocks = (3000 - S - 63) // 8 * 8, (3000 - 64) // 8
        given = [q, *(reference.compress(x, 8)[:, :, :blocks] for x in (k, v)), *(x[:, :, first:] for x in (k, v))]
        leaves = [x.clone().requires_grad_() for x in given]
        plan = compressed_plan(q, k, 8, window=64, first=first, blocks=blocks)

        def attend(q: Tensor, kc: Tensor, vc: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compressed_attention_pooled(q, kc, vc, k=k, v=v, window=64, factor=8, kv_len=3000)

        record = measure_memory(attend, *leaves)
        held = record.input_bytes + record.output_bytes
        assert record.saved_bytes == plan["lse"]
        assert record.forward_peak_bytes == held + plan["lse"] + plan["pooled_forward_scratch"]
        working = plan["lse"] + q.itemsize + record.gradient_bytes + plan["delta"] + plan["backward_scratch"]
        assert record.backward_peak_bytes == held + working


# ---- what is refused


@pytest.mark.glue
def test_wrong_positions_of_a_window() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 5, 8, 3)
    kc, vc = (reference.compress(x, 2) for x in (k, v))
    call = functools.partial(pooled_op, factor=2, kv_len=8)
    for arguments, options, message in (
        ((None, k, v), {}, "k and v need a window, got window=None"),
        ((None, None, v), {"window": 2}, "k must be a tensor, got None"),
        ((None, k, None), {"window": 2}, "v must be a tensor, got None"),
        ((None, k[:, :, 4:], v[:, :, 4:]), {"window": 2}, "k must be of 6 to 8 positions, .* got 4"),
        ((None, k, v[:, :, 1:]), {"window": 2}, r"v must be \(B,Hkv,n,D\) = \[2, 2, 8, 3\] to match kc"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"compressed_attention_pooled: {message}"):
            call(q, kc, vc, *arguments, **options)
    with pytest.raises(ValueError, match=r"kc must be \(B,Hkv,C,D\) with C from 3 to 4 .* window = 2, got C = 2"):
        call(q, kc[:, :, :2], vc[:, :, :2], None, k, v, window=2)

"""States of compressed attention with a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memcheck.ops import compressed_attention_states as states
from memcheck.ops import derivatives
from memcheck.ops.checks import check_int, check_rank, check_states, in_autocast_dtype
from memcheck.ops.compressed_attention_rooms import appended, blocks_in, memory_after, places_in, write
from memcheck.ops.compressed_attention_states import Arguments, Inputs, Places

MOST_POSITIONS = 2**62
_step = torch.ops.memcheck.compressed_attention_window_step.default
Pair = tuple[Tensor, Tensor]  # keys and values


class CompressedAttentionWindowState(NamedTuple):
    """The state of decoding with a window: the blocks before it, and the positions from there on.

    Blocks and positions of successive states share memory: do not write to them.
    """

    kc: Tensor  # (B,Hkv,C,D) means of the keys of blocks that the next position sees as such, in their dtype
    vc: Tensor  # (B,Hkv,C,D) of the values
    k: Tensor  # (B,Hkv,n,D) the keys of all later positions, n <= window + factor - 2
    v: Tensor  # (B,Hkv,n,D) their values
    factor: int  # positions per block
    window: int


class Blocks(NamedTuple):
    """How blocks are formed, and which are seen as such."""

    factor: int  # positions per block
    window: int | None = None
    # k and v (B,Hkv,C factor,D) -> kc and vc (B,Hkv,C,D); the operator's means by default
    compress: Callable[[Tensor, Tensor], Pair] | None = None


def check_window(op: str, window: object) -> None:
    check_int(op, "window", window, 1, MOST_POSITIONS)


def state_before(op: str, name: str, state: object, k: Tensor, blocks: Blocks) -> CompressedAttentionWindowState:
    """The state, after checks; in place of None that of no positions."""
    sizes: Any = blocks[:2]
    check_int(op, "factor", blocks.factor, 1, states.LONGEST)
    check_window(op, blocks.window)
    B, Hkv, _, D = k.shape
    if state is None:
        kc, vc, none, of_none = (k.new_empty(B, Hkv, 0, D) for _ in range(4))
        return CompressedAttentionWindowState(kc, vc, none, of_none, *sizes)
    if not isinstance(state, CompressedAttentionWindowState):
        kind = type(state).__name__
        raise TypeError(f"{op}: {name} must be a CompressedAttentionWindowState or None, got {kind}")
    if state[4:] != sizes:
        held = f"factor {state.factor} and window {state.window}"
        raise ValueError(f"{op}: factor and window must be those of the state, {held}, got {sizes[0]} and {sizes[1]}")
    for fields, letters in ((("kc", "vc"), "(B,Hkv,C,D)"), (("k", "v"), "(B,Hkv,n,D)")):
        check_rank(op, f"{name}.{fields[0]}", getattr(state, fields[0]), letters, 4)
        count = getattr(state, fields[0]).shape[2]
        for field in fields:
            states.check_matches(op, f"{name}.{field}", getattr(state, field), letters, (B, Hkv, count, D), k.dtype, k)
    return state


def go_on(
    op: str,
    inputs: Inputs,
    sink: Tensor | None,
    before: object,
    blocks: Blocks,
    options: Arguments,
    **sequences: Any,
) -> tuple[Any, Any]:
    """Attention of the newest positions q (B,H,S,D) to all keys up to k (B,Hkv,n,D), and the state after them.

    before: the state before them, or None. A packed or padded batch has a sequence of states, one for each.
    """
    q, k, v = (in_autocast_dtype(x) for x in inputs)
    if sequences:
        of_each = _leaving_the_graph if torch.compiler.is_compiling() else _sequences_go_on
        return of_each(op, (q, k, v), sink, before, blocks, options, **sequences)
    if blocks.window is None:
        return states.one_goes_on(op, (q, k, v), sink, before, blocks.factor, options)
    return _one_goes_on(op, (q, k, v), sink, before, blocks, options)


def _one_goes_on(
    op: str,
    inputs: Inputs,
    sink: Tensor | None,
    before: object,
    blocks: Blocks,
    options: Arguments,
    of_sequence: str = "",
) -> tuple[Any, CompressedAttentionWindowState]:
    q, k, v = inputs
    states.check_new(op, q, k, v, options["scale"])
    name = f"initial_state{of_sequence}" if op == "compressed_attention" else "state"
    old = state_before(op, name, before, k, blocks)
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{op}: with a window q must be of new positions, S <= n, got S = {q.shape[2]} and n = {k.shape[2]}"
        )
    near, kept_from = joined(old, k, v)
    state = state_after(op, old, near, kept_from, blocks)
    sizes = {"factor": old.factor, "window": old.window, "kv_len": positions_of(state)}
    return states.attend(states.POOLED, (q, state.kc, state.vc), sink, sizes, options, near), state


def goes_on_as_it_is(state: CompressedAttentionWindowState, blocks: Blocks) -> bool:
    """Whether a new position can be written behind those of the state. The operator checks the rest."""
    kc, vc, k, v = state[:4]
    return (
        type(kc) is type(vc) is type(k) is type(v) is Tensor
        and k.shape == v.shape
        and kc.shape == vc.shape
        and state[4:] == blocks[:2]
        and not (k.requires_grad or v.requires_grad)
    )


def one_position_of_window(
    q: Tensor, k: Tensor, v: Tensor, state: CompressedAttentionWindowState, options: Arguments
) -> tuple[Tensor, CompressedAttentionWindowState]:
    """A step of plain tensors for which goes_on_as_it_is, by one operator."""
    kc, vc, old_k, old_v, factor, window = state
    count, blocks = old_k.shape[2], kc.shape[2]
    completes = count == window + factor - 2
    *room, start = memory_after(old_k, old_v, 1)
    places = memory_after(kc, vc, 1)[:2] if completes else (kc, vc)
    y = _step(q, k, v, *places, *room, blocks, start, count, factor=factor, window=window, **options)
    first = factor if completes else 0
    if completes:
        kc, vc = blocks_in(places, blocks + 1)
    near = blocks_in(room, count + 1 - first, start + first)
    return y, CompressedAttentionWindowState(kc, vc, *near, factor, window)


def _sequences_go_on(
    op: str,
    inputs: Inputs,
    sink: Tensor | None,
    before: object,
    blocks: Blocks,
    options: Arguments,
    **sequences: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """With a window, each sequence has a call of its own, with the state before it."""
    q, k, v = inputs
    derivatives.refuse_mapped_lengths(op, sequences)
    states.check_new(op, q, k, v, options["scale"])
    if blocks.window is None:
        return states.sequences_go_on(op, inputs, sink, before, blocks.factor, options, **sequences)
    of_queries, of_keys = Places.of_sequences(op, q, k, True, sequences)
    given = check_states(op, before, len(of_keys.counts), CompressedAttentionWindowState)
    if not given:
        return states.attend(
            "compressed_attention", inputs, sink, {"factor": blocks.factor, "window": blocks.window}, options
        ), ()
    outputs, afters = [], []
    parts = zip(of_queries.split(q), of_keys.split(k), of_keys.split(v), given, strict=True)
    for i, (*part, state) in enumerate(parts):
        of_one, after = _one_goes_on(op, (part[0], part[1], part[2]), sink, state, blocks, options, f"[{i}]")
        outputs.append(of_one if options["return_lse"] else (of_one,))
        afters.append(after)
    wholes = [
        q.new_zeros(q.shape),
        q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32)),
    ]
    results = zip(*outputs, strict=True)
    wholes = [of_queries.whole(torch.cat(x, 2), whole) for x, whole in zip(results, wholes, strict=False)]
    return (tuple(wholes) if options["return_lse"] else wholes[0]), tuple(afters)


# The sizes of states depend on the values of cu_seqlens or lengths, so that torch.compile cannot trace them.
_leaving_the_graph = torch._disable_dynamo(_sequences_go_on)


def joined(old: CompressedAttentionWindowState, k: Tensor, v: Tensor) -> tuple[Pair, Callable[[int], Pair]]:
    """The positions of the state and then k and v, and a function: those from the nth on, for the next state.

    While decoding, a new position is written behind the others, in memory that has places for half as many more.
    """
    count, more = old.k.shape[2], k.shape[2]
    if more <= count and states.grows_in_place(k, v, old[:4]):
        *room, start = memory_after(old.k, old.v, more)
        write(room, start + count, (k, v))
        return places_in(room, start, count + more), lambda n: blocks_in(room, count + more - n, start + n)
    if not count:
        return (k, v), lambda n: (k[:, :, n:].clone(), v[:, :, n:].clone())
    near = (torch.cat([old.k, k], 2), torch.cat([old.v, v], 2))
    return near, lambda n: (near[0][:, :, n:].clone(), near[1][:, :, n:].clone()) if n else near


def state_after(
    op: str, old: CompressedAttentionWindowState, near: Pair, kept_from: Callable[[int], Pair], blocks: Blocks
) -> CompressedAttentionWindowState:
    """The state after the positions near (B,Hkv,n,D), of which the first are those of the old one."""
    (k, v), (kc, vc, *_, factor, window) = near, old
    seen_as_blocks = max(0, kc.shape[2] * factor + k.shape[2] - window + 1) // factor - kc.shape[2]
    end = seen_as_blocks * factor
    if end > 0:
        whole = k[:, :, :end], v[:, :, :end]
        new = means_of(op, *whole, factor) if blocks.compress is None else blocks.compress(*whole)
        kc, vc = appended((kc, vc), new, states.grows_in_place(*new, old[:4]))
    k, v = kept_from(end)
    return CompressedAttentionWindowState(kc, vc, k, v, factor, window)


def means_of(op: str, k: Tensor, v: Tensor, factor: int) -> Pair:
    """k and v (B,Hkv,C factor,D) -> the means of blocks (B,Hkv,C,D)."""
    sums = states.no_sums(k, k.shape[0])
    kc, vc, *_ = states.extended(op, k, v, sums, sums, positions=[0], factor=factor)
    return kc, vc


def state_of_prompt(op: str, k: Tensor, v: Tensor, blocks: Blocks) -> CompressedAttentionWindowState:
    """The state after a prompt."""
    old = state_before(op, "state", None, k, blocks)
    return state_after(op, old, *joined(old, k, v), blocks)


def positions_of(state: CompressedAttentionWindowState) -> int:
    """The number of positions that a state covers."""
    return state.kc.shape[2] * state.factor + state.k.shape[2]

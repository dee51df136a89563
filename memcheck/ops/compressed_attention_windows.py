"""States of compressed attention with a window."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from memcheck.ops.checks import check_int, check_rank, in_autocast_dtype
from memcheck.ops.compressed_attention_states import (
    LONGEST,
    POOLED,
    Arguments,
    Inputs,
    attend,
    check_matches,
    check_new,
    extended,
    no_sums,
)

MOST_POSITIONS = 2**62


class CompressedAttentionWindowState(NamedTuple):
    """The state of decoding with a window: the blocks before it, and the positions from there on."""

    kc: Tensor  # (B,Hkv,C,D) means of the keys of blocks that the next position sees as such, in their dtype
    vc: Tensor  # (B,Hkv,C,D) of the values
    k: Tensor  # (B,Hkv,n,D) the keys of all later positions, n <= window + factor - 2
    v: Tensor  # (B,Hkv,n,D) their values
    factor: int  # positions per block
    window: int


def check_window(op: str, window: object) -> None:
    check_int(op, "window", window, 1, MOST_POSITIONS)


def state_before(
    op: str, name: str, state: object, k: Tensor, sizes: tuple[int, int]
) -> CompressedAttentionWindowState:
    """The state, after checks; in place of None that of no positions. sizes: factor and window."""
    check_int(op, "factor", sizes[0], 1, LONGEST)
    check_window(op, sizes[1])
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
            check_matches(op, f"{name}.{field}", getattr(state, field), letters, (B, Hkv, count, D), k.dtype, k)
    return state


def go_on(
    op: str, inputs: Inputs, sink: Tensor | None, before: object, sizes: tuple[int, int], options: Arguments
) -> tuple[Any, CompressedAttentionWindowState]:
    """Attention of the newest positions q (B,H,S,D) to all keys up to k (B,Hkv,n,D), and the state after them.

    before: the state before them, or None. sizes: factor and window.
    """
    q, k, v = (in_autocast_dtype(x) for x in inputs)
    check_new(op, q, k, v)
    old = state_before(op, "initial_state" if op == "compressed_attention" else "state", before, k, sizes)
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{op}: with a window q must be of new positions, S <= n, got S = {q.shape[2]} and n = {k.shape[2]}"
        )
    check_new(op, q, k, v, q.shape[2], options["scale"])
    near = [torch.cat(x, 2) if x[0].shape[2] else x[1] for x in ((old.k, k), (old.v, v))]
    state = state_after(op, old, *near)
    blocks = {"factor": old.factor, "window": old.window, "kv_len": positions_of(state)}
    return attend(POOLED, (q, state.kc, state.vc), sink, blocks, options, near), state


def state_after(op: str, old: CompressedAttentionWindowState, k: Tensor, v: Tensor) -> CompressedAttentionWindowState:
    """The state after positions k and v (B,Hkv,n,D), of which the first are those of the old one."""
    kc, vc, *_, factor, window = old
    seen_as_blocks = max(0, kc.shape[2] * factor + k.shape[2] - window + 1) // factor - kc.shape[2]
    end = seen_as_blocks * factor
    if end == 0 and old.k.shape[2]:  # then k and v are tensors of our own
        return old._replace(k=k, v=v)
    state = old._replace(k=k[:, :, end:].clone(), v=v[:, :, end:].clone())
    if end == 0:
        return state
    sums = no_sums(k, k.shape[0])
    new = extended(op, k[:, :, :end], v[:, :, :end], sums, sums, positions=[0], factor=factor)
    kc, vc = torch.cat([kc, new[0]], 2), torch.cat([vc, new[1]], 2)
    return state._replace(kc=kc, vc=vc)


def state_of_prompt(op: str, k: Tensor, v: Tensor, sizes: tuple[int, int]) -> CompressedAttentionWindowState:
    """The state after a prompt. sizes: factor and window."""
    return state_after(op, state_before(op, "state", None, k, sizes), k, v)


def positions_of(state: CompressedAttentionWindowState) -> int:
    """The number of positions that a state covers."""
    return state.kc.shape[2] * state.factor + state.k.shape[2]

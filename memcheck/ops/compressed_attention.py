"""Compressed attention: softmax attention over means of blocks of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from memcheck.ops import checks, derivatives
from memcheck.ops import compressed_attention_states as states
from memcheck.ops import compressed_attention_windows as windows
from memcheck.ops.compressed_attention_rooms import blocks_in, memory_after
from memcheck.ops.compressed_attention_states import Arguments, CompressedAttentionState
from memcheck.ops.compressed_attention_windows import Blocks, CompressedAttentionWindowState

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

State = CompressedAttentionState | CompressedAttentionWindowState

_step = torch.ops.memcheck.compressed_attention_step.default
_last_step = torch.ops.memcheck.compressed_attention_last_step.default


class BlockOptions(TypedDict, total=False):
    """Arguments of attention to blocks beside return_lse, for type checkers."""

    factor: Required[int]
    causal: bool
    strict: bool
    scale: float | None
    sink: Tensor | None
    window: int | None


class PooledOptions(BlockOptions, total=False):
    """Those of compressed_attention_pooled."""

    kv_len: Required[int]
    k: Tensor | None
    v: Tensor | None


class Options(BlockOptions, checks.Sequences, total=False):
    """Those of compressed_attention, beside return_state."""

    initial_state: State | Sequence[State] | None


@overload
def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_state: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_state: Literal[False] = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    return_state: Literal[True],
    **options: Unpack[Options],
) -> tuple[Any, ...]: ...


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
    initial_state: State | Sequence[State] | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Any, ...]:
    """Softmax attention over blocks of `factor` positions, whose keys and values are averaged.

    This is memory-compressed attention (Liu et al. 2018, arXiv:1801.10198) and the compression branch of NSA (Yuan et
    al. 2025, arXiv:2502.11089), with a mean for the compression. factor=1 is softmax attention. The (S, T/factor)
    matrix of scores is never in memory.

    Args:
        q: (B,H,S,D) queries.
        k: (B,Hkv,T,D) keys; query head h reads key head h // (H / Hkv).
        v: (B,Hkv,T,D) values.
        factor: positions per block, at least 1. Blocks begin at position 0; the last one may be shorter.
        causal: query s, at position t = s + T - S (the last query sees the last key), sees the first (t + 1) // factor
            blocks, those that are complete at its position; needs S <= T. Otherwise every query sees every block.
        strict: with causal, t // factor blocks: those complete before its position.
        scale: of the scores; D**-0.5 by default.
        window: W, at least 1; needs causal. The query at position t then sees positions as they are from the last block
            boundary at or before t - W + 1 (at least 0) to t, or with strict to t - 1, and the means of the blocks
            before that boundary. So it sees every position once, in one softmax. With W >= T this is softmax
            attention.
        return_lse: return lse too, with which merge_attention merges y and other attention of the same queries.
        sink: (H,), a score of each head that every query sees, with a value of 0: it adds exp(sink) to the sum over
            which softmax divides, and so to exp(lse). With inf y is 0, lse inf and every gradient 0.
        cu_seqlens: (N+1,) int32 or int64, for N sequences that are packed one behind the other: B = 1, and sequence n
            is positions cu_seqlens[n] to cu_seqlens[n+1]. It ascends from 0 to S = T; sequences may be empty.
        cu_seqlens_q, cu_seqlens_k: the same, where sequences have other numbers of queries than of keys.
        lengths: (B,) int32 or int64, from 0 to T, for a padded batch: how many positions of each row count. Query s is
            at position s + T - S. If not causal and S != T, they are those of the keys alone.
        padding: where lengths has the padding, "right" (after the positions that count) or "left".
        initial_state: the CompressedAttentionState of all positions before these: blocks go on from it. Queries are
            then the newest positions, and T counts the earlier ones too. Needs causal. Packed or padded: a sequence of
            N states, one for each sequence, with B = 1. With a window: CompressedAttentionWindowState, and no more
            queries than new positions.
        return_state: return the state after these positions too; packed or padded, a tuple of N. Needs causal.

    Packed or padded, blocks begin anew with each sequence, and it gives the bits that it gives alone. Nothing of
    padding is read; its rows of y and of the gradients are 0, and its lse is -inf. Work is that of the positions that
    count. On the CPU, sequences share the threads by their lengths. On CUDA the number of launches does not depend on
    that of sequences, and values of cu_seqlens or lengths that lie on the device stay there: if one breaks a rule, all
    sequences count as empty, and under MEMCHECK_CHECK=1 the call waits for them and raises. With states it always does,
    and torch.compile leaves the call out of its graphs, because the sizes of states depend on them.

    float64, float32, float16, bfloat16; any strides. Sums are in float32 (float64 for float64); the means are rounded
    to the dtype of the inputs.

    Returns:
        y (B,H,S,D), contiguous; 0 for a query that sees no block, or only scores of -inf. Kept for backward: q, y (not
        in 16 bits), the means, and one number per query in the accumulation type, but k and v only with a window. A
        gradient has its input's strides if these are dense, else it is contiguous. With return_lse: y and lse (B,H,S)
        in the accumulation type, the natural logarithm of the sum of exp(score) over what a query sees, and -inf where
        y is 0 for lack of it. Both have gradients. With return_state: the state last, a CompressedAttentionState with
        which the next call goes on. Two calls with the state between equal one call over all positions up to rounding.
        The gradient flows through the state into the earlier call. On the CPU, the bits of y and lse of a query depend
        on what it sees and on nothing else: not on the other queries, heads or samples of its call, not on the number
        of threads, and not on the cut between two calls if a block ends there. With a window the cut may be anywhere.

        Sequences and rows of the batch do not touch each other. A NaN reaches the queries that see it, and it or an
        infinity may reach other queries of its sequence.

    Raises:
        ValueError: a shape, device, factor, scale or window, S > T when causal, strict, a window or a state without
            causal, a state of other sizes or another factor, another number of states than of sequences, a rule of
            cu_seqlens and lengths.
        TypeError: a dtype; an input that is no tensor, a factor that is no int, a scale that is no number.

    Equivalent to:
        >>> def blocks(x):
        ...     return torch.stack([block.mean(2) for block in x.split(factor, 2)], 2)
        >>> T, group = k.shape[2], q.shape[1] // k.shape[1]
        >>> kc, vc = (blocks(x).repeat_interleave(group, 1) for x in (k, v))
        >>> last = torch.arange(T - q.shape[2], T)[:, None] + (0 if strict else 1)
        >>> hidden = torch.arange(kc.shape[2]) >= last // factor
        >>> scores = (q @ kc.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> y = torch.softmax(scores, 3).nan_to_num(0) @ vc
        >>> lse = torch.logsumexp(scores, 3)
        >>> lse_with_sink = torch.logaddexp(lse, sink[:, None])
        >>> y_with_sink = y * torch.exp(lse - lse_with_sink)[..., None]
        >>> t, j = torch.arange(T - q.shape[2], T)[:, None], torch.arange(T)
        >>> begin = (t - window + 1).clamp(min=0) // factor * factor
        >>> blocks_hidden = (torch.arange(kc.shape[2]) + 1) * factor > begin
        >>> hidden = torch.cat([blocks_hidden, (j < begin) | (j > t - int(strict))], 1)
        >>> keys = torch.cat([kc, k.repeat_interleave(group, 1)], 2)
        >>> values = torch.cat([vc, v.repeat_interleave(group, 1)], 2)
        >>> scores = (q @ keys.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> y_with_window = torch.softmax(scores, 3).nan_to_num(0) @ values
    """
    op = "compressed_attention"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    checks.check_int(op, "factor", factor, 1, states.LONGEST)
    states.check_scale(op, scale)
    blocks = {"factor": factor} if window is None else {"factor": factor, "window": window}
    if window is not None:
        windows.check_window(op, window)
    sequences = checks.sequence_arguments(op, cu_seqlens, cu_seqlens_q, cu_seqlens_k, lengths, padding)
    options = {"causal": causal, "strict": strict, "scale": scale, "return_lse": return_lse}
    if initial_state is None and not return_state:
        return states.attend(op, (q, k, v), sink, blocks, options, **sequences)
    if not causal:
        raise ValueError(f"{op}: initial_state and return_state need causal=True, got causal=False")
    sink = states.check_sink(op, sink, q)
    outputs, state = windows.go_on(op, (q, k, v), sink, initial_state, Blocks(factor, window), options, **sequences)
    if not return_state:
        return outputs
    return (*outputs, state) if return_lse else (outputs, state)


@overload
def compressed_attention_pooled(
    q: Tensor, kc: Tensor, vc: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[PooledOptions]
) -> Tensor: ...


@overload
def compressed_attention_pooled(
    q: Tensor, kc: Tensor, vc: Tensor, *, return_lse: Literal[True], **options: Unpack[PooledOptions]
) -> tuple[Tensor, Tensor]: ...


def compressed_attention_pooled(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    *,
    factor: int,
    kv_len: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    sink: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    window: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """compressed_attention for keys and values that are compressed already, for example by a learned compression.

    Args:
        q: (B,H,S,D) queries.
        kc: (B,Hkv,C,D) a key for every block: C = ceil(kv_len / factor), or floor if causal.
        vc: (B,Hkv,C,D) a value for every block.
        kv_len: T, the number of positions that the blocks represent.
        factor, causal, strict, scale, return_lse, sink: as in compressed_attention.
        k, v: (B,Hkv,n,D) with a window, keys and values of the newest positions: at least those that a query sees as
            they are. kc and vc may then be of the blocks alone that a query sees.
        window: as in compressed_attention.

    Returns:
        y (B,H,S,D), contiguous; with return_lse, y and lse (B,H,S). Kept for backward: q, kc, vc, y (not in 16 bits),
        one number per query, and with a window k and v.

    Raises:
        ValueError, TypeError: as compressed_attention.

    Equivalent to:
        >>> last = torch.arange(kv_len - q.shape[2], kv_len)[:, None] + (0 if strict else 1)
        >>> hidden = torch.arange(kc.shape[2]) >= last // factor
        >>> kh, vh = (x.repeat_interleave(q.shape[1] // kc.shape[1], 1) for x in (kc, vc))
        >>> scores = (q @ kh.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> y = torch.softmax(scores, 3).nan_to_num(0) @ vh
    """
    op = "compressed_attention_pooled"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    checks.check_int(op, "factor", factor, 1, states.LONGEST)
    checks.check_int(op, "kv_len", kv_len, 0, windows.MOST_POSITIONS)
    states.check_scale(op, scale)
    options = {"causal": causal, "strict": strict, "scale": scale, "return_lse": return_lse}
    blocks = {"factor": factor, "kv_len": kv_len}
    if window is None and k is None and v is None:
        return states.attend(op, (q, kc, vc), sink, blocks, options)
    windows.check_window(op, window)
    if k is None or v is None:
        raise TypeError(f"{op}: window needs k and v, the newest positions, got {'k' if k is None else 'v'}=None")
    near = (checks.in_autocast_dtype(k), checks.in_autocast_dtype(v))
    return states.attend(op, (q, kc, vc), sink, blocks | {"window": window}, options, near)


def compressed_attention_state(k: Tensor, v: Tensor, *, factor: int, window: int | None = None) -> State:
    """The state of compressed_attention_step after these positions. T may be 0.

    Args:
        k: (B,Hkv,T,D) the keys of a prompt.
        v: (B,Hkv,T,D) its values.
        factor: positions per block.
        window: as in compressed_attention.

    Returns:
        CompressedAttentionState(kc, vc, k_sum, v_sum, positions, factor): kc and vc (B,Hkv,T // factor,D) in the dtype
        of k, k_sum and v_sum (B,Hkv,D) in float32 (float64 for float64), positions = T % factor. It has no gradient.
        With a window: CompressedAttentionWindowState(kc, vc, k, v, factor, window), the blocks that the next query sees
        as such, and all later positions, at most window + factor - 2.

    Raises:
        ValueError: a shape, device or factor.
        TypeError: a dtype; an input that is no tensor, a factor that is no int.
        NotImplementedError: grad mode is on and an argument requires a gradient.

    Equivalent to:
        >>> complete = k.shape[2] // factor * factor
        >>> kc, vc = (x[:, :, :complete].unflatten(2, (-1, factor)).mean(3) for x in (k, v))
        >>> k_sum, v_sum = (x[:, :, complete:].sum(2) for x in (k, v))
        >>> state = (kc, vc, k_sum, v_sum, k.shape[2] % factor, factor)
    """
    op = "compressed_attention_state"
    k, v = checks.in_autocast_dtype(k), checks.in_autocast_dtype(v)
    checks.refuse_gradient(op, k, v)
    states.check_new(op, None, k, v)
    if window is not None:
        return windows.state_of_prompt(op, k, v, Blocks(factor, window))
    return states.state_after(op, states.state_before(op, "state", None, k, factor), k, v)


def compressed_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    factor: int,
    strict: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, State]:
    """The newest positions of causal compressed attention, from a state instead of all earlier keys.

    Args:
        q: (B,H,S,D) the queries of the newest positions; one position while decoding.
        k: (B,Hkv,n,D) the keys that are new since the state.
        v: (B,Hkv,n,D) their values.
        state: the result of the last step, or compressed_attention_state of a prompt; None at the beginning.
        factor, strict, scale, window: as in compressed_attention, the same in every step.

    Returns:
        y (B,H,S,D), equal to the last rows of the causal compressed_attention over all keys up to rounding, and the
        new state; the old one does not change. O(T / factor) work per query and no gradient. Its blocks are in memory
        with room for half as many more, in which later steps write theirs: only where it is full are blocks copied. A
        second step from the same state copies them, too.
        With a window, O(T / factor + window) work per query, and S <= n.

    Raises:
        ValueError: a shape, device, factor or scale, S > T, a state of other sizes or another factor.
        TypeError: a dtype; an argument of another type.
        NotImplementedError: grad mode is on and an argument requires a gradient.

    Equivalent to:
        >>> kc, vc, k_sum, v_sum, positions, factor = state
        >>> k_sum, v_sum, positions = k_sum + k[:, :, 0], v_sum + v[:, :, 0], positions + 1
        >>> kv_len = kc.shape[2] * factor + positions
        >>> if positions == factor:
        ...     kc = torch.cat([kc, (k_sum / factor)[:, :, None]], 2)
        ...     vc = torch.cat([vc, (v_sum / factor)[:, :, None]], 2)
        ...     k_sum, v_sum, positions = torch.zeros_like(k_sum), torch.zeros_like(v_sum), 0
        >>> y = compressed_attention_pooled(q, kc, vc, factor=factor, kv_len=kv_len, strict=strict)
    """
    op = "compressed_attention_step"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    states.check_scale(op, scale)
    options = {"strict": strict, "scale": scale} if strict or scale is not None else {}
    of_blocks = Blocks(factor, window)
    if _is_plain_step(q, k, v, state, of_blocks):
        step: Any = _one_position if isinstance(state, CompressedAttentionState) else windows.one_position_of_window
        try:
            return step(q, k, v, state, options)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # The operator has other names for the tensors of the state.
            if window is None:
                states.check_new(op, q, k, v)
                states.state_before(op, "state", state, k, factor)
                raise
    checks.refuse_gradient(op, q, k, v, *(state if isinstance(state, tuple) else ()))
    options = {"causal": True, "strict": strict, "scale": scale, "return_lse": False}
    return windows.go_on(op, (q, k, v), None, state, of_blocks, options)


def _is_plain_step(q: Tensor, k: Tensor, v: Tensor, state: object, blocks: Blocks) -> bool:
    """Whether the operator computes the step: one position, of plain tensors, without transforms."""
    if torch.compiler.is_compiling() or derivatives.transformed():
        return False
    if not (type(q) is type(k) is type(v) is Tensor and k.dim() == 4 and k.shape[2] == 1):
        return False
    if type(state) is CompressedAttentionWindowState:
        return windows.goes_on_as_it_is(state, blocks)
    if type(state) is not CompressedAttentionState or blocks.window is not None:
        return False
    return type(blocks.factor) is int and blocks.factor == state.factor


def _one_position(
    q: Tensor, k: Tensor, v: Tensor, state: CompressedAttentionState, options: Arguments
) -> tuple[Tensor, CompressedAttentionState]:
    """The step for k and v (B,Hkv,1,D) by one operator, which checks all arguments."""
    kc, vc, k_sum, v_sum, positions, factor = state
    if positions + 1 != factor:
        y, k_sum, v_sum = _step(q, k, v, kc, vc, k_sum, v_sum, positions, factor=factor, **options)
        return y, CompressedAttentionState(kc, vc, k_sum, v_sum, positions + 1, factor)
    blocks, room = kc.shape[2], memory_after(kc, vc, 1)[:2]
    y, k_sum, v_sum = _last_step(q, k, v, *room, k_sum, v_sum, blocks, factor=factor, **options)
    return y, CompressedAttentionState(*blocks_in(room, blocks + 1), k_sum, v_sum, 0, factor)

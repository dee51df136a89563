"""Compressed attention: softmax attention over means of blocks of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

import memcheck._extension  # noqa: F401  (registers torch.ops.memcheck)
from memcheck.ops import derivatives
from memcheck.ops.checks import (
    REFUSALS,
    Sequences,
    changed_options,
    check_floating,
    check_int,
    check_like,
    check_plain,
    check_rank,
    check_states,
    dtype_name,
    explain_refusal,
    in_autocast_dtype,
    is_symbolic,
    prepare_input,
    refuse_context_parallel,
    sequence_arguments,
)
from memcheck.ops.reference.sequences import sequences_of

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

LONGEST = 2**31
MOST_POSITIONS = 2**62
DEFAULTS = {"causal": True, "strict": False, "scale": None, "return_lse": False}

Yes = Literal[True]
No = Literal[False]

_forward = torch.ops.memcheck.compressed_attention.default
_forward_sequences = torch.ops.memcheck.compressed_attention_sequences.default
_forward_pooled = torch.ops.memcheck.compressed_attention_pooled.default
_step = torch.ops.memcheck.compressed_attention_step.default


class Options(TypedDict, total=False):
    """Arguments of compressed_attention, but for those that change what it returns."""

    factor: Required[int]
    causal: bool
    strict: bool
    scale: float | None
    sink: Tensor | None


class WithState(Options, total=False):
    """The same, with those of a single state."""

    initial_state: CompressedAttentionState | None


class WithStates(Options, Sequences, total=False):
    """The same, with those of packed or padded sequences, which have a tuple of states."""

    initial_state: CompressedAttentionState | Sequence[CompressedAttentionState] | None


@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = ..., return_state: No = ..., **options: Unpack[WithStates]
) -> Tensor: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_state: No = ..., **options: Unpack[WithStates]
) -> tuple[Tensor, Tensor]: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = ..., return_state: Yes, **options: Unpack[WithState]
) -> tuple[Tensor, CompressedAttentionState]: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_state: Yes, **options: Unpack[WithState]
) -> tuple[Tensor, Tensor, CompressedAttentionState]: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = ..., return_state: Yes, **options: Unpack[WithStates]
) -> tuple[Tensor, States]: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_state: Yes, **options: Unpack[WithStates]
) -> tuple[Tensor, Tensor, States]: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., return_state: bool = ..., **options: Unpack[WithStates]
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, States] | tuple[Tensor, Tensor, States]: ...
def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
    initial_state: CompressedAttentionState | Sequence[CompressedAttentionState] | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, States] | tuple[Tensor, Tensor, States]:
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
        return_lse: return lse too, with which merge_attention merges y and other attention of the same queries.
        sink: (H,), a score of each head that every query sees, with a value of 0: it adds exp(sink) to the sum over
            which softmax divides, and so to exp(lse).
        cu_seqlens: (N+1,) int32 or int64, for N sequences that are packed one behind the other: B = 1, and sequence n
            is positions cu_seqlens[n] to cu_seqlens[n+1]. It ascends from 0 to S = T; sequences may be empty.
        cu_seqlens_q, cu_seqlens_k: the same, where sequences have other numbers of queries than of keys.
        lengths: (B,) int32 or int64, from 0 to T, for a padded batch: how many positions of each row count. Query s is
            at position s + T - S. If not causal and S != T, they are those of the keys alone.
        padding: where lengths has the padding, "right" (after the positions that count) or "left".
        initial_state: the CompressedAttentionState of all positions before these: blocks go on from it. Queries are
            then the newest positions, and T counts the earlier ones too. Needs causal. Packed or padded: a sequence of
            N states, one for each sequence, with B = 1.
        return_state: return the state after these positions too; packed or padded, a tuple of N. Needs causal.

    Packed or padded, blocks begin anew with each sequence, and it gives the bits that it gives alone. Nothing of
    padding is read; its rows of y and of the gradients are 0, and its lse is -inf. Work is that of the positions that
    count. On the CPU, sequences share the threads by their lengths. On CUDA they run one after another, which costs a
    few launches each, and values of cu_seqlens or lengths that lie on the device are waited for. With states,
    torch.compile leaves the call out of its graphs, because the sizes of states depend on those values.

    float64, float32, float16, bfloat16; any strides. Sums are in float32 (float64 for float64); the means are rounded
    to the dtype of the inputs.

    Returns:
        y (B,H,S,D), contiguous; 0 for a query that sees no block, or only scores of -inf. Kept for backward: q, y (not
        in 16 bits), the means, and one number per query in the accumulation type, but not k and v. A gradient has its
        input's strides. With return_lse: y and lse (B,H,S) in the accumulation type, the
        natural logarithm of the sum of exp(score) over what a query sees, and -inf where y is 0 for lack of it. Both
        have gradients. With return_state: the state last, a CompressedAttentionState with which the next call goes on.
        Two calls with the state between equal one call over all positions up to rounding. The gradient flows through
        the state into the earlier call. On the CPU, the bits of y and lse of a query depend on what it sees and on
        nothing else: not on the other queries, heads or samples of its call, not on the number of threads, and not on
        the cut between two calls if a block ends there.

        A block whose keys are all -inf has a score of -inf for every query. A key of -inf makes the mean of its block
        -inf, and so hides all positions of the block. If the weight between a query and a block is 0, because the
        score is -inf or the block is hidden, neither affects the other in y or in gradients. So a NaN or an infinity
        reaches only the queries that see it.

    Raises:
        ValueError: a shape, device, factor or scale, S > T when causal, strict or a state without causal, a state of
            other sizes or another factor, another number of states than of sequences, a rule of cu_seqlens and lengths.
        TypeError: a dtype; an input that is no tensor, a factor that is no int, a scale that is no number.

    Equivalent to:
        >>> def blocks(x):
        ...     return torch.stack([block.mean(2) for block in x.split(factor, 2)], 2)
        >>> T, group = k.shape[2], q.shape[1] // k.shape[1]
        >>> kc, vc = (blocks(x).repeat_interleave(group, 1) for x in (k, v))
        >>> last = torch.arange(T - q.shape[2], T)[:, None] + (0 if strict else 1)
        >>> hidden = torch.arange(kc.shape[2]) >= last // factor
        >>> scores = (q @ kc.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> scores = scores.masked_fill((kc == -torch.inf).all(3)[:, :, None], -torch.inf)
        >>> y = torch.softmax(scores, 3).nan_to_num(0) @ vc
        >>> lse = torch.logsumexp(scores, 3)
        >>> lse_with_sink = torch.logaddexp(lse, sink[:, None])
        >>> y_with_sink = y * torch.exp(lse - lse_with_sink)[..., None]
    """
    op = "compressed_attention"
    refuse_context_parallel(op)
    prepare_input(op, "q", q)
    if not type(q) is type(k) is type(v) is Tensor:
        _check_tensors(op, q=q, k=k, v=v)
    _check_factor(op, factor)
    _check_scale(op, scale)
    sequences = sequence_arguments(op, cu_seqlens, cu_seqlens_q, cu_seqlens_k, lengths, padding)
    if initial_state is not None or return_state:
        if not causal:
            raise ValueError(f"{op}: initial_state and return_state need causal=True, got causal=False")
        q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
        options = {"strict": strict, "scale": scale, "return_lse": return_lse, "sink": sink}
        state: Any
        if sequences:
            go_on = _leaving_the_graph if torch.compiler.is_compiling() else _sequences_go_on
            outputs, state = go_on(op, (q, k, v), initial_state, factor, sequences, options)
        else:
            old = _checked_state(op, q, k, v, initial_state, factor, scale, name="initial_state")
            outputs, state = _go_on(q, k, v, old, **options)
        if not return_state:
            return outputs
        return (*outputs, state) if return_lse else (outputs, state)
    sink = _check_sink(op, sink, q)
    options = {"causal": causal, "strict": strict, "scale": scale, "return_lse": return_lse}
    if derivatives.transformed():
        if sink is None and not (return_lse or sequences):
            return derivatives.call(op, (q, k, v), factor=factor, causal=causal, strict=strict, scale=scale)
        if derivatives.differentiated((q, k, v, sink)):
            results = derivatives.by_reference(op, (q, k, v), sink=sink, factor=factor, **options, **sequences)
            return results if return_lse else results[0]
    forward = _forward_sequences if sequences else _forward
    try:
        y, lse, _, _ = forward(q, k, v, sink, factor=factor, **changed_options(q, options, DEFAULTS), **sequences)
    except REFUSALS:
        explain_refusal(op, q=q, k=k, v=v)
        raise
    return (y, lse) if return_lse else y


@overload
def compressed_attention_pooled(
    q: Tensor, kc: Tensor, vc: Tensor, *, kv_len: int, return_lse: No = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def compressed_attention_pooled(
    q: Tensor, kc: Tensor, vc: Tensor, *, kv_len: int, return_lse: Yes, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def compressed_attention_pooled(
    q: Tensor, kc: Tensor, vc: Tensor, *, kv_len: int, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
    """compressed_attention for keys and values that are compressed already, for example by a learned compression.

    Args:
        q: (B,H,S,D) queries.
        kc: (B,Hkv,C,D) a key for every block: C = ceil(kv_len / factor), or floor if causal.
        vc: (B,Hkv,C,D) a value for every block.
        kv_len: T, the number of positions that the blocks represent.
        factor, causal, strict, scale, return_lse, sink: as in compressed_attention.

    Returns:
        y (B,H,S,D), contiguous; with return_lse, y and lse (B,H,S). Kept for backward: q, kc, vc, y (not in 16 bits),
        and one number per query.

    Raises:
        ValueError, TypeError: as compressed_attention.

    Equivalent to:
        >>> last = torch.arange(kv_len - q.shape[2], kv_len)[:, None] + (0 if strict else 1)
        >>> hidden = torch.arange(kc.shape[2]) >= last // factor
        >>> kh, vh = (x.repeat_interleave(q.shape[1] // kc.shape[1], 1) for x in (kc, vc))
        >>> scores = (q @ kh.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> scores = scores.masked_fill((kh == -torch.inf).all(3)[:, :, None], -torch.inf)
        >>> y = torch.softmax(scores, 3).nan_to_num(0) @ vh
    """
    op = "compressed_attention_pooled"
    refuse_context_parallel(op)
    prepare_input(op, "q", q)
    _check_tensors(op, q=q, kc=kc, vc=vc)
    _check_factor(op, factor)
    check_int(op, "kv_len", kv_len)
    if not 0 <= kv_len <= MOST_POSITIONS:
        raise ValueError(f"{op}: kv_len must be from 0 to {MOST_POSITIONS}, got {kv_len}")
    _check_scale(op, scale)
    sink = _check_sink(op, sink, q)
    blocks = {"factor": factor, "kv_len": kv_len}
    options: dict[str, Any] = {"causal": causal, "strict": strict, "scale": scale, "return_lse": return_lse}
    if derivatives.transformed():
        if sink is None and not return_lse:
            return derivatives.call(op, (q, kc, vc), **blocks, causal=causal, strict=strict, scale=scale)
        if derivatives.differentiated((q, kc, vc, sink)):
            results = derivatives.by_reference(op, (q, kc, vc), sink=sink, **blocks, **options)
            return results if return_lse else results[0]
    try:
        y, lse = _forward_pooled(q, kc, vc, sink, **blocks, **changed_options(q, options, DEFAULTS))
    except REFUSALS:
        explain_refusal(op, q=q, kc=kc, vc=vc)
        raise
    return (y, lse) if return_lse else y


class CompressedAttentionState(NamedTuple):
    """The state of decoding: C complete blocks and an open one."""

    kc: Tensor  # (B,Hkv,C,D) means of the keys of complete blocks, in their dtype
    vc: Tensor  # (B,Hkv,C,D) of the values
    k_sum: Tensor  # (B,Hkv,D) sum over the keys of the open block, in the accumulation type
    v_sum: Tensor  # (B,Hkv,D) of the values
    positions: int  # of the open block, less than factor
    factor: int  # positions per block


# Packed or padded, there is a state for each sequence.
States = CompressedAttentionState | tuple[CompressedAttentionState, ...]


def compressed_attention_state(k: Tensor, v: Tensor, *, factor: int) -> CompressedAttentionState:
    """The state of compressed_attention_step after these positions. T may be 0.

    Args:
        k: (B,Hkv,T,D) the keys of a prompt.
        v: (B,Hkv,T,D) its values.
        factor: positions per block.

    Returns:
        CompressedAttentionState(kc, vc, k_sum, v_sum, positions, factor): kc and vc (B,Hkv,T // factor,D) in the dtype
        of k, k_sum and v_sum (B,Hkv,D) in float32 (float64 for float64), positions = T % factor. It has no gradient.

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
    k, v = in_autocast_dtype(k), in_autocast_dtype(v)
    _check_keys(op, k, v, factor)
    _refuse_gradient(op, k, v)
    return _extended(_empty_state(k, factor), k, v)


def compressed_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: CompressedAttentionState | None = None,
    *,
    factor: int,
    strict: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, CompressedAttentionState]:
    """The newest positions of causal compressed attention, from a state instead of all earlier keys.

    Args:
        q: (B,H,S,D) the queries of the newest positions; one position while decoding.
        k: (B,Hkv,n,D) the keys that are new since the state.
        v: (B,Hkv,n,D) their values.
        state: the result of the last step, or compressed_attention_state of a prompt; None at the beginning.
        factor, strict, scale: as in compressed_attention, the same in every step.

    Returns:
        y (B,H,S,D), equal to the last rows of the causal compressed_attention over all keys up to rounding, and the
        new state; the old one does not change. O(T / factor) work per query and no gradient.

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
    refuse_context_parallel(op)
    if state is not None and _is_plain_step(q, k, v, state, factor):
        try:
            return _one_position(q, k, v, state, strict, scale)
        except (RuntimeError, TypeError, ValueError):
            _checked_step(op, q, k, v, state, factor, scale)  # raises with the names of this function's arguments
            raise
    q, k, v, old = _checked_step(op, q, k, v, state, factor, scale)
    return _go_on(q, k, v, old, strict=strict, scale=scale)


def _is_plain_step(q: Tensor, k: Tensor, v: Tensor, state: CompressedAttentionState, factor: int) -> bool:
    """Whether the operator computes the step: one position, of plain tensors, without transforms."""
    if torch.compiler.is_compiling() or derivatives.transformed():
        return False
    return (
        type(state) is CompressedAttentionState
        and type(q) is type(k) is type(v) is Tensor
        and k.dim() == 4
        and k.shape[2] == 1
        and type(factor) is int
        and factor == state.factor
    )


def _one_position(
    q: Tensor, k: Tensor, v: Tensor, state: CompressedAttentionState, strict: bool, scale: float | None
) -> tuple[Tensor, CompressedAttentionState]:
    """_go_on for k and v (B,Hkv,1,D) by one operator, which checks all arguments."""
    options = {"strict": strict, "scale": scale} if strict or scale is not None else {}
    kc, vc, old_k_sum, old_v_sum, positions, factor = state
    y, new_kc, new_vc, k_sum, v_sum = _step(q, k, v, kc, vc, old_k_sum, old_v_sum, positions, factor=factor, **options)
    if positions + 1 < factor:
        return y, CompressedAttentionState(kc, vc, k_sum, v_sum, positions + 1, factor)
    return y, CompressedAttentionState(new_kc, new_vc, k_sum, v_sum, 0, factor)


def _checked_step(
    op: str, q: Tensor, k: Tensor, v: Tensor, state: object, factor: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, CompressedAttentionState]:
    """q, k and v in the dtype of autocast, and the state, after all checks."""
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    old = _checked_state(op, q, k, v, state, factor, scale)
    _refuse_gradient(op, q, k, v, *old[:4])
    return q, k, v, old


def _go_on(
    q: Tensor, k: Tensor, v: Tensor, state: CompressedAttentionState, **options: Any
) -> tuple[Any, CompressedAttentionState]:
    """Attention of the newest positions q (B,H,S,D) to all keys up to k (B,Hkv,n,D), and the new state."""
    new = _extended(state, k, v)
    kv_len = new.kc.shape[2] * new.factor + new.positions
    return compressed_attention_pooled(q, new.kc, new.vc, factor=new.factor, kv_len=kv_len, **options), new


def _sequences_go_on(
    op: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    states: object,
    factor: int,
    sequences: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Any, tuple[CompressedAttentionState, ...]]:
    """_go_on for each sequence of a packed or padded batch q (B,H,S,D), k and v (B,Hkv,T,D), from its own state."""
    q, k, v = tensors
    _check_keys(op, k, v, factor)
    _check_queries(op, q, k, k.shape[2], options["scale"])
    derivatives.refuse_mapped_lengths(op, sequences)
    of_queries, of_keys = Places.of_sequences(q, k, v, True, sequences)
    old = check_states(op, states, len(of_keys.counts), CompressedAttentionState)
    slices = of_keys.slices()
    before = []
    for i, (of_q, of_k) in enumerate(zip(of_queries.slices(), slices, strict=True)):
        part, name = (q[of_q], k[of_k], v[of_k]), f"initial_state[{i}]"
        before.append(_checked_state(op, *part, old[i], factor, options["scale"], name=name))
    positions = [state.positions for state in before]
    extend = _states_after if derivatives.transformed() else _NewBlocks.apply
    of_each = extend(k, v, slices, positions, factor, *(x for state in before for x in state[:4]))
    after = []
    for i, (opened, count) in enumerate(zip(positions, of_keys.counts, strict=True)):
        kc, vc, k_sum, v_sum = of_each[4 * i : 4 * i + 4]
        after.append(CompressedAttentionState(kc, vc, k_sum, v_sum, (opened + count) % factor, factor))
    blocks = [state.kc for state in after], [state.vc for state in after]
    kv_lens = [state.kc.shape[2] * factor + state.positions for state in after]
    return of_queries.attend(q, *blocks, kv_lens, factor=factor, causal=True, **options), tuple(after)


# The sizes of states depend on the values of cu_seqlens or lengths, so that torch.compile cannot trace them.
_leaving_the_graph = torch._disable_dynamo(_sequences_go_on)


class _AttentionOfSequences(torch.autograd.Function):
    """compressed_attention_pooled_sequences. If its gradients will be differentiated, they are computed for
    each sequence alone: the operator for one sequence has second derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        sink: Tensor | None,
        places: Places,
        return_lse: bool,
        options: dict[str, Any],
        *blocks: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kc, vc = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        keep = any(ctx.needs_input_grad)
        forward = torch.ops.memcheck.compressed_attention_pooled_sequences
        y, lse = forward(q, kc, vc, sink, return_lse=return_lse or keep, **options)
        ctx.places, ctx.options = places, options
        ctx.set_materialize_grads(False)
        if not return_lse:
            ctx.mark_non_differentiable(lse)
        if keep:
            # y is kept for grad_y . y. In 16 bits y is rounded, and grad_y . y is a sum over blocks instead.
            ctx.save_for_backward(q, sink, y if lse.dtype == y.dtype else None, lse, *blocks)
        return y, lse

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, sink, y, lse, *blocks = ctx.saved_tensors
        kc, vc = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        if grad_y is None:
            grad_y = q.new_zeros(()).expand(q.shape)
        of_q, of_sink, _, _, _, *of_blocks = ctx.needs_input_grad
        mask = [of_q, any(of_blocks[: len(kc)]), any(of_blocks[len(kc) :]), of_sink]
        kept = [None if x is None else x.detach() for x in (y, lse)]
        tensors, options = [grad_y, q, kc, vc, *kept, grad_lse, sink], ctx.options | {"output_mask": mask}
        if torch.is_grad_enabled():
            grad_q, grad_kc, grad_vc, grad_sink = _differentiable_gradients(ctx.places, tensors, options)
        else:
            backward = torch.ops.memcheck.compressed_attention_pooled_sequences_backward
            grad_q, grad_kc, grad_vc, grad_sink = backward(*tensors, **options)
        grads = [*(grad_kc or [None] * len(kc)), *(grad_vc or [None] * len(vc))]
        return grad_q, grad_sink, None, None, None, *grads


def _differentiable_gradients(places: Places, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    """The gradients of q, all kc, all vc and sink, by a call for each sequence."""
    grad_y, q, kc, vc, y, lse, grad_lse, sink = tensors
    wants_q, _, _, wants_sink = options["output_mask"]
    common = {name: options[name] for name in ("factor", "causal", "strict", "scale", "output_mask")}
    grad_q = torch.zeros_like(q) if wants_q else None
    grad_kc: list[Tensor] = []
    grad_vc: list[Tensor] = []
    grad_sinks: list[Tensor] = []
    for n, here in enumerate(places.slices()):
        ours = [None if x is None else x[here] for x in (y, lse, grad_lse)]
        its_grad_q, *grads = torch.ops.memcheck.compressed_attention_pooled_backward(
            grad_y[here], q[here], kc[n], vc[n], *ours, sink, kv_len=options["kv_lens"][n], **common
        )
        if grad_q is not None:
            grad_q[here] = its_grad_q
        for gradients, x in zip((grad_kc, grad_vc, grad_sinks), grads, strict=True):
            gradients.append(x)
    return grad_q, grad_kc, grad_vc, sum(grad_sinks) if wants_sink else None


class Places(NamedTuple):
    """Where the sequences of a packed or padded batch lie in a tensor (B,heads,positions,...)."""

    packed: bool
    begins: list[int]  # the first position of each sequence, in the only row or in its own
    counts: list[int]

    @classmethod
    def of_sequences(
        cls, q: Tensor, k: Tensor, v: Tensor, causal: bool, sequences: dict[str, Any]
    ) -> tuple[Places, Places]:
        """Checks a packed or padded batch, and returns its places in q (B,H,S,D), and in k and v (B,Hkv,T,D)."""
        with torch.no_grad():  # only checks: one block per sequence without columns leaves nothing to compute
            one_head = (x.new_empty(x[:, :1, :, :0].shape) for x in (q, k, v))
            torch.ops.memcheck.compressed_attention_sequences(*one_head, factor=LONGEST, causal=causal, **sequences)
        names = derivatives.in_names_of_reference(sequences)
        found = list(sequences_of(len(q), q.shape[2], k.shape[2], causal=causal, **names))
        of_queries, of_keys = ([x[i] for x in found] for i in (1, 2))
        return cls.of_slices(sequences, of_queries), cls.of_slices(sequences, of_keys)

    @classmethod
    def of_slices(cls, sequences: dict[str, Any], slices: list[slice]) -> Places:
        return cls(sequences["lengths"] is None, [x.start for x in slices], [x.stop - x.start for x in slices])

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Views of the sequences, (1,heads,count,...) each, with one gradient for x."""
        if self.packed:
            return x.split(self.counts, 2)
        rows = x.split(1)
        return [row.narrow(2, *place) for row, *place in zip(rows, self.begins, self.counts, strict=True)]

    def attend(
        self,
        q: Tensor,
        kc: Sequence[Tensor],
        vc: Sequence[Tensor],
        kv_lens: Sequence[int],
        *,
        return_lse: bool = False,
        sink: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """compressed_attention_pooled for each sequence of q (B,H,S,D), whose places these are, in one y and lse.

        Args:
            kc, vc: (1,Hkv,C,D), the blocks of each sequence.
            kv_lens: how many positions the blocks of each represent.
            return_lse, sink, options: factor, causal, strict and scale, as in compressed_attention_pooled.
        """
        q, kc, vc = in_autocast_dtype(q), [in_autocast_dtype(x) for x in kc], [in_autocast_dtype(x) for x in vc]
        sink = _check_sink("compressed_attention", sink, q)
        if derivatives.transformed():
            options |= {"return_lse": return_lse, "sink": sink}
            parts = zip(self.split(q), kc, vc, kv_lens, strict=True)
            results = [compressed_attention_pooled(*part, kv_len=n, **options) for *part, n in parts]
            if not return_lse:
                return self.join(q, results, 0)
            y, lse = zip(*results, strict=True)
            return self.join(q, y, 0), self.join(q[..., 0], lse, -torch.inf)
        options |= {"packed": self.packed, "begins": self.begins, "counts": self.counts, "kv_lens": kv_lens}
        y, lse = _AttentionOfSequences.apply(q, sink, self, return_lse, options, *kc, *vc)
        return (y, lse) if return_lse else y

    def join(self, like: Tensor, parts: Sequence[Tensor], fill: float) -> Tensor:
        """The inverse of split, with `fill` in padding; like (B,heads,positions,...) has as many."""
        if self.packed:
            return torch.cat(list(parts), 2)
        rows = []
        for part, begin, count in zip(parts, self.begins, self.counts, strict=True):
            around = (begin, like.shape[2] - begin - count)
            rows.append(torch.nn.functional.pad(part, (0,) * 2 * (part.dim() - 3) + around, value=fill))
        return torch.cat(rows)

    def slices(self) -> list[tuple[slice, slice, slice]]:
        """The index of each sequence."""
        rows = [slice(0, 1) if self.packed else slice(n, n + 1) for n in range(len(self.counts))]
        ends = zip(rows, self.begins, self.counts, strict=True)
        return [(row, slice(None), slice(begin, begin + count)) for row, begin, count in ends]


def _check_keys(op: str, k: Tensor, v: Tensor, factor: int) -> None:
    _check_tensors(op, k=k, v=v)
    for name, x in (("k", k), ("v", v)):
        check_rank(op, name, x, "(B,Hkv,n,D)", 4)
    if v.shape != k.shape:
        raise ValueError(f"{op}: v must be (B,Hkv,n,D) = {list(k.shape)} to match k, got {list(v.shape)}")
    check_floating(op, "k", k)
    check_like(op, "v", v, k.dtype, k)
    _check_factor(op, factor)


def _check_queries(op: str, q: Tensor, k: Tensor, kv_len: int, scale: float | None) -> None:
    _check_tensors(op, q=q)
    check_rank(op, "q", q, "(B,H,S,D)", 4)
    (B, H, S, D), (_, Hkv, _, _) = q.shape, k.shape
    if (k.shape[0], k.shape[3]) != (B, D):
        expected = [k.shape[0], H, S, k.shape[3]]
        raise ValueError(f"{op}: q must be (B,H,S,D) = {expected} to match k, got {list(q.shape)}")
    if H % Hkv if Hkv else H:
        raise ValueError(
            f"{op}: H, the heads of q, must be a multiple of Hkv, the heads of k, got H = {H} and Hkv = {Hkv}"
        )
    check_like(op, "q", q, k.dtype, k)
    if kv_len < S:
        raise ValueError(f"{op}: q must be of no more positions than k so far, S <= T, got S = {S} and T = {kv_len}")
    _check_scale(op, scale)
    accumulation = torch.promote_types(q.dtype, torch.float32)
    if scale is not None and not abs(scale) <= torch.finfo(accumulation).max:
        raise ValueError(f"{op}: scale must be a finite number of {dtype_name(accumulation)}, got {scale}")


def _checked_state(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Any,
    factor: int,
    scale: float | None,
    name: str = "state",
) -> CompressedAttentionState:
    """The state after all checks; if it is None, that of no positions."""
    _check_keys(op, k, v, factor)
    old = _empty_state(k, factor) if state is None else state
    _check_state(op, name, k, old, factor)
    _check_queries(op, q, k, old.kc.shape[2] * factor + old.positions + k.shape[2], scale)
    return old


def _check_state(op: str, of: str, k: Tensor, state: CompressedAttentionState, factor: int) -> None:
    if not isinstance(state, CompressedAttentionState):
        raise TypeError(f"{op}: {of} must be a CompressedAttentionState or None, got {type(state).__name__}")
    check_int(op, f"{of}.factor", state.factor)
    if factor != state.factor:
        raise ValueError(f"{op}: factor must be {state.factor}, as that of the state, got {factor}")
    _check_tensor(op, f"{of}.kc", state.kc)
    check_rank(op, f"{of}.kc", state.kc, "(B,Hkv,C,D)", 4)
    B, Hkv, _, D = k.shape
    C, accumulation = state.kc.shape[2], torch.promote_types(k.dtype, torch.float32)
    for name, x, shape, dtype in (
        ("kc", state.kc, (B, Hkv, C, D), k.dtype),
        ("vc", state.vc, (B, Hkv, C, D), k.dtype),
        ("k_sum", state.k_sum, (B, Hkv, D), accumulation),
        ("v_sum", state.v_sum, (B, Hkv, D), accumulation),
    ):
        _check_tensor(op, f"{of}.{name}", x)
        if x.shape != shape:
            raise ValueError(f"{op}: {of}.{name} must be {list(shape)} to match k, got {list(x.shape)}")
        check_like(op, f"{of}.{name}", x, dtype, k)
    check_int(op, f"{of}.positions", state.positions)
    if not 0 <= state.positions < factor:
        raise ValueError(f"{op}: {of}.positions must be from 0 to factor - 1 = {factor - 1}, got {state.positions}")


def _check_tensor(op: str, name: str, x: object) -> None:
    if is_symbolic(x):
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {x if x is None else type(x).__name__}") from None
    check_plain(op, name, x)


def _check_tensors(op: str, **tensors: object) -> None:
    for name, x in tensors.items():
        if type(x) is not Tensor:
            _check_tensor(op, name, x)


def _check_factor(op: str, factor: int) -> None:
    check_int(op, "factor", factor)
    if not 1 <= factor <= LONGEST:
        raise ValueError(f"{op}: factor must be from 1 to {LONGEST}, got {factor}")


def _check_scale(op: str, scale: object) -> None:
    if scale is not None and not isinstance(scale, float | int | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}")


def _check_sink(op: str, sink: Tensor | None, q: Tensor) -> Tensor | None:
    """The sink in the accumulation type. The operator checks its shape and its device."""
    if sink is None or is_symbolic(sink):
        return sink
    _check_tensor(op, "sink", sink)
    check_floating(op, "sink", sink)
    return sink.to(torch.promote_types(q.dtype, torch.float32))


def _refuse_gradient(op: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(f"{op}: has no gradient, and an argument requires one; call it under torch.no_grad()")


def _empty_state(k: Tensor, factor: int) -> CompressedAttentionState:
    B, Hkv, _, D = k.shape
    # Two tensors each, because torch.compile refuses an autograd function whose inputs are the same tensor twice.
    kc, vc = (k.new_empty(B, Hkv, 0, D) for _ in range(2))
    k_sum, v_sum = (k.new_zeros(B, Hkv, D, dtype=torch.promote_types(k.dtype, torch.float32)) for _ in range(2))
    return CompressedAttentionState(kc, vc, k_sum, v_sum, 0, factor)


def _extended(state: CompressedAttentionState, k: Tensor, v: Tensor) -> CompressedAttentionState:
    """The state after n more positions, k and v (B,Hkv,n,D)."""
    total = state.positions + k.shape[2]
    new: Sequence[Tensor]
    if total < state.factor or derivatives.transformed():
        new = _state_after((k, v), state[:4], state.positions, state.factor)
    else:
        everywhere = [(slice(None),) * 3]
        new = _NewBlocks.apply(k, v, everywhere, [state.positions], state.factor, *state[:4])
    kc, vc, k_sum, v_sum = new
    return CompressedAttentionState(kc, vc, k_sum, v_sum, total % state.factor, state.factor)


def _add(total: Tensor, x: Tensor) -> Tensor:
    """(B,Hkv,D) + (B,Hkv,n,D) summed over its positions"""
    return total + (x[:, :, 0] if x.shape[2] == 1 else x.sum(2, dtype=total.dtype))


def _gradient_stride(x: Tensor) -> tuple[int, ...]:
    """The strides of x (B,Hkv,n,D) if it is dense and does not overlap itself, else those of a contiguous tensor."""
    left = [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]
    elements = 1
    while left:  # torch.compile cannot sort strides
        next_places = [place for place, (stride, _) in enumerate(left) if stride == elements]
        if not next_places:
            _, Hkv, n, D = x.shape
            return Hkv * n * D, n * D, D, 1
        elements *= left.pop(next_places[0])[1]
    return x.stride()


class _NewBlocks(torch.autograd.Function):
    """The states of sequences after new positions, in the operator's bits.

    k, v (B,Hkv,n,D), where in them each sequence is, how many positions its open block has so far, and (kc, vc, k_sum,
    v_sum) of each state before -> those of each state after. k and v are not saved for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, places: Sequence[Any], positions: Sequence[int], factor: int, *states: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.like = [(x.shape, _gradient_stride(x)) for x in (k, v)]
        counts, old = [k[here].shape[2] for here in places], [kc.shape[2] for kc in states[::4]]
        cuts = [_cuts(*numbers, factor) for numbers in zip(positions, counts, strict=True)]
        ctx.factor, ctx.sequences = factor, list(zip(places, cuts, old, strict=True))
        ctx.padded = sum(k[here].numel() for here in places) != k.numel()
        return _states_after(k, v, places, positions, factor, *states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_positions, of_states = [], [list(grads[i : i + 4]) for i in range(0, len(grads), 4)]
        for x, (shape, stride) in enumerate(ctx.like):
            gradient = torch.empty_strided(shape, stride, dtype=grads[0].dtype, device=grads[0].device)
            if ctx.padded:
                gradient.zero_()
            for (here, cuts, old), of_state in zip(ctx.sequences, of_states, strict=True):
                of_state[x], of_state[2 + x] = _spread(
                    gradient[here], of_state[x], of_state[2 + x], cuts, old, ctx.factor
                )
            of_positions.append(gradient)
        return *of_positions, None, None, None, *(x for of_state in of_states for x in of_state)


def _cuts(opened: int, count: int, factor: int) -> tuple[int, int] | None:
    """How many new positions complete the open block, and how many end with a whole one; None if none is complete."""
    if opened + count < factor:
        return None
    return (factor - opened) % factor, count - (opened + count) % factor


def _states_after(
    k: Tensor, v: Tensor, places: Sequence[Any], positions: Sequence[int], factor: int, *states: Tensor
) -> tuple[Tensor, ...]:
    """See _NewBlocks."""
    after: list[Tensor] = []
    for i, (here, opened) in enumerate(zip(places, positions, strict=True)):
        after += _state_after((k[here], v[here]), states[4 * i : 4 * i + 4], opened, factor)
    return tuple(after)


def _state_after(new: Sequence[Tensor], state: Sequence[Tensor], opened: int, factor: int) -> list[Tensor]:
    """kc, vc (B,Hkv,C,D), k_sum and v_sum (B,Hkv,D) after new k and v (B,Hkv,n,D)."""
    old, sums = state[:2], state[2:]
    cuts = _cuts(opened, new[0].shape[2], factor)
    if cuts is None:
        return [*old, *(_add(total, x) for total, x in zip(sums, new, strict=True))]
    first, last = cuts
    blocks = _whole_blocks([x[:, :, first:last] for x in new], factor)
    if first:
        means = [(_add(total, x[:, :, :first]) / factor).to(x.dtype) for total, x in zip(sums, new, strict=True)]
        blocks = [torch.cat([mean[:, :, None], x], 2) for mean, x in zip(means, blocks, strict=True)]
    if old[0].shape[2]:
        blocks = [torch.cat(x, 2) for x in zip(old, blocks, strict=True)]
    return [*blocks, *(_add(torch.zeros_like(total), x[:, :, last:]) for total, x in zip(sums, new, strict=True))]


def _whole_blocks(new: Sequence[Tensor], factor: int) -> list[Tensor]:
    """The means of k and v (B,Hkv,n,D) over blocks of `factor` positions, which end with them."""
    if derivatives.transformed():
        sizes = (new[0].shape[2] // factor, factor)
        accumulation = torch.promote_types(new[0].dtype, torch.float32)
        return [x.unflatten(2, sizes).mean(3, dtype=accumulation).to(x.dtype) for x in new]
    # A forward without queries keeps the means for backward.
    no_queries = new[0][:, :, :0]
    _, _, *blocks = torch.ops.memcheck.compressed_attention(no_queries, *new, factor=factor, causal=False, keep=True)
    return blocks


def _spread(
    gradient: Tensor, of_blocks: Tensor, of_sum: Tensor, cuts: tuple[int, int] | None, old: int, factor: int
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of new positions (B,Hkv,n,D), and returns those of the blocks and the sum before them.

    of_blocks (B,Hkv,C,D) and of_sum (B,Hkv,D) are those of the state after them, whose first `old` blocks are not new.
    """
    if cuts is None:
        gradient.copy_(of_sum[:, :, None])
        return of_blocks, of_sum
    first, last = cuts
    opened = 1 if first else 0
    shares = of_blocks[:, :, old:] / factor
    gradient[:, :, :first] = shares[:, :, :opened]
    whole = gradient[:, :, first:last].unflatten(2, ((last - first) // factor, factor))
    whole.copy_(shares[:, :, opened:, None])
    gradient[:, :, last:] = of_sum[:, :, None]
    return of_blocks[:, :, :old], shares[:, :, 0].to(of_sum.dtype) if first else torch.zeros_like(of_sum)

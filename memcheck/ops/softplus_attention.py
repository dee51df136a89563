"""Softplus attention: linear in length, without heads and without a running maximum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from memcheck.ops import checks, derivatives

if TYPE_CHECKING:
    from typing_extensions import Unpack

State = tuple[Tensor, ...]  # (Z, A), or (Z, A, Z_rest, A_rest)

DEFAULTS = {"causal": True, "eps": 1e-6}
STEP_DEFAULTS = {"eps": 1e-6}

_forward = torch.ops.memcheck.softplus_attention.default
_step = torch.ops.memcheck.softplus_attention_step.default


class Options(checks.Sequences, total=False):
    """Optional arguments of softplus_attention beside return_state, for type checkers."""

    causal: bool
    eps: float
    initial_state: State | None
    state_rest: bool


@overload
def softplus_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def softplus_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, State]: ...


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
    initial_state: State | None = None,
    return_state: bool = False,
    state_rest: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """A running mean of the values, weighted by softplus(k), gated by softplus(q).

    Every channel is a head of its own, as in AFT-simple (Zhai et al. 2021, arXiv:2105.14103), with softplus in place
    of exp.

    Args:
        q: (B,S,R) queries, token-major.
        k: (B,R,T) keys, channel-major. Any strides; contiguous along T is fastest.
        v: (B,R,T) values, like the keys.
        causal: query s sees keys t <= s + T - S (the last query sees the last key); needs S <= T.
            Otherwise every query sees every key.
        eps: added to the sum of the weights; positive.
        cu_seqlens: (N+1,) int32 or int64, for N sequences that are packed one behind the other: B = 1, and sequence n
            is positions cu_seqlens[n] to cu_seqlens[n+1]. It ascends from 0 to S = T; sequences may be empty.
        cu_seqlens_q, cu_seqlens_k: the same, where sequences have other numbers of queries than of keys.
        lengths: (B,) int32 or int64, from 0 to T, for a padded batch: how many positions of each row count. Query s is
            at position s + T - S. If not causal and S != T, they are those of the keys alone.
        padding: where lengths has the padding, "right" (after the positions that count) or "left".
        initial_state: (Z, A), the sums over the positions before the first, each (B,R), packed (N,R), in the
            accumulation type (float32; float64 for float64). Or (Z, A, Z_rest, A_rest).
        return_state: whether to return the state after the last position, too.
        state_rest: whether that state is (Z, A, Z_rest, A_rest), with what rounding has left out of the sums; needs
            return_state.

    Packed or padded, each sequence gives the bits that it gives alone. Nothing of padding is read; its rows of y and of
    the gradients are 0. Nothing is copied, and work and memory are those of the positions that count, beside y and the
    gradients. On the CPU, sequences share the threads by their lengths. On CUDA a call has the same launches for any
    number of sequences and does not wait for cu_seqlens or lengths that lie on the device. If these break a rule, all
    sequences count as empty; with MEMCHECK_CHECK=1 in the environment the call waits for them and raises.

    A sequence in pieces, each from the state of the one before, gives the y of one call: with rests the same bits, if
    pieces end at multiples of 256 positions; else up to rounding. Without rests each piece rounds the sums once, and
    such errors add up if terms are alike. Z and A are differentiable, as arguments and as results; rests are constants.

    float64, float32, float16, bfloat16. Sums are in float32 (float64 for float64).

    Returns:
        y (B,S,R), contiguous; with return_state (y, state). Kept for backward: q, k, v, and two sums per channel and
        256 positions in the accumulation type. A gradient has its input's strides if these are dense,
        else it is contiguous.

    Raises:
        ValueError: a shape, device, S > T when causal, eps <= 0, or a rule of cu_seqlens and lengths.
        TypeError: a dtype.
        NotImplementedError: inside torch.distributed's context_parallel.

    Equivalent to:
        >>> def softplus(x):
        ...     return torch.logaddexp(x, x.new_zeros(()))
        >>> weights, offset = softplus(k), k.shape[2] - q.shape[1]
        >>> z = weights.cumsum(2)[:, :, offset:].transpose(1, 2)
        >>> a = (weights * v).cumsum(2)[:, :, offset:].transpose(1, 2)
        >>> y = softplus(q) * a / (z + eps)
    """
    op = "softplus_attention"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    sequences = checks.sequence_arguments(op, cu_seqlens, cu_seqlens_q, cu_seqlens_k, lengths, padding)
    options: dict[str, Any] = {"causal": causal, "eps": eps}
    if state_rest and not return_state:
        raise ValueError(f"{op}: state_rest needs return_state=True, got return_state={return_state}")
    if not sequences and initial_state is None and not return_state:
        if derivatives.transformed():
            return derivatives.call(op, (q, k, v), **options)
        try:
            y: Tensor = _forward(q, k, v, **checks.changed_options(q, options, DEFAULTS))[0]
        except checks.REFUSALS:
            checks.explain_refusal(op, q=q, k=k, v=v)
            raise
        return y
    options |= sequences
    y, state = _attend_from_state(op, q, k, v, initial_state, return_state, state_rest, options)
    return (y, state) if return_state else y


def _attend_from_state(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: object,
    return_state: bool,
    state_rest: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Any]:
    """y, and the state after the last position, () if it is not wanted."""
    sums = rest = None
    tensors = () if state is None else checks.check_initial_state(op, state, q)
    if derivatives.differentiated((q, k, v, *tensors)):
        if state_rest or len(tensors) == 4:
            raise NotImplementedError(f"{op}: torch.func differentiates states without rests only, (Z, A)")
        options |= {"initial_state": tensors or None, "return_state": return_state}
        y, *after = derivatives.by_reference("softplus_attention", (q, k, v), **options)
        return y, (*after[0],) if after else ()
    if tensors:
        sums, rest = torch.stack(tensors[:2]), torch.stack(tensors[2:]) if len(tensors) == 4 else None
    try:
        y, _, sums, rest = _forward(q, k, v, sums, rest, return_state=return_state, **options)
    except checks.REFUSALS:
        checks.explain_refusal(op, q=q, k=k, v=v)
        raise
    if not return_state:
        return y, ()
    return y, (*sums.unbind(), *rest.unbind()) if state_rest else (*sums.unbind(),)


def softplus_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, eps: float = 1e-6, state_rest: bool = False
) -> tuple[Tensor, State]:
    """The newest positions of causal softplus attention, from a state instead of all earlier keys.

    Args:
        q: (B,S,R) the queries of the newest positions: one while decoding, several to check a draft.
        k: (B,R,n) the keys that are new since the state, n >= S: one while decoding, a whole prompt to begin with.
        v: (B,R,n) their values.
        state: (Z, A), each (B,R) in the accumulation type (float32; float64 for float64), or (Z, A, Z_rest, A_rest)
            with what rounding has left out of them; None at the beginning.
        eps: as in softplus_attention.
        state_rest: whether the new state has rests, too. It has if the state has.

    Returns:
        y (B,S,R), equal to the last S rows of softplus_attention over all keys up to rounding, and the new state.
        O(B R n) work and no gradient. With several queries or with rests it is softplus_attention with initial_state
        and return_state. With rests the state does not drift. Without, each step rounds it: after N steps in float32
        its error is at most N 2^-24 times the sum of its terms' absolute values. Measured after 100,000 steps of one
        key each: 1.4e-3 for the state and 1.8e-3 for y if all tokens are equal; 1e-5 and 2e-7 if they are random. Keys
        of the same step are added with compensated rounding, and do not drift.

    Raises:
        ValueError, TypeError: as softplus_attention; a state that is no pair of tensors, or of other sizes.
        NotImplementedError: grad mode is on and an argument requires a gradient; inside context_parallel.

    Equivalent to:
        >>> z, a = state
        >>> z, a = z + softplus(k).sum(2), a + (softplus(k) * v).sum(2)
        >>> y = softplus(q) * (a / (z + eps))[:, None]
    """
    op = "softplus_attention_step"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    state_rest = state_rest or (isinstance(state, checks.PAIRS) and len(state) == 4)
    if state_rest or (isinstance(q, Tensor) and q.dim() == 3 and q.shape[1] != 1):
        checks.refuse_gradient(op, q, k, v, *(state if isinstance(state, checks.PAIRS) else ()))
        return _attend_from_state(op, q, k, v, state, True, state_rest, {"eps": eps})
    if state is None:
        for name, x, letters in (("q", q, "(B,1,R)"), ("k", k, "(B,R,n)"), ("v", v, "(B,R,n)")):
            checks.check_rank(op, name, x, letters, 3)
        zeros = torch.zeros(k.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=k.device)
        state = (zeros, zeros)
    checks.check_state(op, state, ("z", "a"))
    try:
        y, z, a = _step(q, k, v, *state, **checks.changed_options(q, {"eps": eps}, STEP_DEFAULTS))
    except checks.REFUSALS:
        checks.explain_refusal(op, q=q, k=k, v=v, z=state[0], a=state[1])
        raise
    return y, (z, a)

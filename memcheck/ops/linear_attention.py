"""Linear attention: weights are products of features, so that all keys and values fit in a state of constant size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from memcheck.ops import checks, derivatives

if TYPE_CHECKING:
    from typing_extensions import Unpack

State = tuple[Tensor | Any, ...]  # (M, z), (M, None) if y is not normalized, or (M, z, M_rest, z_rest)
DEFAULTS = {"feature_map": "elu+1", "eps": 1e-6}

_forward = torch.ops.memcheck.linear_attention.default
_step = torch.ops.memcheck.linear_attention_step.default


class Options(checks.Sequences, total=False):
    """Optional arguments of linear_attention beside return_state, for type checkers."""

    causal: bool
    feature_map: str
    eps: float
    normalize: bool
    decay: Tensor | None
    log_decay: Tensor | None
    initial_state: State | None


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, State]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """A mean of the values, weighted by phi(q).phi(k) (Katharopoulos et al. 2020, arXiv:2006.16236).

    Args:
        q: (B,H,S,D) queries. H is a multiple of Hkv: query head h reads key head h // (H // Hkv).
        k: (B,Hkv,T,D) keys. Any strides; contiguous along D is fastest.
        v: (B,Hkv,T,Dv) values.
        causal: query s sees keys t <= s + T - S (the last query sees the last key); needs S <= T.
            Otherwise every query sees every key.
        feature_map: "elu+1": phi(x) = x + 1 for x > 0, else exp(x); "identity": q and k are mapped already.
        eps: added to the sum of the weights; positive.
        normalize: False: y is the weighted sum of the values, without the division by the sum of the weights and eps.
        decay: (Hkv,), or (B,Hkv,T) for one of each position, in (0, 1], in the accumulation type; needs causal. Before
            it takes in key t, the state of key head h is multiplied by decay[.., h, t], so the weight of key t for
            query s has the decays of the keys t + 1 to s + T - S as factors. With normalize=False and identity
            features this is RetNet, Lightning Attention, simple gated linear attention, and the state space model of
            Mamba-2, whose step sizes belong in v.
        log_decay: the natural logarithm of the decay in place of it, at most 0, in the same shapes. The gradient of a
            strong decay is then as accurate as that of a weak one, even where the decay itself would be too small for
            the type. At -inf the state begins anew with the position, as at the border of two documents; the gradient
            there is 0. With both decay and log_decay the call raises.
        cu_seqlens: (N+1,) int32 or int64, for N sequences that are packed one behind the other: B = 1, and sequence n
            is positions cu_seqlens[n] to cu_seqlens[n+1]. It ascends from 0 to S = T; sequences may be empty.
        cu_seqlens_q, cu_seqlens_k: the same, where sequences have other numbers of queries than of keys.
        lengths: (B,) int32 or int64, from 0 to T, for a padded batch: how many positions of each row count. Query s is
            at position s + T - S. If not causal and S != T, they are those of the keys alone.
        padding: where lengths has the padding, "right" (after the positions that count) or "left".
        initial_state: (M (B,Hkv,D,Dv), z (B,Hkv,D)), the sums over the keys before the first, in the accumulation
            type; packed, with N in place of B. z is None if normalize is False. Needs causal.
        return_state: also return the state behind the last key; needs causal.

    float64, float32, float16, bfloat16. Sums are in float32 (float64 for float64).

    Packed or padded, each sequence gives the bits that it gives alone. On CUDA one of 512 positions or more gives the
    bits that it gives in any packed or padded batch of as many queries as keys; a dense call rounds it differently.
    Nothing of padding is read; its rows of y and of the gradients are 0. Nothing is copied, and work and memory are
    those of the positions that count, beside y and the gradients.

    Two calls with the state between give what one call gives, up to rounding. They give the same bits on the CPU if the
    first ends with a segment: after a multiple of max(512, 16 Dv) / (H / Hkv) keys, rounded up to a multiple of 64, in
    sequences of up to 512 segments. On CUDA they do if the first has a multiple of 32 keys, and the sequence fewer than
    512.

    Returns:
        y (B,H,S,Dv), contiguous; with return_state, (y, (M, z)), differentiable in all of them. Kept for backward: only
        the inputs, and the returned M and z for the gradient of decay; the states of positions are recomputed. On the
        CPU, where heads are too few for the threads, the sequence is cut into segments, each with a state in memory.
        The number of threads changes no bit of the results. A gradient has its input's strides if these are dense,
        else it is contiguous.
        A NaN or an infinity in v at one position also reaches queries up to 31 positions before it (on CUDA 63),
        because it is multiplied by 0. The gradient of log(a) of a decay a is a sum of terms that all have a as a
        factor, and that of a is this divided by a. On CUDA it is a difference of two sums without this factor, whose
        rounding error grows as 1 / a; where a is below the accumulation type's epsilon it is 0.

    Raises:
        ValueError: a shape, device, feature map, S > T when causal, eps <= 0, a decay outside of (0, 1], a log_decay
            above 0, both of them, a rule of cu_seqlens and lengths, or an argument without the one that it needs.
        TypeError: a dtype.
        NotImplementedError: inside torch.distributed's context_parallel.

    Equivalent to:
        >>> def phi(x):
        ...     return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())
        >>> k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        >>> weights = phi(q) @ phi(k).mT  # (B,H,S,T), which memcheck never forms
        >>> if causal:
        ...     weights = weights.tril(k.shape[2] - q.shape[2])
        >>> if decay is not None:
        ...     log_decay = decay.log()
        >>> if log_decay is not None:
        ...     sums = log_decay.cumsum(2)  # of log_decay (B,Hkv,T) without -inf
        ...     sums = sums.repeat_interleave(q.shape[1] // sums.shape[1], 1)
        ...     weights = weights * (sums[..., -q.shape[2]:, None] - sums[..., None, :]).clamp(max=0).exp()
        >>> y = (weights @ v) / (weights.sum(-1, keepdim=True) + eps) if normalize else weights @ v
    """
    op = "linear_attention"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    sequences = checks.sequence_arguments(op, cu_seqlens, cu_seqlens_q, cu_seqlens_k, lengths, padding)
    arguments: Sequence[Tensor | None] = ()
    options: dict[str, Any] = {"feature_map": feature_map, "eps": eps}
    if normalize and not (sequences or return_state) and decay is log_decay is initial_state is None:
        if derivatives.transformed():
            return derivatives.call(op, (q, k, v), causal=causal, **options)
        options = checks.changed_options(q, options, DEFAULTS)
    else:
        checks.check_decays(op, decay, log_decay)
        arguments = decay if log_decay is None else log_decay, *_initial_state(op, initial_state, normalize)
        options |= {"normalize": normalize, "return_state": return_state, **sequences}
        if derivatives.differentiated((q, k, v, *arguments)):
            options |= {"decay": decay, "log_decay": log_decay, "initial_state": initial_state}
            y, *after = derivatives.by_reference(op, (q, k, v), causal=causal, **options)
            return (y, after[0]) if return_state else y
        if log_decay is not None:
            options["log_decay"] = True
    try:
        y, m, z = _forward(q, k, v, *arguments, causal=causal, **options)
    except checks.REFUSALS:
        checks.explain_refusal(op, q=q, k=k, v=v, **dict(zip(("decay", "m", "z"), arguments, strict=False)))
        raise
    return (y, (m, z)) if return_state else y


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    state_rest: bool = False,
) -> tuple[Tensor, State]:
    """One position of causal linear attention, from a state instead of all earlier keys.

    Args:
        q: (B,H,1,D) the query of the newest position.
        k: (B,Hkv,n,D) the keys that are new since the state: one while decoding, a whole prompt to begin with.
        v: (B,Hkv,n,Dv) their values.
        state: (M (B,Hkv,D,Dv), z (B,Hkv,D)) in the accumulation type (float32; float64 for float64); None at the
            beginning. Or (M, z, M_rest, z_rest), with what rounding has left out of the sums.
        feature_map, eps, normalize: as in linear_attention. Not normalized, z of the state is None.
        decay, log_decay: (Hkv,) or (B,Hkv,n), as in linear_attention.
        state_rest: whether the new state has rests, too. It has if the state has. Not with decay, under which errors
            fade as the terms do, and not with normalize=False.

    Returns:
        y (B,H,1,Dv), equal to the last row of linear_attention over all keys up to rounding, and the new state.
        O(n D Dv) work per head, and no gradient. Each step rounds the state: after N steps in float32 its error is at
        most N 2^-24 times the sum of its terms' absolute values. Measured after 100,000 steps of one key each: 1.0e-3
        for the state and 6e-4 for y if all tokens are equal; 8e-6 and 4e-8 if they are random. Keys of the same step
        are added with compensated rounding on the CPU, and round the state every 64 keys on a GPU. With rests the state
        does not drift; a step forms the sums of its keys once more, in memory of a state, and takes twice as long.

    Raises:
        ValueError, TypeError: as linear_attention; a state that is no pair of tensors (or four), or of other sizes;
            state_rest with a decay or normalize=False.
        NotImplementedError: grad mode is on and an argument requires a gradient; inside context_parallel.

    Equivalent to:
        >>> m, z = state
        >>> m, z = m + phi(k).mT @ v, z + phi(k).sum(2)
        >>> M, Z = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (m, z))
        >>> y = (phi(q) @ M) / (phi(q) @ Z[..., None] + eps)
    """
    op = "linear_attention_step"
    checks.refuse_context_parallel(op)
    checks.prepare_input(op, "q", q)
    given: Any = state
    with_rests = isinstance(given, checks.PAIRS) and len(given) == 4
    state_rest = state_rest or with_rests
    if not (decay is log_decay is None and normalize):
        if state_rest:
            raise ValueError(f"{op}: a state with rests needs normalize=True and no decay")
        checks.check_decays(op, decay, log_decay)
        checks.check_rank(op, "q", q, "(B,H,1,D)", 4)
        if q.shape[2] != 1:
            raise ValueError(f"{op}: q must be one position, (B,H,1,D), got {list(q.shape)}")
        options: dict[str, Any] = {"feature_map": feature_map, "eps": eps, "normalize": normalize}
        options |= {"decay": decay, "log_decay": log_decay}
        with torch.no_grad():
            return linear_attention(q, k, v, causal=True, initial_state=given, return_state=True, **options)
    if given is None:
        given = _empty_state(op, q, k, v)
    sums, rests = (given[:2], given[2:]) if with_rests else (given, None)
    checks.check_state(op, sums, ("m", "z"))
    options = checks.changed_options(q, {"feature_map": feature_map, "eps": eps}, DEFAULTS)
    try:
        y, m, z = _step(q, k, v, *sums, **options)
    except checks.REFUSALS:
        checks.explain_refusal(op, q=q, k=k, v=v, m=sums[0], z=sums[1])
        raise
    if not state_rest:
        return y, (m, z)
    zeros = [torch.zeros_like(x) for x in (m, z)]
    rests = rests or zeros
    _check_rests(op, rests, (m, z))
    _, *new = _step(q, k, v, *zeros, **options)
    return y, (*(_add_to_sum(*terms) for terms in zip(new, sums, rests, strict=True)), *new)


def _add_to_sum(x: Tensor, total: Tensor, rest: Tensor) -> Tensor:
    """The sum of a total and x, compensated: x becomes what rounding leaves out of it."""
    x += rest
    new = total + x
    x -= new - total
    x.nan_to_num_(0.0, 0.0, 0.0)  # an infinite sum leaves inf - inf
    return new


def _check_rests(op: str, rests: Sequence[Tensor], sums: tuple[Tensor, Tensor]) -> None:
    for name, rest, total in zip(("m_rest", "z_rest"), rests, sums, strict=True):
        expected = (total.shape, total.dtype, total.device)
        checks.check_plain(op, name, rest)
        if (rest.shape, rest.dtype, rest.device) != expected:
            raise ValueError(
                f"{op}: {name} must be a tensor like its sum, {list(total.shape)}, got {checks.described(rest)}"
            )


def _initial_state(op: str, state: object, normalize: bool) -> tuple[Tensor | None, Tensor | None]:
    """(M, z) of an initial state, both None without one. TypeError if it is no such pair."""
    if state is None:
        return None, None
    pair = "(m, z)" if normalize else "(m, None), because normalize is False"
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(f"{op}: initial_state must be a pair {pair} or None, got {checks.described(state)}")
    m, z = state
    if not isinstance(m, Tensor) or (not isinstance(z, Tensor) if normalize else z is not None):
        raise TypeError(f"{op}: initial_state must be {pair}, got ({checks.described(m)}, {checks.described(z)})")
    return m, z


def _empty_state(op: str, q: Tensor, k: Tensor, v: Tensor) -> State:
    """Zeros for M (B,Hkv,D,Dv) and z (B,Hkv,D)."""
    for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,T,D)"), ("v", v, "(B,Hkv,T,Dv)")):
        checks.check_rank(op, name, x, letters, 4)
    dtype = torch.promote_types(q.dtype, torch.float32)
    z = torch.zeros((*k.shape[:2], k.shape[3]), dtype=dtype, device=k.device)
    return torch.zeros((*z.shape, v.shape[3]), dtype=dtype, device=k.device), z

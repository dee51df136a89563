"""Linear attention: weights are products of features, so that all keys and values fit in a state of constant size."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck._extension import _C  # noqa: F401  (registers torch.ops.memcheck)
from memcheck.ops.checks import check_rank, check_state, refuse_context_parallel

State = tuple[Tensor, Tensor]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, feature_map: str = "elu+1", eps: float = 1e-6
) -> Tensor:
    """A mean of the values, weighted by phi(q).phi(k) (Katharopoulos et al. 2020, arXiv:2006.16236).

    Args:
        q: (B,H,S,D) queries. H is a multiple of Hkv: query head h reads key head h // (H // Hkv).
        k: (B,Hkv,T,D) keys. Any strides; contiguous along D is fastest.
        v: (B,Hkv,T,Dv) values.
        causal: query s sees keys t <= s + T - S (the last query sees the last key); needs S <= T.
            Otherwise every query sees every key.
        feature_map: "elu+1": phi(x) = x + 1 for x > 0, else exp(x); "identity": q and k are mapped already.
        eps: added to the sum of the weights; positive.

    float64, float32, float16, bfloat16. Sums are in float32 (float64 for float64).

    Returns:
        y (B,H,S,Dv), contiguous. Kept for backward: only q, k and v; the (D,Dv) states are recomputed. On the CPU,
        where heads are too few for the threads, the sequence is cut into segments, each with a state in memory. The
        number of threads changes no bit of the results. A gradient has its input's strides. A double backward raises.
        A NaN or an infinity in v at one position also reaches queries up to 31 positions before it, because it is
        multiplied by 0.

    Raises:
        ValueError: a shape, device, feature map, S > T when causal, or eps <= 0.
        TypeError: a dtype.
        NotImplementedError: torch.func's gradients; inside torch.distributed's context_parallel.

    Equivalent to:
        >>> def phi(x):
        ...     return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())
        >>> k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        >>> weights = phi(q) @ phi(k).mT  # (B,H,S,T), which memcheck never forms
        >>> if causal:
        ...     weights = weights.tril(k.shape[2] - q.shape[2])
        >>> y = (weights @ v) / (weights.sum(-1, keepdim=True) + eps)
    """
    refuse_context_parallel("linear_attention")
    y: Tensor = torch.ops.memcheck.linear_attention(q, k, v, causal=causal, feature_map=feature_map, eps=eps)
    return y


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, feature_map: str = "elu+1", eps: float = 1e-6
) -> tuple[Tensor, State]:
    """One position of causal linear attention, from a state instead of all earlier keys.

    Args:
        q: (B,H,1,D) the query of the newest position.
        k: (B,Hkv,n,D) the keys that are new since the state: one while decoding, a whole prompt to begin with.
        v: (B,Hkv,n,Dv) their values.
        state: (M (B,Hkv,D,Dv), z (B,Hkv,D)) in the accumulation type (float32; float64 for float64); None at the
            beginning.
        feature_map, eps: as in linear_attention.

    Returns:
        y (B,H,1,Dv), equal to the last row of linear_attention over all keys up to rounding, and the new state.
        O(n D Dv) work per head, and no gradient. Each step rounds the state: after N steps in float32 its error is at
        most N 2^-24 times the sum of its terms' absolute values. Measured after 100,000 steps of one key each: 1.0e-3
        for the state and 6e-4 for y if all tokens are equal; 8e-6 and 4e-8 if they are random. Keys of the same step
        are added with compensated rounding on the CPU, and round the state every 64 keys on a GPU.

    Raises:
        ValueError, TypeError: as linear_attention; a state that is no pair of tensors, or of other sizes.
        NotImplementedError: grad mode is on and an argument requires a gradient; inside context_parallel.

    Equivalent to:
        >>> m, z = state
        >>> m, z = m + phi(k).mT @ v, z + phi(k).sum(2)
        >>> M, Z = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (m, z))
        >>> y = (phi(q) @ M) / (phi(q) @ Z[..., None] + eps)
    """
    op = "linear_attention_step"
    refuse_context_parallel(op)
    if state is None:
        state = _empty_state(op, q, k, v)
    check_state(op, state, ("m", "z"))
    y, m, z = torch.ops.memcheck.linear_attention_step(q, k, v, *state, feature_map=feature_map, eps=eps)
    return y, (m, z)


def _empty_state(op: str, q: Tensor, k: Tensor, v: Tensor) -> State:
    """Zeros for M (B,Hkv,D,Dv) and z (B,Hkv,D)."""
    for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,T,D)"), ("v", v, "(B,Hkv,T,Dv)")):
        check_rank(op, name, x, letters, 4)
    dtype = torch.promote_types(q.dtype, torch.float32)
    z = torch.zeros((*k.shape[:2], k.shape[3]), dtype=dtype, device=k.device)
    return torch.zeros((*z.shape, v.shape[3]), dtype=dtype, device=k.device), z

"""Linear attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor


def features(x: Tensor, feature_map: str = "elu+1") -> Tensor:
    """phi(x): x + 1 for x > 0, else exp(x), never elu(x) + 1, which cancels; or x itself."""
    if feature_map == "identity":
        return x
    # Not clamp, whose gradient at 0 is 1 up to torch 2.13 and 0 from 2.14 on.
    positive = x > 0
    return torch.where(positive, x + 1, x.masked_fill(positive, 0).exp())


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, feature_map: str = "elu+1", eps: float = 1e-6
) -> Tensor:
    """q (B,H,S,D), k (B,Hkv,T,D), v (B,Hkv,T,Dv) -> y (B,H,S,Dv), with autograd. See memcheck.linear_attention."""
    weights, v = weights_of(features(q, feature_map), features(k, feature_map), causal), per_head(v, q)
    return (weights @ v) / (weights.sum(-1, keepdim=True) + eps)


def linear_attention_cumsum(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Causal as it is often written, with a (D,Dv) state for every position: q (B,H,S,D), k (B,H,T,D), v (B,H,T,Dv)."""
    phi_q, phi_k, offset = features(q), features(k), k.shape[2] - q.shape[2]
    states = (phi_k[..., :, None] * v[..., None, :]).cumsum(2)  # (B,H,T,D,Dv)
    numerator = (phi_q[..., None, :] @ states[:, :, offset:]).squeeze(-2)
    return numerator / ((phi_q * phi_k.cumsum(2)[:, :, offset:]).sum(-1, keepdim=True) + eps)


def linear_attention_chunked(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6, chunk: int = 64) -> Tensor:
    """Causal, chunk by chunk: the plain PyTorch that a careful user would write: q, k (B,H,N,D), v (B,H,N,Dv)."""
    phi_q, phi_k = features(q), features(k)
    state = q.new_zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    sums = q.new_zeros((*k.shape[:2], 1, k.shape[3]))
    pieces = []
    for start in range(0, q.shape[2], chunk):
        here = slice(start, start + chunk)
        weights = (phi_q[:, :, here] @ phi_k[:, :, here].mT).tril()
        numerator = phi_q[:, :, here] @ state + weights @ v[:, :, here]
        denominator = phi_q[:, :, here] @ sums.mT + weights.sum(-1, keepdim=True)
        pieces.append(numerator / (denominator + eps))
        state = state + phi_k[:, :, here].mT @ v[:, :, here]
        sums = sums + phi_k[:, :, here].sum(2, keepdim=True)
    return torch.cat(pieces, 2)


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """(B,Hkv,T,.) -> (B,H,T,.)"""
    return x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1)


def visible(weights: Tensor, causal: bool) -> Tensor:
    """(B,H,S,T), 0 where the query does not see the key."""
    return weights.tril(weights.shape[3] - weights.shape[2]) if causal else weights


def weights_of(x: Tensor, y: Tensor, causal: bool) -> Tensor:
    """x (B,H,S,.), y (B,Hkv,T,.) -> their products (B,H,S,T) where the query sees the key."""
    return visible(x @ per_head(y, x).mT, causal)

"""Compressed attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
) -> Tensor:
    """q (B,H,S,D), k and v (B,Hkv,T,D) -> y (B,H,S,D), with autograd. See memcheck.compressed_attention."""
    kc, vc = compress(k, factor), compress(v, factor)
    return compressed_attention_pooled(
        q, kc, vc, factor=factor, kv_len=k.shape[2], causal=causal, strict=strict, scale=scale
    )


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
) -> Tensor:
    """q (B,H,S,D), kc and vc (B,Hkv,C,D) -> y (B,H,S,D), with autograd. See memcheck.compressed_attention_pooled."""
    kc, vc = over_heads(kc, q), over_heads(vc, q)
    return weights_of(q, kc, hidden_from(q, kc, factor, kv_len, causal, strict), scale) @ vc


def compress(x: Tensor, factor: int) -> Tensor:
    """(B,Hkv,T,D) -> (B,Hkv,C,D): means over blocks, the last one of what is there."""
    return block_sums(x, factor) / block_lengths(x.shape[2], factor, x)[:, None]


def block_sums(x: Tensor, factor: int) -> Tensor:
    """(B,Hkv,T,D) -> (B,Hkv,C,D)"""
    T = x.shape[2]
    blocks = -(-T // factor)
    factor = min(factor, max(T, 1))  # one block may be much shorter than factor
    return pad(x, (0, 0, 0, blocks * factor - T)).unflatten(2, (blocks, factor)).sum(3)


def block_lengths(T: int, factor: int, like: Tensor) -> Tensor:
    """(C,)"""
    ends = [min(T, begin + factor) - begin for begin in range(0, T, factor)]
    return torch.tensor(ends, dtype=like.dtype, device=like.device)


def over_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B,Hkv,..) -> (B,H,..): a key head for every query head."""
    return x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1)


def hidden_from(q: Tensor, kc: Tensor, factor: int, kv_len: int, causal: bool, strict: bool) -> Tensor:
    """(S,C): which blocks a query does not see."""
    S, C = q.shape[2], kc.shape[2]
    if not causal:
        return torch.zeros(S, C, dtype=torch.bool, device=q.device)
    positions = torch.arange(kv_len - S, kv_len, device=q.device)
    visible = (positions if strict else positions + 1) // factor  # (S,)
    return torch.arange(C, device=q.device) >= visible[:, None]


def scale_of(q: Tensor, scale: float | None) -> float:
    return float(max(q.shape[3], 1) ** -0.5) if scale is None else scale


def absent_blocks(kc: Tensor) -> Tensor:
    """(B,H,C): which blocks have keys of -inf throughout, and so a score of -inf for every query."""
    return (kc == -torch.inf).all(3) if kc.shape[3] else torch.zeros(kc.shape[:3], dtype=torch.bool, device=kc.device)


def weights_of(q: Tensor, kc: Tensor, hidden: Tensor, scale: float | None = None) -> Tensor:
    """(B,H,S,C): softmax of the scores, 0 where hidden; of scores of -inf alone there is no softmax, nor a gradient."""
    absent = absent_blocks(kc)
    scores = q @ kc.masked_fill(absent[..., None], 0).mT * scale_of(q, scale)
    scores = scores.masked_fill_(hidden, -torch.inf).masked_fill_(absent[:, :, None], -torch.inf)
    if not scores.shape[3]:
        return scores
    nothing = scores.detach().amax(3, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill_(nothing, 0), 3).masked_fill(nothing, 0)

"""Softplus attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memcheck.ops.reference.sequences import sequences_of


def softplus(x: Tensor) -> Tensor:
    """log(exp(x) + exp(0)), right to the last digit, as is its derivative; F.softplus is 1e-10 off in float64."""
    return torch.logaddexp(x, x.new_zeros(()))


def softplus_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6, **sequences: Any
) -> Tensor:
    """q (B,S,R), k and v (B,R,T) -> y (B,S,R), with autograd. See memcheck.softplus_attention."""
    if not sequences:
        return attend(q, k, v, causal, eps)
    y = torch.zeros_like(q)
    for row, queries, keys in sequences_of(len(q), q.shape[1], k.shape[2], causal=causal, **sequences):
        y[row, queries] = attend(q[row, queries], k[row, :, keys], v[row, :, keys], causal, eps)
    return y


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, eps: float) -> Tensor:
    """Softplus attention within one sequence, or a batch of sequences of one length."""
    weights = softplus(k)
    weighted = weights * v
    if causal:
        offset = k.shape[2] - q.shape[1]
        z = weights.cumsum(2)[:, :, offset:].transpose(1, 2)
        a = weighted.cumsum(2)[:, :, offset:].transpose(1, 2)
    else:
        z = weights.sum(2)[:, None]
        a = weighted.sum(2)[:, None]
    return softplus(q) * a / (z + eps)

"""Attention as textbooks write it: the whole matrix of scores, in plain PyTorch. The baseline of every comparison."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, hidden: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the last query aligned to the last key.

    q (B,H,S,D)   k, v (B,H,T,D)   y (B,H,S,D); causal needs S <= T. hidden, expandable to (B,H,S,T): True where a
    query does not see a key, beside the causal mask.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B,H,S,T)
    if causal:
        S, T = scores.shape[-2:]
        future = torch.ones(S, T, dtype=torch.bool, device=q.device).triu(T - S + 1)  # (S,T)
        scores = scores.masked_fill(future, float("-inf"))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v

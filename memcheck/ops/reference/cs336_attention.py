"""The attention of the published Stanford CS336 table: no heads, no mask, and a softmax written by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cs336_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v: q (B,S,D), k and v (B,T,D) -> y (B,S,D)."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B,S,T)
    probabilities = softmax(scores)
    return probabilities @ v


def softmax(x: Tensor) -> Tensor:
    shifted = x - x.max(dim=-1, keepdim=True).values
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)

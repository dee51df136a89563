"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.nn.weighted import DeviceLike


class Rotary(torch.nn.Module):
    """Rotary position embedding: rotates channels i and i + D/2 by position * base^(-2i/D) (Su et al. 2021).

    Args:
        dim: D, even. context: the longest sequence. The buffers cos and sin are (context, D/2).

    In the forward x is (..,S,D), at positions (S,), by default 0 to S - 1.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, dim: int, context: int, base: float = 1e4, *, device: DeviceLike = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"Rotary: dim must be even, got {dim}")
        angles = angles_at(torch.arange(context, device=device, dtype=torch.float32), dim, base)
        dtype = dtype or torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = slice(x.shape[-2]) if positions is None else positions
        # Under autocast dtypes differ.
        cos, sin = (table[rows].to(x.dtype) for table in (self.cos, self.sin))
        return rotated(x, cos, sin)


def angles_at(positions: Tensor, dim: int, base: float) -> Tensor:
    """positions (..) -> (..,D/2), the angle of channels i and i + D/2, in the dtype of positions"""
    frequencies = base ** -(torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim)
    return positions[..., None] * frequencies


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..,D) with channels i and i + D/2 rotated by an angle whose cos and sin are (..,D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def positions_within(cu_seqlens: Tensor, tokens: Tensor, first: Tensor | None = None) -> Tensor:
    """cu_seqlens (N+1,), tokens (1,S,..) -> (S,), the position of each token in its own document.

    first: (N,), the position of the first token of each document; 0 by default.
    """
    cu_seqlens = cu_seqlens.to(tokens.device)
    packed = torch.arange(tokens.shape[1], device=tokens.device, dtype=cu_seqlens.dtype)
    starts = cu_seqlens if first is None else cu_seqlens - torch.nn.functional.pad(first, (0, 1))
    return packed - starts[torch.searchsorted(cu_seqlens[1:], packed, right=True)]

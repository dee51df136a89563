"""The projections in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def linear_r(x: Tensor, w: Tensor) -> Tensor:
    """x (B,S,E), w (E,R) -> (B,S,R)."""
    return x @ w


def linear_l(x: Tensor, w: Tensor) -> Tensor:
    """x (B,S,E), w (E,R) -> (B,R,S), contiguous."""
    return (x @ w).transpose(1, 2).contiguous()

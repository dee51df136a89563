"""The base of attention modules with heads: their four linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.nn.checks import check_divides, check_positive, check_tokens, refuse_scripting
from memcheck.nn.weighted import DeviceLike


class HeadedSelfAttention(torch.nn.Module):
    """x (B,S,E) -> q (B,H,S,D), k and v (B,Hkv,S,D), and y (B,H,S,D) -> (B,S,E), where D = E / H."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None, *, bias: bool, device: DeviceLike, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        name = type(self).__name__
        check_positive(name, dim=dim, heads=heads, kv_heads=kv_heads)
        check_divides(name, "heads", heads, "dim", dim)
        check_divides(name, "kv_heads", kv_heads, "heads", heads)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, dim // heads
        kv_dim = kv_heads * self.head_dim
        self.q_proj = torch.nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = torch.nn.Linear(dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = torch.nn.Linear(dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = torch.nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B,H,S,D), k and v (B,Hkv,S,D): views of what the layers wrote, (B,S,H D)"""
        check_tokens(type(self).__name__, x, self.dim)
        q, k, v = (
            layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def leave(self, y: Tensor) -> Tensor:
        """y (B,H,S,D) -> (B,S,E)"""
        tokens: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return tokens

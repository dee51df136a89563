"""The attentions of bluewalm/memcheck_pyt's published table, as that program ran them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HIDDEN = -1e4  # added to the scores of keys that a query must not see


class NaiveAttention(torch.nn.Module):
    """Softmax attention over the whole score matrix. Only the last of its four weights takes part."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(dim, dim, bias=False, device=device, dtype=dtype) for _ in range(4)
        )
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B,S,E), k and v (B,T,E) -> y (B,S,E), and k and v (B,H,T,D), for a cache to hold; needs S <= T."""
        q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1)  # (B,H,S,T)
        scores = scores / math.sqrt(q.shape[-1])
        if self.causal:
            S, T = scores.shape[-2:]
            mask = torch.full((S, T), HIDDEN, device=q.device).triu(T - S + 1)  # alive until the end
            scores += mask
        scores = self.dropout(torch.softmax(scores, dim=-1))
        y = scores @ v
        y = y.transpose(1, 2).flatten(2)
        return self.out(y), k.detach(), v.detach()


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """q (B,S,E), k and v (B,T,E) -> y (B,S,E). Three dimensions: SDPA has no kernel but math for those."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal)

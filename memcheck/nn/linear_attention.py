"""Linear attention with its projections, as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.nn.checks import check_step
from memcheck.nn.heads import HeadedSelfAttention
from memcheck.nn.weighted import DeviceLike
from memcheck.ops.linear_attention import State, linear_attention, linear_attention_step


class LinearSelfAttention(HeadedSelfAttention):
    """Linear self-attention, projections inside: x (B,S,E) -> y (B,S,E).

    Args:
        dim: E, of the tokens.
        heads: H, which divides dim; a head is D = E / H wide.
        kv_heads: Hkv, which divides heads; heads by default. Query head h reads key head h // (H / Hkv).
        causal: position s sees positions up to s; otherwise all. `step` needs it.
        feature_map, eps: as in memcheck.linear_attention.
        bias: of the four torch.nn.Linear inside.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive or does not divide, an x that is not (B,S,E), a step without causal.

    Equivalent to:
        >>> q, k, v = (p(x).unflatten(2, (-1, module.head_dim)).transpose(1, 2)
        ...            for p in (module.q_proj, module.k_proj, module.v_proj))
        >>> y = linear_attention(q, k, v, causal=module.causal, feature_map=module.feature_map, eps=module.eps)
        >>> y = module.out_proj(y.transpose(1, 2).flatten(2))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = True,
        feature_map: str = "elu+1",
        eps: float = 1e-6,
        bias: bool = True,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, kv_heads, bias=bias, device=device, dtype=dtype)
        self.causal, self.feature_map, self.eps = causal, feature_map, eps

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, "
            f"feature_map={self.feature_map!r}, eps={self.eps}"
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.leave(linear_attention(q, k, v, causal=self.causal, feature_map=self.feature_map, eps=self.eps))

    @torch.no_grad()
    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: the prompt first, then one at a time.
            state: the result of the previous step; None at the beginning. M (B,Hkv,D,D) and z (B,Hkv,D) in the
                accumulation type.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state. Each
            token rounds the state once; see linear_attention_step for the error.
        """
        q, k, v = self.project(x)
        check_step("LinearSelfAttention", x, self.causal)
        if state is None:
            y = linear_attention(q, k, v, causal=True, feature_map=self.feature_map, eps=self.eps)
            _, state = linear_attention_step(q[:, :, -1:], k, v, feature_map=self.feature_map, eps=self.eps)
            return self.leave(y), state
        rows = []
        for q_1, k_1, v_1 in zip(q.split(1, 2), k.split(1, 2), v.split(1, 2), strict=True):
            row, state = linear_attention_step(q_1, k_1, v_1, state, feature_map=self.feature_map, eps=self.eps)
            rows.append(row)
        return self.leave(torch.cat(rows, 2)), state

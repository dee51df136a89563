"""Linear attention with its projections, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memcheck.nn.layers import DeviceLike, HeadedSelfAttention, StatefulSelfAttention, check_decay
from memcheck.ops.linear_attention import linear_attention, linear_attention_step


class LinearSelfAttention(HeadedSelfAttention, StatefulSelfAttention):
    """Linear self-attention, projections inside: x (B,S,E) -> y (B,S,E).

    Args:
        dim: E, of the tokens.
        heads: H, which divides dim; a head is D = E / H wide.
        kv_heads: Hkv, which divides heads; heads by default. Query head h reads key head h // (H / Hkv).
        causal: position s sees positions up to s; otherwise all. `step` needs it.
        feature_map, eps, normalize: as in memcheck.linear_attention.
        decay: the decay of each key head, Hkv numbers in (0, 1]: a state is multiplied by it before it takes in a
            position. "retnet": those of RetNet (Sun et al. 2023, arXiv:2307.08621), 1 - 2^(-5-h) for head h. Needs
            causal.
        learned_decay: train the decays, from these, which must then be below 1. The parameter is decay_logit (Hkv,);
            the decay is sigmoid(decay_logit). The operator gets its logarithm in the accumulation type.
        bias: of the four torch.nn.Linear inside.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive or does not divide, an x that is not (B,S,E), a step or a decay without
            causal, decays of another number or out of range.

    Equivalent to:
        >>> q, k, v = (p(x).unflatten(2, (-1, module.head_dim)).transpose(1, 2)
        ...            for p in (module.q_proj, module.k_proj, module.v_proj))
        >>> y = linear_attention(q, k, v, causal=module.causal, feature_map=module.feature_map, eps=module.eps)
        >>> y = module.out_proj(y.transpose(1, 2).flatten(2))
    """

    operator, step_operator = staticmethod(linear_attention), staticmethod(linear_attention_step)
    positions = (2, 2, 2)

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = True,
        feature_map: str = "elu+1",
        eps: float = 1e-6,
        normalize: bool = True,
        decay: Sequence[float] | str | None = None,
        learned_decay: bool = False,
        bias: bool = True,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, kv_heads, bias=bias, device=device, dtype=dtype)
        self.causal, self.feature_map, self.eps, self.normalize = causal, feature_map, eps, normalize
        if decay == "retnet":
            decay = [1 - 2.0 ** (-5 - head) for head in range(self.kv_heads)]
        check_decay("LinearSelfAttention", decay, self.kv_heads, causal, learned_decay)
        self.decay, self.learned_decay = decay, learned_decay
        self.decay_logit: Tensor | None
        if decay is None:
            self.decay_logit = None
            return
        logit = torch.empty(self.kv_heads, device=device, dtype=dtype)
        if learned_decay:
            self.decay_logit = torch.nn.Parameter(logit)
        else:
            self.register_buffer("decay_logit", logit, persistent=False)
        self.reset_decay()

    def reset_decay(self) -> None:
        if self.decay_logit is not None:
            with torch.no_grad():
                self.decay_logit.copy_(torch.tensor(self.decay, dtype=torch.float64, device="cpu").logit())

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_decay()

    def extra_repr(self) -> str:
        text = (
            f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, "
            f"feature_map={self.feature_map!r}, eps={self.eps}"
        )
        if not self.normalize:
            text += ", normalize=False"
        if self.decay is not None:
            text += f", decay={list(self.decay)}, learned_decay={self.learned_decay}"
        return text

    def options(self, q: Tensor) -> dict[str, Any]:
        logit = self.decay_logit
        if logit is not None:
            logit = torch.nn.functional.logsigmoid(logit.to(torch.promote_types(q.dtype, torch.float32)))
        return {"feature_map": self.feature_map, "eps": self.eps, "normalize": self.normalize, "log_decay": logit}

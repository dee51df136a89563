"""Softplus attention with its projections, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memcheck.nn.layers import DeviceLike, SelfAttentionLayers, StatefulSelfAttention, check_positive, check_tokens
from memcheck.ops.softplus_attention import softplus_attention, softplus_attention_step


def heuristic_core_dim(dim: int) -> int:
    """The core dimension for `dim` that clients of the closed bluewalm module take by default: 424 for 128.

    A line, rounded to a multiple of 8 and at least 8: for dim below 55 it is less than dim.

    Equivalent to:
        >>> core_dim = max(8, 8 * round((5.04 * dim - 222) / 8))
    """
    return max(8, 8 * round((5.04 * dim - 222) / 8))


class ChannelSelfAttention(SelfAttentionLayers):
    """x (B,S,E) -> q (B,S,R), k and v (B,R,S), and y (B,S,R) -> (B,S,E): the linear layers of softplus attention."""

    # Version 1 had transposed weights.
    _version = 2

    def __init__(self, dim: int, core_dim: int, *, device: DeviceLike, dtype: torch.dtype | None) -> None:
        check_positive(type(self).__name__, dim=dim, core_dim=core_dim)
        super().__init__(dim, core_dim, core_dim, bias=False, device=device, dtype=dtype)
        self.core_dim = core_dim

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tokens(type(self).__name__, x, self.dim)
        return self.q_proj(x), self.k_proj(x).mT, self.v_proj(x).mT

    def leave(self, y: Tensor) -> Tensor:
        tokens: Tensor = self.out_proj(y)
        return tokens

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Transposes weights of version 1. Without a version, it is told by the shape; square weights are kept."""
        version = local_metadata.get("version")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weight, shape = state_dict.get(f"{prefix}{name}.weight"), getattr(self, name).weight.shape
            if weight is not None and (version == 1 or (version is None and weight.shape != shape == weight.mT.shape)):
                state_dict[f"{prefix}{name}.weight"] = weight.mT.contiguous()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class SoftplusSelfAttention(ChannelSelfAttention, StatefulSelfAttention):
    """Softplus self-attention, projections inside: x (B,S,E) -> y (B,S,E).

    The projections q_proj, k_proj, v_proj and out_proj are torch.nn.Linear without bias, which other libraries know.

    Args:
        dim: E, of the tokens.
        core_dim: R, the number of channels, each a head of its own. dim by default: weights and activations are then
            those of the other self-attention modules; heuristic_core_dim(dim) is the closed module's larger choice.
        causal: position s sees positions up to s; otherwise all. `step` needs it.
        eps: as in memcheck.softplus_attention.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive, an x that is not (B,S,E), a step without causal.

    Equivalent to:
        >>> q, k, v = module.q_proj(x), module.k_proj(x).mT, module.v_proj(x).mT
        >>> y = module.out_proj(memcheck.softplus_attention(q, k, v, causal=module.causal, eps=module.eps))
    """

    operator, step_operator = staticmethod(softplus_attention), staticmethod(softplus_attention_step)
    positions = (1, 2, 2)

    def __init__(
        self,
        dim: int,
        core_dim: int | None = None,
        *,
        causal: bool = True,
        eps: float = 1e-6,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, dim if core_dim is None else core_dim, device=device, dtype=dtype)
        self.causal, self.eps = causal, eps

    def extra_repr(self) -> str:
        return f"causal={self.causal}, eps={self.eps}"

    def options(self, q: Tensor) -> dict[str, Any]:
        return {"eps": self.eps}

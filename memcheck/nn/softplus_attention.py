"""Softplus attention with its projections, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from memcheck.nn.checks import check_positive, check_step, check_tokens, refuse_scripting
from memcheck.nn.weighted import DeviceLike
from memcheck.ops.checks import SelfSequences
from memcheck.ops.softplus_attention import State, softplus_attention, softplus_attention_step

if TYPE_CHECKING:
    from typing_extensions import Unpack


def heuristic_core_dim(dim: int) -> int:
    """The core dimension that clients of the closed bluewalm module take by default: 424 for dim 128.

    A line, rounded to a multiple of 8 and at least 8: for dim below 55 it is less than dim.

    Equivalent to:
        >>> core_dim = max(8, 8 * round((5.04 * dim - 222) / 8))
    """
    return max(8, 8 * round((5.04 * dim - 222) / 8))


class ChannelSelfAttention(torch.nn.Module):
    """x (B,S,E) -> q (B,S,R), k and v (B,R,S), and y (B,S,R) -> (B,S,E): the linear layers of softplus attention."""

    # Version 1 had transposed weights.
    _version = 2
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, dim: int, core_dim: int, *, device: DeviceLike, dtype: torch.dtype | None) -> None:
        super().__init__()
        check_positive(type(self).__name__, dim=dim, core_dim=core_dim)
        self.dim, self.core_dim = dim, core_dim
        self.q_proj = torch.nn.Linear(dim, core_dim, bias=False, device=device, dtype=dtype)
        self.k_proj = torch.nn.Linear(dim, core_dim, bias=False, device=device, dtype=dtype)
        self.v_proj = torch.nn.Linear(dim, core_dim, bias=False, device=device, dtype=dtype)
        self.out_proj = torch.nn.Linear(core_dim, dim, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            layer.reset_parameters()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B,S,R), k and v (B,R,S): views of what the layers wrote, (B,S,R)"""
        check_tokens(type(self).__name__, x, self.dim)
        return self.q_proj(x), self.k_proj(x).mT, self.v_proj(x).mT

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Transposes weights of version 1. Without a version, it is told by the shape; square weights are kept."""
        version = local_metadata.get("version")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weight, shape = state_dict.get(f"{prefix}{name}.weight"), getattr(self, name).weight.shape
            if weight is not None and (version == 1 or (version is None and weight.shape != shape == weight.mT.shape)):
                state_dict[f"{prefix}{name}.weight"] = weight.mT.contiguous()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Options(SelfSequences, total=False):
    """Arguments of the forward that do not change what it returns."""

    initial_state: State | None


class SoftplusSelfAttention(ChannelSelfAttention):
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

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
    ) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: bool, **options: Unpack[Options]
    ) -> Tensor | tuple[Tensor, State]: ...

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: str = "right",
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x (B,S,E) -> y (B,S,E), zeros where padded; with return_state (y, state), which `step` takes too.

        The other arguments are those of memcheck.softplus_attention. The projections read padding, so x must be finite
        there if a weight wants a gradient.
        """
        q, k, v = self.project(x)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "lengths": lengths, "padding": padding}
        options |= {"initial_state": initial_state, "return_state": return_state}
        result = softplus_attention(q, k, v, causal=self.causal, eps=self.eps, **options)
        if not return_state:
            tokens: Tensor = self.out_proj(result)
            return tokens
        y, state = result
        return self.out_proj(y), state

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

    @torch.no_grad()
    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: the prompt first, then one at a time.
            state: the result of the previous step; None at the beginning. (Z, A), each (B,R) in the accumulation type.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state. Each
            token rounds the state once; see softplus_attention_step for the error.
        """
        q, k, v = self.project(x)
        check_step("SoftplusSelfAttention", x, self.causal)
        if state is None:
            y = softplus_attention(q, k, v, eps=self.eps)
            _, state = softplus_attention_step(q[:, -1:], k, v, eps=self.eps)
            return self.out_proj(y), state
        rows = []
        for q_1, k_1, v_1 in zip(q.split(1, 1), k.split(1, 2), v.split(1, 2), strict=True):
            row, state = softplus_attention_step(q_1, k_1, v_1, state, eps=self.eps)
            rows.append(row)
        return self.out_proj(torch.cat(rows, 1)), state

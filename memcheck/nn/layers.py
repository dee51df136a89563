"""The bases of attention modules: their four linear layers, and the forward and the step of those with a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from memcheck.nn.checks import check_divides, check_positive, check_step, check_tokens, refuse_scripting
from memcheck.nn.weighted import DeviceLike
from memcheck.ops.checks import SelfSequences

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(SelfSequences, total=False):
    """Optional arguments of a forward beside return_state, for type checkers."""

    initial_state: Any


class SelfAttentionLayers(torch.nn.Module):
    """Linear layers: x (B,S,E) -> q (B,S,q_dim), k and v (B,S,kv_dim), and y (B,S,q_dim) -> (B,S,E)."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self, dim: int, q_dim: int, kv_dim: int, *, bias: bool, device: DeviceLike, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = torch.nn.Linear(dim, q_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = torch.nn.Linear(dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = torch.nn.Linear(dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = torch.nn.Linear(q_dim, dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the operator takes them: views of what the layers wrote."""
        raise NotImplementedError

    def leave(self, y: Tensor) -> Tensor:
        """y of the operator -> (B,S,E)"""
        raise NotImplementedError


class HeadedSelfAttention(SelfAttentionLayers):
    """x (B,S,E) -> q (B,H,S,D), k and v (B,Hkv,S,D), and y (B,H,S,D) -> (B,S,E), where D = E / H."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None, *, bias: bool, device: DeviceLike, dtype: torch.dtype | None
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        name = type(self).__name__
        check_positive(name, dim=dim, heads=heads, kv_heads=kv_heads)
        check_divides(name, "heads", heads, "dim", dim)
        check_divides(name, "kv_heads", kv_heads, "heads", heads)
        super().__init__(dim, dim, kv_heads * (dim // heads), bias=bias, device=device, dtype=dtype)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_tokens(type(self).__name__, x, self.dim)
        q, k, v = (
            layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def leave(self, y: Tensor) -> Tensor:
        tokens: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return tokens


class StatefulSelfAttention(SelfAttentionLayers):
    """The forward and the step of attention with a state of constant size."""

    causal: bool
    operator: Callable[..., Any]
    step_operator: Callable[..., Any]
    positions: tuple[int, int, int]  # the dimensions of q, k and v that are positions

    def options(self, q: Tensor) -> dict[str, Any]:
        """Arguments of the operator and its step."""
        raise NotImplementedError

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[True], **options: Unpack[Options]) -> tuple[Tensor, Any]: ...

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: str = "right",
        initial_state: Any = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Any]:
        """x (B,S,E) -> y (B,S,E); with return_state (y, state), which `step` takes too.

        The other arguments are those of the operator. Where padded, y is 0, or the bias of out_proj if it has one. The
        projections read padding, so x must be finite there if a weight wants a gradient.
        """
        q, k, v = self.project(x)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "lengths": lengths, "padding": padding}
        options |= {"initial_state": initial_state, "return_state": return_state, **self.options(q)}
        result = self.operator(q, k, v, causal=self.causal, **options)
        return (self.leave(result[0]), result[1]) if return_state else self.leave(result)

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

    @torch.no_grad()
    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: the prompt first, then one at a time.
            state: the result of the previous step, or of the forward with return_state; None at the beginning. It is
                that of the operator's own step, in the accumulation type.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state. Each
            token rounds the state once; the operator's step says what the error is.
        """
        inputs = self.project(x)
        check_step(type(self).__name__, x, self.causal)
        options = self.options(inputs[0])
        if state is None:
            y = self.operator(*inputs, causal=True, **options)
            q, k, v = inputs
            _, state = self.step_operator(q.narrow(self.positions[0], x.shape[1] - 1, 1), k, v, **options)
            return self.leave(y), state
        rows = []
        for one in zip(*(part.split(1, dim) for part, dim in zip(inputs, self.positions, strict=True)), strict=True):
            row, state = self.step_operator(*one, state, **options)
            rows.append(row)
        return self.leave(torch.cat(rows, self.positions[0])), state

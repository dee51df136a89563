"""Linear attention with its projections, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from memcheck.nn.checks import check_decay, check_step
from memcheck.nn.heads import HeadedSelfAttention
from memcheck.nn.weighted import DeviceLike
from memcheck.ops.checks import SelfSequences
from memcheck.ops.linear_attention import AnyState, linear_attention, linear_attention_step

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(SelfSequences, total=False):
    """Arguments of the forward that do not change what it returns."""

    initial_state: AnyState | None


class LinearSelfAttention(HeadedSelfAttention):
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
        """Arguments of the operator and its step."""
        logit = self.decay_logit
        if logit is not None:
            logit = torch.nn.functional.logsigmoid(logit.to(torch.promote_types(q.dtype, torch.float32)))
        return {"feature_map": self.feature_map, "eps": self.eps, "normalize": self.normalize, "log_decay": logit}

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
    ) -> tuple[Tensor, AnyState]: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: bool, **options: Unpack[Options]
    ) -> Tensor | tuple[Tensor, AnyState]: ...

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: str = "right",
        initial_state: AnyState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, AnyState]:
        """x (B,S,E) -> y (B,S,E); with return_state (y, state), which `step` takes too.

        The other arguments are those of memcheck.linear_attention. Where padded, y is the bias of out_proj. The
        projections read padding, so x must be finite there if a weight wants a gradient.
        """
        q, k, v = self.project(x)
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "lengths": lengths, "padding": padding}
        options |= {"initial_state": initial_state, "return_state": return_state, **self.options(q)}
        result = linear_attention(q, k, v, causal=self.causal, **options)
        if not return_state:
            return self.leave(result)
        y, state = result
        return self.leave(y), state

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

    @torch.no_grad()
    def step(self, x: Tensor, state: AnyState | None = None) -> tuple[Tensor, AnyState]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: the prompt first, then one at a time.
            state: the result of the previous step, or of the forward with return_state; None at the beginning.
                M (B,Hkv,D,D) and z (B,Hkv,D) in the accumulation type; z is None if y is not normalized.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state. Each
            token rounds the state once; see linear_attention_step for the error.
        """
        q, k, v = self.project(x)
        check_step("LinearSelfAttention", x, self.causal)
        options = self.options(q)
        if state is None:
            y = linear_attention(q, k, v, causal=True, **options)
            _, state = linear_attention_step(q[:, :, -1:], k, v, **options)
            return self.leave(y), state
        rows = []
        for q_1, k_1, v_1 in zip(q.split(1, 2), k.split(1, 2), v.split(1, 2), strict=True):
            row, state = linear_attention_step(q_1, k_1, v_1, state, **options)
            rows.append(row)
        return self.leave(torch.cat(rows, 2)), state

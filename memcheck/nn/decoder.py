"""A decoder-only language model whose attention and feed-forward layer are chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from memcheck.nn import layers as nn_layers
from memcheck.nn.combinator import Combinator
from memcheck.nn.layers import DeviceLike, HeadedSelfAttention, Rotary, check_positive, refuse_scripting
from memcheck.nn.softplus_attention import ChannelSelfAttention
from memcheck.ops.checks import check_plain, is_symbolic
from memcheck.ops.compressed_attention import compressed_attention
from memcheck.ops.linear_attention import linear_attention
from memcheck.ops.reference.naive_attention import naive_attention
from memcheck.ops.softplus_attention import softplus_attention

ATTENTIONS: dict[str, Callable[..., Any]] = {
    "naive": naive_attention,
    "softmax": partial(scaled_dot_product_attention, is_causal=True),
    "linear": partial(linear_attention, causal=True),
    "compressed": compressed_attention,
    "softplus": softplus_attention,
}
PACKABLE = ("linear", "compressed", "softplus")
FEED_FORWARDS = ("swiglu", "combinator", "combinator-low-memory")


class Attend(torch.nn.Module):
    """An attention function as a module."""

    def __init__(self, function: Callable[..., Any], **arguments: Any) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **sequences: Any) -> Tensor:
        y: Tensor = self.function(q, k, v, **self.arguments, **sequences)
        return y


class RotarySelfAttention(HeadedSelfAttention):
    """Causal self-attention with heads and rotary positions: x (B,S,E) -> y (B,S,E)."""

    def __init__(self, dim: int, heads: int, rotary: Rotary, attend: Attend, **place: Any) -> None:
        super().__init__(dim, heads, None, bias=False, **place)
        self.rotary, self.attend = rotary, attend

    def forward(self, x: Tensor, positions: Tensor | None = None, **sequences: Any) -> Tensor:
        q, k, v = self.project(x)
        rotary = partial(self.rotary, positions=positions)
        return self.leave(self.attend(rotary(q), rotary(k), v, **sequences))


class RotarySoftplusSelfAttention(ChannelSelfAttention):
    """Softplus attention with rotary positions, all channels one head: x (B,S,E) -> y (B,S,E)."""

    def __init__(self, dim: int, rotary: Rotary, attend: Attend, **place: Any) -> None:
        super().__init__(dim, dim, **place)
        self.rotary, self.attend = rotary, attend

    def forward(self, x: Tensor, positions: Tensor | None = None, **sequences: Any) -> Tensor:
        rotary = partial(self.rotary, positions=positions)
        k = rotary(self.k_proj(x)).mT
        y: Tensor = self.out_proj(self.attend(rotary(self.q_proj(x)), k, self.v_proj(x).mT, **sequences))
        return y


class SwiGLU(torch.nn.Module):
    """W2 (silu(W1 x) * W3 x), of three linear layers without bias (Shazeer 2020): x (..,E) -> y (..,E)."""

    def __init__(self, dim: int, hidden_dim: int, **place: Any) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(dim, hidden_dim, bias=False, **place)
        self.up_proj = torch.nn.Linear(dim, hidden_dim, bias=False, **place)
        self.down_proj = torch.nn.Linear(hidden_dim, dim, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class DecoderLayer(torch.nn.Module):
    """x (B,S,E) -> h + feed_forward(norm(h)), where h = x + attention(norm(x))."""

    def __init__(self, attention: torch.nn.Module, feed_forward: torch.nn.Module, dim: int, **place: Any) -> None:
        super().__init__()
        self.attention_norm = torch.nn.RMSNorm(dim, eps=1e-5, **place)
        self.attention = attention
        self.feed_forward_norm = torch.nn.RMSNorm(dim, eps=1e-5, **place)
        self.feed_forward = feed_forward
        self.checkpointing = False

    def extra_repr(self) -> str:
        return f"checkpointing={self.checkpointing}"

    def forward(self, x: Tensor, **sequences: Any) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            return self.run(x, **sequences)
        # Nothing in a layer is random.
        y: Tensor = checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=False, **sequences)
        return y

    def run(self, x: Tensor, **sequences: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **sequences)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Decoder(torch.nn.Module):
    """A pre-norm decoder: tokens (B,S) of int64 -> logits (B,S,V).

    It has RMSNorm, rotary positions and no biases, and its head is not tied to the embedding.

    Args:
        vocabulary: V.
        dim: E.
        feed_forward_dim: F, of SwiGLU.
        layers: their number.
        heads: their number, which divides dim.
        context: the longest S.
        attention: "naive" (the whole score matrix), "softmax" (F.scaled_dot_product_attention), "linear", "compressed"
            or "softplus" (no heads, R = E); all causal. Or one of these for each layer, as
            ["linear", "linear", "linear", "softmax"].
        factor, window: of compressed attention.
        feed_forward: "swiglu", or in its place a "combinator" or "combinator-low-memory".
        checkpointing: keep only each layer's input for backward, and run the layer again then.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: an unknown name, another number of them than layers, a size that is not positive or does not
            divide, an odd head, a window without compressed attention, S beyond the context; in the forward, cu_seqlens
            with another attention.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        feed_forward_dim: int,
        layers: int,
        heads: int,
        *,
        context: int,
        attention: str | Sequence[str] = "softmax",
        factor: int = 8,
        window: int | None = None,
        feed_forward: str = "swiglu",
        checkpointing: bool = False,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "feed_forward_dim": feed_forward_dim, "layers": layers, "context": context}
        check_positive("Decoder", **sizes, heads=heads, factor=factor)
        kinds = (attention,) * layers if isinstance(attention, str) else tuple(attention)
        for kind in kinds:
            check_known("attention", kind, tuple(ATTENTIONS))
        if len(kinds) != layers:
            raise ValueError(f"Decoder: attention must name one for each of layers = {layers}, got {len(kinds)}")
        check_known("feed_forward", feed_forward, FEED_FORWARDS)
        options: dict[str, Any] = {"factor": factor}
        if window is not None:
            check_positive("Decoder", window=window)
            if "compressed" not in kinds:
                raise ValueError(f"Decoder: window needs compressed attention, got attention={attention!r}")
            options["window"] = window
        place: Any = {"device": device, "dtype": dtype}
        self.context, self.attention = context, kinds
        self.embedding = torch.nn.Embedding(vocabulary, dim, **place)
        # Layers share the tables of rotary positions: one of heads, and one of all channels for softplus attention.
        rotaries = {
            whole: Rotary(dim if whole else dim // heads, context, **place)
            for whole in sorted({kind == "softplus" for kind in kinds})
        }
        self.layers = torch.nn.ModuleList(
            DecoderLayer(
                make_attention(kind, dim, heads, options, rotaries[kind == "softplus"], **place),
                make_feed_forward(feed_forward, dim, feed_forward_dim, **place),
                dim,
                **place,
            )
            for kind in kinds
        )
        self.norm = torch.nn.RMSNorm(dim, eps=1e-5, **place)
        self.head = torch.nn.Linear(dim, vocabulary, bias=False, **place)
        self.reset_parameters()
        self.set_checkpointing(checkpointing)

    def reset_parameters(self) -> None:
        """Initialises all weights but those of norms normally with deviation 0.02.

        For layers that write to the residual stream the deviation is divided by sqrt(2 layers), so that the stream
        does not grow with depth (Radford et al. 2019).
        """
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("out_proj.weight", "down_proj.weight"))
                torch.nn.init.normal_(weight, std=0.02 / ((2 * len(self.layers)) ** 0.5 if last else 1))

    def set_checkpointing(self, on: bool) -> None:
        """Turns checkpointing of every layer `on`, or off."""
        # Not self.layers alone: torch.compile and parallel training wrap layers in modules of their own.
        for layer in self.modules():
            if isinstance(layer, DecoderLayer):
                layer.checkpointing = on

    def forward(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """tokens (B,S) -> logits (B,S,V).

        Args:
            cu_seqlens: (N+1,), for N documents that are packed one behind the other: B = 1, and document n is positions
                cu_seqlens[n] to cu_seqlens[n+1]. No document sees another, and the positions of each begin at 0. Needs
                linear, compressed or softplus attention.
        """
        if is_symbolic(tokens):
            raise NotImplementedError("Decoder: torch.fx.symbolic_trace cannot check tokens; use torch.export.export")
        check_plain("Decoder", "tokens", tokens)
        if tokens.dim() != 2 or tokens.shape[1] > self.context:
            raise ValueError(f"Decoder: tokens must be (B,S) with S <= {self.context}, got {tuple(tokens.shape)}")
        sequences = {}
        if cu_seqlens is not None:
            for kind in self.attention:
                if kind not in PACKABLE:
                    raise ValueError(f"Decoder: cu_seqlens needs attention {', '.join(PACKABLE)}, got {kind!r}")
            sequences = {"cu_seqlens": cu_seqlens, "positions": nn_layers.positions_within(cu_seqlens, tokens)}
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, **sequences)
        logits: Tensor = self.head(self.norm(x))
        return logits

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward


def check_known(argument: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"Decoder: {argument} must be one of {', '.join(known)}, got {name!r}")


def make_attention(
    name: str, dim: int, heads: int, options: dict[str, Any], rotary: Rotary, **place: Any
) -> torch.nn.Module:
    """options: arguments of compressed attention."""
    attend = Attend(ATTENTIONS[name], **(options if name == "compressed" else {}))
    if name == "softplus":
        return RotarySoftplusSelfAttention(dim, rotary, attend, **place)
    return RotarySelfAttention(dim, heads, rotary, attend, **place)


def make_feed_forward(name: str, dim: int, hidden_dim: int, **place: Any) -> torch.nn.Module:
    if name == "swiglu":
        return SwiGLU(dim, hidden_dim, **place)
    return Combinator(dim, low_memory=name == "combinator-low-memory", **place)

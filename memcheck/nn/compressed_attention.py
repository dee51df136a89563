"""Compressed attention with its projections and its compression, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from memcheck.nn.checks import check_positive, check_step, check_tokens
from memcheck.nn.heads import HeadedSelfAttention
from memcheck.nn.weighted import DeviceLike
from memcheck.ops.checks import SelfSequences, check_states, sequence_arguments
from memcheck.ops.compressed_attention import compressed_attention, compressed_attention_pooled
from memcheck.ops.compressed_attention_states import CompressedAttentionState, Places
from memcheck.ops.compressed_attention_windows import CompressedAttentionWindowState

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CompressedState(NamedTuple):
    """The state of decoding, in the dtype of keys and values: complete blocks, and the positions of the open one."""

    kc: Tensor  # (B,Hkv,C,D)
    vc: Tensor  # (B,Hkv,C,D)
    k: Tensor  # (B,Hkv,m,D), m < factor
    v: Tensor  # (B,Hkv,m,D)


# The state with compression="mean", of it with a window, or with "convolution"; packed or padded, a tuple with one for
# each sequence.
State = CompressedAttentionState | CompressedAttentionWindowState | CompressedState
States = State | tuple[CompressedAttentionState, ...] | tuple[CompressedState, ...]


class Options(SelfSequences, total=False):
    """Arguments of the forward that do not change what it returns."""

    initial_state: States | None


class BlockConvolution(torch.nn.Module):
    """A learned mean of every `factor` positions: (B,Hkv,T,D) -> (B,Hkv,C,D), C = floor(T/factor).

    A depthwise convolution along T whose kernel and stride are `factor`, without bias. The weight (Hkv,factor,D) is
    initialised to 1/factor, so that the convolution starts as the mean. With `shorter_last`, C = ceil(T/factor): the
    sum over the remaining positions is scaled by factor over their number, so it also starts as the mean.
    torch.nn.Conv1d is not used because cuDNN would round to TF32, and it is several times slower on the CPU.
    """

    def __init__(
        self, kv_heads: int, head_dim: int, factor: int, device: DeviceLike = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.factor = factor
        self.weight = torch.nn.Parameter(torch.empty(kv_heads, factor, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 1 / self.factor)

    def extra_repr(self) -> str:
        kv_heads, factor, head_dim = self.weight.shape
        return f"kv_heads={kv_heads}, head_dim={head_dim}, factor={factor}"

    def forward(self, x: Tensor, shorter_last: bool = False) -> Tensor:
        weight = self.weight.to(x.dtype)  # under autocast they differ
        whole, rest = in_blocks(x, self.factor)
        blocks = (whole * weight[:, None]).sum(3)
        if shorter_last and rest.shape[2]:
            last = (rest * weight[:, : rest.shape[2]]).sum(2, keepdim=True) * (self.factor / rest.shape[2])
            blocks = torch.cat([blocks, last], 2)
        return blocks


def in_blocks(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """x (B,Hkv,T,D) -> (B,Hkv,C,factor,D), and the rest (B,Hkv,m,D) with m < factor: views"""
    C = x.shape[2] // factor
    return x[:, :, : C * factor].unflatten(2, (C, factor)), x[:, :, C * factor :]


class CompressedSelfAttention(HeadedSelfAttention):
    """Self-attention over keys and values that are compressed block by block: x (B,S,E) -> y (B,S,E).

    Args:
        dim: E, of the tokens.
        heads: H, which divides dim; a head is D = E / H wide.
        kv_heads: Hkv, which divides heads; heads by default. Query head h reads key head h // (H / Hkv).
        factor: positions per block.
        compression: "mean", or "convolution": a weighted sum over the block, learned for each channel of keys and
            values, that starts as the mean.
        causal: position s sees the blocks that are complete at s; without any its result is 0. Otherwise it sees all
            blocks. `step` needs it.
        strict: only blocks complete before s. Needs causal.
        scale: of the scores; D**-0.5 by default.
        window: as in memcheck.compressed_attention: the newest positions are seen as they are. Needs causal.
        sink: learn a score for each head that every query sees, with a value of 0. The parameter is sink (H,), which
            starts at 0: it adds 1 to the sum over which softmax divides.
        bias: of the four torch.nn.Linear inside.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive or does not divide, another compression, strict without causal, an x
            that is not (B,S,E), a step or a window without causal.
        NotImplementedError: with "convolution", a window and a state or a packed or padded batch.

    Equivalent to:
        >>> q, k, v = (p(x).unflatten(2, (-1, module.head_dim)).transpose(1, 2)
        ...            for p in (module.q_proj, module.k_proj, module.v_proj))
        >>> y = compressed_attention(q, k, v, factor=module.factor, causal=module.causal, strict=module.strict)
        >>> y = module.out_proj(y.transpose(1, 2).flatten(2))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        factor: int,
        compression: str = "mean",
        causal: bool = True,
        strict: bool = False,
        scale: float | None = None,
        window: int | None = None,
        sink: bool = False,
        bias: bool = True,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = "CompressedSelfAttention"
        super().__init__(dim, heads, kv_heads, bias=bias, device=device, dtype=dtype)
        check_positive(name, factor=factor)
        if compression not in ("mean", "convolution"):
            raise ValueError(f'{name}: compression must be "mean" or "convolution", got "{compression}"')
        if strict and not causal:
            raise ValueError(f"{name}: strict needs causal=True, got causal=False")
        if window is not None:
            check_positive(name, window=window)
            if not causal:
                raise ValueError(f"{name}: window needs causal=True, got causal=False")
        self.window = window
        self.factor, self.compression = factor, compression
        self.causal, self.strict, self.scale = causal, strict, scale
        if compression == "convolution":
            sizes = (self.kv_heads, self.head_dim, factor)
            self.k_compression = BlockConvolution(*sizes, device=device, dtype=dtype)
            self.v_compression = BlockConvolution(*sizes, device=device, dtype=dtype)
        self.sink = torch.nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sink else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.sink is not None:
            torch.nn.init.zeros_(self.sink)

    def extra_repr(self) -> str:
        more = "" if self.window is None else f", window={self.window}"
        more += "" if self.sink is None else ", sink=True"
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, factor={self.factor}, compression={self.compression!r}, "
            f"causal={self.causal}, strict={self.strict}, scale={self.scale}{more}"
        )

    def options(self) -> dict[str, Any]:
        """Arguments of both operators."""
        options = {"factor": self.factor, "causal": self.causal, "strict": self.strict}
        options |= {} if self.window is None else {"window": self.window}
        return {**options, "scale": self.scale, "sink": self.sink}

    def compress(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B,Hkv,T,D) -> kc and vc (B,Hkv,C,D). Means are of whole blocks only, for `step`."""
        if self.compression == "convolution":
            return self.k_compression(k, not self.causal), self.v_compression(v, not self.causal)
        return in_blocks(k, self.factor)[0].mean(3), in_blocks(v, self.factor)[0].mean(3)

    @overload
    def forward(self, x: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: Literal[True], initial_state: State | None = ...
    ) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
    ) -> tuple[Tensor, States]: ...

    @overload
    def forward(
        self, x: Tensor, *, return_state: bool, **options: Unpack[Options]
    ) -> Tensor | tuple[Tensor, States]: ...

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: str = "right",
        initial_state: States | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, States]:
        """x (B,S,E) -> y (B,S,E); with return_state (y, state), which `step` takes too.

        The other arguments are those of memcheck.compressed_attention. Where padded, y is the bias of out_proj. The
        projections read padding, so x must be finite there if a weight wants a gradient. States are
        CompressedAttentionState with "mean", CompressedAttentionWindowState with a window too, CompressedState with
        "convolution"; packed or padded, a tuple of them.
        """
        options: dict[str, Any]
        if self.compression == "mean":
            q, k, v = self.project(x)
            options = {"cu_seqlens": cu_seqlens, "lengths": lengths, "padding": padding}
            options |= {"initial_state": initial_state, "return_state": return_state, **self.options()}
            result = compressed_attention(q, k, v, **options)
            return (self.leave(result[0]), result[1]) if return_state else self.leave(result)
        name = "CompressedSelfAttention"
        sequences = sequence_arguments(name, cu_seqlens, None, None, lengths, padding)
        continued = initial_state is not None or return_state
        if continued and not self.causal:
            raise ValueError(f"{name}: initial_state and return_state need causal=True, got causal=False")
        if self.window is not None and (continued or sequences):
            raise NotImplementedError(
                f'{name}: with compression="convolution" window is not available with states, nor packed or padded, yet'
            )
        if sequences:
            y, states = self.extend_sequences(x, initial_state, sequences)
            return (y, states) if return_state else y
        if continued:
            y, state = self.extend(x, initial_state)
            return (y, state) if return_state else y
        q, k, v = self.project(x)
        kc, vc = self.compress(k, v)
        options = {"kv_len": k.shape[2], **self.options()} | ({} if self.window is None else {"k": k, "v": v})
        return self.leave(compressed_attention_pooled(q, kc, vc, **options))

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

    def extend(self, x: Tensor, state: object) -> tuple[Tensor, CompressedState]:
        """The newest positions x (B,n,E) -> y (B,n,E), and the new state."""
        q, k, v = self.project(x)
        new = self.state_after(k, v, state)
        y = compressed_attention_pooled(q, new.kc, new.vc, kv_len=self.positions(new), **self.options())
        return self.leave(y), new

    def extend_sequences(
        self, x: Tensor, states: object, sequences: dict[str, Any]
    ) -> tuple[Tensor, tuple[CompressedState, ...]]:
        """The same for packed or padded sequences, each from its own state; there is none if not causal."""
        q, k, v = self.project(x)
        of_queries, of_keys = Places.of_sequences("CompressedSelfAttention", q, k, self.causal, sequences)
        parts = list(zip(of_keys.split(k), of_keys.split(v), strict=True))
        new: list[CompressedState] = []
        if self.causal:
            old = check_states("CompressedSelfAttention", states, len(parts), CompressedState)
            new = [self.state_after(*part, state) for part, state in zip(parts, old, strict=True)]
            blocks, kv_lens = [(state.kc, state.vc) for state in new], [self.positions(state) for state in new]
        else:
            blocks, kv_lens = [self.compress(*part) for part in parts], of_keys.counts
        kc, vc = ([pair[i] for pair in blocks] for i in range(2))
        return self.leave(of_queries.attend(q, kc, vc, kv_lens, **self.options())), tuple(new)

    def positions(self, state: CompressedState) -> int:
        """The number of positions that a state covers."""
        return state.kc.shape[2] * self.factor + state.k.shape[2]

    def state_after(self, k: Tensor, v: Tensor, state: object) -> CompressedState:
        """The state after new keys and values (B,Hkv,n,D)."""
        if state is None:
            state = CompressedState(*[k[:, :, :0]] * 4)
        if not isinstance(state, CompressedState):
            raise TypeError(
                f"CompressedSelfAttention: state must be a CompressedState or None, got {type(state).__name__}"
            )
        k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        kc, vc = state.kc, state.vc
        if k.shape[2] >= self.factor:
            new = self.compress(k, v)
            kc, vc = torch.cat([kc, new[0]], 2), torch.cat([vc, new[1]], 2)
            # Clones, so that the state does not keep the completed blocks' positions alive.
            k, v = in_blocks(k, self.factor)[1].clone(), in_blocks(v, self.factor)[1].clone()
        return CompressedState(kc, vc, k, v)

    @torch.no_grad()
    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: the prompt first, then any number.
            state: the result of the previous step, or of the forward with return_state; None at the beginning.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state, of the
            old one's type; at the beginning a CompressedState, or with a window a CompressedAttentionWindowState.
        """
        check_tokens("CompressedSelfAttention", x, self.dim)
        check_step("CompressedSelfAttention", x, self.causal)
        if isinstance(state, CompressedAttentionState) or self.window is not None:
            y, state = self(x, initial_state=state, return_state=True)
            return y, state
        return self.extend(x, state)

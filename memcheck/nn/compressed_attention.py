"""Compressed attention with its projections and its compression, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from memcheck.nn import layers
from memcheck.nn.layers import DeviceLike, HeadedSelfAttention, Options
from memcheck.ops.checks import check_rank, check_states, sequence_arguments
from memcheck.ops.compressed_attention import compressed_attention, compressed_attention_pooled
from memcheck.ops.compressed_attention_states import CompressedAttentionState, Places
from memcheck.ops.compressed_attention_windows import Blocks, CompressedAttentionWindowState, go_on

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CompressedState(NamedTuple):
    """The state of decoding, in the dtype of keys and values: complete blocks, and the positions of the open one."""

    kc: Tensor  # (B,Hkv,C,D)
    vc: Tensor  # (B,Hkv,C,D)
    k: Tensor  # (B,Hkv,m,D), m < factor
    v: Tensor  # (B,Hkv,m,D)


# The state with compression="mean", with a window, or with "convolution" and no window; packed or padded, a tuple with
# one for each sequence.
State = CompressedAttentionState | CompressedAttentionWindowState | CompressedState
States = State | tuple[State, ...]


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
        rotary_base: rotate channels i and i + D/2 of queries and keys at position t by t * rotary_base^(-2i/D) (Su et
            al. 2021; often 10,000), before blocks are formed of keys. None: no positions. Needs an even D.
        sink: learn a score for each head that every query sees, with a value of 0. The parameter is sink (H,), which
            starts at 0: it adds 1 to the sum over which softmax divides.
        bias: of the four torch.nn.Linear inside.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive or does not divide, another compression, strict without causal, an x
            that is not (B,S,E), a step or a window without causal, rotary positions of an odd D.

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
        rotary_base: float | None = None,
        sink: bool = False,
        bias: bool = True,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = "CompressedSelfAttention"
        super().__init__(dim, heads, kv_heads, bias=bias, device=device, dtype=dtype)
        layers.check_positive(name, factor=factor)
        if compression not in ("mean", "convolution"):
            raise ValueError(f'{name}: compression must be "mean" or "convolution", got "{compression}"')
        if strict and not causal:
            raise ValueError(f"{name}: strict needs causal=True, got causal=False")
        if window is not None:
            layers.check_positive(name, window=window)
            if not causal:
                raise ValueError(f"{name}: window needs causal=True, got causal=False")
        if rotary_base is not None:
            if not rotary_base > 0:
                raise ValueError(f"{name}: rotary_base must be positive, got {rotary_base}")
            if self.head_dim % 2:
                raise ValueError(f"{name}: rotary_base needs an even dim / heads, got {self.head_dim}")
        self.window, self.rotary_base = window, rotary_base
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
        more += "" if self.rotary_base is None else f", rotary_base={self.rotary_base}"
        more += "" if self.sink is None else ", sink=True"
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, factor={self.factor}, compression={self.compression!r}, "
            f"causal={self.causal}, strict={self.strict}, scale={self.scale}{more}"
        )

    def options(self) -> dict[str, Any]:
        """Arguments of both operators."""
        options = {"factor": self.factor, "causal": self.causal, "strict": self.strict}
        options |= {} if self.window is None else {"window": self.window}
        return {**options, "scale": self.scale, "sink": self.score_of_sink()}

    def score_of_sink(self) -> Tensor | None:
        """The sink in float32, or in float64, as the operators take it."""
        return None if self.sink is None else self.sink.to(torch.promote_types(self.sink.dtype, torch.float32))

    def compress(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B,Hkv,T,D) -> kc and vc (B,Hkv,C,D). Means are of whole blocks only, for `step`."""
        if self.compression == "convolution":
            return self.k_compression(k, not self.causal), self.v_compression(v, not self.causal)
        return in_blocks(k, self.factor)[0].mean(3), in_blocks(v, self.factor)[0].mean(3)

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
        initial_state: States | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, States]:
        """x (B,S,E) -> y (B,S,E); with `return_state` (y, state), which `step` takes too.

        `cu_seqlens`, `lengths`, `padding` and `initial_state` are those of memcheck.compressed_attention. Where padded,
        y is the bias of out_proj. The projections read padding, so x must be finite there if a weight wants a gradient.
        States are CompressedAttentionState with "mean", CompressedState with "convolution", and with a window
        CompressedAttentionWindowState; packed or padded, a tuple of them.
        """
        options: dict[str, Any]
        q, k, v = self.project_at(x, initial_state, cu_seqlens, lengths, padding)
        if self.compression == "mean":
            options = {"cu_seqlens": cu_seqlens, "lengths": lengths, "padding": padding}
            options |= {"initial_state": initial_state, "return_state": return_state, **self.options()}
            result = compressed_attention(q, k, v, **options)
            return (self.leave(result[0]), result[1]) if return_state else self.leave(result)
        name = "CompressedSelfAttention"
        sequences = sequence_arguments(name, cu_seqlens, None, None, lengths, padding)
        continued = initial_state is not None or return_state
        if continued and not self.causal:
            raise ValueError(f"{name}: initial_state and return_state need causal=True, got causal=False")
        pair: tuple[Tensor, States]
        if self.window is not None and (continued or sequences):
            blocks = Blocks(self.factor, self.window, self.compress)
            options = {"causal": True, "strict": self.strict, "scale": self.scale, "return_lse": False}
            y, after = go_on(name, (q, k, v), self.score_of_sink(), initial_state, blocks, options, **sequences)
            pair = self.leave(y), after
        elif sequences:
            pair = self.extend_sequences((q, k, v), initial_state, sequences)
        elif continued:
            pair = self.extend((q, k, v), initial_state)
        else:
            kc, vc = self.compress(k, v)
            options = self.options() | ({} if self.window is None else {"k": k, "v": v})
            return self.leave(compressed_attention_pooled(q, kc, vc, kv_len=k.shape[2], **options))
        return pair if return_state else pair[0]

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

    def project_at(
        self,
        x: Tensor,
        states: object,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: str = "right",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B,H,S,D), k and v (B,Hkv,S,D), with rotary positions behind those of the states."""
        q, k, v = self.project(x)
        if self.rotary_base is not None:
            positions = self.positions(x, states, cu_seqlens, lengths, padding)
            angles = layers.angles_at(positions, self.head_dim, self.rotary_base)
            q, k = (layers.rotated(part, angles.cos().to(part.dtype), angles.sin().to(part.dtype)) for part in (q, k))
        return q, k, v

    def positions(
        self, x: Tensor, states: object, cu_seqlens: Tensor | None, lengths: Tensor | None, padding: str
    ) -> Tensor:
        """The positions of x (B,S,E), (S,) or (B,1,S), in at least float32."""
        name, S = "CompressedSelfAttention", x.shape[1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        first = None
        for of, letters in ((cu_seqlens, "(N+1,)"), (lengths, "(B,)")):
            if of is not None:
                check_rank(name, "cu_seqlens" if of is cu_seqlens else "lengths", of, letters, 1)
                if states is not None:
                    count = of.shape[0] - (of is cu_seqlens)
                    given = check_states(name, states, count, self.kind_of_state)
                    first = torch.tensor([self.covered(state) for state in given], device=x.device)
        if cu_seqlens is not None:
            return layers.positions_within(cu_seqlens, x, first).to(dtype)
        positions = torch.arange(S, device=x.device)
        if lengths is None:
            return (positions + self.covered(states)).to(dtype)
        shift = torch.zeros_like(lengths) if padding == "right" else lengths - S
        positions = positions + (shift.to(x.device) + (0 if first is None else first))[:, None, None]
        return positions.to(dtype)

    @property
    def kind_of_state(self) -> type[State]:
        if self.window is not None:
            return CompressedAttentionWindowState
        return CompressedAttentionState if self.compression == "mean" else CompressedState

    def covered(self, state: object) -> int:
        """The number of positions that a state covers; 0 of None, and of what the operator refuses."""
        if not isinstance(state, State):
            return 0
        opened = state.positions if isinstance(state, CompressedAttentionState) else state.k.shape[2]
        return state.kc.shape[2] * self.factor + opened

    def extend(self, inputs: tuple[Tensor, Tensor, Tensor], state: object) -> tuple[Tensor, CompressedState]:
        """q (B,H,n,D), k and v (B,Hkv,n,D) of the newest positions -> y (B,n,E), and the new state."""
        q, k, v = inputs
        new = self.state_after(k, v, state)
        y = compressed_attention_pooled(q, new.kc, new.vc, kv_len=self.covered(new), **self.options())
        return self.leave(y), new

    def extend_sequences(
        self, inputs: tuple[Tensor, Tensor, Tensor], states: object, sequences: dict[str, Any]
    ) -> tuple[Tensor, tuple[CompressedState, ...]]:
        """The same for packed or padded sequences, each from its own state; there is none if not causal."""
        q, k, v = inputs
        of_queries, of_keys = Places.of_sequences("CompressedSelfAttention", q, k, self.causal, sequences)
        parts = list(zip(of_keys.split(k), of_keys.split(v), strict=True))
        new: list[CompressedState] = []
        if self.causal:
            old = check_states("CompressedSelfAttention", states, len(parts), CompressedState)
            new = [self.state_after(*part, state) for part, state in zip(parts, old, strict=True)]
            blocks, kv_lens = [(state.kc, state.vc) for state in new], [self.covered(state) for state in new]
        else:
            blocks, kv_lens = [self.compress(*part) for part in parts], of_keys.counts
        kc, vc = ([pair[i] for pair in blocks] for i in range(2))
        return self.leave(of_queries.attend(q, kc, vc, kv_lens, **self.options())), tuple(new)

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
        layers.check_tokens("CompressedSelfAttention", x, self.dim)
        layers.check_step("CompressedSelfAttention", x, self.causal)
        if isinstance(state, CompressedAttentionState) or self.window is not None:
            y, state = self(x, initial_state=state, return_state=True)
            return y, state
        return self.extend(self.project_at(x, state), state)

"""Compressed attention with its projections and its compression, as a module."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from memcheck.nn.checks import check_positive, check_step
from memcheck.nn.heads import HeadedSelfAttention
from memcheck.nn.weighted import Device
from memcheck.ops.compressed_attention import compressed_attention, compressed_attention_pooled


class CompressedState(NamedTuple):
    """What decoding keeps, in the dtype of keys and values: completed blocks, and the open one as it came."""

    kc: Tensor  # (B,Hkv,C,D)
    vc: Tensor  # (B,Hkv,C,D)
    k: Tensor  # (B,Hkv,m,D), m < factor
    v: Tensor  # (B,Hkv,m,D)


class BlockConvolution(torch.nn.Conv1d):
    """A learned mean of every `factor` positions, for each channel of each head its own: (B,Hkv,T,D) -> (B,Hkv,C,D).

    Kernel and stride are `factor`, there is no bias, and every weight, (Hkv D,1,factor), starts as 1/factor, so that
    it starts as the mean. C = floor(T/factor), or, with the shorter last block, ceil(T/factor): that block's sum is
    scaled by factor over its length, so that it starts as the mean of what is there, too.
    """

    def __init__(self, kv_heads: int, head_dim: int, factor: int, device: Device, dtype: torch.dtype | None) -> None:
        channels = kv_heads * head_dim
        super().__init__(
            channels, channels, factor, stride=factor, groups=channels, bias=False, device=device, dtype=dtype
        )
        self.kv_heads, self.factor = kv_heads, factor

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 1 / self.kernel_size[0])

    def forward(self, x: Tensor, shorter_last: bool = False) -> Tensor:
        channels = x.transpose(2, 3).flatten(1, 2)  # (B,Hkv D,T)
        rest = channels.shape[2] % self.factor
        whole = channels.shape[2] - rest
        blocks = super().forward(channels[:, :, :whole]) if whole else channels[:, :, :0]
        if rest and shorter_last:
            last = super().forward(pad(channels[:, :, whole:], (0, self.factor - rest)))
            blocks = torch.cat([blocks, last * (self.factor / rest)], 2)
        return blocks.unflatten(1, (self.kv_heads, -1)).transpose(2, 3)


class CompressedSelfAttention(HeadedSelfAttention):
    """Self-attention over keys and values that are compressed block by block: x (B,S,E) -> y (B,S,E).

    Args:
        dim: E, of the tokens.
        heads: H, which divides dim; a head is D = E / H wide.
        kv_heads: Hkv, which divides heads; heads by default. Query head h reads key head h // (H / Hkv).
        factor: positions a block.
        compression: "mean", or "convolution": a weighted sum over the block, learned for keys and values, each channel
            on its own, that starts as the mean.
        causal: position s sees the blocks that are complete at s, and none yields 0 for it; else all. `step` needs it.
        strict: only those complete before s. Needs causal.
        scale: of the scores; D**-0.5 by default.
        bias: of the four torch.nn.Linear inside.
        device, dtype: of the weights, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive or does not divide, another compression, strict without causal, an x
            that is not (B,S,E), a step without causal.

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
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = "CompressedSelfAttention"
        super().__init__(dim, heads, kv_heads, bias=bias, device=device, dtype=dtype)
        check_positive(name, factor=factor)
        if compression not in ("mean", "convolution"):
            raise ValueError(f'{name}: compression must be "mean" or "convolution", got "{compression}"')
        if strict and not causal:
            raise ValueError(f"{name}: strict needs causal=True, got causal=False")
        self.factor, self.compression = factor, compression
        self.causal, self.strict, self.scale = causal, strict, scale
        if compression == "convolution":
            sizes = (self.kv_heads, self.head_dim, factor)
            self.k_compression = BlockConvolution(*sizes, device=device, dtype=dtype)
            self.v_compression = BlockConvolution(*sizes, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, factor={self.factor}, compression={self.compression!r}, "
            f"causal={self.causal}, strict={self.strict}, scale={self.scale}"
        )

    def compress(self, k: Tensor, v: Tensor, *, shorter_last: bool = False) -> tuple[Tensor, Tensor]:
        """k and v (B,Hkv,T,D) -> kc and vc (B,Hkv,C,D)"""
        if self.compression == "convolution":
            return self.k_compression(k, shorter_last), self.v_compression(v, shorter_last)
        kc, vc = (x.unflatten(2, (-1, self.factor)).mean(3) for x in (k, v))
        return kc, vc

    def attend_to_blocks(self, q: Tensor, kc: Tensor, vc: Tensor, kv_len: int) -> Tensor:
        """q (B,H,S,D), kc and vc (B,Hkv,C,D) -> (B,S,E)"""
        return self.leave(
            compressed_attention_pooled(
                q, kc, vc, factor=self.factor, kv_len=kv_len, causal=self.causal, strict=self.strict, scale=self.scale
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.compression == "mean":
            return self.leave(
                compressed_attention(
                    q, k, v, factor=self.factor, causal=self.causal, strict=self.strict, scale=self.scale
                )
            )
        kc, vc = self.compress(k, v, shorter_last=not self.causal)
        return self.attend_to_blocks(q, kc, vc, kv_len=k.shape[2])

    @torch.no_grad()
    def step(self, x: Tensor, state: CompressedState | None = None) -> tuple[Tensor, CompressedState]:
        """The newest positions, from a state instead of all earlier tokens; no gradient.

        Args:
            x: (B,n,E), the tokens that are new since the state: as many as there are, the prompt to begin with.
            state: what the step before returned; None at the beginning.

        Returns:
            y (B,n,E), equal to the last n rows of the forward over all tokens up to rounding, and the new state.
        """
        q, k, v = self.project(x)
        check_step("CompressedSelfAttention", x, self.causal)
        state = state or CompressedState(*[k[:, :, :0]] * 4)
        k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        kc, vc = state.kc, state.vc
        complete = k.shape[2] - k.shape[2] % self.factor
        if complete:
            kc_new, vc_new = self.compress(k[:, :, :complete], v[:, :, :complete])
            kc, vc = torch.cat([kc, kc_new], 2), torch.cat([vc, vc_new], 2)
            # Clones, so that the state does not keep the completed blocks' positions alive.
            k, v = k[:, :, complete:].clone(), v[:, :, complete:].clone()
        y = self.attend_to_blocks(q, kc, vc, kv_len=kc.shape[2] * self.factor + k.shape[2])
        return y, CompressedState(kc, vc, k, v)

"""Llamas of torchtitan under FSDP2: pull request 165 (March 2024), and the benchmark of December 2024.

Facts of the model, of what is checkpointed and of the loop were read in pytorch/torchtitan at these dates, and those of
FSDP2 in pytorch/pytorch. Tensors live as long as theirs do: what is free when another is allocated decides what is
reserved.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.predict.api import predict_memory

from .scripts import Loop, predict_script

HEAD = 128


class RMSNorm(nn.Module):
    """In float32, and back before the weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return normed(x.float()).type_as(x) * self.weight


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def pairs_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def rotated(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B,T,heads,E) by complex turns (T,E/2). Both are there in float32 before either is rotated."""
    q_pairs, k_pairs = pairs_of(q), pairs_of(k)
    turns = turns[: q.shape[1]].view(1, q.shape[1], 1, -1)
    q_turned = torch.view_as_real(q_pairs * turns).flatten(3)
    k_turned = torch.view_as_real(k_pairs * turns).flatten(3)
    return q_turned.type_as(q), k_turned.type_as(k)


def repeated(x: Tensor, times: int) -> Tensor:
    batch, length, heads, size = x.shape
    if times == 1:
        return x
    return x[:, :, :, None].expand(batch, length, heads, times, size).reshape(batch, length, heads * times, size)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.times = heads // kv_heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, count * HEAD, bias=False) for count in (heads, kv_heads, kv_heads, heads)
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = q.view(batch, length, -1, HEAD), k.view(batch, length, -1, HEAD), v.view(batch, length, -1, HEAD)
        q, k = rotated(q, k, turns)
        keys, values = repeated(k, self.times), repeated(v, self.times)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous()
        return self.out(y.view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, inner), (inner, width), (width, inner))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, inner)
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.norm_1(x), turns)
        return h + self.feed_forward(self.norm_2(h))


class Llama(nn.Module):
    """widens: logits are float32, as in March 2024."""

    def __init__(self, vocabulary: int, inner: int, kv_heads: int, length: int, widens: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4096)
        self.register_buffer("turns", torch.empty(length, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block(4096, inner, 32, kv_heads) for _ in range(32))
        self.norm = RMSNorm(4096)
        self.output = nn.Linear(4096, vocabulary, bias=False)
        self.widens = widens

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h, self.turns)
        h = self.norm(h)
        return self.output(h).float() if self.widens else self.output(h)


SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


def every_second_product() -> Any:
    """Selective checkpointing: attention and every second matrix product are kept."""
    counts: dict[bool, int] = defaultdict(int)

    def policy(context: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if function == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            keeps = counts[context.is_recompute] % 2 == 1
        else:
            keeps = function in SAVED
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class ReducedOnItsStream(DefaultReduceScatter):
    """Allocates what is reduced on the stream of reductions, as FSDP2 did until July 2024 (pytorch/pytorch#129721)."""

    def __init__(self, module: FSDPModule) -> None:
        self.module = module

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (group,) = self.module._get_fsdp_state()._fsdp_param_groups
        with torch.cuda.stream(group.comm_ctx.reduce_scatter_stream):
            return super().allocate(size, dtype=dtype, device=device)


def split(model: Any, mesh: Any, selective: bool, newer: bool) -> None:
    """Checkpoints and shards each block. The last block is not sharded again after its forward.

    newer: reductions take their inputs from the memory of the default stream.
    """
    model = model.model if isinstance(model, Loop) else model
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    kept: dict[str, Any] = {"context_fn": every_second_product} if selective else {}
    for number, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, **kept)
        fully_shard(wrapped, **how, reshard_after_forward=number < len(model.layers) - 1)
        model.layers[number] = wrapped
    fully_shard(model, **how)
    for module in () if newer else model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ReducedOnItsStream(module))


def predict(row: dict[str, str], place: Place) -> Prediction:
    batch, length = int(row["batch"]), int(row["seq"])
    newer = "3.1" in row["model"]
    with torch.device("meta"):
        model = Llama(128256, 14336, 8, length, False) if newer else Llama(32000, 11008, 32, length, True)
        ids, labels = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))

    def loss(y: Tensor) -> Tensor:
        flat = y.flatten(0, 1)
        return functional.cross_entropy(flat.float() if newer else flat, labels.flatten(0, 1))

    # The newer loop deletes the logits before the backward.
    step = Step(model, ids, loss=loss, optimizer="adamw", clip_grad_norm=1.0, keep_outputs=not newer)
    return predict_memory(step, place) if newer else predict_script(Loop(step), place, iterations=1)

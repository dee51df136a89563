"""Operators on DTensors over gloo processes: cases of tests/split_over_gloo.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

import memcheck


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An operator whose inputs have these placements gives y with its placement, without communication."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    placements: tuple[Placement, ...]
    of_y: Placement

    def __call__(self) -> None:
        mesh, generator = mesh_of_all(), torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator).sigmoid() for shape in self.shapes]
        leaves = [x.requires_grad_() for x in inputs]
        y = self.function(*leaves)
        gradients = torch.autograd.grad(y.square().sum(), leaves)
        with torch.no_grad():  # The decision of a call without gradients must not be reused with them.
            self.function(*self.distributed(inputs, mesh))
        parts = [x.requires_grad_() for x in self.distributed(inputs, mesh)]
        with CommDebugMode() as communication:
            sharded = self.function(*parts)
        assert communication.get_total_counts() == 0
        assert sharded.placements == (self.of_y,)
        found = torch.autograd.grad(sharded.square().sum(), parts)
        for part, truth in zip((sharded, *found), (y, *gradients), strict=True):
            assert isinstance(part, DTensor)
            assert part.to_local().is_contiguous()
            torch.testing.assert_close(part.full_tensor(), truth)

    def distributed(self, inputs: list[Tensor], mesh: DeviceMesh) -> list[Any]:
        return [distribute_tensor(x.detach(), mesh, [at]) for x, at in zip(inputs, self.placements, strict=True)]


FIRST, SECOND, THIRD, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()
HEADS = ((4, 8, 9, 6), (4, 4, 9, 6), (4, 4, 9, 6))
CHANNELS = ((4, 300, 8), (4, 8, 300), (4, 8, 300))
TOKENS, WEIGHT = (4, 4, 8), (8, 12)
linear = partial(memcheck.linear_attention, causal=True)
compressed = partial(memcheck.compressed_attention, factor=4)


def decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return linear(q, k, v, decay=decay)


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return compressed(q, k, v, sink=sink)


def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return memcheck.compressed_attention_pooled(q, k, v, factor=1, kv_len=9)


def continued(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y, state = memcheck.softplus_attention(q, k, v, return_state=True)
    return memcheck.softplus_attention(y, k, v, initial_state=state)


BY_HEADS, BY_BATCH, BY_CHANNELS = (SECOND,) * 3, (FIRST,) * 3, (THIRD, SECOND, SECOND)
SHARDED: dict[str, Callable[[], None]] = {
    "linear, sharded by heads": Sharded(linear, HEADS, BY_HEADS, SECOND),
    "linear, sharded by batch": Sharded(memcheck.linear_attention, HEADS, BY_BATCH, FIRST),
    "decay, sharded by heads": Sharded(decayed, (*HEADS, HEADS[1][:3]), (*BY_HEADS, SECOND), SECOND),
    "decay of heads, sharded by heads": Sharded(decayed, (*HEADS, (4,)), (*BY_HEADS, FIRST), SECOND),
    "decay of heads, sharded by batch": Sharded(decayed, (*HEADS, (4,)), (*BY_BATCH, WHOLE), FIRST),
    "not normalized, sharded by heads": Sharded(partial(linear, normalize=False), HEADS, BY_HEADS, SECOND),
    "softplus, sharded by channels": Sharded(memcheck.softplus_attention, CHANNELS, BY_CHANNELS, THIRD),
    "softplus, sharded by batch": Sharded(memcheck.softplus_attention, CHANNELS, BY_BATCH, FIRST),
    "softplus continued, sharded by channels": Sharded(continued, CHANNELS, BY_CHANNELS, THIRD),
    "compressed, sharded by heads": Sharded(compressed, HEADS, BY_HEADS, SECOND),
    "compressed, sharded by batch": Sharded(compressed, HEADS, BY_BATCH, FIRST),
    "sink, sharded by batch": Sharded(with_sink, (*HEADS, (8,)), (*BY_BATCH, WHOLE), FIRST),
    "sink, sharded by heads": Sharded(with_sink, (*HEADS, (8,)), (*BY_HEADS, FIRST), SECOND),
    "pooled, sharded by heads": Sharded(pooled, HEADS, BY_HEADS, SECOND),
    "combinator, sharded by batch": Sharded(memcheck.combinator, (TOKENS, (2, 8, 8)), (FIRST, WHOLE), FIRST),
    "combinator, sharded by positions": Sharded(
        partial(memcheck.combinator, low_memory=True), (TOKENS, (2, 8, 8)), (SECOND, WHOLE), SECOND
    ),
    "linear_r, by columns": Sharded(memcheck.linear_r, (TOKENS, WEIGHT), (WHOLE, SECOND), THIRD),
    "linear_r, by rows": Sharded(memcheck.linear_r, (TOKENS, WEIGHT), (THIRD, FIRST), Partial()),
    "linear_l, by columns": Sharded(memcheck.linear_l, (TOKENS, WEIGHT), (WHOLE, SECOND), SECOND),
    "linear_l, by batch": Sharded(memcheck.linear_l, (TOKENS, WEIGHT), (FIRST, WHOLE), FIRST),
}


def uneven_groups_are_gathered() -> None:
    """Shards of 6 query and 3 key heads would not have the key heads of their query heads."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4)
    for placement in (Shard(1), Replicate()):
        shards = [distribute_tensor(x, mesh, [placement, Replicate()]) for x in (q, k, k)]
        whole = [x.full_tensor() for x in shards]
        torch.testing.assert_close(linear(*shards).full_tensor(), linear(*whole))


def a_sharded_sequence_names_the_function_for_it() -> None:
    mesh = mesh_of_all()
    calls: dict[str, Any] = {"linear_attention": linear, "compressed_attention": compressed}
    for name, function in calls.items():
        shards = [distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]) for _ in range(3)]
        with pytest.raises(
            NotImplementedError, match=f"{name}: q is sharded along its positions, dimension 2"
        ) as error:
            function(*shards)
        assert f"call memcheck.distributed.{name}" in str(error.value)


def local_map_calls_the_function_for_a_sharded_sequence() -> None:
    mesh = mesh_of_all()
    inputs = [torch.randn(1, 2, 16, 4) for _ in range(3)]
    for x in inputs:
        dist.broadcast(x, 0)
    attend = local_map(
        partial(memcheck.distributed.linear_attention, causal=True),
        out_placements=[Shard(2)],
        in_placements=([Shard(2)],) * 3,
        device_mesh=mesh,
    )
    y = attend(*(distribute_tensor(x, mesh, [Shard(2)]) for x in inputs))
    torch.testing.assert_close(y.full_tensor(), linear(*inputs))


SHARDED |= {
    "uneven groups": uneven_groups_are_gathered,
    "sharded by positions": a_sharded_sequence_names_the_function_for_it,
    "local_map": local_map_calls_the_function_for_a_sharded_sequence,
}

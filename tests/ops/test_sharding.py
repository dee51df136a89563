"""How DTensor runs the operators, seen from one process of two: a process group that exchanges nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sharded_over_gloo import SHARDED, Sharded
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import memcheck

CASES = {name: case for name, case in SHARDED.items() if isinstance(case, Sharded)}
pytestmark = [pytest.mark.cpu, pytest.mark.isolated]


def mesh_of_two():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,))


def shard_of(x: Tensor, placement: Placement) -> Tensor:
    """The first of two shards, or all of x."""
    return x.chunk(2, placement.dim)[0] if isinstance(placement, Shard) else x


def test_a_shard_is_computed_without_communication() -> None:
    """y and the gradients are the shards of the whole tensors; sums over a sharded dimension are only partial ones."""
    mesh = mesh_of_two()
    for name, case in CASES.items():
        inputs = [torch.randn(shape).sigmoid().requires_grad_() for shape in case.shapes]
        y = case.function(*inputs)
        truths = [y, *torch.autograd.grad(y, inputs, torch.ones_like(y))]
        shards = [
            DTensor.from_local(shard_of(x.detach(), at).clone(), mesh, [at], run_check=False).requires_grad_()
            for x, at in zip(inputs, case.placements, strict=True)
        ]
        with CommDebugMode() as communication:
            sharded = case.function(*shards)
        assert communication.get_total_counts() == 0, name
        assert sharded.placements == (case.of_y,), name
        found = [sharded, *torch.autograd.grad(sharded, shards, torch.ones_like(sharded))]
        for part, truth in zip(found, truths, strict=True):
            (placement,) = part.placements
            assert part.shape == truth.shape, name
            if not placement.is_partial():
                torch.testing.assert_close(part.to_local(), shard_of(truth, placement))


def test_query_heads_without_their_key_heads_are_gathered() -> None:
    """Half of 6 query heads and of 3 key heads do not belong together."""
    mesh = mesh_of_two()
    q, k = (
        DTensor.from_local(torch.randn(2, heads, 5, 4), mesh, [Replicate()], run_check=False).redistribute(
            mesh, [Shard(1)]
        )
        for heads in (6, 3)
    )
    with CommDebugMode() as communication:
        y = memcheck.linear_attention(q, k, k)
    assert communication.get_total_counts() > 0
    assert y.shape == (2, 6, 5, 4)


def test_a_sharded_sequence_is_refused() -> None:
    mesh = mesh_of_two()
    for name, dimension in (("softplus_attention", 1), ("linear_attention", 2), ("compressed_attention", 2)):
        queries, keys = ((1, 4, 2), (1, 2, 8)) if dimension == 1 else ((1, 2, 4, 2), (1, 2, 8, 2))
        q = DTensor.from_local(torch.ones(queries), mesh, [Shard(dimension)], run_check=False)
        k = DTensor.from_local(torch.ones(keys), mesh, [Replicate()], run_check=False)
        options = {"factor": 2} if name == "compressed_attention" else {}
        with pytest.raises(
            NotImplementedError, match=f"{name}: q is sharded along its positions, dimension {dimension}"
        ) as error:
            getattr(memcheck, name)(q, k, k, **options)
        assert f"call memcheck.distributed.{name} with each process's to_local()" in str(error.value)

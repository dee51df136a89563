"""What operators on images take on CUDA: copies and scratch as read in sources, and estimates of cuDNN's workspaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcheck
from memcheck.core.prediction import EMPTY_CACHE
from memcheck.predict.operators import scratch_of
from memcheck.predict.operators.products import LEARNED
from memcheck.predict.scratch import Scratch, Target, Unknown, call_of

ops = torch.ops.aten
GPU = Target("cuda", architecture=(8, 0))


def taken(func: Any, *args: Any, target: Target = GPU) -> tuple[dict[str, int], list[Unknown]]:
    """The scratch of a call on meta tensors, by name, and what is unknown."""
    parts = scratch_of(call_of(func, args, {}, func(*args), target))
    known = {part.name: part.bytes for part in parts if isinstance(part, Scratch)}
    return known, [part for part in parts if isinstance(part, Unknown)]


def image(*shape: int, like: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(shape, device="meta").to(memory_format=like)


def convolved(x: Tensor, w: Tensor, stride: int = 1, groups: int = 1) -> tuple[dict[str, int], list[Unknown]]:
    where = ([stride, stride], [1, 1], [1, 1], False, [0, 0], groups)
    return taken(ops.convolution.default, x, w, None, *where)


def test_an_estimate_of_cudnns_workspace_is_named_as_one() -> None:
    x, w = image(2, 16, 8, 8), image(32, 16, 3, 3)
    assert convolved(x, w) == ({"cuDNN's workspace, estimated": x.nbytes + 2 * x.nbytes + w.nbytes}, [LEARNED])
    assert convolved(x, image(32, 16, 1, 1)) == ({}, [LEARNED])


def test_depthwise_convolutions_of_32_bits_need_no_workspace() -> None:
    x, w = image(2, 16, 8, 8), image(16, 1, 3, 3)
    assert convolved(x, w, groups=16) == ({}, [])
    assert convolved(x.half(), w.half(), groups=16)[1] == ["whether cuDNN runs depthwise convolutions of 16 bits"]


@pytest.mark.parametrize("like", [torch.contiguous_format, torch.channels_last])
def test_operands_of_convolutions_are_laid_out(like: torch.memory_format) -> None:
    x, w, gradient = image(2, 16, 8, 8, like=like), image(32, 16, 1, 1), image(2, 32, 8, 8, like=torch.channels_last)
    where = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    func = ops.convolution_backward.default
    known, _ = taken(func, gradient, x, w, [0], *where, [True, True, False])
    assert known == ({"grad output, laid out": gradient.nbytes} if like is torch.contiguous_format else {})


def test_a_search_for_algorithms_empties_the_cache_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))).to("meta")
    x = image(2, 8, 8, 8)

    def emptied() -> int:
        trace = memcheck.predict_memory(model, x, optimizer="sgd", device="A100-40GB").trace
        assert trace is not None
        return sum(allocation.name == EMPTY_CACHE for allocation in trace.log.allocations)

    assert emptied() == 0
    with torch.backends.cudnn.flags(benchmark=True):
        assert emptied() == 2  # A forward and a backward: the layers are equal, and so are all passes.


def test_group_norm() -> None:
    x, w, statistics = image(4, 6, 5, 5), torch.empty(6, device="meta"), torch.empty(4, 3, device="meta")
    known, unknown = taken(ops.native_group_norm.default, x, w, w, 4, 6, 25, 3, 1e-5)
    assert (known, unknown) == ({"factor and summand of each channel": 2 * 4 * 6 * 4}, [])
    backward, where = ops.native_group_norm_backward.default, (statistics, statistics, w, 4, 6, 25, 3)
    known, unknown = taken(backward, x, x, *where, [True, True, True])
    assert (known, unknown) == ({"ds and db": 2 * 4 * 6 * 4, "c2 and c3": 2 * 4 * 3 * 4, "c1": 4 * 6 * 4}, [])


def test_sums_at_places_sort_them() -> None:
    table, places, values = image(10, 4), torch.empty(7, dtype=torch.int64, device="meta"), image(7, 4)
    known, unknown = taken(ops.index_put.default, table, [places], values, True)
    assert known == {"places, their numbers, and both in order": 4 * 8 * 7}
    assert unknown == ["what sorting 7 places takes"]
    assert taken(ops.index_put.default, table, [places], values, False) == ({}, [])


def test_norms_of_a_list_have_a_partial_sum_for_each_chunk() -> None:
    parts = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (10, 3 * 64 * 1024 + 1)]
    assert taken(ops._foreach_norm.Scalar, parts, 2) == ({"partial sums": 2 * 4 * 4}, [])
    assert taken(ops._foreach_norm.Scalar, parts, 3)[1] == ["what norms of a list take one by one"]


def test_efficient_attentions_backward_has_a_tile_for_each_block() -> None:
    q = torch.empty(2, 3, 100, 48, device="meta")
    y, lse, *seeds = ops._scaled_dot_product_efficient_attention(q, q, q, None, True)
    func = ops._scaled_dot_product_efficient_attention_backward.default
    args = (
        y.transpose(1, 2).contiguous().transpose(1, 2),
        q,
        q,
        q,
        None,
        y,
        lse,
        *seeds,
        0.0,
        [True, True, True, False],
    )
    known, unknown = taken(func, *args)
    assert known["dq, a tile for each block of threads"] == 2 * 3 * 2 * (16 + 64 * 64 * 4)
    assert unknown == []
    assert taken(func, *args, target=Target("cuda", architecture=(9, 0)))[1] != []

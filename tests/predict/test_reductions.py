"""What CUDA's reductions take, by hand from setReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh."""

from __future__ import annotations

import pytest
import torch

from memcheck.predict.operators import scratch_of
from memcheck.predict.scratch import Target, Unknown, call_of

A100 = Target("cuda", architecture=(8, 0), multiprocessors=108)


def taken(*shape: int, dims: list[int], target: Target = A100) -> list[int | str]:
    """Bytes of the scratch of a sum, and what is unknown."""
    x = torch.empty(shape, device="meta")
    call = call_of(torch.ops.aten.sum.dim_IntList, (x, dims), {}, x.sum(dims), target)
    return [part if isinstance(part, Unknown) else part.bytes for part in scratch_of(call)]


@pytest.mark.parametrize(
    ("shape", "dims", "sums", "counters"),
    [
        # Blocks of 32 x 4 threads, with 4 columns each: 24 groups of columns, and 1728 blocks at once.
        ((25216, 3072), [0], 4 * 3072 * 72 * 32 * 4, 4 * 24),
        # 6304 values of each thread: shared by as many blocks as leave 256 of them.
        ((16 * 25216, 768), [0], 4 * 768 * 394 * 32 * 4, 4 * 6),
        # Blocks of 32 x 16 threads, which reduce rows and images: 64 results, and 432 blocks at once.
        ((16, 64, 112, 112), [0, 2, 3], 4 * 64 * 7, 4 * 64),
        # A single result: blocks of 512 threads with 4 values each.
        ((2**20,), [0], 4 * 128, 4),
    ],
)
def test_blocks_that_share_a_result_have_sums(
    shape: tuple[int, ...], dims: list[int], sums: int, counters: int
) -> None:
    assert taken(*shape, dims=dims) == [sums, counters]


def test_a_block_alone_has_none() -> None:
    assert taken(1024, 1481, dims=[0]) == taken(4096, 300, dims=[1]) == taken(8, dims=[0]) == []


def test_a_gpu_of_unknown_size_leaves_a_doubt() -> None:
    (words,) = taken(25216, 3072, dims=[0], target=Target("cuda", architecture=(8, 0)))
    assert words == "the buffer of aten::sum over 25216 elements"
    assert isinstance(words, Unknown)

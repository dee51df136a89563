"""Operators that read or write at positions which tensors give."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from memcheck.simulated.scratch import OperatorCall, Scratch, Unknown, Unlisted, add, doubt


def sorted_places(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Values are added in the order of their places, four numbers of 64 bits for each: index_put_with_sort_kernel.

    Without accumulation, and for the few that a mask finds, this is not so.
    """
    given = [index for index in call.indices if index is not None]
    if not call.accumulate:
        return
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        yield Unknown("what a sum over the places of a mask takes")
        return
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    yield Scratch("places, their numbers, and both in order", 4 * 8 * count)
    if not call.values.is_contiguous():
        yield Scratch("values, laid out", call.values.nbytes)
    yield Unknown(f"what sorting {count} places takes")


INDEXING = "TensorAdvancedIndexing.cpp"
# Indices are read in place if they are 64-bit integers; a mask is turned into such indices first.
cuda_index = doubt(
    Unlisted("what aten::index takes for a mask or 32-bit indices"),
    lambda call: any(index is not None and index.dtype != torch.int64 for index in call.indices),
)
add("index", "x[classes[:2]], x[x > 0.3]", cuda=cuda_index, source=INDEXING)
PLACES = "rows.index_put((classes[:5],), rows[:5], accumulate=True), x.index_put((x > 0.3,), x[x > 0.3])"
add("index_put", PLACES, cuda=sorted_places, source=f"{INDEXING} cuda/Indexing.cu")

"""Packed and padded batches in plain PyTorch: one call for each sequence."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# The row of the batch, the positions of its queries, and those of its keys.
Sequence = tuple[slice, slice, slice]


def sequences_of(
    B: int,
    S: int,
    T: int,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
) -> Iterator[Sequence]:
    """The sequences of a batch; without packing or padding, one that is all of it."""
    if cu_seqlens is not None:
        cu_seqlens_q = cu_seqlens_k = cu_seqlens
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for n in range(len(queries) - 1):
            yield slice(0, 1), slice(queries[n], queries[n + 1]), slice(keys[n], keys[n + 1])
    elif lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            left = padding == "left"
            of_keys = slice(T - length, T) if left else slice(0, length)
            of_queries = slice(max(0, S - length), S) if left else slice(0, max(0, length - (T - S)))
            yield slice(b, b + 1), of_queries if causal or S == T else slice(0, S), of_keys
    else:
        yield slice(0, B), slice(0, S), slice(0, T)

"""Operators of sparse tensors on meta. The sizes of their results follow from indices, which must be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck.core.tensors import tensors_in
from memcheck.predict.known_contents import KnownContents
from memcheck.predict.operators import facts_of

# The largest dense operand that is made of zeros for a while, to learn the sizes of a result.
MOST_BYTES = 2**30


def is_sparse(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The indices and values of a sparse tensor."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def with_parts(tensor: Tensor, parts: tuple[Tensor, ...]) -> Any:
    """A tensor like that sparse one, of these indices and values."""
    make: Any = torch.sparse_coo_tensor if tensor.layout == torch.sparse_coo else torch.sparse_compressed_tensor
    if tensor.layout == torch.sparse_coo:
        return make(*parts, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False)
    return make(*parts, tensor.shape, layout=tensor.layout, check_invariants=False)


def takes_sparse(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operator takes a sparse tensor and has no kernel for such on meta."""
    for tensor in tensors_in((args, kwargs)):
        if is_sparse(tensor):
            return facts_of(func._schema.name).sparse != "on meta"
    return False


def computed(
    func: Any, args: Any, kwargs: Any, contents: KnownContents, known_on_meta: Callable[[Tensor], Tensor]
) -> tuple[Any, list[Tensor]]:
    """What the operator returns, learned from zeros in place of unknown contents, and what it replaced in an operand.

    NotImplementedError: indices are not known.
    """
    pairs: list[tuple[Tensor, Tensor]] = []  # Real tensors, and those on meta that they stand for.

    def real(part: Any) -> Any:
        if isinstance(part, torch.device):
            return torch.device("cpu")
        if not isinstance(part, Tensor):
            return part
        if is_sparse(part):
            pairs.append((with_parts(part, tuple(real(inner) for inner in parts_of(part))), part))
            return pairs[-1][0]
        known = contents.of(part)
        if known is None and part.numel() and not part.is_floating_point() and not part.is_complex():
            raise NotImplementedError("the indices of a sparse tensor are not known on meta: give real ones")
        if part.nbytes > MOST_BYTES:
            raise NotImplementedError("an operand of a sparse tensor is too large")
        pairs.append((known if known is not None else torch.zeros(part.shape, dtype=part.dtype), part))
        return pairs[-1][0]

    args, kwargs = tree_map(real, (args, kwargs))
    output = func(*args, **kwargs)

    def on_meta(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        same = next((meta for own, meta in pairs if own is part), None)
        if same is not None and not is_sparse(part):
            return same
        if is_sparse(part):
            return with_parts(part, tuple(on_meta(inner) for inner in parts_of(part)))
        storage = part.untyped_storage()._cdata
        for own, meta in pairs:
            if not is_sparse(own) and own.untyped_storage()._cdata == storage:
                return meta.as_strided(part.shape, part.stride(), part.storage_offset())
        if part.is_floating_point():
            return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
        return known_on_meta(part)

    written = next((meta for own, meta in pairs if own is output and is_sparse(own)), None)
    found = tree_map(on_meta, output)
    pairs.clear()  # These functions refer to themselves, and so would keep it alive.
    if written is None:
        return found, []
    before = list(parts_of(written))
    with torch.no_grad():
        written.data = found
    return written, before


def dense_parts(thing: Any) -> Iterator[Tensor]:
    """The dense tensors in an operator's arguments or results, with those that sparse tensors consist of."""
    for tensor in tensors_in(thing):
        yield from parts_of(tensor) if is_sparse(tensor) else (tensor,)

"""Operators whose results depend on values: shapes by masks or nonzero elements, sparse tensors, checked conditions.

Where the deciding values are known, the shapes are exact. Else a usual case is assumed, in most cases the largest
possible result, and a doubt says so. Checks of arguments are assumed to pass. The sizes of sparse results follow from
indices, which must be known.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck.core.tensors import tensors_in
from memcheck.predict.known_contents import KnownContents
from memcheck.predict.scratch import OperatorCall, Scratch, Target, Unknown, Unlisted, add, call_of, doubt, facts_of


class DecidingValues(KnownContents):
    """The values that decide the shapes of an operator's results, for a probe that runs the operator.

    output: the results on meta; None: the operator itself returns them.
    size: the size that the operator gives to the tensor of out=, which is the output.
    contents: the values of deciding operands, by their identity.
    doubts: what is assumed of values that are not known.
    """

    def __init__(self, inner: KnownContents) -> None:
        self.inner = inner
        self.output: Any = None
        self.size: torch.Size | None = None
        self.contents: dict[int, Tensor] = {}
        self.doubts: list[str] = []

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of an operand, or None if they are unknown."""
        found = self.contents.get(id(tensor))
        return self.inner.of(tensor) if found is None else found

    def decides(self, tensor: Tensor) -> bool:
        return id(tensor) in self.contents

    def count(self, operand: Tensor, doubt: str) -> int:
        """The number of nonzero elements of the operand; all, with the doubt, if they are unknown.

        A probe gets as many nonzero elements in other places, so that its result serves other masks, too.
        """
        known = self.inner.read(operand)
        number = operand.numel() if known is None else int(torch.count_nonzero(known))
        if known is None:
            self.doubts.append(doubt)
            if operand.dtype == torch.bool:
                self.inner.note_all(operand)
        if known is None or 0 not in operand.stride():
            known = torch.zeros(operand.numel(), dtype=operand.dtype)
            known[:number] = 1
        self.contents[id(operand)] = known.view(operand.shape)
        return number

    def known(self, operand: Tensor, doubt: str) -> Tensor | None:
        """The values of the operand; None, with the doubt, if they are unknown."""
        known = self.inner.read(operand)
        if known is None:
            self.doubts.append(doubt)
        else:
            self.contents[id(operand)] = known
        return known


def nonzero(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    words = "aten::nonzero returns a row per element that is not 0, which depends on values; assumed: all elements"
    number = decided.count(call.self, words)
    decided.output = torch.empty(number, call.self.dim(), dtype=torch.int64, device="meta")


def masked_select(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    words = "aten::masked_select returns the elements where the mask is True, which depends on values; assumed: all"
    number, mask = decided.count(call.mask, words), call.mask
    shape = torch.broadcast_shapes(call.self.shape, mask.shape)
    times = torch.Size(shape).numel() // mask.numel() if mask.numel() else 0
    decided.output = torch.empty(number * times, dtype=call.self.dtype, device="meta")


def index(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    """A mask is read as the positions of its True elements, one index per dimension of the mask."""
    decided.output = func(call.self, positions(decided, call.indices, "aten::index"))


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


def index_put(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    fills = call.arguments["values"].numel() == 1 and not call.accumulate  # Where the mask is True.
    if not fills or sum(part is not None for part in call.indices) != 1:
        positions(decided, call.indices, call.name)


def positions(decided: DecidingValues, indices: Any, name: str) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    words = f"{name} reads or writes where a mask is True, which depends on values; assumed: everywhere"
    for part in indices:
        if part is None or part.dtype not in (torch.bool, torch.uint8):
            found.append(part)
            continue
        number = decided.count(part, words)
        found += [torch.empty(number, dtype=torch.int64, device="meta") for _ in part.shape]
    return found


def masked_scatter_backward(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    decided.count(call.mask, "aten::masked_scatter_backward selects by a mask, which depends on values; assumed: all")


def unique(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    """Unknown values are assumed to differ. Inverse and counts have no element unless they are asked for."""
    x, dim = call.self, call.arguments.get("dim")
    words = f"{call.name} returns the values that differ, which depends on values; assumed: all of them"
    if (known := decided.known(x, words)) is not None:
        decided.output = tuple(part.to("meta") for part in func(**{**call.arguments, "self": known}))
        return
    number = x.numel() if dim is None else x.shape[dim]
    inverse = x.shape if dim is None else (number,)
    sizes = [
        ((number,) if dim is None else x.shape, x.dtype),
        (inverse if call.arguments.get("return_inverse") else (0,), torch.int64),
        ((number,) if call.arguments.get("return_counts") else (0,), torch.int64),
    ]
    made = tuple(torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes)
    decided.output = made[: len(func._schema.returns)]
    decided.contents[id(x)] = torch.arange(x.numel()).to(x.dtype).view(x.shape)


def bincount(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    x, weights = call.self, call.weights
    words = "aten::bincount returns a count up to the largest value, which depends on values; assumed: minlength, or 1"
    known = decided.known(x, words)
    most = int(known.max()) + 1 if known is not None and known.numel() else min(x.numel(), 1)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    decided.output = torch.empty(max(most, call.minlength), dtype=dtype, device="meta")


def repeat_interleave(decided: DecidingValues, func: Any, call: OperatorCall) -> None:
    words = "aten::repeat_interleave returns as many as the repeats say, which depends on values; assumed: 1 each"
    repeats, size = call.repeats, call.output_size
    known = decided.known(repeats, words)
    number = size if size is not None else int(known.sum()) if known is not None else repeats.numel()
    decided.output = torch.empty(number, dtype=repeats.dtype, device="meta")
    if known is None:
        decided.contents[id(repeats)] = torch.ones(repeats.shape, dtype=repeats.dtype)


INDEXING = "TensorAdvancedIndexing.cpp"
# Indices are read in place if they are 64-bit integers; a mask is turned into such indices first.
cuda_index = doubt(
    Unlisted("what aten::index takes for a mask or 32-bit indices"),
    lambda call: any(index is not None and index.dtype != torch.int64 for index in call.indices),
)
add("index", "x[classes[:2]], x[x > 0.3]", shapes=index, cuda=cuda_index, source=INDEXING)
PLACES = "rows.index_put((classes[:5],), rows[:5], accumulate=True), x.index_put((x > 0.3,), x[x > 0.3])"
add("index_put", PLACES, shapes=index_put, cuda=sorted_places, source=f"{INDEXING} cuda/Indexing.cu")
add("index_put_", "(x * 1).index_put_((x > 0.3,), x[x > 0.3])", shapes=index_put, source=INDEXING)
add("_index_put_impl_", "ops._index_put_impl_(x * 1, [x > 0.3], x[x > 0.3])", shapes=index_put, source=INDEXING)
add("nonzero", "(x > 0.3).nonzero()", shapes=nonzero, source=INDEXING)
add("masked_select", "x.masked_select(x > 0.3)", shapes=masked_select, source=INDEXING)
MASKED = "x.masked_scatter(x > 0.3, x * 2)"
add("masked_scatter_backward", MASKED, shapes=masked_scatter_backward, source=INDEXING)
add("_unique _unique2", "ops.{name}(whole)", shapes=unique, source="Unique.cpp")
add("unique_dim", "ops.unique_dim(whole, 0)", shapes=unique, source="Unique.cpp")
add("unique_consecutive", "ops.unique_consecutive(whole)", shapes=unique, source="Unique.cpp")
add("bincount", "whole.flatten().bincount()", shapes=bincount, source="SummaryOps.cpp")
add("repeat_interleave", "torch.repeat_interleave(whole.flatten())", shapes=repeat_interleave, source="Repeat.cpp")


def decided_by_values(func: Any, args: Any, kwargs: dict[str, Any], contents: KnownContents) -> DecidingValues | None:
    """The values that decide on the shapes of the results, and these; None for operators whose shapes need none."""
    rule = facts_of(func._schema.name).shapes
    if rule is None or (rule in (index, index_put) and not has_mask(args[1])):
        return None
    decided, out = DecidingValues(contents), kwargs.get("out")
    given = {key: value for key, value in kwargs.items() if key != "out"}
    rule(decided, func, call_of(func, args, given, (), Target("cpu")))
    if out is not None and decided.output is not None:
        decided.output, decided.size = out, decided.output.shape
    return decided


def has_mask(indices: Any) -> bool:
    return any(part.dtype in (torch.bool, torch.uint8) for part in tensors_in(list(indices)))


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


OF_ALL = ("aten::all", "aten::_is_all_true")
# Modules that ask for the code that calls them; pytest asks once more for the message of an assert that failed.
ASKING_FOR_OTHERS = ("torch", "memcheck.predict", "_pytest")


class AssumedValues:
    """The values that unknown conditions are assumed to have, by the operator and the line of code that asks.

    A prediction is of a program that runs, so checks are assumed to pass. At first, "all" is assumed to be True and
    everything else False. If the model raises an error, the condition that it asked for last may be a check that does
    not pass: its value is turned, and the model is traced again.
    """

    def __init__(self) -> None:
        self._turned: set[tuple[str, str, int]] = set()
        self._last: tuple[str, str, int] | None = None

    def value(self, made_by: str) -> bool:
        """The value of a condition, which that operator returned."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(ASKING_FOR_OTHERS):
            frame = frame.f_back
        self._last = made_by, frame.f_code.co_filename, frame.f_lineno
        return (made_by in OF_ALL) != (self._last in self._turned)

    def turn_last(self) -> bool:
        """Turns the condition that was asked for last, after an error. False: there is none, or it was turned."""
        if self._last is None or self._last in self._turned:
            return False
        self._turned.add(self._last)
        return True

"""The contents of tensors on meta, as far as they are known, for models whose shapes or control flow depend on them.

Contents are known of the tensors that a model and its inputs bring, and of what operators compute from these. An
operator is noted when it runs on meta tensors, and it computes its results only when somebody asks for them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from memcheck.core.tensors import tensors_in

# Results up to this size are followed.
MOST_BYTES = 2**26
# Elements that operators read and write on request, in one prediction: about a second of computing.
MOST_WORK = 2**26
# Elements up to which contents of integers, and of floats computed from them, are followed for probes: positions,
# masks and token ids, but no activations.
MOST_INTEGERS, MOST_FLOATS = 2**16, 2**10


UNKNOWN = object()
NEEDS_VALUES = "Tensor.{}() needs values that are not known; pass inputs and a model with data, or compute with tensors"
UNSCALED = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default  # Of a GradScaler.


class Contents:
    """What a storage on meta holds, between two operators that write into it.

    | state      | real | step | how it came                            | becomes                                |
    | ---------- | ---- | ---- | -------------------------------------- | -------------------------------------- |
    | no object  |      |      | nobody knows: random, too large, from  |                                        |
    |            |      |      | unknown operands                       |                                        |
    | given      | yes  | no   | note(): a real tensor was brought      | superseded by the next write           |
    | a result   | no   | yes  | note_call(): a new storage             | computed, when somebody reads it       |
    | written    | no   | yes  | note_call(): after a write in place    | computed, when somebody reads it       |
    | computed   | yes  | no   | NotedOperator.run()                    | superseded by the next write           |
    | superseded | any  | any  | a later Contents has its storage       | freed with the last step that needs it |

    A storage has the newest one. An operator's View keeps those that it read, also if they are superseded, so that it
    can run later.
    """

    __slots__ = ("__weakref__", "bytes", "real", "small", "step")

    def __init__(self, bytes: int, real: torch.UntypedStorage | None, step: NotedOperator | None, small: bool) -> None:
        self.bytes = bytes
        self.real = real
        self.step = step
        self.small = small  # Whether the contents depend on small integers alone.


@dataclass(frozen=True)
class View:
    """A tensor on meta: where its elements lie in a storage."""

    contents: Contents
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor, contents: Contents) -> View:
        layout = (tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        return cls(contents, *layout, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        shell = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)
        shell = torch._conj(shell) if self.is_conj else shell
        return torch._neg_view(shell) if self.is_neg else shell


@dataclass(eq=False)
class NotedOperator:
    """An operator that was noted, and runs when somebody reads what it computes. Views stand for its tensors.

    results: the results that lie in new storages, by position.
    written: the contents of operands that it overwrites, before and after.
    What it computes is referred to weakly: if nobody can ask for it any more, the step and its operands go.
    """

    func: Any
    args: Any
    kwargs: Any
    results: list[tuple[int, weakref.ref[Contents], View]]
    written: list[tuple[Contents, weakref.ref[Contents]]]

    @property
    def views(self) -> list[View]:
        return list(filter(is_view, tree_leaves((self.args, self.kwargs), is_leaf=is_view)))

    @property
    def operands(self) -> list[Contents]:
        return [view.contents for view in self.views]

    @property
    def work(self) -> int:
        views = [*self.views, *(view for _, _, view in self.results)]
        return sum(torch.Size(view.shape).numel() for view in views)

    def run(self) -> None:
        """Computes the contents of the results and of the operands that are written. Every operand is real."""
        copies = {id(before): before.real.clone() for before, _ in self.written if before.real is not None}

        def real(part: Any) -> Any:
            if isinstance(part, View):
                assert part.contents.real is not None
                return part.on(copies.get(id(part.contents), part.contents.real))
            return torch.device("cpu") if isinstance(part, torch.device) else part

        output = self.func(*mapped(real, self.args), **mapped(real, self.kwargs))
        found = list(tensors_in(output if isinstance(output, tuple | list) else (output,)))
        for position, reference, view in self.results:
            if (contents := reference()) is not None:
                contents.real, contents.step = laid_out(found[position], view, contents.bytes), None
        for before, reference in self.written:
            if (contents := reference()) is not None:
                contents.real, contents.step = copies[id(before)], None


class KnownContents:
    """The contents of storages on meta. Views need no care: a tensor's contents are read from its storage."""

    def __init__(self) -> None:
        self._contents: dict[int, Contents] = {}  # By storage.
        self._work_left = MOST_WORK

    def of(self, tensor: Tensor) -> Tensor | None:
        """A real tensor with the contents, or None unless they depend on small integers alone and are known.

        Views of a storage share its memory, which must not be modified.
        """
        contents = self._of(tensor)
        if is_meta(tensor) and (contents is None or not contents.small):
            return None
        return self.read(tensor)

    def read(self, tensor: Tensor) -> Tensor | None:
        """A real tensor with the contents, whatever they depend on, or None if they are unknown."""
        if not is_meta(tensor):
            return tensor if tensor.device.type == "cpu" and not is_wrapped(tensor) else None
        contents = self._of(tensor)
        if contents is None:
            return None
        if not self._computed(contents):
            return None
        assert contents.real is not None
        with undisturbed():
            return View.of(tensor, contents).on(contents.real)

    def given_to(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the function, such as Tensor.numpy, returns for the known contents of the tensor.

        An array keeps the tensor alive, as if they shared their memory. NotImplementedError: contents are unknown.
        """
        known = self.read(tensor)
        if known is None:
            raise NotImplementedError(NEEDS_VALUES.format(func.__name__))
        with undisturbed():
            found = func(known, *args, **kwargs)
        if not isinstance(found, list | int | float | bool | complex):
            weakref.finalize(found, lambda _: None, tensor).atexit = False
        return found

    def note(self, tensor: Tensor, contents: Tensor) -> None:
        """Stores the contents of a real tensor of the same shape."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            with undisturbed():
                noted = Contents(storage.nbytes(), None, None, may_be_known(tensor))
                real = laid_out(contents, View.of(tensor, noted), storage.nbytes())
                noted.real = real if real.resizable() else real.clone()  # NumPy's memory is not kept by its contents.
            self._set(storage, noted)

    def note_same(self, storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """The other storage has the contents of the first one, as far as they are known."""
        if (contents := self._contents.get(storage._cdata)) is not None:
            self._set(other, contents)

    def note_all(self, mask: Tensor) -> None:
        """Assumes that every element of the mask's storage is True."""
        storage = mask.untyped_storage()
        real = torch.ones(storage.nbytes(), dtype=torch.bool).untyped_storage()
        self._set(storage, Contents(storage.nbytes(), real, None, False))

    def decides(self, tensor: Tensor) -> bool:
        """Whether a probe's result depends on the values of this tensor, of whatever dtype."""
        return False

    def note_storage(self, storage: torch.UntypedStorage, real: torch.UntypedStorage, *, small: bool) -> None:
        """Notes that a storage on meta stands for a real one, which nobody modifies."""
        if real.nbytes():
            self._set(storage, Contents(real.nbytes(), real, None, small))

    def note_call(self, func: Any, args: Any, kwargs: dict[str, Any], outputs: Iterable[Tensor]) -> None:
        """Notes what an operator that ran on meta tensors computes: results, and operands after its writes.

        Without known operands, or if it draws random numbers, what it writes is forgotten and its results stay unknown.
        """
        written = list(written_by(func, args, kwargs))
        parts: dict[int, View] = {}
        if not is_determined(func) or not self._find_operands((args, kwargs), parts):
            self._forget(args[0] if func is UNSCALED else written)
            return
        operands = {view.contents: None for view in parts.values()}
        small = all(contents.small for contents in operands)
        old = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors_in((args, kwargs))}
        new = [
            (position, tensor)
            for position, tensor in enumerate(outputs)
            if tensor.layout == torch.strided
            and tensor.untyped_storage()._cdata not in old
            and self._of(tensor) is None
            and 0 < tensor.untyped_storage().nbytes() <= MOST_BYTES
        ]
        if not operands and "device" not in {argument.name for argument in func._schema.arguments}:
            return
        if not written and not new:
            return

        def part(thing: Any) -> Any:
            return parts[id(thing)] if isinstance(thing, Tensor) else thing

        step = NotedOperator(func, mapped(part, args), mapped(part, kwargs), [], [])
        for position, tensor in new:
            self._note_result(step, position, tensor, small)
        for tensor in written:
            before = self._of(tensor)
            if before is None or tensor.untyped_storage().nbytes() != before.bytes:  # It was resized.
                self._forget([tensor])
            elif all(before is not other for other, _ in step.written):
                after = Contents(before.bytes, None, step, small and before.small)
                step.written.append((before, weakref.ref(after)))
                self._set(tensor.untyped_storage(), after)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], *, small: bool = False) -> Any:
        """What the operator returns for the known contents of its operands; UNKNOWN if any is unknown.

        small: operands that depend on more than small integers count as unknown.
        """
        operands = list(tensors_in((args, kwargs)))
        if not is_determined(func):
            return UNKNOWN
        reals = {id(operand): (self.of if small else self.read)(operand) for operand in operands}
        if any(real is None for real in reals.values()):
            return UNKNOWN
        if not operands and "device" not in {argument.name for argument in func._schema.arguments}:
            return UNKNOWN

        def real(part: Any) -> Any:
            if isinstance(part, Tensor):
                return reals[id(part)]
            return torch.device("cpu") if isinstance(part, torch.device) else part

        with undisturbed():
            return func(*mapped(real, args), **mapped(real, kwargs))

    def _of(self, tensor: Tensor) -> Contents | None:
        if tensor.layout != torch.strided or is_wrapped(tensor):
            return None
        storage = tensor.untyped_storage()
        found = self._contents.get(storage._cdata)
        return found if found is not None and found.bytes == storage.nbytes() else None  # None: it was resized.

    def _set(self, storage: torch.UntypedStorage, contents: Contents) -> None:
        if storage._cdata not in self._contents:
            weakref.finalize(storage, self._contents.pop, storage._cdata, None)
        self._contents[storage._cdata] = contents

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._contents.pop(tensor.untyped_storage()._cdata, None)

    def _find_operands(self, thing: Any, parts: dict[int, View]) -> bool:
        """Fills parts with a view of each tensor, by identity. False: the contents of one are not known."""
        for tensor in tensors_in(thing):
            if (contents := self._of(tensor)) is None and (contents := copied(tensor)) is None:
                return False
            parts[id(tensor)] = View.of(tensor, contents)
        return True

    def _note_result(self, step: NotedOperator, position: int, tensor: Tensor, small: bool) -> None:
        storage = tensor.untyped_storage()
        noted = Contents(storage.nbytes(), None, step, small and may_be_known(tensor))
        step.results.append((position, weakref.ref(noted), View.of(tensor, EMPTY)))
        self._set(storage, noted)

    def _computed(self, wanted: Contents) -> bool:
        """Computes the contents and all that they depend on, unless that is too much work.

        A step runs when none of its operands waits; until then these go on top of the stack.
        """
        stack = [wanted]
        with undisturbed():
            while stack:
                step = stack[-1].step
                operands = [] if step is None else step.operands
                waiting = [operand for operand in operands if operand.real is None]
                if waiting:
                    stack += waiting
                    continue
                stack.pop()
                if step is None:
                    continue
                self._work_left -= step.work
                if self._work_left < 0:
                    return False
                try:
                    step.run()
                except Exception:  # An operator that the CPU lacks, or refuses for these contents.
                    return False
        return wanted.real is not None


EMPTY = Contents(0, None, None, False)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, operators run on real tensors: no mode sees them, autograd and autocast are off."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(autocast),
    ):
        yield


def copied(tensor: Tensor) -> Contents | None:
    """The contents of a small real tensor on the CPU; None for any other."""
    if is_meta(tensor) or tensor.device.type != "cpu" or not may_be_known(tensor):
        return None
    storage = tensor.untyped_storage()
    with undisturbed():
        return Contents(storage.nbytes(), storage.clone(), None, True)


def laid_out(real: Tensor, view: View, size: int) -> torch.UntypedStorage:
    """A storage of that size with the contents of a real tensor, laid out as the view says."""
    storage = real.untyped_storage()
    if storage.nbytes() == size and (real.storage_offset(), real.stride()) == (view.offset, view.stride):
        return storage if not real.is_conj() and not real.is_neg() else storage.clone()
    storage = torch.UntypedStorage(size)
    own = view.on(storage)
    # An expanded tensor: every element of the storage once.
    one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.stride)
    own[one].copy_(real[one])
    return storage


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The operands that the operator writes."""
    for position, name in written_arguments_of(func):
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


@functools.cache
def written_arguments_of(func: Any) -> tuple[tuple[int, str], ...]:
    """The positions and the names of the arguments that the operator writes."""
    aliases = ((one.alias_info, place, one.name) for place, one in enumerate(func._schema.arguments))
    return tuple((place, name) for alias, place, name in aliases if alias is not None and alias.is_write)


@functools.cache
def is_determined(func: Any) -> bool:
    """Whether operands determine what the operator computes. Gradients for a GradScaler are assumed to be finite."""
    random = torch.Tag.nondeterministic_seeded in func.tags
    return not random and func is not UNSCALED and func._schema.name != "aten::set_"


def mapped(function: Any, thing: Any) -> Any:
    return tree_map(function, thing, is_leaf=is_view)


def is_view(part: Any) -> bool:
    return isinstance(part, View)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it is a tensor inside of a transform of torch.func. It has no storage; the one that it wraps may have."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def flagged_as(tensor: Tensor, other: Tensor) -> Tensor:
    """The other tensor, lazily conjugated and negated as the first one is."""
    other = other.conj() if tensor.is_conj() else other
    return torch._neg_view(other) if tensor.is_neg() else other


def is_meta(tensor: Tensor) -> bool:
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.layout != torch.strided or tensor.untyped_storage().device.type == "meta"


def may_be_known(tensor: Tensor) -> bool:
    """Whether the contents of such a tensor are followed for probes."""
    if is_wrapped(tensor) or tensor.layout != torch.strided or tensor.untyped_storage().nbytes() > 8 * MOST_INTEGERS:
        return False
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (MOST_FLOATS if is_real else MOST_INTEGERS)

"""Copies of models and inputs whose tensors lie on the meta device, so that a copy takes no memory.

A model also reaches tensors that no copy replaces: in caches, in globals, in objects that refuse to be copied. Such a
tensor gets a twin on meta when an operator first takes it.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.core.tensors import HOOKS, storages_in, tensors_in
from memcheck.predict.known_contents import KnownContents, flagged_as, is_meta, may_be_known
from memcheck.predict.operators.value_shapes import is_sparse, parts_of, with_parts
from memcheck.predict.python_functions import CompiledCodeError, compiled_words
from memcheck.predict.reached import Reaching, has_hooks_of_accumulator

Thing = TypeVar("Thing")
Stand = Callable[[torch.UntypedStorage, torch.UntypedStorage], None]
NESTED = "nested tensors are not predicted; measure the model, or predict it with padded tensors"


class MetaCopies(TorchFunctionMode):
    """Makes the copies and the twins of one prediction. Tensors that share a storage still do; no gradient is copied.

    contents: receives what is known of them, which may steer control flow and sizes.
    stand: called with the storage of a real tensor and that of its twin.
    """

    def __init__(self, contents: KnownContents, stand: Stand = lambda original, twin: None) -> None:
        super().__init__()
        self.contents = contents
        self.stand = stand
        self.memo: dict[int, Any] = {}  # As copy.deepcopy keeps it.
        self._copies: set[int] = set()  # Identities of copied modules and optimizers.
        # Without a cycle, so that a replaced object frees its copies at once: the garbage collector rests.
        copy_of_part = weakref.WeakMethod(self._copy_of_part)
        self._reaching = Reaching(lambda part: copy_of_part()(part))  # type: ignore[misc]
        self.doubts: list[str] = []
        self._met: list[Tensor] = []  # Originals whose copies lack their attributes and hooks.
        # By the original's identity: the original and its copy.
        self._storages: dict[int, tuple[torch.UntypedStorage, weakref.ref[torch.UntypedStorage]]] = {}
        self._originals: list[Any] = []  # Keeps the identities valid.
        self.written: set[int] = set()  # Storages of real tensors whose twins were written.
        self._twins: dict[int, Tensor] = {}  # By the identity of a tensor.
        self._held: list[torch.UntypedStorage] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if is_state_of_generator(tensor):
                return tensor.clone()
            if id(tensor) not in memo:
                memo[id(tensor)] = self.copy_of(tensor).requires_grad_(tensor.requires_grad)
                self._met.append(tensor)
            return memo[id(tensor)]
        # Parameter.__deepcopy__ calls self.data.clone().
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            self._met.append(args[0])
            return self.copy_of(args[0])
        if getattr(func, "__name__", "") == "clone":
            return args[0] if is_meta(args[0]) else self.copy_of(args[0])
        return func(*args, **(kwargs or {}))

    def copy(self, thing: Thing) -> Thing:
        """A deep copy with meta tensors. Objects that refuse to be copied are shared with the original.

        thing: a tuple. Functions in it, or in its modules, call copies of the modules that they reach.
        """
        copied = self._deep_copy(thing)
        for module in [part for part in self.memo.values() if isinstance(part, torch.nn.Module)]:
            self._reaching.replace_functions(module)
        copied = self._reaching.copied(copied)
        while self._met:
            tensor = self._met.pop()
            if has_hooks_of_accumulator(tensor):
                self.doubts.append("hooks of a node of autograd that adds to a .grad")
            self._complete(tensor, self.memo[id(tensor)])
        # From here on, the copy decides how long its tensors live.
        self._held.clear()
        self.memo = {key: part for key, part in self.memo.items() if is_kept(part)}
        return copied

    def _copy_of_part(self, part: Any) -> Any:
        if id(part) not in self.memo and id(part) not in self._copies and not isinstance(part, Tensor):
            if isinstance(part, torch.nn.Module):
                refuse_unknown_sizes(part)
            self._deep_copy(part)
        return self.memo.get(id(part), part)

    def _complete(self, tensor: Tensor, copied: Tensor) -> None:
        """Gives a tensor's copy its attributes and hooks, with copies of what they reach."""
        missing = {name: part for name, part in vars(tensor).items() if name not in vars(copied)}
        vars(copied).update(self._reaching.copied(missing))
        for hooks in HOOKS:
            if own := hooks.__get__(tensor):
                hooks.__set__(copied, OrderedDict((key, self._reaching.copied(hook)) for key, hook in own.items()))

    def _deep_copy(self, thing: Thing) -> Thing:
        shared: dict[int, Any] = {}
        while True:
            memo = {**self.memo, **shared}
            try:
                with self:
                    copied = copy.deepcopy(thing, memo)
            except Exception as error:
                refusing = refusing_object(error)
                if refusing is None or refusing is thing or id(refusing) in shared:
                    raise
                shared |= {id(other): substitute(other) for other in others_like(refusing)}
                self._originals.append(refusing)
            else:
                originals = memo.pop(id(memo), [])
                for module in (part for part in originals if isinstance(part, torch.nn.Module)):
                    refuse_compiled(module)  # Its copy does not know that.
                    if (again := getattr(module._compiled_call_impl, "again", None)) is not None:
                        again(memo[id(module)])
                self._originals += originals
                self.memo |= memo
                self._copies |= {id(part) for part in memo.values() if isinstance(part, torch.nn.Module | Optimizer)}
                return copied

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A meta tensor like this one."""
        if tensor.is_nested:
            raise NotImplementedError(NESTED)
        if is_sparse(tensor):
            return with_parts(tensor, tuple(self.copy_of(part) for part in parts_of(tensor)))
        storage = self._storage_of(tensor)
        shell = torch.empty(0, dtype=tensor.dtype, device="meta")
        shell.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return flagged_as(tensor, shell)

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        found = known[1]() if known is not None else None
        if found is None:
            found = torch.UntypedStorage(storage.nbytes(), device="meta")
            self._storages[storage._cdata] = storage, weakref.ref(found)
            small = may_be_known(tensor) and not tensor.is_floating_point()
            if not is_meta(tensor) and (small or storage.device.type == "cpu"):
                self.contents.note_storage(found, storage.cpu(), small=small)
        self._held.append(found)
        return found

    def storages(self) -> Iterator[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """The storages of all copies that are alive, each after that of the original."""
        for original, reference in self._storages.values():
            if (storage := reference()) is not None:
                yield original, storage

    def twin_of(self, tensor: Tensor) -> Tensor:
        """The copy of a real tensor, or a meta tensor that stands for it from now on."""
        known = self.memo.get(id(tensor), self._twins.get(id(tensor)))
        if isinstance(known, Tensor):
            return known
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            count = len(self._storages)
            twin = self.copy_of(tensor.detach())
            if len(self._storages) > count:
                self.stand(tensor.untyped_storage(), twin.untyped_storage())
            twin.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        # Views are made by the million, and each has the storage's twin. Only a leaf must stay the same tensor.
        if twin.requires_grad:
            with torch._C.DisableTorchFunction():
                self._complete(tensor, twin)
            self._twins[id(tensor)] = twin
            self._originals.append(tensor)
        return twin

    def owned(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The tensors, each once, with twins for those of modules that refused to be copied. These twins do not stand.

        Beside tensors on meta, one on the CPU without a twin belongs there on a GPU too, as AdamW's step counters do.
        """
        named = list(named)
        found: dict[int, tuple[str, Tensor]] = {}
        stand, self.stand = self.stand, lambda original, twin: None
        with torch._C.DisableTorchFunction():
            stays = any(is_meta(tensor) for _, tensor in named)
            for name, tensor in named:
                has_twin = any(storage._cdata in self._storages for storage in storages_in(tensor))
                if not is_meta(tensor) and (has_twin or not stays):
                    tensor = self.twin_of(tensor)
                found.setdefault(id(tensor), (name, tensor))
        self.stand = stand
        return list(found.values())

    def with_twins(self, func: Any, args: Any, kwargs: Any, hosts: set[int]) -> tuple[Any, Any]:
        """The operands with twins for real tensors, except those with storages in `hosts`."""

        def is_foreign(part: Any) -> bool:
            return isinstance(part, Tensor) and not part.is_meta and is_real(part, hosts)

        if func._schema.is_mutable:
            foreign = filter(is_foreign, tensors_in((args, kwargs)))
            self.written |= {tensor.untyped_storage()._cdata for tensor in foreign}
        return self._replaced(is_foreign, args, kwargs)

    def are_unchanged(self, args: Any, kwargs: Any) -> bool:
        """Whether all operands are real tensors with the contents that they had before."""
        tensors = list(tensors_in((args, kwargs)))
        if not tensors or any(map(is_meta, tensors)):
            return False
        return all(tensor.untyped_storage()._cdata not in self.written for tensor in tensors)

    def _replaced(self, is_wanted: Callable[[Any], bool], args: Any, kwargs: Any) -> tuple[Any, Any]:
        twins: tuple[Any, Any] = tree_map(lambda part: self.twin_of(part) if is_wanted(part) else part, (args, kwargs))
        return twins

    def with_leaves(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with twins for real tensors that a backward would give a gradient."""
        return (args, kwargs) if all_on_meta(args, kwargs) else self._replaced(is_real_leaf, args, kwargs)


def refuse_unknown_sizes(module: torch.nn.Module) -> None:
    """NotImplementedError: a compiler decides what a part of the module allocates, or it has no sizes yet."""
    for path, part in module.named_modules():
        name = path or type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise NotImplementedError(f"TorchScript decides what {name} allocates; predict the Python module instead")
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise NotImplementedError(f"{name} has no sizes before its first call; call the model once before")
        refuse_compiled(part, name)


def refuse_compiled(module: torch.nn.Module, name: str = "") -> None:
    """ElsewhereError: its compile() was called."""
    if hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable"):
        raise CompiledCodeError(compiled_words(module._compiled_call_impl, name))


def all_on_meta(args: Any, kwargs: Any) -> bool:
    """Whether no tensor in the arguments has data. Every call asks, so this looks into lists and tuples only."""
    for part in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(part, Tensor):
            if not part.is_meta:
                return False
        elif type(part) in (list, tuple) and not all_on_meta(part, None):
            return False
    return True


def is_kept(part: Any) -> bool:
    return isinstance(part, torch.nn.Module | Optimizer) or (
        isinstance(part, Tensor) and part.requires_grad and part.is_leaf
    )


def is_real(tensor: Tensor, hosts: set[int]) -> bool:
    """Whether the tensor has data that the traced run did not make."""
    return not is_meta(tensor) and tensor.device.type == "cpu" and tensor.untyped_storage()._cdata not in hosts


def is_real_leaf(part: Any) -> bool:
    return isinstance(part, Tensor) and part.requires_grad and part.is_leaf and not part.is_meta and not is_meta(part)


def is_state_of_generator(tensor: Tensor) -> bool:
    """Whether copy.deepcopy copies a random generator whose state the tensor is. The copy needs the state's data."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.device.type != "cpu":
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not copy._reconstruct.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    return frame is not None and isinstance(frame.f_locals["x"], torch.Generator)


def refusing_object(error: Exception) -> Any:
    """The object that copy.deepcopy was about to copy when the error was raised; None if there is none."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return found


def others_like(thing: Any) -> list[Any]:
    """The object, and all others of a type that cannot be copied, such as locks."""
    if type(thing).__module__ in ("builtins", "_thread", "_io", "torch"):
        return [thing, *(other for other in gc.get_objects() if type(other) is type(thing))]
    return [thing]


def substitute(thing: Any) -> Any:
    """The stand-in in a copy for an object that refuses to be copied: itself; for a generator, a new one."""
    return torch.Generator(thing.device).set_state(thing.get_state()) if isinstance(thing, torch.Generator) else thing

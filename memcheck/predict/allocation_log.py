"""The log of allocations and releases, the trace that reads it, and the storages and modules that a run logs for."""

from __future__ import annotations

import bisect
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memcheck.core.layers import TracedModule
from memcheck.core.prediction import Allocation, AllocationLog
from memcheck.core.tensors import storages_in, tensors_in
from memcheck.predict.autocast import running_node
from memcheck.predict.device_kinds import KINDS
from memcheck.predict.scratch import Target

# References to a storage in LiveStorages.note_sizes if no code of the model holds it: the list, the variable, the
# argument of sys.getrefcount, and the tensor's own.
OWN_REFERENCES = 4


class LiveStorages:
    """Logs an allocation for each new storage, and its release when nothing holds the storage any more.

    held: on a GPU, the allocations of tensors that the model holds besides inputs and parameters.
    """

    def __init__(self, log: AllocationLog, target: Target, modules: Modules) -> None:
        self.log = log
        self.kind = KINDS[target.kind]
        self.modules = modules
        self.held: list[Allocation] = []
        self._allocations: dict[int, Allocation] = {}  # By storage.
        self._aside: dict[int, Allocation] = {}
        self._lent: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._emptied: dict[int, str] = {}  # Names of storages that were resized to nothing.
        # Storages that were there before and are no inputs or parameters, and memory that is not torch's.
        self._preexisting: set[int] = set()
        self.on_host: set[int] = set()  # Storages on the CPU that the run made.
        self._empty: set[int] = set()  # Storages on meta without bytes.
        self._is_noting = True

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """The allocation of the tensor's storage, if it was logged here."""
        return next(iter(self.allocations_of(tensor)), None)

    def allocations_of(self, tensor: Tensor) -> list[Allocation]:
        with torch._C.DisableTorchFunction():
            found = [self._allocations.get(storage._cdata) for storage in storages_in(tensor)]
        return [allocation for allocation in found if allocation is not None]

    @contextmanager
    def not_noted(self) -> Iterator[None]:
        """Inside, allocations do not count."""
        self._is_noting = False
        try:
            yield
        finally:
            self._is_noting = True

    def note(self, tensor: Tensor, name: str) -> None:
        """Logs an allocation for each of the tensor's storages that has none."""
        with torch._C.DisableTorchFunction():
            for storage in storages_in(tensor) if self._is_noting else ():
                self._note_storage(storage, name)

    def _note_storage(self, storage: torch.UntypedStorage, name: str) -> None:
        if storage._cdata in self._allocations:
            return
        if storage.device.type == "cpu" and storage._cdata not in self.on_host:
            self._remember(self.on_host, storage)
        elif storage.nbytes() == 0 and storage._cdata not in self._empty:
            self._remember(self._empty, storage)
        # Numbers that an optimizer or an autograd node keeps are real CPU tensors.
        is_real = self.kind.counts_numbers and storage.device.type == "cpu"
        counts = is_real and (self.log.phase == "inputs" or bool(running_node()))
        size = storage.nbytes()
        if not (counts or storage.device.type == "meta") or size == 0:
            return
        if storage._cdata in self._preexisting:
            return
        if storage._cdata in self._aside and self.log.phase != "inputs":
            return
        allocation = self.allocate(running_node() or name, size)
        allocation.made_by = name
        self.keep(storage, allocation)

    def allocate(self, name: str, size: int) -> Allocation:
        """Logs an allocation of the module that runs, or whose node does."""
        return self.log.allocate(name, size, module=self.modules.path_of(torch._C._current_autograd_node()))

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._allocations

    def know(self, tensor: Tensor) -> bool:
        """Whether it is a plain tensor whose storage has an allocation."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor._is_zerotensor()
        return is_plain and tensor.untyped_storage()._cdata in self._allocations

    def identities(self) -> set[int]:
        """Identities of the storages without data that are alive."""
        return {*self._allocations, *self._aside, *self._preexisting, *self._empty} - self.on_host

    def set_aside(self, other: LiveStorages) -> None:
        """Does not count what the other saw allocated, unless it is among the inputs."""
        self._aside = other._allocations

    def note_not_torchs(self, tensor: Tensor) -> None:
        """The tensor's memory is NumPy's, or another buffer's."""
        self._remember(self._preexisting, tensor.untyped_storage())

    def note_copies(self, copies: Iterable[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> None:
        """Marks copies of what the model holds as there from the start, unless they are inputs or parameters."""
        for real, storage in copies:
            if storage not in self and storage._cdata not in self._preexisting:
                self.stand(real, storage)

    def stand(self, real: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Marks the copy of a real storage as there from the start."""
        self._remember(self._preexisting, storage)
        if self.kind.counts_held and storage.nbytes():
            self.held.append(Allocation("tensor that the model holds", storage.nbytes(), 0))
            weakref.finalize(storage, self.log.free, self.held[-1])

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Allocates the storage's new size, and frees the old one. The name stays, also that of an empty one."""
        key = storage._cdata
        old = self._allocations.pop(key, None)
        name = old.name if old is not None else self._emptied.pop(key, "storage")
        self._note_storage(storage, name)
        if old is not None:
            self.log.free(old)
        if key in self._allocations:
            self._allocations[key].name = name
        else:
            self._emptied[key] = name

    def lend(self, storage: torch.UntypedStorage) -> None:
        """The model gets a storage, which it may resize."""
        self._lent.add(storage)

    def note_sizes(self, storages: Iterable[torch.UntypedStorage] | None = None) -> None:
        """Notes the new sizes of storages that were resized, by default of those that the model got and may hold."""
        for storage in list(self._lent) if storages is None and len(self._lent) else storages or ():
            allocation = self._allocations.get(storage._cdata)
            if (0 if allocation is None else allocation.bytes) != storage.nbytes():
                self.note_resized(storage)
            has_tensor = torch._C._storage_Use_Count(storage._cdata) > 1
            if storages is None and has_tensor and sys.getrefcount(storage) <= OWN_REFERENCES:
                self._lent.discard(storage)

    def hand_over(self, before: Tensor, after: Tensor) -> None:
        """Transfers the first tensor's memory to the second."""
        allocation = self._allocations.pop(before.untyped_storage()._cdata, None)
        if allocation is not None:
            self.keep(after.untyped_storage(), allocation)

    def keep(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        """Ties the allocation to the storage."""
        self._allocations[storage._cdata] = allocation
        weakref.finalize(storage, self._let_go, storage._cdata)

    def _remember(self, keys: set[int], storage: torch.UntypedStorage) -> None:
        keys.add(storage._cdata)
        weakref.finalize(storage, keys.discard, storage._cdata)

    def _let_go(self, key: int) -> None:
        self._emptied.pop(key, None)
        if (allocation := self._allocations.pop(key, None)) is not None:
            self.log.free(allocation)


class Modules:
    """Follows the modules of a forward. Nodes of the graph are known by their sequence numbers, which only grow."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self.traced: dict[str, TracedModule] = {}  # By path.

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Inside, forwards of the model's modules are followed."""
        seen: set[int] = set()
        with ExitStack() as stack:
            for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
                own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
                seen.update(map(id, own))
                with torch._C.DisableTorchFunction():  # Of a DTensor, the part of this rank.
                    elements = sum(getattr(one, "_local_tensor", one).numel() for one in own)
                self.traced[path] = TracedModule(class_of(module), elements)
                before = module.register_forward_pre_hook(lambda *_, path=path: self._begin(path))
                after = module.register_forward_hook(
                    lambda _, given, output, path=path: self._end(path, output), always_call=True
                )
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def begin_pass(self) -> None:
        """Calls are counted from here."""
        for module in self.traced.values():
            module.calls, module.outputs = 0, ()

    def path_of(self, node: Any) -> str:
        """The path of the module that runs, else of the one that made the node that runs; "" if there is none."""
        if self._open:
            return self._open[-1]
        if node is None or not self._numbers:
            return ""
        position = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[position] if position >= 0 else ""

    def _begin(self, path: str) -> None:
        self._open.append(path)
        self._note()

    def _end(self, path: str, output: Any) -> None:
        self._open.pop()
        self._note()
        if torch._C._current_graph_task_id() == -1:  # A checkpoint's second forward, in the backward, is no call.
            module = self.traced[path]
            module.calls += 1
            with torch._C.DisableTorchFunction():
                module.outputs = tuple(tuple(tensor.shape) for tensor in tensors_in(output))

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._paths.append(self._open[-1] if self._open else "")


def class_of(module: torch.nn.Module) -> str:
    """The name of the module's class; not that of the class which FSDP2 derives from it."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))

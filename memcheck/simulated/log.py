"""What the simulated GPU logs, as allocations of a prediction: who made them, in which module, and when they ended."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memcheck.core.prediction import Allocation, AllocationLog
from memcheck.core.tensors import storages_in
from memcheck.predict.allocation_log import Modules
from memcheck.simulated.library import library
from memcheck.simulated.rules import known_name

ALLOCATED, FREED, EMPTIED = range(3)  # Happened of csrc/simulated/log.cpp.
TENSOR, SCRATCH, LIBRARY = range(3)  # Purpose of log.h.
AT_ONCE = 1024  # Entries that are read.
# Operators that only make, view, copy or fill memory.
PLAIN = {"empty", "empty_strided", "copy_", "fill_", "zero_", "resize_", "_reshape_alias", "_to_copy", "clone"}


class Entry(ctypes.Structure):
    """As Entry in csrc/simulated/log.cpp."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("kind", "device", "address", "bytes", "stream", "purpose", "name", "node", "sequence", "mark")
    ]


class MarkedModules(Modules):
    """Tells the library when a module begins and ends, and finds the module of what it logged."""

    def _note(self) -> None:
        super()._note()
        library().mark(len(self._paths) - 1)

    def of_entry(self, entry: Entry) -> str:
        """The path of the module that ran, else of the one that made the node that ran; "" if there is none."""
        path = self._paths[entry.mark] if entry.mark < len(self._paths) else ""
        if path or entry.sequence < 0:
            return path
        position = bisect.bisect_right(self._numbers, entry.sequence) - 1
        return self._paths[position] if position >= 0 else ""


class SimulatedLog(AllocationLog):
    """The log of the GPU, which is read when somebody looks."""

    def __init__(self, modules: MarkedModules) -> None:
        self.modules = modules
        self.at: dict[int, Allocation] = {}  # What is alive, by its address.
        self.before: dict[int, int] = {}  # Bytes of what was alive at the start and was not noted yet, by address.
        self._names: dict[int, str] = {}
        self._read = 0
        self._is_reading = True
        super().__init__()
        self._is_reading = False

    @property
    def allocations(self) -> list[Allocation]:
        self.read()
        return self._allocations

    @allocations.setter
    def allocations(self, value: list[Allocation]) -> None:
        self._allocations = value

    @property
    def events(self) -> list[tuple[Allocation, bool]]:
        self.read()
        return self._events

    @events.setter
    def events(self, value: list[tuple[Allocation, bool]]) -> None:
        self._events = value

    def start(self) -> None:
        """What is alive now is not logged until it is noted."""
        self.read()
        library().forget_calls()
        self.before = {address: one.bytes for address, one in self.at.items()}
        self.at.clear()
        self._allocations.clear()
        self._events.clear()

    def read(self) -> None:
        """Reads what was logged since the last time."""
        if self._is_reading or self.closed:
            return
        self._is_reading = True
        try:
            entries = (Entry * AT_ONCE)()
            while count := library().logged(self._read, AT_ONCE, entries):
                for entry in entries[:count]:
                    self._add(entry)
                self._read += count
        finally:
            self._is_reading = False

    def _add(self, entry: Entry) -> None:
        if entry.kind == EMPTIED:
            self.empty_cache()
        elif entry.kind == ALLOCATED:
            by, node = known_name(self._name(entry.name)), self._name(entry.node)
            is_library = entry.purpose == LIBRARY
            name = by if entry.purpose != TENSOR else node or by
            module = self.modules.of_entry(entry)
            one = self.allocate(name, entry.bytes, is_library=is_library, module="" if is_library else module)
            one.made_by, one.stream = by if entry.purpose == TENSOR else "", entry.stream
            self.at[entry.address] = one
        elif entry.address in self.at:
            self.free(self.at.pop(entry.address))
        else:
            self.before.pop(entry.address, None)

    def _name(self, number: int) -> str:
        if number not in self._names:
            self._names[number] = library().name(number).decode()
        return self._names[number]

    def note(self, address: int, name: str) -> None:
        """Logs what was there at the start, and is an input or a parameter."""
        self.read()
        if (size := self.before.pop(address, None)) is not None:
            self.at[address] = self.allocate(name, size)


class SimulatedStorages:
    """The allocations of tensors, by the addresses of their storages.

    held: tensors that the model holds besides inputs and parameters.
    """

    def __init__(self, log: SimulatedLog) -> None:
        self.log = log
        self.held: list[Allocation] = []

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        return next(iter(self.allocations_of(tensor)), None)

    def allocations_of(self, tensor: Tensor) -> list[Allocation]:
        self.log.read()
        return [self.log.at[address] for address in addresses(tensor) if address in self.log.at]

    def note(self, tensor: Tensor, name: str) -> None:
        for address in addresses(tensor):
            self.log.note(address, name)

    def note_not_torchs(self, tensor: Tensor) -> None:
        for address in addresses(tensor):
            self.log.before.pop(address, None)

    def note_copies(self, _copies: Any) -> None:
        """What else was there at the start is there before everything."""
        for address, size in self.log.before.items():
            self.log.at[address] = one = Allocation("tensor that the model holds", size, 0)
            self.held.append(one)
        self.log.before = {}

    def note_sizes(self, _storages: Any = None) -> None:
        """The library knows them."""


def addresses(tensor: Tensor) -> Iterator[int]:
    with torch._C.DisableTorchFunction():
        for storage in storages_in(tensor):
            if storage.device.type == "cuda" and storage.nbytes():
                yield storage.data_ptr()


def operators_called() -> list[str]:
    """The operators that ran on the GPU, without PLAIN ones.

    Of operators that call others the outermost one is named, unless it is composite for autograd, too.
    """
    callees: dict[str, set[str]] = {}
    ran = set[str]()
    for line in library().calls().decode().splitlines():
        name, separator, by = line.partition("\t")
        if separator:
            callees.setdefault(by, set()).add(name)
        else:
            ran.add(name)

    def reached(name: str, seen: set[str]) -> bool:
        seen.add(name)
        return name in ran or any(reached(one, seen) for one in callees.get(name, ()) if one not in seen)

    found: dict[str, None] = {}
    seen, waiting = set[str](), [""]
    while waiting:
        for name in sorted(callees.get(waiting.pop(), set()) - seen):
            seen.add(name)
            if is_composite(name):
                waiting.append(name)
            elif name.removeprefix("aten::") not in PLAIN and reached(name, set()):
                found[name] = None
    return list(found)


def is_composite(name: str) -> bool:
    """Whether the operator is one that autograd sees as those which it calls."""
    space, _, own = name.partition("::")
    try:
        overloads = getattr(getattr(torch.ops, space), own).overloads()
    except AttributeError:
        return True  # No operator, but a function of torch that is recorded, too.
    names = [name if overload == "default" else f"{name}.{overload}" for overload in overloads if "out" not in overload]
    return all(has_composite_kernel(each) for each in names)


def has_composite_kernel(name: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))
    except RuntimeError:
        return True  # It is torch.jit's alone, and nothing of torch calls it.

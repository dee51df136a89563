"""What a simulated device logs, as allocations of a prediction: who made them, in which module, and when they ended."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memcheck._extension import extension
from memcheck.core.tensors import storages_in, tensors_in
from memcheck.core.trace import Allocation, AllocationLog, TracedModule
from memcheck.measure.recorders import FACTORIES, NODE, allocated_by
from memcheck.simulated.library import library
from memcheck.simulated.rules import USED_BY, known_name

ALLOCATED, FREED, EMPTIED = range(3)  # Happened of csrc/simulated/log.cpp.
TENSOR, SCRATCH, LIBRARY = range(3)  # Purpose of log.h.
AT_ONCE = 1024  # Entries that are read.
# Operators that only make, view, copy or fill memory.
PLAIN = {"empty", "empty_strided", "copy_", "fill_", "zero_", "resize_", "_reshape_alias", "_to_copy", "clone"}


class Modules:
    """Follows the modules of a forward. Nodes of the graph are known by their sequence numbers, which only grow.

    mark: called with a number when a module begins or ends; the device's log then has it with every allocation.
    """

    def __init__(self, mark: Callable[[int], Any]) -> None:
        self.mark = mark
        self._open: list[str] = []
        self._numbers: list[int] = [-1]
        self._paths: list[str] = [""]
        self.traced: dict[str, TracedModule] = {}  # By path.

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Inside, forwards of the model's modules are followed."""
        seen: set[int] = set()
        with ExitStack() as stack:
            for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # It takes no hooks.
                own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
                seen.update(map(id, own))
                # Of a DTensor, the part of this rank.
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

    def path_of(self, mark: int, node: int) -> str:
        """The path of the module that ran, else of the one that made the node that ran; "" if there is none.

        mark: the last one. node: the node's sequence number, below 0 if none ran.
        """
        path = self._paths[mark] if mark < len(self._paths) else ""
        return path or (self._paths[bisect.bisect_right(self._numbers, node) - 1] if node >= 0 else "")

    @property
    def current(self) -> str:
        """The path of the module that runs."""
        return self._open[-1] if self._open else ""

    def _begin(self, path: str) -> None:
        self._open.append(path)
        self._note()

    def _end(self, path: str, output: Any) -> None:
        self._open.pop()
        self._note()
        if torch._C._current_graph_task_id() == -1:  # A checkpoint's second forward, in the backward, is no call.
            module = self.traced[path]
            module.calls += 1
            module.outputs = tuple(tuple(tensor.shape) for tensor in tensors_in(output))

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._paths.append(self.current)
        self.mark(len(self._paths) - 1)


def class_of(module: torch.nn.Module) -> str:
    """The name of the module's class; not that of the class which FSDP2 derives from it."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


class DeviceLog(AllocationLog):
    """The log of a device. Allocations and events are there as far as read() was called.

    kind: of the device. at: what is alive, by address. operators: the names of those that ran.
    """

    kind: str

    def __init__(self, mark: Callable[[int], Any]) -> None:
        super().__init__()
        self.modules = Modules(mark)
        self.at: dict[int, Allocation] = {}

    def read(self) -> None:
        """Adds what the device logged since the last time."""

    def note(self, tensor: Tensor, name: str) -> None:
        """Logs what was there at the start: an input, a parameter, or state of an optimizer."""
        for address, size in self._blocks_of(tensor):
            if address not in self.at:
                self.at[address] = self.allocate(name, size)

    def allocations_of(self, tensors: Iterable[Tensor]) -> list[Allocation]:
        """Those that are alive, each once."""
        addresses = (address for tensor in tensors for address, _ in self._blocks_of(tensor))
        return list(dict.fromkeys(self.at[address] for address in addresses if address in self.at))

    def note_rest(self) -> list[Allocation]:
        """Logs what else was there at the start, where it counts, and returns it."""
        return []

    def operators(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _blocks_of(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """Addresses and bytes of the tensor's storages on the device."""
        for storage in storages_in(tensor):
            if storage.device.type == self.kind and storage.nbytes():
                yield storage.data_ptr(), storage.nbytes()

    def _free_at(self, address: int) -> None:
        if address in self.at:
            self.free(self.at.pop(address))


class Entry(ctypes.Structure):
    """As Entry in csrc/simulated/log.cpp."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("kind", "device", "address", "bytes", "block_bytes", "stream"),
            *("purpose", "name", "node", "sequence", "mark"),
        )
    ]


class GpuLog(DeviceLog):
    """The log of the GPU that this process simulates, from the construction of this object on."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__(library().mark)
        self._names: dict[int, str] = {}
        self._read = 0
        self._before: dict[int, Allocation] = {}  # What was alive at the start, and was not noted yet.
        self.read()
        self._before, self.at = self.at, {}
        self.allocations, self.events = [], []
        library().forget_calls()

    def read(self) -> None:
        entries = (Entry * AT_ONCE)()
        while count := library().logged(self._read, AT_ONCE, entries):
            for entry in entries[:count]:
                self._add(entry)
            self._read += count

    def note(self, tensor: Tensor, name: str) -> None:
        for address, _ in self._blocks_of(tensor):
            if (one := self._before.pop(address, None)) is not None:
                self._again(address, one, name)

    def note_rest(self) -> list[Allocation]:
        """Logs what else was there at the start, and returns it."""
        rest, self._before = self._before, {}
        for address, one in rest.items():
            self._again(address, one, one.name if one.is_library else "tensor that the model holds")
        return [self.at[address] for address in rest]

    def _again(self, address: int, one: Allocation, name: str) -> None:
        self.at[address] = new = self.allocate(name, one.bytes, is_library=one.is_library)
        new.block_bytes, new.stream = one.block_bytes, one.stream

    def operators(self) -> tuple[str, ...]:
        return tuple(map(known_name, operators_called()))

    def _add(self, entry: Entry) -> None:
        if entry.kind == EMPTIED:
            self.empty_cache()
        elif entry.kind == FREED:
            self._before.pop(entry.address, None)
            self._free_at(entry.address)
        else:
            by, node = known_name(self._name(entry.name)), self._name(entry.node)
            is_library, is_tensor = entry.purpose == LIBRARY, entry.purpose == TENSOR
            module = "" if is_library else self.modules.path_of(entry.mark, entry.sequence)
            name = node or by if is_tensor else by
            one = self.allocate(name, entry.bytes, is_library=is_library, module=module)
            one.made_by, one.stream, one.block_bytes = by if is_tensor else "", entry.stream, entry.block_bytes
            if not (is_tensor or is_library):
                one.used_by = node or USED_BY.get((by, entry.bytes), "")
            self.at[entry.address] = one

    def _name(self, number: int) -> str:
        if number not in self._names:
            self._names[number] = library().name(number).decode()
        return self._names[number]


class CpuLog(DeviceLog):
    """The log of the tracking allocator, which must be installed, from the construction of this object to close()."""

    kind = "cpu"

    def __init__(self) -> None:
        self._timeline = extension("recording memory on the CPU").AllocationTimeline()
        super().__init__(self._timeline.set_module)
        self._paths: list[tuple[str, ...]] = [()]
        self._read = 0

    def close(self) -> None:
        self._timeline.close()

    def read(self) -> None:
        events = self._timeline.events(self._read)
        self._read += len(events)
        for outer, name in self._timeline.paths()[len(self._paths) :]:
            self._paths.append((*self._paths[outer], name))
        for address, size, path, mark, node, _ in events:
            if size < 0:
                self._free_at(address)
                continue
            stack = self._paths[path]
            one = self.allocate(allocated_by(stack), size, module=self.modules.path_of(mark, node))
            one.made_by = next((name for name in reversed(stack) if not FACTORIES.fullmatch(name)), "")
            self.at[address] = one

    def operators(self) -> tuple[str, ...]:
        names = (name for path in self._paths for name in path)
        return tuple(dict.fromkeys(name for name in names if "::" in name and not name.startswith(NODE)))


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

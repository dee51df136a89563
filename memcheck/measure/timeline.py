"""The timeline of a run: every allocation and free of a forward and a backward, with the operator's name."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from memcheck.core.arguments import takes_step
from memcheck.core.place import HERE, Place
from memcheck.core.record import Record
from memcheck.core.step import Step
from memcheck.core.tensors import StorageWeakRef, dtype_name, storages_on
from memcheck.measure.allocation_events import AllocationEvent, AllocationRecorder, allocated_by, open_recorder
from memcheck.measure.run import MeasuredCall, MeasuredRun, NamedTensors, range_around

OTHER = "other"
FREED = "freed, from before"
LEFT = "left by the first step"
# Names below this share of the highest sum are combined.
SMALL = 0.01


@dataclass(frozen=True)
class Allocation:
    """Allocated memory, from the event that allocated it to the event that freed it."""

    bytes: int  # Negative: freed during the run, but allocated before it and not held by the caller.
    allocator: str  # The operator or autograd node that allocated it; "" if it existed before.
    born: int  # Event number; 0 if it existed before.
    died: int | None = None
    phase: str | None = None  # The phase in which it was allocated.
    role: str | None = None  # "input q", "parameter weight", "output", "gradient of input q"
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    stack: tuple[str, ...] = ()  # Operators and nodes around the allocation, outermost first.
    address: int = 0

    @property
    def name(self) -> str:
        """The role and the operator: "output (aten::bmm)"."""
        if self.role is None or not self.allocator:
            return self.role or self.allocator
        return f"{self.role} ({self.allocator})"

    @property
    def group(self) -> str:
        """The name under which allocations are combined: "inputs", "gradients", or the allocating operator."""
        kind = (self.role or "").partition(" ")[0]
        if kind == "optimizer":
            return "optimizer state"
        return f"{kind}s" if kind in ("input", "parameter", "output", "gradient") else self.name

    def alive_after(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


@dataclass(frozen=True, order=True)
class Event:
    index: int
    bytes: int  # Negative for a free.
    name: str  # Name of the block.
    phase: str


class Timeline:
    """The allocations of a run over time. Events are numbered from 1; step 0 is before the first event.

    blocks: every allocation in order; the inputs and parameters first.
    phases: (name, first step, last step). The last step of the forward is the first of the backward.
    record: the record of the run, whose bytes were counted independently.
    """

    def __init__(self, blocks: list[Allocation], phases: list[tuple[str, int, int]], record: Record) -> None:
        self.blocks = blocks
        self.phases = phases
        self.record = record

    @property
    def steps(self) -> list[int]:
        """The numbers of all steps."""
        return list(range(self.phases[-1][2] + 1 if self.phases else 1))

    @cached_property
    def events(self) -> list[Event]:
        """All allocations and frees, in order."""
        births = [(block.born, block.bytes, block) for block in self.blocks if block.born]
        deaths = [(block.died, -block.bytes, block) for block in self.blocks if block.died is not None]
        return sorted(Event(index, size, block.name, self.phase_of(index)) for index, size, block in births + deaths)

    @cached_property
    def alive(self) -> list[int]:
        """Bytes alive after each step."""
        return self._sums(self.blocks)

    @cached_property
    def peak(self) -> dict[str, int]:
        """For each phase, the first step with the highest sum."""
        return {name: max(range(first, last + 1), key=self.alive.__getitem__) for name, first, last in self.phases}

    @property
    def series(self) -> dict[str, list[int]]:
        """Bytes alive after each step, by name; see stacked()."""
        return self.stacked()

    def stacked(self, by: str = "name", top: int = 11) -> dict[str, list[int]]:
        """Bytes alive after each step, by name in the order of allocation. They add up to `alive`; the rest is "other".

        by: "name" combines the allocations of one operator, the inputs, the outputs and so on; "tensor" separates
            them: "aten::bmm", "aten::bmm 2", ...
        top: the number of names beside "other".
        """
        groups = self._grouped("group" if by == "name" else "name")
        if by != "name":
            groups = {
                f"{name} {index}" if index > 1 else name: [block]
                for name, blocks in groups.items()
                for index, block in enumerate(blocks, 1)
            }
        sums = {name: self._sums(blocks) for name, blocks in groups.items()}
        highest = {name: max(map(abs, levels)) for name, levels in sums.items()}
        large = sorted(highest, key=lambda name: -highest[name])[:top]
        named = {name for name in large if highest[name] >= SMALL * max(self.alive)}
        rest = [block for name, blocks in groups.items() if name not in named for block in blocks]
        series = {name: levels for name, levels in sums.items() if name in named}
        return {**series, OTHER: self._sums(rest)} if rest or not series else series

    def alive_at_peak(self, phase: str, top: int = 10) -> list[dict[str, Any]]:
        """The blocks alive at the phase's peak, largest first, and the rest combined; they add up to the peak."""
        alive = self.alive_after(self.peak[phase])
        largest, rest = alive[:top], alive[top:]
        rows = [
            {"phase": phase, "name": block.name, "bytes": block.bytes, "shape": block.shape, "dtype": block.dtype}
            for block in largest
        ]
        if rest:
            size = sum(block.bytes for block in rest)
            rows.append({"phase": phase, "name": OTHER, "bytes": size, "shape": None, "dtype": None})
        return rows

    def alive_after(self, step: int) -> list[Allocation]:
        """The allocations alive after the step, largest first."""
        return sorted((block for block in self.blocks if block.alive_after(step)), key=lambda block: -block.bytes)

    def kept(self) -> list[Allocation]:
        """Allocations left after the forward besides its outputs: kept for backward or by a library."""
        return [block for block in self.alive_after(self.phases[0][2]) if block.role is None]

    def phase_of(self, event: int) -> str:
        """The name of the event's phase."""
        return next(name for name, _, last in self.phases if event <= last)

    def _grouped(self, attribute: str) -> dict[str, list[Allocation]]:
        groups: dict[str, list[Allocation]] = defaultdict(list)
        for block in self.blocks:
            groups[getattr(block, attribute)].append(block)
        return groups

    def _sums(self, blocks: list[Allocation]) -> list[int]:
        changes = [0] * len(self.steps)
        for block in blocks:
            changes[block.born] += block.bytes
            if block.died is not None:
                changes[block.died] -= block.bytes
        return list(itertools.accumulate(changes))


@takes_step(places=HERE)
def record_timeline(step: Step, place: Place) -> Timeline:
    """Runs a step, and returns every allocation and free of its forward and backward, to the byte.

        record_timeline(model, x, device="cpu")

    Arguments and bytes are those of memcheck.measure_memory. Allocations are named after the operator, "aten::bmm",
    or in the backward after the autograd node, "BmmBackward0"; inputs, parameters, outputs and gradients also after
    their role. If memory runs out, the timeline ends there. On CUDA, torch's recording of memory history restarts,
    and operators come from its tracebacks. Only one timeline can be recorded at a time.
    """
    return recorded(MeasuredCall(step, place.device), place.limit_bytes)[0]


def recorded(call: MeasuredCall, limit_bytes: int | None = None, hooks: bool = False) -> tuple[Timeline, MeasuredRun]:
    """Records the timeline of a run, and returns both."""
    watch = _Watch(call)
    run = watch.run = MeasuredRun(call, limit_bytes, hooks, watch.phase)
    try:
        record = run.measure()
    finally:
        events = watch.close()
    return Timeline(watch.blocks_of(events), watch.phases, record), run


class _Watch:
    """Notes the events at which phases begin and end, and the role of each allocation."""

    run: MeasuredRun

    def __init__(self, call: MeasuredCall) -> None:
        self.call = call
        self.phases: list[tuple[str, int, int]] = []
        self._recorder: AllocationRecorder | None = None
        self._roles: list[_Role] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # The allocator is installed only once the run's tracker is open.
        if self._recorder is None:
            self._recorder = open_recorder(self.call.device)
        first = self.phases[-1][2] if self.phases else 0
        try:
            with range_around.get()(name):
                yield
        finally:
            self._note_results(name, self._recorder.count())
            if name == "backward":
                self.run.output_gradients.clear()  # Freed as part of the backward.
            self.phases.append((name, first, self._recorder.count()))

    def close(self) -> list[AllocationEvent]:
        return [] if self._recorder is None else self._recorder.close()

    def blocks_of(self, events: list[AllocationEvent]) -> list[Allocation]:
        last = self.phases[-1][2] if self.phases else 0  # Later events belong to the run's cleanup.
        return _with_roles(self._held_blocks() + _blocks_of(events[:last], self.phases), self._roles)

    def _held_blocks(self) -> list[Allocation]:
        held: dict[StorageWeakRef, _Role] = {}
        call = self.call
        for role in _roles_of([*call.named_given, *call.named_state, *call.named_owned], 0, call.device):
            if role.storage_bytes:
                held.setdefault(role.storage, role)
        blocks = [
            Allocation(role.storage_bytes, "", 0, None, None, role.name, role.shape, role.dtype, (), role.address)
            for role in held.values()
        ]
        # State of an optimizer that cannot be inspected, and caches that fn filled.
        rest = self.run.standing_bytes - sum(block.bytes for block in blocks)
        return [*blocks, Allocation(rest, "", 0, role=LEFT)] if rest else blocks

    def _note_results(self, phase: str, step: int) -> None:
        named = self.run.named_outputs
        if phase == "backward":
            named = [("gradient of the output", tensor) for tensor in self.run.output_gradients]
            leaves = [(name, leaf.grad) for name, leaf in self.call.named_leaves if leaf.grad is not None]
            named += [(f"gradient of {name}", gradient) for name, gradient in leaves]
        self._roles += _roles_of(named, step, self.call.device)


class _Role(NamedTuple):
    """The role of the storage that is at an address after a step."""

    step: int
    name: str
    storage: StorageWeakRef
    storage_bytes: int
    address: int
    shape: tuple[int, ...]
    dtype: str


def _roles_of(named: NamedTensors, step: int, device: torch.device) -> list[_Role]:
    roles = []
    for name, tensor in named:
        for storage in storages_on(tensor, device):
            place = StorageWeakRef(storage), storage.nbytes(), storage.data_ptr()
            roles.append(_Role(step, name, *place, tuple(tensor.shape), dtype_name(tensor)))
    return roles


def _blocks_of(events: list[AllocationEvent], phases: list[tuple[str, int, int]]) -> list[Allocation]:
    blocks: list[Allocation] = []
    alive: dict[int, int] = {}  # Address -> index of its block.
    for index, event in enumerate(events, 1):
        address, size = event.address, event.bytes
        phase = next(name for name, _, last in phases if index <= last)
        if size > 0:
            alive[address] = len(blocks)
            name = allocated_by(event.stack)
            blocks.append(
                Allocation(size, name, index, None, phase, None, event.shape, event.dtype, event.stack, address)
            )
        elif address in alive:
            freed = alive.pop(address)
            blocks[freed] = replace(blocks[freed], died=index)
        else:
            blocks.append(Allocation(size, "", index, None, phase, FREED, address=address))
    return blocks


def _with_roles(blocks: list[Allocation], roles: list[_Role]) -> list[Allocation]:
    by_address: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        by_address[block.address].append(index)
    for role in roles:
        for index in by_address[role.address]:
            block = blocks[index]
            if block.role is None and block.alive_after(role.step):
                shape, dtype = (block.shape, block.dtype) if block.shape is not None else (role.shape, role.dtype)
                blocks[index] = replace(block, role=role.name, shape=shape, dtype=dtype)
    return blocks

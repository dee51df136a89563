"""The timeline of a run: every allocation and free of a forward and a backward, with the operator's name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from memcheck.core.arguments import takes_step
from memcheck.core.step import HERE, Place, Step
from memcheck.core.tensors import StorageWeakRef, dtype_name, storages_on
from memcheck.core.timeline import FREED, LEFT, Allocation, Timeline
from memcheck.measure.recorders import AllocationEvent, Recorder, allocated_by, open_recorder
from memcheck.measure.run import MeasuredCall, MeasuredRun, NamedTensors, range_around


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
        self._recorder: Recorder | None = None
        self._roles: list[_Role] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # The allocator is installed only once the run's tracker is open.
        if self._recorder is None:
            self._recorder = open_recorder(self.call.device, keep_history=True)
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
        if self._recorder is None:
            return []
        self._recorder.close()
        return self._recorder.events()

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

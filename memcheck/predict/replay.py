"""Replays a trace in a model of the device's allocator: the predicted record, with each figure as a sum of terms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from memcheck.allocator import AllocatorSettings, CachingAllocator, Order, OutOfMemory, PlainAllocator
from memcheck.core.devices import OLDEST_TRIED, Version, running, untried, version_name
from memcheck.core.prediction import EMPTY_CACHE, WARM_UP, Allocation, Evidence, Prediction, Trace
from memcheck.core.record import Certainty, Doubt, Record
from memcheck.core.step import Place
from memcheck.core.units import format_bytes
from memcheck.core.version import __version__
from memcheck.core.workload import Terms
from memcheck.predict.bounds import doubts_of_verdict, evidence_of, operators_of_equal_rows, unknown_allocations
from memcheck.predict.scratch import Target

# The torch version of the published A100 rows whose figures are all predicted as printed.
PUBLISHED_TORCH = (2, 7)


def unlimited_segments(prediction: Prediction) -> int | None:
    """What the segments of the GPU's allocator take without a limit."""
    if prediction.trace is None:
        return None
    record = dataclasses.replace(prediction.record, status="ok")
    return (
        Replay(prediction.trace, prediction.case, prediction.place.unlimited, record).prediction().record.reserved_bytes
    )


def evidence_at(trace: Trace, place: Place) -> Evidence | None:
    """Published measurements of programs like a traced one on the place's kind of GPU. None for a CPU."""
    device = place.for_device
    return evidence_of(trace.operators, device.architecture) if device.kind == "cuda" else None


def certainty_of(trace: Trace, dtype: str, place: Place, target: Target) -> Certainty:
    """How the figures of the trace's replay are known, as far as nothing is unknown."""
    device = place.for_device
    if device.kind == "cpu":
        tried = target.torch_version >= OLDEST_TRIED and untried(target.torch_version) is None
        return Certainty.EXACT if tried else Certainty.DERIVED
    if not evidence_of(trace.operators, device.architecture).covers:
        return Certainty.DERIVED
    like_equal_rows = (
        "A100" in device.name
        and target.torch_version == PUBLISHED_TORCH
        and dtype == "float32"
        and not place.expandable_segments
        and operators_of_equal_rows(device.architecture).issuperset(trace.operators)
    )
    return Certainty.EXACT if like_equal_rows else Certainty.VERIFIED


def target_at(place: Place) -> Target:
    """The target of predictions for the place; by default with this process's threads and torch version."""
    device, version = place.for_device, cast(Version | None, place.torch_version)
    threads, searches = place.threads or torch.get_num_threads(), torch.backends.cudnn.benchmark
    return Target(
        device.kind,
        threads,
        device.architecture,
        version or running(),
        multiprocessors=device.multiprocessors,
        searches=searches,
    )


def allocator_at(place: Place) -> CachingAllocator | PlainAllocator:
    """The model of the place's allocator, which has allocated nothing yet."""
    device = place.for_device
    if device.kind != "cuda":
        return PlainAllocator(place.room_bytes)
    return CachingAllocator(
        device.usable_bytes,
        AllocatorSettings(expandable_segments=place.expandable_segments),
        allowed_bytes=place.limit_bytes,
        total_bytes=None if device.usable_bytes is None else device.total_bytes,
        order=Order.of(cast(Version | None, place.torch_version) or running()),
    )


R = TypeVar("R", bound=Record)


def blank_record(kind: type[R], place: Place, target: Target) -> R:
    """A predicted record with the environment's fields filled in."""
    device = place.for_device
    return kind(
        source="predicted",
        device=device.kind,
        device_name=None if device.kind == "cpu" else device.name,
        device_total_bytes=device.total_bytes,
        torch_version=str(torch.__version__)
        if target.torch_version == running()
        else version_name(target.torch_version),
        memcheck_version=__version__,
        allocator="memcheck tracking allocator" if device.kind == "cpu" else "default",
        threads=target.threads,
    )


@dataclass
class Moment:
    """The event with the highest number of bytes in a phase."""

    event: int = 0
    bytes: int = -1

    def note(self, event: int, size: int) -> None:
        if size > self.bytes:
            self.event, self.bytes = event, size


@dataclass
class Replay:
    """Replays a trace in a model of the device's allocator and fills the record."""

    trace: Trace
    case: Any = field(repr=False)  # Case, ModelCase or Step.
    place: Place
    record: Record
    blocks: dict[Allocation, Any] = field(default_factory=dict)  # As the allocator returned them.
    sizes: dict[Allocation, int] = field(default_factory=dict)  # Sizes of blocks as they were handed out.
    event: int = 0
    terms: Terms = field(default_factory=dict)
    requested: dict[str, Moment] = field(default_factory=dict)
    allocated: dict[str, Moment] = field(default_factory=dict)
    certainty: Certainty = Certainty.DERIVED
    refused: Allocation | None = None

    def __post_init__(self) -> None:
        self.device = self.place.for_device

    def prediction(self) -> Prediction:
        """Replays the trace and returns the prediction."""
        self.allocator = allocator_at(self.place)
        try:
            for phase in self.trace.phases:
                self._play(phase)
                self._note(phase)
        except OutOfMemory as error:
            self._note_refusal(phase, error)
        if isinstance(self.allocator, CachingAllocator):
            segments = self.allocator.segments()
            self._note_terms("reserved_bytes", segments)
            if (context := self.device.context_bytes) is not None:
                self._note_terms("process_bytes", {**segments, "CUDA context": context})
            if self.record.status == "ok":
                measured = [moment.bytes for phase, moment in self.allocated.items() if phase != WARM_UP]
                self.record.max_allocated_bytes = max(measured)
        self.record.backward_from = self.trace.backward_from
        self.record.terms = self.terms
        unknown = [*unknown_allocations(self.trace, self.record, self.requested, self.device)]
        self.record.certainty = Certainty.VERIFIED if self.certainty is Certainty.EXACT and unknown else self.certainty
        no_backward = map(Doubt, filter(None, [self.trace.no_backward]))
        self.record.doubts = (
            *unknown,
            *no_backward,
            *doubts_of_verdict(self.trace, self.record, self.requested, self.place),
        )
        return Prediction(
            self.case,
            self.place,
            self.record,
            self.terms,
            self.trace,
            self.refused,
            evidence=evidence_at(self.trace, self.place),
            unlimited_segments=unlimited_segments,
        )

    def fits(self) -> bool:
        """Whether the device has the memory, without any figure."""
        self.allocator = allocator_at(self.place)
        try:
            for phase in self.trace.phases:
                self._play(phase)
        except OutOfMemory:
            return False
        return True

    def _play(self, phase: str) -> None:
        first, last = self.trace.phases[phase]
        requested, allocated = self.requested[phase], self.allocated[phase] = Moment(), Moment()
        allocator = self.allocator
        requested.note(first, allocator.requested.current)
        allocated.note(first, allocator.allocated.current)
        for event, (allocation, taken) in enumerate(self.trace.log.events[first:last], first + 1):
            self.event = event
            if taken:
                if allocation.name == EMPTY_CACHE and isinstance(allocator, CachingAllocator):
                    allocator.empty_cache()
                before = allocator.allocated.current
                self.blocks[allocation] = allocator.malloc(allocation.bytes, allocation.stream)
                self.sizes[allocation] = allocator.allocated.current - before
                requested.note(event, allocator.requested.current)
                allocated.note(event, allocator.allocated.current)
            else:
                allocator.free(self.blocks[allocation])
        limit = self.place.limit_bytes
        if phase == "inputs" and limit is not None and isinstance(allocator, CachingAllocator):
            allocator.empty_cache()
            allocator.allowed_bytes = allocator.reserved.current + limit - allocator.requested.current

    def _note(self, phase: str) -> None:
        if phase == "inputs":
            self._note_sum("input_bytes", self.trace.inputs)
            self._note_sum("parameter_bytes", [p for p in self.trace.parameters if p not in self.trace.inputs])
            if self.case.mode == "decode":
                self._note_sum("state_bytes", self.trace.state)
                self.record.note_state(self.record.state_bytes or 0, self.case.bsz, self.case.kv_len)
            if self.trace.has_optimizer:
                self._note_sum("optimizer_bytes", self.trace.optimizer)
        elif phase == WARM_UP:
            pass  # They have no figures.
        elif phase == "forward":
            self._note_sum("output_bytes", self.trace.outputs)
            self._note_sum("saved_bytes", self.trace.saved)
            self._note_peaks(phase)
        elif phase == "backward":
            self._note_sum("gradient_bytes", self.trace.gradients)
            self._note_peaks(phase, {*self.trace.gradients, *self.trace.incoming})
        else:
            self._note_sum("optimizer_peak_bytes", self.trace.log.alive(self.requested[phase].event))

    def _note_peaks(self, phase: str, gradients: Iterable[Allocation] = ()) -> None:
        record = self.record
        alive = self.trace.log.alive(self.requested[phase].event)
        self._note_sum(f"{phase}_peak_bytes", alive)
        held = [
            allocation
            for allocation in self.trace.held
            if allocation in alive or allocation not in self.trace.preexisting
        ]
        held += [*self.trace.carried_over, *self.trace.outputs, *self.trace.saved, *gradients]
        library = sum(allocation.bytes for allocation in alive if allocation.is_library)
        scratch = self.requested[phase].bytes - library - sum(allocation.bytes for allocation in dict.fromkeys(held))
        record.workspace_bytes = max(record.workspace_bytes or 0, scratch)
        if self.device.kind == "cuda":
            library = max(library, self._library_bytes_at_end(phase))
            record.library_workspace_bytes = max(record.library_workspace_bytes or 0, library)
            self._note_allocated(phase)

    def _library_bytes_at_end(self, phase: str) -> int:
        """A workspace stays once it is there, until it is dropped after the phase. The peak may come before it."""
        events, end = self.trace.log.events, self.trace.phases[phase][1]
        while end and events[end - 1][0].is_library and not events[end - 1][1]:
            end -= 1
        return sum(allocation.bytes for allocation in self.trace.log.alive(end) if allocation.is_library)

    def _note_allocated(self, phase: str) -> None:
        """Sums of blocks. This peak is the highest so far; it is not reset between phases."""
        names = ("forward", "backward")[: 1 if phase == "forward" else 2]
        fullest = max((self.allocated[name] for name in names), key=lambda moment: moment.bytes)
        blocks = ((self._block_name(one), self.sizes[one]) for one in self.trace.log.alive(fullest.event))
        self._note_terms(f"{phase}_max_allocated_bytes", numbered(blocks))

    def _block_name(self, allocation: Allocation) -> str:
        """The allocation's name, with the reason if its block is larger than the rounded size."""
        assert isinstance(self.allocator, CachingAllocator)
        if self.sizes[allocation] <= self.allocator.settings.rounded(allocation.bytes):
            return allocation.name
        return f"{allocation.name} of {format_bytes(allocation.bytes)}, for which a larger block was taken whole"

    def _note_sum(self, field: str, allocations: Iterable[Allocation]) -> None:
        self._note_terms(field, numbered((allocation.name, allocation.bytes) for allocation in allocations))

    def _note_terms(self, field: str, terms: dict[str, int]) -> None:
        self.terms[field] = terms
        setattr(self.record, field, sum(terms.values()))

    def _note_refusal(self, phase: str, error: OutOfMemory) -> None:
        record = self.record
        record.status = "oom"
        request = f"{format_bytes(error.requested_bytes)} requested with {format_bytes(error.in_use_bytes)} in use"
        self.refused = self.trace.log.events[self.event - 1][0] if self.event else None
        if phase == "inputs":
            record.reason = f"the inputs alone do not fit: {request}"
            return
        record.oom_phase, record.oom_requested_bytes = self.trace.phase_of(self.event), error.requested_bytes
        self._note_sum("oom_in_use_bytes", self.trace.log.alive(self.event - 1))
        record.reason = f"predicted: {request}, of {format_bytes(self.allocator.room_bytes or 0)}"


def numbered(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Name -> bytes; a repeated name becomes "name 2"."""
    terms: dict[str, int] = {}
    for name, size in sizes:
        names = itertools.chain([name], (f"{name} {index}" for index in itertools.count(2)))
        terms[next(free for free in names if free not in terms)] = size
    return terms

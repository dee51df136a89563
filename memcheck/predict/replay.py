"""Replays a trace in a model of the device's allocator: the predicted record, and how its figures are known.

Each figure is a sum of terms. `memcheck/data/evidence_NAME.json` has, for each source, GPU and set of operators of the
study NAME, how far off the predictions of its rows were.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from memcheck.allocator import AllocatorSettings, CachingAllocator, Order, OutOfMemory, PlainAllocator
from memcheck.core.devices import DEVICES, OLDEST_TRIED, Device, Version, running, untried, version_name
from memcheck.core.prediction import EMPTY_CACHE, WARM_UP, Allocation, Evidence, Prediction, Trace
from memcheck.core.record import UNKNOWN, Certainty, Doubt, Record
from memcheck.core.step import Place
from memcheck.core.units import format_bytes
from memcheck.core.version import __version__
from memcheck.core.workload import Terms
from memcheck.predict.scratch import FreedLate, Target, Unlisted

# Fields that become lower bounds when a phase has unknown allocations.
FIELDS_OF = {
    "inputs": ("reserved_bytes",),
    "forward": (
        *("forward_peak_bytes", "workspace_bytes", "forward_max_allocated_bytes"),
        *("backward_max_allocated_bytes", "max_allocated_bytes"),
    ),
    "backward": ("backward_peak_bytes", "workspace_bytes", "backward_max_allocated_bytes", "max_allocated_bytes"),
    "optimizer": ("optimizer_peak_bytes", "max_allocated_bytes"),
}
ENDS = ("forward_end_allocated_bytes", "backward_end_allocated_bytes")
# Further fields that are uncertain if not even the sizes of results are known.
ALSO_FIELDS_OF = {
    "forward": (
        *("output_bytes", "saved_bytes", "gradient_bytes", *ENDS),
        *(*FIELDS_OF["backward"], *FIELDS_OF["optimizer"]),
    ),
    "backward": ("gradient_bytes", ENDS[1], *FIELDS_OF["optimizer"]),
}
# Further fields that are uncertain if allocations may outlive their phase.
LATER_FIELDS_OF = {
    "forward": ("saved_bytes", *ENDS, *FIELDS_OF["backward"]),
    "backward": (ENDS[1], *FIELDS_OF["optimizer"]),
}
# Fields that are no sums of terms.
MORE_FIELDS = ("workspace_bytes", "oom_requested_bytes", "max_allocated_bytes", *ENDS)
# Fields that an untried torch version may change: all that the caller does not provide.
COMPUTED = ("output_bytes", "saved_bytes", "gradient_bytes", *ENDS, *itertools.chain.from_iterable(FIELDS_OF.values()))


def unknown_allocations(trace: Trace, record: Record, played: Collection[str], device: Device) -> Iterator[Doubt]:
    """A doubt for each unknown allocation, with the fields that it affects. The record has all terms.

    played: the phases up to the refused request.
    """
    fields: dict[str, set[str]] = {}
    for phase, found in trace.unknown.items():
        for words in found:
            affected = fields.setdefault(words, set())
            affected.update(FIELDS_OF.get(phase, COMPUTED))
            affected.update(ALSO_FIELDS_OF.get(phase, ()) if isinstance(words, Unlisted) else ())
            affected.update(LATER_FIELDS_OF.get(phase, ()) if isinstance(words, FreedLate) else ())
    if any(allocation.is_library for allocation in trace.log.allocations) and device.architecture is None:
        words = "cuBLAS's workspace, as the GPU's architecture is not known"
        fields[words] = set(itertools.chain.from_iterable(FIELDS_OF.values()))
    for affected in filter(None, fields.values()):
        if device.kind == "cuda":  # Which blocks are free decides which larger ones are taken whole.
            affected |= {end for end in ENDS if end.replace("end", "max") in affected}
        affected |= {"reserved_bytes", "process_bytes"}
        if record.status == "oom" and not trace.unknown.keys().isdisjoint(played):
            affected |= {"oom_in_use_bytes", "oom_requested_bytes"}
    terms = (record.terms or {}).keys()
    if trace.beyond is not None:
        words = f"what comes after a tensor beyond 64 bits, in the {trace.beyond}"
        fields[words] = {name for name in terms if name.startswith(trace.beyond)}
    filled = terms | {name for name in MORE_FIELDS if getattr(record, name) is not None}
    for words, affected in fields.items():
        yield Doubt(words, UNKNOWN, tuple(sorted(affected & filled)))


def doubts_of_verdict(trace: Trace, record: Record, played: Collection[str], place: Place) -> Iterator[Doubt]:
    """A doubt about the verdict, if there is a limit and a phase's figures are bounds."""
    if place.room_bytes is None or trace.unknown.keys().isdisjoint(played):
        return
    verdict = "It fits" if record.status == "ok" else f"It runs out of memory in the {record.oom_phase}"
    guessed = any(isinstance(words, Unlisted) for found in trace.unknown.values() for words in found)
    yield Doubt(f"{verdict}, as far as known: the run may need more{', or less' if guessed else ''}")


DATA = Path(__file__).parents[1] / "data"
# A measured program is like a predicted one if it runs this share of its operators.
SHARE = 0.5


@dataclass(frozen=True)
class Measured:
    """Rows of one source, measured on one GPU, whose programs run the same operators.

    errors: predicted / published - 1 of each row.
    """

    source: str
    gpu: str
    operators: frozenset[str]
    errors: tuple[float, ...]


@functools.cache
def measured() -> tuple[Measured, ...]:
    """All that was measured and predicted."""
    found = (entry for path in sorted(DATA.glob("evidence_*.json")) for entry in json.loads(path.read_text("utf-8")))
    return tuple(
        Measured(entry["source"], entry["gpu"], frozenset(entry["operators"]), tuple(entry["errors"]))
        for entry in found
    )


def operators_of_equal_rows(architecture: tuple[int, int] | None) -> frozenset[str]:
    """Operators of programs whose every row on a GPU of the architecture was predicted as printed."""
    here = (it for it in measured() if DEVICES[it.gpu].architecture == architecture)
    return frozenset[str]().union(*(it.operators for it in here if not any(it.errors)))


def evidence_of(operators: Iterable[str], architecture: tuple[int, int] | None) -> Evidence:
    """What was measured of programs like one with these operators, on GPUs of the architecture."""
    wanted = frozenset(operators)
    here = [it for it in measured() if architecture is not None and DEVICES[it.gpu].architecture == architecture]
    like = [it for it in here if wanted and len(it.operators & wanted) >= SHARE * len(wanted)]
    errors = sorted(abs(error) for it in like for error in it.errors)
    gpus, sources = Counter[str](), Counter[str]()
    for it in like:
        gpus[it.gpu] += len(it.errors)
        sources[it.source] += len(it.errors)
    known = frozenset[str]().union(*(it.operators for it in here))
    return Evidence(
        len(errors),
        dict(gpus),
        dict(sources),
        statistics.median(errors) if errors else None,
        errors[math.ceil(0.95 * len(errors)) - 1] if errors else None,
        errors[-1] if errors else None,
        tuple(sorted(name for name in wanted - known if name.removesuffix("_") not in known)),  # In place or not.
    )


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
        setattr(record, f"{phase}_end_allocated_bytes", self._allocated_at_end(phase))
        if self.device.kind == "cuda":
            library = max(library, self._library_bytes_at_end(phase))
            record.library_workspace_bytes = max(record.library_workspace_bytes or 0, library)
            self._note_allocated(phase)

    def _dropped(self, phase: str) -> list[Allocation]:
        """The workspaces that are dropped when the phase is over. Until then, one stays once it is there."""
        events = reversed(self.trace.log.events[slice(*self.trace.phases[phase])])
        return [one for one, _ in itertools.takewhile(lambda event: event[0].is_library and not event[1], events)]

    def _library_bytes_at_end(self, phase: str) -> int:
        """The workspaces at the end of the phase. The peak may come before them."""
        alive = self.trace.log.alive(self.trace.phases[phase][1])
        return sum(one.bytes for one in (*alive, *self._dropped(phase)) if one.is_library)

    def _allocated_at_end(self, phase: str) -> int:
        """The sum of the blocks at the end of the phase, whose events are the last that were replayed."""
        dropped = self._dropped(phase) if self.place.drop_workspaces else ()
        return self.allocator.allocated.current + sum(self.sizes[one] for one in dropped)

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

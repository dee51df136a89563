"""What a measurement would say, from the shapes alone: the record, and each figure as a sum of named terms.

A case is traced on meta tensors; the trace is then replayed in a model of the device's allocator.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from memcheck.bench.catalog import CONTENDERS, Contender
from memcheck.bench.workloads import prepare
from memcheck.core.case import Case, Terms
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import UnsupportedError
from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.core.version import __version__
from memcheck.measure.sdpa_backend import fused_backend
from memcheck.predict.allocator import Block, CachingAllocator, OutOfMemory, PlainAllocator
from memcheck.predict.plain_operators import SHOWN_ON_A100
from memcheck.predict.scratch import Target
from memcheck.predict.torch_versions import Version, name_of, running, untried
from memcheck.predict.trace import WORKSPACE, Piece, Run, Trace

# What of a record is not known where it is not known what a phase takes.
FIELDS_OF = {
    "inputs": ("reserved_bytes",),
    "forward": ("forward_peak_bytes", "workspace_bytes", "forward_max_allocated_bytes", "backward_max_allocated_bytes"),
    "backward": ("backward_peak_bytes", "workspace_bytes", "backward_max_allocated_bytes"),
    "optimizer": ("optimizer_peak_bytes",),
}
# Nor these, where not even the sizes of results are known.
ALSO_FIELDS_OF = {
    "forward": ("output_bytes", "saved_bytes", "gradient_bytes", *FIELDS_OF["backward"], *FIELDS_OF["optimizer"]),
    "backward": ("gradient_bytes", *FIELDS_OF["optimizer"]),
}
# What a torch that was not tried may have changed: all that the caller does not give.
COMPUTED = ("output_bytes", "saved_bytes", "gradient_bytes", *itertools.chain.from_iterable(FIELDS_OF.values()))


@dataclass(frozen=True)
class Prediction:
    """What a case takes on a device, as a measurement would say.

    terms: field of the record -> what it is the sum of: name -> bytes.
    basis: "verified", by rules that were compared with measurements on this kind of device: the CPU, or what published
    rows show of an A100. Or "derived": by rules read in sources, and compared with nothing.
    unknown: in words what cannot be known, and `bounds` the fields that are not known to the byte because of it: what
    they say is at least so much, for threads at most, and of an operator without a rule all that its shapes tell.
    exact: the basis is "verified", and nothing is unknown: every figure is what a measurement says, to the byte.
    """

    case: Any  # a Case, or of memcheck.predict_model a ModelCase
    device: Device
    record: Record
    terms: Terms
    exact: bool
    unknown: tuple[str, ...]
    bounds: frozenset[str] = frozenset()
    basis: str = "derived"

    @property
    def known_terms(self) -> Terms:
        """The terms of the fields that are known to the byte."""
        return {name: terms for name, terms in self.terms.items() if name not in self.bounds}


def predict_memory(
    case: Case,
    device: Device | str = "cpu",
    *,
    limit_bytes: int | None = None,
    dense_grad: bool = False,
    threads: int | None = None,
    expandable_segments: bool = False,
    torch_version: Version | None = None,
    drops_workspaces: bool = True,
) -> Prediction:
    """The record that measuring the case on the device would give, without it: nothing is run or allocated.

    device: of memcheck.core.devices, or a name for memcheck.core.devices.device_named: "A100-40GB", "cpu", "40GiB".
    limit_bytes: a budget as memcheck.measure_memory has it; on CUDA a per-process limit of segments.
    dense_grad: the gradient of the output is a full tensor, instead of one element expanded.
    threads: of the CPU; as many as torch has, unless given. expandable_segments: as in PYTORCH_ALLOC_CONF.
    torch_version: (2, 7), say, the torch whose memory is meant; that of this process, unless given. Where it, or the
        one of this process, is newer than the newest that predictions were compared with, no figure is exact.
    drops_workspaces: after each phase, as a measurement does. A program keeps those of both of its threads.

    Running out of memory is an answer: status "oom", its phase, the request and what was in use. Compiled operators
    are "skipped" as not predicted. What an operator takes and shapes do not tell is in `unknown`, and in the record's
    doubts. On CUDA the process has just begun: its allocator has cached nothing.
    """
    device = device_named(device) if isinstance(device, str) else device
    target = target_for(device, threads, torch_version)
    record = blank_of(case, device, target)
    contender = CONTENDERS[case.operator]
    if case.compiled:
        return unpredicted(case, device, record, "the compiler decides what is allocated")
    try:
        trace = traced(contender, dataclasses.replace(case, device="meta"), target, dense_grad, drops_workspaces)
    except UnsupportedError as error:
        record.status, record.reason, record.basis = "unsupported", str(error), None
        return Prediction(case, device, record, {}, False, ())
    except NotImplementedError as error:
        return unpredicted(case, device, record, f"it does not run on meta tensors: {first_line(error)}")
    except torch.OutOfMemoryError as error:
        record.status, record.reason = "oom", f"the inputs alone do not fit: {error}"
        return Prediction(case, device, record, {}, False, ())
    record.backend = backend_of(trace, contender, case, device)
    basis = basis_of(trace, case.dtype, device, target, expandable_segments)
    return Replay(trace, case, device, record, limit_bytes, expandable_segments, basis=basis).prediction()


# The torch of the published rows of an A100.
PUBLISHED_TORCH = (2, 7)


def basis_of(trace: Trace, dtype: str, device: Device, target: Target, expandable_segments: bool = False) -> str:
    if device.kind == "cpu":
        return "verified" if untried(target.torch_version) is None else "derived"
    like_published = (
        "A100" in device.name
        and device.architecture == (8, 0)
        and target.torch_version == PUBLISHED_TORCH
        and dtype == "float32"
        and not expandable_segments
        and trace.operators
        and all(name.removeprefix("aten::") in SHOWN_ON_A100 for name in trace.operators)
    )
    return "verified" if like_published else "derived"


# What a record's theory is of.
THEORY = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "state_bytes")


def terms_of(case: Case, torch_version: Version | None = None) -> Terms | None:
    """Of those fields that are known to the byte, what they are the sum of, on the device that the case names; None
    where nothing is known. No memory is too small; of a GPU that is not here, cuBLAS's workspaces come on top."""
    kind = case.device.partition(":")[0]
    device = (
        device_named(case.device)
        if kind == "cpu" or torch.cuda.is_available()
        else Device(kind, kind, None, 0, None, "")
    )
    prediction = predict_memory(case, dataclasses.replace(device, usable_bytes=None), torch_version=torch_version)
    if device.architecture is None and kind != "cpu":
        prediction = without_workspaces(prediction)
    return {name: terms for name, terms in prediction.known_terms.items() if name in THEORY} or None


def without_workspaces(prediction: Prediction) -> Prediction:
    terms = {
        name: {part: size for part, size in parts.items() if not part.startswith(WORKSPACE)}
        for name, parts in prediction.terms.items()
    }
    bounds = prediction.bounds if len(prediction.unknown) > 1 else frozenset[str]()
    return dataclasses.replace(prediction, terms=terms, bounds=bounds)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def target_for(device: Device, threads: int | None = None, torch_version: Version | None = None) -> Target:
    return Target(device.kind, threads or torch.get_num_threads(), device.architecture, torch_version or running())


R = TypeVar("R", bound=Record)


def blank(kind: type[R], device: Device, target: Target) -> R:
    """A record that says where, and not yet of what."""
    return kind(
        source="predicted",
        device=device.kind,
        device_name=None if device.kind == "cpu" else device.name,
        device_total_bytes=device.total_bytes,
        torch_version=str(torch.__version__) if target.torch_version == running() else name_of(target.torch_version),
        memcheck_version=__version__,
        allocator="memcheck tracking allocator" if device.kind == "cpu" else "default",
        threads=target.threads,
    )


def blank_of(case: Case, device: Device, target: Target) -> Record:
    fields = {name: value for name, value in dataclasses.asdict(case).items() if name != "device"}
    return dataclasses.replace(blank(Record, device, target), **fields)


def unpredicted(case: Case, device: Device, record: Record, why: str) -> Prediction:
    record.status, record.reason, record.exact, record.basis = "skipped", f"not predicted: {why}", False, None
    return Prediction(case, device, record, {}, False, (why,))


@functools.lru_cache(maxsize=128)
def traced(contender: Contender, case: Case, target: Target, dense_grad: bool, drops_workspaces: bool) -> Trace:
    """contender: as the catalog has it now, because names can be registered anew."""
    return Run(target, dense_grad=dense_grad, drops_workspaces=drops_workspaces).trace(prepare(case))


def backend_of(trace: Trace, contender: Contender, case: Case, device: Device) -> str:
    if contender.backend is not None:
        return contender.backend(dataclasses.replace(case, device=device.kind))
    return next(filter(None, map(fused_backend, trace.operators)), contender.unfused)


@dataclass
class Moment:
    """The fullest moment of a phase: the event, and the bytes."""

    event: int = 0
    bytes: int = -1

    def note(self, event: int, size: int) -> None:
        if size > self.bytes:
            self.event, self.bytes = event, size


@dataclass
class Replay:
    """A trace in an allocator, as it fills and empties through the phases, and the record that it fills."""

    trace: Trace
    case: Any  # a Case, or a ModelCase
    device: Device
    record: Record
    limit_bytes: int | None = None
    expandable_segments: bool = False
    blocks: dict[Piece, Block | None] = field(default_factory=dict)
    sizes: dict[Piece, int] = field(default_factory=dict)  # of blocks, as they were given
    event: int = 0
    terms: Terms = field(default_factory=dict)
    requested: dict[str, Moment] = field(default_factory=dict)
    allocated: dict[str, Moment] = field(default_factory=dict)
    basis: str = "derived"

    def prediction(self) -> Prediction:
        self.allocator = self._open_allocator()
        try:
            for phase in self.trace.phases:
                self._play(phase)
                self._note(phase)
        except OutOfMemory as error:
            self._note_refusal(phase, error)
        self._note_reserved()
        unknown, bounds = self._unknown()
        exact = self.basis == "verified" and not unknown
        self.record.theory, self.record.exact, self.record.basis = self.terms, exact, self.basis
        self.record.doubts = (*unknown, *self._doubtful_verdict())
        return Prediction(self.case, self.device, self.record, self.terms, exact, unknown, bounds, self.basis)

    def _doubtful_verdict(self) -> Iterator[str]:
        """Where there is a limit, and a phase that ran, or in which memory ran out, is not known."""
        if not self.has_limit or not any(self._has_run(phase) for phase in self.trace.unknown):
            return
        verdict = "ok" if self.record.status == "ok" else f"{self.record.status} in the {self.record.oom_phase}"
        yield f"{verdict} is the verdict of what is known: the run may need more" + (
            ", or less" if self.trace.guessed else ""
        )

    @property
    def has_limit(self) -> bool:
        return self.device.usable_bytes is not None or self.limit_bytes is not None

    def _has_run(self, phase: str) -> bool:
        return phase in self.requested

    def _open_allocator(self) -> CachingAllocator | PlainAllocator:
        rooms = [room for room in (self.device.usable_bytes, self.limit_bytes) if room is not None]
        room = min(rooms, default=None)
        if self.device.kind == "cpu":
            return PlainAllocator(room)
        return CachingAllocator(room, expandable=self.expandable_segments)

    def _play(self, phase: str) -> None:
        first, last = self.trace.phases[phase]
        requested, allocated = self.requested[phase], self.allocated[phase] = Moment(), Moment()
        allocator = self.allocator
        requested.note(first, allocator.requested.current)
        allocated.note(first, allocator.allocated.current)
        for event, (piece, taken) in enumerate(self.trace.tape.events[first:last], first + 1):
            self.event = event
            if taken:
                block = self.blocks[piece] = allocator.malloc(piece.bytes)
                self.sizes[piece] = block.bytes if block is not None else 0
                requested.note(event, allocator.requested.current)
                allocated.note(event, allocator.allocated.current)
            else:
                allocator.free(self.blocks[piece])
        if phase == "inputs" and self.limit_bytes is not None:
            allocator.empty_cache()
            room = allocator.room_for(self.limit_bytes, allocator.requested.current)
            allocator.limit_bytes = min(room, self.device.usable_bytes or room)

    def _note(self, phase: str) -> None:
        if phase == "inputs":
            self._note_sum("input_bytes", self.trace.inputs)
            self._note_sum("parameter_bytes", self.trace.parameters)
            self._note_state()
        elif phase == "forward":
            self._note_sum("output_bytes", self.trace.outputs)
            self._note_sum("saved_bytes", self.trace.saved)
            self._note_peaks(phase)
        elif phase == "backward":
            self._note_sum("gradient_bytes", self.trace.gradients)
            self._note_peaks(phase, {*self.trace.gradients, *self.trace.incoming})
        else:
            self._note_sum("optimizer_peak_bytes", self.trace.tape.alive(self.requested[phase].event))

    def _note_state(self) -> None:
        if self.case.mode != "decode":
            return
        self._note_sum("state_bytes", self.trace.state)
        self.record.state_bytes_per_sequence = (self.record.state_bytes or 0) / self.case.bsz
        if self.case.kv_len:
            self.record.state_bytes_per_token = self.record.state_bytes_per_sequence / self.case.kv_len

    def _note_peaks(self, phase: str, gradients: Iterable[Piece] = ()) -> None:
        record = self.record
        alive = self.trace.tape.alive(self.requested[phase].event)
        self._note_sum(f"{phase}_peak_bytes", alive)
        held = [*self.trace.held, *self.trace.outputs, *self.trace.saved, *gradients]
        library = self._note_library(alive)
        scratch = self.requested[phase].bytes - library - sum(piece.bytes for piece in dict.fromkeys(held))
        record.workspace_bytes = max(record.workspace_bytes or 0, scratch)
        if self.device.kind == "cuda":
            self._note_allocated(phase)

    def _note_library(self, alive: list[Piece]) -> int:
        size = sum(piece.bytes for piece in alive if piece.is_library)
        if self.device.kind == "cuda":
            self.record.library_workspace_bytes = max(self.record.library_workspace_bytes or 0, size)
        return size

    def _note_allocated(self, phase: str) -> None:
        """Of blocks; the peak is the highest so far, not reset between the phases."""
        names = ("forward", "backward")[: 1 if phase == "forward" else 2]
        fullest = max((self.allocated[name] for name in names), key=lambda moment: moment.bytes)
        alive = self.trace.tape.alive(fullest.event)
        self._note_terms(f"{phase}_max_allocated_bytes", numbered((piece.name, self.sizes[piece]) for piece in alive))

    def _note_reserved(self) -> None:
        segments = self.allocator.segments()
        if segments is not None:
            self._note_terms("reserved_bytes", segments)

    def _note_sum(self, field: str, pieces: Iterable[Piece]) -> None:
        self._note_terms(field, numbered((piece.name, piece.bytes) for piece in pieces))

    def _note_terms(self, field: str, terms: dict[str, int]) -> None:
        self.terms[field] = terms
        setattr(self.record, field, sum(terms.values()))

    def _note_refusal(self, phase: str, error: OutOfMemory) -> None:
        record = self.record
        record.status = "oom"
        asked, used = format_bytes(error.requested_bytes), format_bytes(error.in_use_bytes)
        if phase == "inputs":
            record.reason = f"the inputs alone do not fit: {asked} requested with {used} in use"
            return
        record.oom_phase, record.oom_requested_bytes = phase, error.requested_bytes
        self._note_sum("oom_in_use_bytes", self.trace.tape.alive(self.event - 1))
        room = format_bytes(self.allocator.limit_bytes or 0)
        record.reason = f"predicted: {asked} requested with {used} in use, of {room}"

    def _unknown(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """In words what is not known, and the fields that it is part of."""
        words = list(itertools.chain.from_iterable(self.trace.unknown.values()))
        bounds = {name for phase in self.trace.unknown for name in FIELDS_OF.get(phase, COMPUTED)}
        bounds |= {name for phase in self.trace.guessed for name in ALSO_FIELDS_OF.get(phase, ())}
        if any(piece.is_library for piece in self.trace.tape.pieces) and self.device.architecture is None:
            words.append("cuBLAS's workspace, as the GPU's architecture is not known")
            bounds |= {name for names in FIELDS_OF.values() for name in names}
        if bounds:
            bounds.add("reserved_bytes")
        if self.record.status == "oom" and any(self._has_run(phase) for phase in self.trace.unknown):
            bounds |= {"oom_in_use_bytes", "oom_requested_bytes"}
        if self.trace.beyond is not None:
            words.append(f"what comes after a tensor beyond 64 bits, in the {self.trace.beyond}")
            bounds |= {name for name in self.terms if name.startswith(self.trace.beyond)}
        return tuple(dict.fromkeys(words)), frozenset(bounds & {*self.terms, "workspace_bytes", "oom_requested_bytes"})


def numbered(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Name -> bytes; the second of a name is "name 2"."""
    terms: dict[str, int] = {}
    for name, size in sizes:
        names = itertools.chain([name], (f"{name} {index}" for index in itertools.count(2)))
        terms[next(free for free in names if free not in terms)] = size
    return terms

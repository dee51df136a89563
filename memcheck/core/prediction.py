"""A prediction: the log of what a run would allocate, its roles, and the record with how its figures are known."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memcheck.core.devices import Device
from memcheck.core.layers import Layers, TracedModule, layers_of
from memcheck.core.record import UNKNOWN, Certainty, Doubt, Record
from memcheck.core.step import Place
from memcheck.core.units import counted, format_bytes
from memcheck.core.verdict import alive_words, certainty, few_lines, largest_words, place_words, size_words, verdict
from memcheck.core.workload import Case, Terms

ANY_PHASE = "any phase"
WARM_UP = "before"  # Earlier steps, and earlier backwards of the step.
WORKSPACE = "cuBLAS workspace"
COMPILED_BUFFER = "buffer of compiled code"
# What operators of FSDP2 and of process groups do with an argument, by its name.
BUFFERS = {
    "fsdp::all_gather_copy_in": {"all_gather_output": "all-gather buffer"},
    "fsdp::split_with_sizes_copy": {"out": "all-gathered parameters"},
    "fsdp::chunk_cat": {"out": "reduce-scatter input"},
    "c10d::_reduce_scatter_base_": {"output_tensor": "reduce-scatter output"},
    "c10d::allreduce_": {"tensors": "all-reduce buffer"},
}
GATHERED_COPY, REDUCED_COPY = "gloo's copy of what it gathers", "gloo's copy of what it reduces"
BUFFER_NAMES = {GATHERED_COPY, REDUCED_COPY, *(name for names in BUFFERS.values() for name in names.values())}
EMPTY_CACHE = "torch.cuda.empty_cache"  # An allocation of no bytes, at which the allocator's cache is emptied.


@dataclass(eq=False)
class Allocation:
    """A piece of memory, from its allocation to its release."""

    name: str
    bytes: int
    born: int
    died: int | None = None
    is_library: bool = False
    module: str = ""  # Path of the module that allocated it.
    made_by: str = ""  # The operator that returned it.
    stream: int = 0  # That it was allocated on, which alone can use its memory again. 0: the default one.

    def resized(self, size: int) -> Allocation:
        """An allocation of that size which is like this one otherwise."""
        how = self.is_library, self.module, self.made_by, self.stream
        return Allocation(self.name, size, self.born, self.died, *how)

    def alive_after(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


@dataclass
class AllocationLog:
    """A log of allocations and releases. Events are numbered from 1."""

    allocations: list[Allocation] = field(default_factory=list)
    events: list[tuple[Allocation, bool]] = field(default_factory=list)  # The allocation, and whether it was allocated.
    begun: list[tuple[int, str]] = field(default_factory=list)  # The events before a phase of a pass, and its name.
    phase: str = "inputs"  # The phase that runs.
    stream: int = 0  # The stream that is current.
    closed: bool = False

    def allocate(self, name: str, size: int, *, is_library: bool = False, module: str = "") -> Allocation:
        allocation = Allocation(
            name, size, len(self.events) + 1, is_library=is_library, module=module, stream=self.stream
        )
        self.allocations.append(allocation)
        self.events.append((allocation, True))
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Logs the release, unless it was logged before or the run has ended."""
        if not self.closed and allocation.died is None:
            self.events.append((allocation, False))
            allocation.died = len(self.events)

    def empty_cache(self) -> None:
        """Logs that unused segments go back to the driver."""
        self.free(self.allocate(EMPTY_CACHE, 0))

    def begin(self, phase: str) -> None:
        """A phase of a pass begins."""
        self.phase = phase
        self.begun.append((len(self.events), phase))

    def forget_the_past(self) -> None:
        """Keeps the allocation of what is alive, and no other event."""
        self.allocations = self.alive()
        self.events = [(allocation, True) for allocation in self.allocations]
        for number, allocation in enumerate(self.allocations, 1):
            allocation.born = number

    def phase_of(self, event: int) -> str:
        """The phase of an event of any pass."""
        return next((name for before, name in reversed(self.begun) if before < event), "inputs")

    def alive(self, event: int | None = None) -> list[Allocation]:
        now = len(self.events) if event is None else event
        return [allocation for allocation in self.allocations if allocation.alive_after(now)]


@dataclass
class Trace:
    """The log of a run, and the roles of its allocations.

    phases: name -> (first event, last event) of "inputs", "forward", "backward" and "optimizer". The last event of a
        phase is the first of the next.
    first_gradients: of the passes before the measured one.
    operators: the names of all operators that ran, each once.
    unknown: phase, or ANY_PHASE -> descriptions of allocations whose sizes are unknown.
    backward_from: that of the record.
    no_backward: why no backward ran, although the step has one.
    beyond: the phase that ended with a tensor beyond 64 bits.
    """

    log: AllocationLog
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    inputs: list[Allocation] = field(default_factory=list)
    parameters: list[Allocation] = field(default_factory=list)
    # What splitting the model made besides its parameters; on a GPU, other tensors that the model reaches.
    preexisting: list[Allocation] = field(default_factory=list)
    state: list[Allocation] = field(default_factory=list)
    # What earlier passes left behind, as far as the forward keeps it, and buffers that it made in place of others.
    carried_over: list[Allocation] = field(default_factory=list)
    optimizer: list[Allocation] = field(default_factory=list)  # The optimizer's state, which is part of it.
    has_optimizer: bool = False  # Or hooks that may step some.
    outputs: list[Allocation] = field(default_factory=list)
    saved: list[Allocation] = field(default_factory=list)
    incoming: list[Allocation] = field(default_factory=list)
    gradients: list[Allocation] = field(default_factory=list)
    first_gradients: list[Allocation] = field(default_factory=list)
    modules: dict[str, TracedModule] = field(default_factory=dict)  # By path, outer ones first. "": the model.
    operators: tuple[str, ...] = ()
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    beyond: str | None = None
    passes: list[int] = field(default_factory=list)  # The events before each pass.
    backward_from: str | None = None
    no_backward: str | None = None

    def begin_with(self, allocations: list[Allocation]) -> None:
        """Adds allocations that were there before all others."""
        count = len(allocations)
        for allocation in {*self.log.allocations, *allocations}:
            allocation.born += count
            allocation.died = None if allocation.died is None else allocation.died + count
        for number, allocation in enumerate(allocations, 1):
            allocation.born = number
        self.log.allocations[:0] = allocations
        self.log.events[:0] = [(allocation, True) for allocation in allocations]
        self.log.begun = [(before + count, name) for before, name in self.log.begun]
        self.passes = [before + count for before in self.passes]
        for name, (first, last) in self.phases.items():
            self.phases[name] = (first if name == "inputs" else first + count), last + count

    @property
    def held(self) -> list[Allocation]:
        """Tensors that the caller holds."""
        return list(dict.fromkeys([*self.inputs, *self.parameters, *self.preexisting]))

    @property
    def roles(self) -> dict[Allocation, str]:
        """What tensors are for, of those that a model or its optimizer holds: "parameters", "gradients", ..."""
        roles = dict.fromkeys(self.inputs, "inputs")
        roles |= dict.fromkeys([*self.first_gradients, *self.gradients], "gradients")
        return roles | dict.fromkeys(self.optimizer, "optimizer state") | dict.fromkeys(self.parameters, "parameters")

    def named_by_operator(self, allocations: Iterable[Allocation]) -> Iterator[tuple[str, Allocation]]:
        """The allocations, each with its role, else with the operator or autograd's node that made it."""
        roles, outputs = self.roles, set(self.outputs)
        for one in allocations:
            yield roles.get(one) or (one.made_by if one in outputs else "") or one.name, one

    def phase_of(self, event: int) -> str:
        """The phase of an event, also in the passes before the measured one."""
        name = next((name for name, (first, last) in self.phases.items() if first < event <= last), "inputs")
        return self.log.phase_of(event) if name == WARM_UP else name


@dataclass(frozen=True)
class Evidence:
    """How far off predictions of measured programs like a predicted one were.

    gpus, sources: name -> its rows. median, most, largest: of the errors without their sign; 95 % do not exceed `most`.
    missing: operators of the prediction that no measured program ran on a GPU of its kind.
    """

    rows: int
    gpus: dict[str, int]
    sources: dict[str, int]
    median: float | None
    most: float | None
    largest: float | None
    missing: tuple[str, ...]

    @property
    def covers(self) -> bool:
        """Whether programs like it ran, and all its operators did on such a GPU."""
        return self.rows > 0 and not self.missing

    def __str__(self) -> str:
        if self.median is None or self.most is None:
            return "No published run is like it"
        runs = f"{counted(self.rows, 'published run')} of such programs on {', '.join(self.gpus)}"
        words = f"{runs} were predicted with a median error of {self.median:.1%}, 95 % of them within {self.most:.1%}"
        if not self.missing:
            return words
        more = f" and {len(self.missing) - 3} more operators" if len(self.missing) > 3 else ""
        return f"{words}; none of them has {', '.join(self.missing[:3])}{more}"


@dataclass(frozen=True)
class Peak:
    """The moment when most is alive.

    module, operator: what allocated last: the path of the module, and the name of the operator or of autograd's node.
    alive: what is alive.
    is_bound: allocations of the phase are unknown, so the peak may be higher.
    """

    phase: str
    bytes: int
    module: str
    operator: str
    alive: list[Allocation]
    is_bound: bool

    def __repr__(self) -> str:
        where = place_words(self.phase, self.module, self.operator)
        size = f"{'at least ' if self.is_bound else ''}{format_bytes(self.bytes)}"
        names = ((allocation.name, allocation.bytes) for allocation in self.alive)
        return few_lines([f"The peak is {size}, {where}.", f"Alive then: {alive_words(names)}."])


@dataclass(frozen=True)
class Prediction:
    """The record that a measurement would give, and how its figures are known.

    Attributes:
        terms: field of the record -> its summands: name -> bytes.
    """

    case: Any = field(repr=False)  # Case, ModelCase or Step.
    place: Place
    record: Record
    terms: Terms
    trace: Trace | None = field(default=None, repr=False, compare=False)
    refused: Allocation | None = field(default=None, repr=False, compare=False)  # What there was no room for.
    # Published measurements of programs like this one on such a GPU. None for a CPU, or if nothing was traced.
    evidence: Evidence | None = field(default=None, repr=False, compare=False)
    # What the segments of a prediction that does not fit take without a limit.
    unlimited_segments: Callable[[Prediction], int | None] | None = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> Device:
        """The device that the prediction is for."""
        return self.place.for_device

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if unknown."""
        if self.record.status not in ("ok", "oom"):
            return None
        return self.record.status == "ok"

    @property
    def certainty(self) -> Certainty | None:
        """How the figures are known; None if there are none."""
        return self.record.certainty

    @property
    def exact(self) -> bool:
        """Whether every figure equals the measured one."""
        return self.record.exact

    @property
    def unknown(self) -> tuple[Doubt, ...]:
        """The doubts about allocations that are not known."""
        return tuple(doubt for doubt in self.record.doubts if doubt.kind == UNKNOWN)

    @property
    def bounds(self) -> frozenset[str]:
        """The fields that are not known to the byte.

        They are lower bounds; upper bounds if the number of concurrent threads is unknown; estimates if sizes or
        branches that depend on values are assumed.
        """
        return frozenset(self.record.bounds)

    @functools.cached_property
    def segments_bytes(self) -> int | None:
        """What the segments of the GPU's allocator take; without a limit, if it does not fit. None if unknown."""
        if self.record.status == "ok" or self.record.reserved_bytes is None or self.unlimited_segments is None:
            return self.record.reserved_bytes
        return self.unlimited_segments(self)

    @property
    def timeline(self) -> list[tuple[str, int]]:
        """(phase, bytes alive) after each allocation and release."""
        if self.trace is None:
            return []
        phases = [(last, name) for name, (_, last) in self.trace.phases.items()]
        return list(timeline_of(self.trace.log.events, sorted(phases)))

    @property
    def peak(self) -> Peak | None:
        """The moment of all phases when most is alive, whether it fits or not. None if nothing was traced."""
        if self.trace is None:
            return None
        sums = [size for _, size in self.timeline]
        top = max(sums, default=0)
        event = len(sums) - sums[::-1].index(top) if sums else 0
        last = self.trace.log.events[event - 1][0] if sums else Allocation("", 0, 0)
        phase = self.trace.phase_of(event)
        is_bound = not {phase, ANY_PHASE}.isdisjoint(self.trace.unknown)
        return Peak(phase, top, last.module, last.name, self.trace.log.alive(event), is_bound)

    @property
    def by_module(self) -> dict[str, dict[str, int]]:
        """Path of a module -> its bytes "saved" for backward, and those alive at the highest "peak".

        The path "" has what belongs to no module.
        """
        peak = self.peak
        if self.trace is None or peak is None:
            return {}
        found: dict[str, dict[str, int]] = {}
        for kind, allocations in {"saved": self.trace.saved, "peak": peak.alive}.items():
            for allocation in allocations:
                sums = found.setdefault(allocation.module, {"saved": 0, "peak": 0})
                sums[kind] += allocation.bytes
        return found

    @functools.cached_property
    def layers(self) -> Layers:
        """The modules as a tree: shapes of outputs, parameters, bytes kept for backward, and alive at the peak."""
        peak, name = self.peak, self.record.operator or ""
        return Layers() if self.trace is None or peak is None else layers_of(self.trace, peak, name)

    @property
    def buffers(self) -> dict[str, int]:
        """Buffer of a collective -> its bytes at the peak; empty unless the model is split over processes."""
        sums: Counter[str] = Counter()
        for allocation in self.peak.alive if self.peak is not None else ():
            if allocation.name in BUFFER_NAMES:
                sums[allocation.name] += allocation.bytes
        return dict(sums)

    def __repr__(self) -> str:
        return few_lines(self.sentences())

    def sentences(self) -> list[str]:
        """Whether it fits, how that is known, and what is alive at the peak."""
        words = [verdict(self), certainty(self)]
        if alive := self.alive_at_peak():
            words.append(f"Alive at the peak: {alive_words(alive)}.")
        return list(filter(None, words))

    def alive_at_peak(self) -> list[tuple[str, int]]:
        """(name, bytes) of what is alive at the peak. Of a model, sums by operator."""
        if self.trace is None or (peak := self.peak) is None:
            return []
        if not self.trace.modules:
            return [(one.name, one.bytes) for one in peak.alive]
        sums = Counter[str]()
        for name, one in self.trace.named_by_operator(peak.alive):
            sums[name] += one.bytes
        return sums.most_common()

    def _repr_html_(self) -> str:
        words = [verdict(self), certainty(self)]
        parts = [self.layers.to_html()] if len(self.layers) > 1 else []
        return self.record.to_html(words=words, steps=self.timeline, parts=parts)

    @property
    def known_terms(self) -> Terms:
        """The terms of the fields that are not bounds."""
        return {name: terms for name, terms in self.terms.items() if name not in self.bounds}


def timeline_of(events: list[tuple[Allocation, bool]], phases: list[tuple[int, str]]) -> Iterator[tuple[str, int]]:
    alive, index = 0, 0
    for number, (allocation, taken) in enumerate(events, 1):
        alive += allocation.bytes if taken else -allocation.bytes
        while index < len(phases) - 1 and number > phases[index][0]:
            index += 1
        yield phases[index][1] if phases else "", alive


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the predictions for it and for the next size.

    Attributes:
        size: 0 if nothing fits.
        step: sizes are its multiples.
        at: the prediction at that size; None if nothing fits.
        beyond: the prediction at the next size, which does not fit; None if every size that was allowed fits.
        tried: the number of sizes that were predicted.
    """

    size: int
    step: int
    at: Prediction | None
    beyond: Prediction | None
    tried: int

    def __repr__(self) -> str:
        return few_lines([largest_words("size", self.size, self.step, self.at, self.beyond)])


@dataclass(frozen=True, repr=False)
class Capacity(Largest):
    """The largest size of one axis at which a case fits, and why the next size does not.

    Attributes:
        case: the case at that size, or at the smallest size if none fits.
        gaps: smaller sizes that were predicted and do not fit.
    """

    axis: str
    case: Case
    device: Device
    gaps: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return few_lines([largest_words(size_words(self.axis, self.case), self.size, self.step, self.at, self.beyond)])

    @property
    def largest(self) -> int:
        """The size."""
        return self.size

    @property
    def next_size(self) -> int:
        return self.size + self.step

    @property
    def unpredicted(self) -> str | None:
        """The reason if the case cannot be predicted."""
        if self.at is None and self.beyond is not None and self.beyond.record.status != "oom":
            return self.beyond.record.reason or self.beyond.record.status
        return None

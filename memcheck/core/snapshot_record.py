"""What a snapshot of torch's CUDA allocator says about a device. Sizes are bytes; unknown is None.

An event is a place in device_traces[device] of the snapshot, counted from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memcheck.core.script_record import Alive, Course, Growth, Origin


@dataclass(frozen=True)
class Replay:
    """How true the model of the allocator is: the recorded requests in it, given the recorded segment addresses.

    exact: every address, segment and reserved byte agrees.
    """

    allocations: int
    at_recorded_address: int
    peak_reserved_bytes: int
    exact: bool
    reason: str | None = None  # Why there was no replay.


@dataclass(frozen=True)
class Holes:
    """Free memory inside of the segments of a pool."""

    pool: str  # "large", "small", and its stream if it is not the default one.
    reserved_bytes: int
    free_bytes: int
    largest_bytes: int
    holes: int


@dataclass(frozen=True)
class Moment:
    """The state of the device after an event."""

    event: int  # -1: before the first.
    seconds: float | None  # Since the first event.
    allocated_bytes: int
    reserved_bytes: int
    place: Origin | None  # Of the event.
    alive: list[Alive]  # Adds up to allocated_bytes.
    sizes: list[tuple[int, int, int]]  # Least bytes of a block, bytes of all blocks from there on, their number.
    holes: list[Holes]


@dataclass(frozen=True)
class OutOfMemory:
    """A request without room. free_bytes: of the GPU then, as the driver told torch."""

    requested_bytes: int
    free_bytes: int
    moment: Moment


@dataclass(frozen=True)
class WhatIf:
    """The recorded requests under other settings or on another GPU.

    failing_event: of the first request without room. limit_bytes: what the process could reserve; None: unlimited.
    """

    settings: str
    limit_bytes: int | None
    fits: bool
    peak_reserved_bytes: int
    failing_event: int | None
    failing_place: Origin | None = None


@dataclass
class SnapshotRecord:
    """A device of a snapshot: its peak, why memory ran out, and what would have fitted."""

    file: str
    device: int
    settings: str  # As in PYTORCH_ALLOC_CONF; empty: the defaults.
    events: int
    allocations: int
    seconds: float | None
    before: tuple[int, int]  # Bytes and blocks in use before the first event.
    peak: Moment  # Of allocated bytes.
    peak_reserved_bytes: int
    reserved_bytes: int  # At the end.
    allocated_bytes: int  # At the end.
    oom: OutOfMemory | None  # The last one.
    ooms: int
    replay: Replay
    steps: int
    growing: list[Growth]
    what_if: list[WhatIf]
    course: Course
    source: str | None = None  # Where the file says it is from.
    gpu: tuple[str, int] | None = None  # Its name and bytes, if the caller says it.
    doubts: list[str] = field(default_factory=list)

    @property
    def moment(self) -> Moment:
        """When memory ran out; in any other snapshot, the peak."""
        return self.peak if self.oom is None else self.oom.moment

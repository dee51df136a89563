"""The timeline of a run: its allocations and frees, by what they hold, and sums of them over time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memcheck.core.record import Record
from memcheck.core.script_record import Course, Origin, Point

OTHER = "other"
FREED = "freed, from before"
LEFT = "left by the first step"


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


@dataclass
class Timeline:
    """The allocations of a run over time. Events are numbered from 1; step 0 is before the first event.

    blocks: every allocation in order; the inputs and parameters first.
    phases: (name, first step, last step). The last step of the forward is the first of the backward.
    record: the record of the run, whose bytes were counted independently.
    """

    blocks: list[Allocation]
    phases: list[tuple[str, int, int]]
    record: Record

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
    def course(self) -> Course:
        """What was alive after each step, by Allocation.group and phase."""
        places: dict[Origin, int] = {}
        changes = [Counter[int]() for _ in self.steps]
        for block in self.blocks:
            place = places.setdefault(Origin(block.group, block.phase or "elsewhere"), len(places))
            changes[block.born][place] += block.bytes
            if block.died is not None:
                changes[block.died][place] -= block.bytes
        sizes, points = Counter[int](), list[Point]()
        for step, change in enumerate(changes):
            sizes.update(change)
            points.append(Point(step, None, [(place, sizes[place]) for place in change]))
        return Course(list(places), points)

    @cached_property
    def alive(self) -> list[int]:
        """Bytes alive after each step."""
        return self.course.sums

    @cached_property
    def peak(self) -> dict[str, int]:
        """For each phase, the first step with the highest sum."""
        return {name: max(range(first, last + 1), key=self.alive.__getitem__) for name, first, last in self.phases}

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

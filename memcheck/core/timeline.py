"""The timeline of a run: its allocations and frees, by what they hold, and sums of them over time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memcheck.core.record import Record

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

"""What a script needed: its peak, what was alive then, and its memory over time. Sizes are bytes; unknown is None."""

from __future__ import annotations

import json
import linecache
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memcheck.core.errors import UsageError
from memcheck.core.record import of_values

RUN = "run.json"  # The file of a record in a folder of results.

# Names of csrc/memory/peak_ledger.h's phases and kinds, in its order.
PHASES = ("elsewhere", "forward", "backward", "optimizer step")
KINDS = (None, "parameters", "buffers", "gradients", "optimizer state")
# The layers of the picture: each kind that has a name, then the rest by the phase that allocated it.
LAYERS = (*[kind for kind in KINDS if kind], *[f"from {phase}" for phase in PHASES])


@dataclass(frozen=True)
class Line:
    """A line of Python."""

    file: str
    number: int
    function: str
    text: str | None = field(default=None, compare=False)  # Its source when the script ended.

    def read(self) -> str | None:
        """Its source as the file has it now."""
        linecache.checkcache(self.file)
        return linecache.getline(self.file, self.number).strip() or None

    def __str__(self) -> str:
        """ "train.py:12 (main)"."""
        return f"{self.short} ({self.function})"

    @property
    def short(self) -> str:
        """The file and the number, with the path from the current folder, or the last three parts of any other."""
        path = Path(self.file)
        if path.is_relative_to(os.getcwd()):
            name = str(path.relative_to(os.getcwd()))
        else:
            name = "/".join(path.parts[-3:]) if len(path.parts) > 4 else str(path)
        return f"{name}:{self.number}"


@dataclass(frozen=True)
class Origin:
    """Where memory was allocated, and what it holds."""

    operator: str  # The operator or autograd node.
    phase: str  # One of PHASES.
    kind: str | None = None  # One of KINDS.
    module: str | None = None  # "GPT.layers.0.attention", or of parameters that no forward used yet "Linear".
    line: Line | None = None

    @property
    def layer(self) -> str:
        return self.kind or f"from {self.phase}"

    @property
    def where(self) -> str:
        """The line of Python; of what has none, such as most of a backward, the phase and the operator."""
        if self.line is not None:
            return str(self.line)
        return self.operator if self.phase == "elsewhere" else f"{self.phase}: {self.operator}"


@dataclass(frozen=True)
class Alive:
    """The blocks of one place that were alive at a moment."""

    place: Origin
    bytes: int
    blocks: int


@dataclass(frozen=True)
class Moment:
    """An allocation, and the sum that was alive after it."""

    bytes: int
    event: int  # Counted from 1.
    seconds: float  # Since the script began.
    step: int  # The optimizer step that it belongs to, from 1.
    place: Origin


@dataclass(frozen=True)
class Refusal:
    """An allocation that failed, and what was alive."""

    requested_bytes: int
    moment: Moment
    alive: list[Alive]


@dataclass(frozen=True)
class Refused:
    """The allocations of one place that failed."""

    place: Origin
    count: int


@dataclass(frozen=True)
class Point:
    """The highest sum of some events in a row."""

    event: int
    seconds: float | None
    changes: list[tuple[int, int]]  # Places whose bytes differ from those of the point before, and their bytes.


@dataclass(frozen=True)
class Course:
    """What was alive over time, by place."""

    places: list[Origin]
    points: list[Point]
    stacks: list[tuple[Line, ...]] = field(default_factory=list)  # Calls of Python to each place; empty: not known.
    reserved: list[int] = field(default_factory=list)  # By the allocator at each point; empty: not known.

    def states(self) -> list[list[int]]:
        """The bytes of each place at each point."""
        sizes, states = [0] * len(self.places), []
        for point in self.points:
            for place, size in point.changes:
                sizes[place] = size
            states.append(sizes.copy())
        return states

    def by(self, name_of: Callable[[Origin], str]) -> dict[str, list[int]]:
        """The bytes of all places of a name at each point. `name_of` gives a place its name, such as its module."""
        names = [name_of(place) for place in self.places]
        sums: dict[str, list[int]] = {name: [] for name in names}
        sizes, now = [0] * len(names), dict.fromkeys(sums, 0)
        for point in self.points:
            for place, size in point.changes:
                now[names[place]] += size - sizes[place]
                sizes[place] = size
            for name, levels in sums.items():
                levels.append(now[name])
        return sums

    @property
    def sums(self) -> list[int]:
        """The bytes of all places at each point."""
        return self.by(lambda _: "")[""] if self.places else [0] * len(self.points)

    @classmethod
    def of(
        cls,
        origins: Sequence[Origin],
        rows: Iterable[tuple[int, float | None, Sequence[int]]],
        stacks: Sequence[tuple[Line, ...]] = (),
    ) -> Course:
        """The course of `rows`: event, seconds, bytes of each origin. Equal `origins` and `stacks` are one place."""
        places: dict[tuple[Origin, tuple[Line, ...]], int] = {}
        pairs = zip(origins, stacks or [()] * len(origins), strict=True)
        numbers = [places.setdefault(pair, len(places)) for pair in pairs]
        before, points = [0] * len(places), list[Point]()
        for event, seconds, sizes in rows:
            now = [0] * len(places)
            for number, size in zip(numbers, sizes, strict=False):
                now[number] += size
            changes = [(number, size) for number, size in enumerate(now) if size != before[number]]
            points.append(Point(event, seconds, changes))
            before = now
        return cls([origin for origin, _ in places], points, [stack for _, stack in places] if stacks else [])


@dataclass(frozen=True)
class Growth:
    """A line whose bytes grow from step to step."""

    place: Origin
    bytes_per_step: int
    blocks_per_step: float
    bytes: int  # At the last step's end.
    since: int | None = None  # The step from which on they grow; None: all of them.


@dataclass(frozen=True)
class StepEnd:
    """What is alive on the device at the end of a step, and the memory of the process."""

    step: int  # From 1.
    bytes: int
    process_bytes: int | None


@dataclass(frozen=True)
class Process:
    """The resident memory of the process: its tensors on the CPU and all else. None where it cannot be read."""

    begin_bytes: int | None = None  # When the script began.
    peak_bytes: int | None = None
    end_bytes: int | None = None
    growth_per_step: int = 0  # Beside the tensors on the CPU; 0 if it does not grow.


@dataclass(frozen=True)
class LineDoubt:
    """What a simulated GPU answered a line of Python and does not know, such as a number, and how often."""

    what: str
    file: str
    line: int
    count: int


@dataclass(frozen=True)
class Unwritten:
    """A file that was not written, as its tensors have no values on a simulated GPU."""

    path: str
    bytes: int  # Of these tensors.


@dataclass
class ScriptRecord:
    command: list[str]  # SCRIPT ARGS or -m MODULE ARGS.
    device: str  # "cpu" or "cuda:0": whose memory this is.
    limit_bytes: int | None
    peak: Moment
    alive: list[Alive]  # At the peak; they add up to it.
    phase_peaks: dict[str, int]  # The highest sum after an allocation in each phase.
    left_bytes: int  # Alive at the end of the script.
    other_peaks: dict[str, int]  # Of the other devices that the script used.
    events: int  # Allocations and frees.
    steps: int  # Optimizer steps.
    seconds: float
    refusals: int
    refusal: Refusal | None  # The last one.
    least_bytes: int  # Smaller allocations have no line.
    exit_code: int
    error: str | None  # "ValueError: ..." of a script that failed.
    ran_out: bool  # That error says that memory ran out.
    doubts: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    snapshot: str | None = None  # The file with torch's memory snapshot.
    growing: list[Growth] = field(default_factory=list)  # Largest first.
    process: Process = Process()
    step_name: str = "step"  # What growth is compared by: "step" of the optimizer, or "call of GPT".
    step_ends: list[StepEnd] = field(default_factory=list)  # Some of them, evenly spaced.
    course: Course = field(default_factory=lambda: Course([], []))
    refused: list[Refused] = field(default_factory=list)  # On a GPU.
    reserved_bytes: int | None = None  # The most that the allocator of a GPU reserved.
    simulated: bool = False  # The GPU is not there.
    device_name: str | None = None  # Of a simulated one, as are the fields below.
    usable_bytes: int | None = None  # What torch's allocator could get.
    ended: str | None = None  # Why memcheck ended the script.
    allocated_bytes: int | None = None  # The peak of blocks, as torch.cuda.max_memory_allocated() says.
    unwritten: list[Unwritten] = field(default_factory=list)
    line_doubts: list[LineDoubt] = field(default_factory=list)
    gpus: int = 1  # Of the simulated machine.
    rank: int | None = None  # Of a rank of torchrun's.
    ranks: int | None = None  # Their number.
    other_reserved: dict[str, int] = field(default_factory=dict)  # As other_peaks, by the allocators of GPUs.
    children: int = 0  # Processes that the script started by multiprocessing, whose tensors are not counted.
    children_bytes: int | None = None  # The resident memory of the largest one that has ended.

    @classmethod
    def read(cls, path: Path) -> ScriptRecord:
        """The record of a file that memcheck run wrote. UsageError: this version cannot read it."""
        try:
            return of_values(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"{path} is no report of memcheck run that this version reads: {why}") from None

    @property
    def device_words(self) -> str:
        """ "cpu", "cuda:0", "a simulated RTX-4090", or "cuda:1 of 4 simulated RTX-4090"."""
        if not self.simulated:
            return self.device
        several = self.gpus > 1 and self.rank is None
        return (
            f"{self.device} of {self.gpus} simulated {self.device_name}"
            if several
            else f"a simulated {self.device_name}"
        )

    @property
    def growth_per_step(self) -> int:
        return sum(growth.bytes_per_step for growth in self.growing)

    @property
    def alive_then(self) -> list[Alive]:
        """Blocks alive when memory ran out; for any other script, at the peak."""
        return self.refusal.alive if self.ran_out and self.refusal is not None else self.alive


def is_run(path: Path) -> bool:
    """Whether the file is a record of memcheck run, which begins with the command."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"command"' in file.read(64)

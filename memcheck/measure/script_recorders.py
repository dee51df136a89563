"""Recorders of the events of a script: of the CPU's allocator, and of CUDA's memory history."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from memcheck._extension import extension
from memcheck.core.script_record import KINDS, Line
from memcheck.measure.allocation_events import (
    NODE,
    cuda_memory_history,
    restart_cuda_memory_history,
    stack_of,
)
from memcheck.measure.tracker import cuda_refusal_listeners

# Smaller allocations are counted, but the line of Python is not looked up for each of them.
LEAST_BYTES = 4096
PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE = range(1, len(KINDS))
MEMCHECK, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
WATCHING = "watching the memory of a script"
# Events that change what CUDA's allocator has reserved.
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Mark(NamedTuple):
    """The kind and module of the block at an address. The module is a number, or that of the block at `like`."""

    address: int
    kind: int
    module: int | None = None
    like: int | None = None


class Recorder(Protocol):
    """Fills a ledger from its construction to close()."""

    ledger: Any  # A _C.PeakLedger.
    snapshot: dict[str, Any] | None  # After close(): torch's memory snapshot, of CUDA.
    reserved_bytes: int | None  # See CudaRecorder.
    refused: Counter[tuple[int, ...]]

    def set_module(self, module: int) -> int: ...  # The number of the module whose forward runs; returns the last one.
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def mark(self, marks: Iterable[Mark]) -> None: ...
    def stacks(self) -> Sequence[tuple[str, ...]]: ...  # Operators of each path.
    def lines(self) -> Sequence[Line | None]: ...
    def counts(self) -> bytes: ...  # See PeakLedger.counts().
    # The same and its sites, of any thread; on CUDA as of the last step.
    def counts_so_far(self) -> bytes: ...
    def sites_so_far(self) -> list[tuple[int, ...]]: ...
    def close(self) -> None: ...


class CpuRecorder:
    """Records the tracking allocator, which must be installed."""

    snapshot: dict[str, Any] | None = None
    reserved_bytes: int | None = None

    def __init__(self) -> None:
        self.refused: Counter[tuple[int, ...]] = Counter()
        skipped = [f"{TORCH}{os.sep}", f"{MEMCHECK}{os.sep}", "<", *inductor_folders()]
        self._extension = extension(WATCHING)
        self._extension.set_python_lines(skipped, torch.autograd.graph._engine_run_backward.__code__)
        self.ledger = self._extension.PeakLedger(LEAST_BYTES)
        self._timeline = self._extension.AllocationTimeline(self.ledger, LEAST_BYTES)
        self.set_module = self._timeline.set_module
        self.begin_step = self._timeline.begin_step
        self.end_step = self._timeline.end_step
        self.counts = self.counts_so_far = self._timeline.counts

    def sites_so_far(self) -> list[tuple[int, ...]]:
        sites: list[tuple[int, ...]] = self._timeline.sites()
        return sites

    def mark(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            if mark.like is None:
                self._timeline.set_kind(mark.address, mark.kind, mark.module)
            else:
                self._timeline.set_kind_like(mark.address, mark.kind, mark.like)

    def stacks(self) -> list[tuple[str, ...]]:
        stacks: list[tuple[str, ...]] = [()]
        for outer, name in self._timeline.paths()[1:]:
            stacks.append((*stacks[outer], name))
        return stacks

    def lines(self) -> list[Line | None]:
        return [None, *(Line(*line) for line in self._extension.python_lines()[1:])]

    def close(self) -> None:
        self._timeline.close()


def inductor_folders() -> list[str]:
    """Where torch.compile writes the code that it generates."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return [os.path.join(tempfile.gettempdir(), "torchinductor_"), *([named] if named else [])]


class Interner:
    """Things in the order of their first use. Number 0 is `nothing`."""

    def __init__(self, nothing: Any) -> None:
        self.things = [nothing]
        self._numbers: dict[Hashable, int] = {}

    def of(self, thing: Hashable) -> int:
        number = self._numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


class ByIdentity:
    """Values of objects that may have no hash. An entry ends with its object."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], int]] = {}

    def get(self, thing: Any) -> int | None:
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None else None

    def set(self, thing: Any, value: int) -> None:
        key = id(thing)
        self._entries[key] = (weakref.ref(thing, lambda _: self._entries.pop(key, None)), value)


class SharedStacks:
    """Stacks of frames in which equal ones are one object, so that a long history stays small."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._stacks: dict[tuple[int, ...], list[dict[str, Any]]] = {}

    def of(self, stack: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        frames = [self._frames.setdefault((frame["filename"], frame["line"], frame["name"]), frame) for frame in stack]
        return self._stacks.setdefault(tuple(map(id, frames)), frames)


class CudaRecorder:
    """Records torch's CUDA caching allocator, in requested bytes: folds its history into the ledger at every step.

    A block's module is known where a forward allocated it, as the history has no forward lines of autograd nodes. It
    ends a recording of the user's.

    snapshot: after close(), what torch.cuda.memory._snapshot() returns. With keep_history it has every event; else
        those since the last fold, up to the last request that had no room if no step ended after it.
    reserved_bytes: the most that the allocator had in segments. A script may reset torch's own peak.
    refused: site -> requests that had no room.
    """

    # Modules that are entered before the history is folded, in a script without optimizer steps.
    MOST_MODULES = 10_000

    def __init__(self, device: int, *, keep_history: bool = False) -> None:
        self.ledger = extension(WATCHING).PeakLedger(LEAST_BYTES)
        self.snapshot: dict[str, Any] | None = None
        self._device = device
        self._kept: dict[int, list[dict[str, Any]]] | None = defaultdict(list) if keep_history else None
        self._shared = SharedStacks()
        self._paths, self._lines = Interner(()), Interner(None)
        self._own = threading.local()  # Like torch's metadata.
        self._entered = 0
        self._reserved: int = torch.cuda.memory_reserved(device)
        self.reserved_bytes: int | None = self._reserved
        self.refused: Counter[tuple[int, ...]] = Counter()
        self._allocations = self._highest = 0
        self._start: float | None = None
        self._history = ExitStack()
        self._history.enter_context(cuda_memory_history())
        cuda_refusal_listeners.append(self._note_refusal)

    def set_module(self, module: int) -> int:
        outer = int(getattr(self._own, "module", 0))
        self._own.module = module
        self._tell()
        self._entered += 1
        if self._entered > self.MOST_MODULES:
            self.fold()
        return outer

    def begin_step(self) -> None:
        self._own.in_step = True
        self._tell()

    def end_step(self) -> None:
        self._own.in_step = False
        self._tell()
        self.fold()
        self.snapshot = None
        self.ledger.end_step()

    def mark(self, marks: Iterable[Mark]) -> None:
        self.fold()
        for mark in marks:
            if mark.like is None:
                self.ledger.set_kind(mark.address, mark.kind, mark.module)
            else:
                self.ledger.set_kind_like(mark.address, mark.kind, mark.like)

    def stacks(self) -> Sequence[tuple[str, ...]]:
        return self._paths.things

    def lines(self) -> Sequence[Line | None]:
        return self._lines.things

    def counts(self) -> bytes:
        self.fold()
        return self.counts_so_far()

    def counts_so_far(self) -> bytes:
        counts: bytes = self.ledger.counts()
        return counts

    def sites_so_far(self) -> list[tuple[int, ...]]:
        sites: list[tuple[int, ...]] = self.ledger.sites()
        return sites

    def allocated(self) -> tuple[int, int, int]:
        """The number of allocations since the last call, the bytes alive, and the most that were in between."""
        level = self.ledger.level
        figures = self._allocations, level, max(self._highest, level)
        self._allocations, self._highest = 0, level
        return figures

    def close(self) -> None:
        cuda_refusal_listeners.remove(self._note_refusal)
        with self._history:  # torch discards the history when the recording ends.
            torch.cuda.memory._set_memory_metadata("")
            last = self.fold()
        if self._kept is not None:
            traces = [self._kept[device] for device in range(len(last["device_traces"]))]
            self.snapshot = {**last, "device_traces": traces}
        elif self.snapshot is None:
            self.snapshot = last

    def fold(self) -> dict[str, Any]:
        """Moves the history into the ledger, and begins it anew. Returns torch's snapshot with this history."""
        self._entered = 0
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        restart_cuda_memory_history()
        for entry in snapshot["device_traces"][self._device]:
            self._note(entry)
        if self._kept is not None:
            for device, entries in enumerate(snapshot["device_traces"]):
                for entry in entries:
                    if "frames" in entry:
                        entry["frames"] = self._shared.of(entry["frames"])
                self._kept[device] += entries
        return snapshot

    def _note_refusal(self, _device: int, _requested: int) -> None:
        """Takes the snapshot before the exception frees tensors: only blocks in use have lines in its segments."""
        if self._kept is None:
            # An error here would take the place of the OutOfMemoryError, and close() takes a snapshot anyway.
            with suppress(Exception):
                self.snapshot = torch.cuda.memory._snapshot()

    def _tell(self) -> None:
        """Attaches the module to the allocations that follow."""
        module, in_step = getattr(self._own, "module", 0), getattr(self._own, "in_step", False)
        torch.cuda.memory._set_memory_metadata(f"memcheck {module} {int(in_step)}")

    def _note(self, entry: dict[str, Any]) -> None:
        microseconds = entry.get("time_us", 0)
        self._start = microseconds if self._start is None else self._start
        self.ledger.set_seconds((microseconds - self._start) / 1e6)
        if entry["action"] == "free_completed":
            self.ledger.release(entry["addr"], entry["size"])
        elif entry["action"] in SEGMENTS:
            self._reserved += SEGMENTS[entry["action"]] * entry["size"]
            self.reserved_bytes = max(self.reserved_bytes or 0, self._reserved)
        elif entry["action"] in ("alloc", "oom"):
            frames = entry.get("frames", ())
            stack = stack_of(frames)
            told = re.match(r"memcheck (\d+) (\d)", entry.get("user_metadata") or "")
            module, in_step = map(int, told.groups()) if told else (0, 0)
            kind = GRADIENT if any("AccumulateGrad" in name for name in stack) else 0
            phase = 2 if any(name.startswith(NODE) for name in stack) else 1 if module else 3 * in_step
            place = (self._paths.of(stack), self._lines.of(line_among(frames)), module, phase, kind)
            if entry["action"] == "oom":
                self.refused[place] += 1
                self.ledger.refuse(entry["size"], *place)
            else:
                self.ledger.allocate(entry["addr"], entry["size"], *place)
                self._allocations += 1
                self._highest = max(self._highest, self.ledger.level)


def line_among(frames: Iterable[dict[str, Any]]) -> Line | None:
    """The innermost line of Python that is neither torch's nor memcheck's."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and not file.startswith((str(TORCH), str(MEMCHECK))):
            return Line(file, frame["line"], frame["name"])
    return None

"""Records allocations and frees, each with the operators that were running: of the CPU's allocator and of CUDA's."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from memcheck._extension import extension
from memcheck.core.script_record import KINDS, Line
from memcheck.measure.tracker import cuda_refusal_listeners

# Smaller allocations are counted, but the line of Python is not looked up for each of them.
LEAST_BYTES = 4096
PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE = range(1, len(KINDS))
MEMCHECK, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
# Events that change what CUDA's allocator has reserved.
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# The autograd engine's name for the evaluation of a node; torch.profiler uses it as well.
NODE = "autograd::engine::evaluate_function: "
# Operators that only allocate. The operator that called them is named instead.
FACTORIES = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted|_memory_format)?|aten::resize_(as_)?")
# The name of an allocation outside of any operator: torch turns a Python number into a tensor.
NOWHERE = "no operator"


class AllocationEvent(NamedTuple):
    """An allocation, or a free if bytes are negative."""

    address: int
    bytes: int
    stack: tuple[str, ...]  # Operators and autograd nodes, outermost first.
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Mark(NamedTuple):
    """The kind and module of the block at an address. The module is a number, or that of the block at `like`."""

    address: int
    kind: int
    module: int | None = None
    like: int | None = None


class Recorder(Protocol):
    """Fills a ledger from its construction to close(), or keeps every event."""

    ledger: Any  # A _C.PeakLedger; on the CPU None if every event is kept.
    snapshot: dict[str, Any] | None  # After close(): torch's memory snapshot, of CUDA.
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
    def count(self) -> int: ...  # Of events so far, if every one is kept.
    def events(self) -> list[AllocationEvent]: ...  # The same after close().


def open_recorder(device: torch.device, *, keep_history: bool = False, all_devices: bool = False) -> Recorder:
    """Begins a recording of the device. keep_history: every event."""
    if device.type == "cuda":
        return CudaRecorder(device.index, keep_history=keep_history, all_devices=all_devices)
    return CpuRecorder(keep_history=keep_history)


def allocated_by(stack: Sequence[str]) -> str:
    """The innermost operator that does more than allocate; inside a backward, the autograd node."""
    nodes = [name.removeprefix(NODE) for name in stack if name.startswith(NODE)]
    if nodes and "CppNode<" not in nodes[-1]:
        return nodes[-1].removeprefix("torch::autograd::")
    operators = [name for name in stack if not FACTORIES.fullmatch(name)] or stack
    return operators[-1] if operators else NOWHERE


class CpuRecorder:
    """Records the tracking allocator, which must be installed."""

    snapshot: dict[str, Any] | None = None

    def __init__(self, *, keep_history: bool = False) -> None:
        self.refused: Counter[tuple[int, ...]] = Counter()
        self._extension = extension("recording memory on the CPU")
        if keep_history:
            self.ledger, self._timeline = None, self._extension.AllocationTimeline()
        else:
            # Where torch.compile writes the code that it generates.
            inductor = os.path.join(tempfile.gettempdir(), "torchinductor_"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            skipped = [f"{TORCH}{os.sep}", f"{MEMCHECK}{os.sep}", copy.__file__, "<", *filter(None, inductor)]
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

    def count(self) -> int:
        return len(self._timeline)

    def events(self) -> list[AllocationEvent]:
        stacks = self.stacks()
        return [
            AllocationEvent(address, size, stacks[path], *(tensor or ()))
            for address, size, path, _module, _node, tensor in self._timeline.events()
        ]


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


class SharedStacks:
    """Stacks of frames in which equal ones are one object, so that a long history stays small."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._stacks: dict[tuple[int, ...], list[dict[str, Any]]] = {}

    def of(self, stack: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        frames = [self._frames.setdefault((frame["filename"], frame["line"], frame["name"]), frame) for frame in stack]
        return self._stacks.setdefault(tuple(map(id, frames)), frames)


def restart_cuda_memory_history() -> None:
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="all", clear_history=True)


@contextmanager
def cuda_memory_history() -> Iterator[None]:
    """Restarts torch's recording of its CUDA allocator, with tracebacks of allocations."""
    restart_cuda_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


class CudaRecorder:
    """Records torch's CUDA caching allocator, in requested bytes: folds its history into the ledger at every step.

    A block's module is known where a forward allocated it, as the history has no forward lines of autograd nodes. It
    ends a recording of the user's.

    snapshot: after close(), what torch.cuda.memory._snapshot() returns. With keep_history it has every event; else
        those since the last fold, up to the last request that had no room if no step ended after it.
    ledgers: device -> its own; `ledger` is that of the device which is watched.
    reserved_by_device: the most that each allocator had in segments. A script may reset torch's own peak.
    refused: site -> requests that had no room.
    """

    # Modules that are entered before the history is folded, in a script without optimizer steps.
    MOST_MODULES = 10_000

    def __init__(self, device: int, *, keep_history: bool = False, all_devices: bool = False) -> None:
        """all_devices: the others have ledgers, too."""
        devices = {device, *(range(torch.cuda.device_count()) if all_devices else ())}
        self.ledgers = {index: extension("recording memory on CUDA").PeakLedger(LEAST_BYTES) for index in devices}
        self.ledger = self.ledgers[device]
        self.snapshot: dict[str, Any] | None = None
        self._device = device
        self._kept: dict[int, list[dict[str, Any]]] | None = defaultdict(list) if keep_history else None
        self._shared = SharedStacks()
        self._paths, self._lines = Interner(()), Interner(None)
        self._own = threading.local()  # Like torch's metadata.
        self._entered = 0
        self._reserved = {index: torch.cuda.memory_reserved(index) for index in devices}
        self.reserved_by_device = dict(self._reserved)
        self._folding = threading.Lock()
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
        for ledger in self.ledgers.values():
            ledger.end_step()

    def mark(self, marks: Iterable[Mark]) -> None:
        self.fold()
        for mark in marks:
            for ledger in self.ledgers.values():  # Those that have no such block leave it out.
                if mark.like is None:
                    ledger.set_kind(mark.address, mark.kind, mark.module)
                else:
                    ledger.set_kind_like(mark.address, mark.kind, mark.like)

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

    def count(self) -> int:
        self.fold()
        return len(self._kept_events())

    def events(self) -> list[AllocationEvent]:
        return [
            AllocationEvent(entry["addr"], entry["size"], stack_of(entry.get("frames", ())))
            if entry["action"] == "alloc"
            else AllocationEvent(entry["addr"], -entry["size"], ())
            for entry in self._kept_events()
        ]

    def _kept_events(self) -> list[dict[str, Any]]:
        # A block counts as requested until its free is completed, as other streams may still read it.
        kept = self._kept[self._device] if self._kept is not None else []
        return [entry for entry in kept if entry["action"] in ("alloc", "free_completed")]

    def fold(self) -> dict[str, Any]:
        """Moves the history into the ledger, and begins it anew. Returns torch's snapshot with this history."""
        with self._folding:
            return self._fold()

    def _fold(self) -> dict[str, Any]:
        self._entered = 0
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        restart_cuda_memory_history()
        traces = [snapshot["device_traces"][device] for device in self.ledgers]
        if self._start is None and any(traces):
            self._start = min(trace[0].get("time_us", 0) for trace in traces if trace)
        for device, ledger in self.ledgers.items():
            for entry in snapshot["device_traces"][device]:
                self._note(entry, device, ledger)
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

    def _note(self, entry: dict[str, Any], device: int, ledger: Any) -> None:
        ledger.set_seconds((entry.get("time_us", 0) - (self._start or 0)) / 1e6)
        if entry["action"] == "free_completed":
            ledger.release(entry["addr"], entry["size"])
        elif entry["action"] in SEGMENTS:
            self._reserved[device] += SEGMENTS[entry["action"]] * entry["size"]
            self.reserved_by_device[device] = max(self.reserved_by_device[device], self._reserved[device])
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
                ledger.refuse(entry["size"], *place)
            else:
                ledger.allocate(entry["addr"], entry["size"], *place)
                self._allocations += 1
                if device == self._device:
                    self._highest = max(self._highest, ledger.level)


def stack_of(frames: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Operators and nodes of a C++ and Python traceback, innermost first; if it has none, the Python frame."""
    frames = list(frames)
    stack: list[str] = []
    for frame in reversed(frames):
        name = _known_name(frame["name"])
        if name is not None and stack[-1:] != [name]:
            stack.append(name)
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    return tuple(stack or [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in python[:1]])


def _known_name(function: str) -> str | None:
    if found := re.search(r"\bat::_ops::(\w+?)(?:_[A-Z]\w*)?::(?:call|redispatch)\b", function):
        return f"aten::{found[1]}"  # Without the overload's name, as in mul_Tensor.
    if found := re.search(r"(\w+Backward\d*|\bAccumulateGrad|\bCppNode<.*>)::apply\b", function):
        return NODE + found[1]
    return None


def line_among(frames: Iterable[dict[str, Any]]) -> Line | None:
    """The innermost line of Python that is neither torch's nor memcheck's, nor of copy.deepcopy."""
    for frame in frames:
        file = str(frame["filename"])
        is_python = file.endswith(".py") or ".ipynb cell " in file
        if is_python and not file.startswith((str(TORCH), str(MEMCHECK), copy.__file__)):
            return Line(file, frame["line"], frame["name"])
    return None

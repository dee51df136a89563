"""Records allocations and frees, each with the operators that were running."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from memcheck._extension import extension

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


class AllocationRecorder(Protocol):
    """Records events from its construction to close()."""

    def count(self) -> int: ...  # The number of events so far.
    def close(self) -> list[AllocationEvent]: ...


def open_recorder(device: torch.device) -> AllocationRecorder:
    """Begins a recording for the device."""
    return CudaRecorder(device.index) if device.type == "cuda" else CpuRecorder()


def allocated_by(stack: Sequence[str]) -> str:
    """The innermost operator that does more than allocate; inside a backward, the autograd node."""
    nodes = [name.removeprefix(NODE) for name in stack if name.startswith(NODE)]
    if nodes and "CppNode<" not in nodes[-1]:
        return nodes[-1].removeprefix("torch::autograd::")
    operators = [name for name in stack if not FACTORIES.fullmatch(name)] or stack
    return operators[-1] if operators else NOWHERE


class CpuRecorder:
    """Records the events of the tracking allocator, which must be installed."""

    def __init__(self) -> None:
        self._timeline = extension("recording memory on the CPU").AllocationTimeline()

    def count(self) -> int:
        return len(self._timeline)

    def close(self) -> list[AllocationEvent]:
        self._timeline.close()
        stacks: list[tuple[str, ...]] = [()]
        for outer, name in self._timeline.paths()[1:]:
            stacks.append((*stacks[outer], name))
        return [
            AllocationEvent(address, size, stacks[path], *(tensor or ()))
            for address, size, path, tensor in self._timeline.events()
        ]


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
    """Records the events of torch's CUDA caching allocator, in requested bytes. It ends a recording of the user's."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._history = ExitStack()
        self._history.enter_context(cuda_memory_history())

    def count(self) -> int:
        return sum(1 for _ in self._entries())

    def close(self) -> list[AllocationEvent]:
        with self._history:  # torch discards the events when the recording ends.
            entries = list(self._entries())
        return [
            AllocationEvent(entry["addr"], entry["size"], stack_of(entry.get("frames", ())))
            if entry["action"] == "alloc"
            else AllocationEvent(entry["addr"], -entry["size"], ())
            for entry in entries
        ]

    def _entries(self) -> Iterator[dict[str, Any]]:
        # A block counts as requested until its free is completed, as other streams may still read it.
        trace = torch.cuda.memory._snapshot()["device_traces"][self._device]
        return (entry for entry in trace if entry["action"] in ("alloc", "free_completed"))


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

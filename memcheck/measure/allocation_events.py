"""Allocations and frees as they come from an allocator, each with the stack of operators it happened in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from memcheck._extension import _C

# What the autograd engine calls the evaluation of a node, in torch.profiler's traces as well.
NODE = "autograd::engine::evaluate_function: "
# Operators that only allocate, for the one that asked them to.
FACTORIES = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted)?|aten::resize_(as_)?")
# Torch makes tensors of numbers by itself.
NOWHERE = "no operator"


class AllocationEvent(NamedTuple):
    """An allocation, or a free where bytes are negative."""

    address: int
    bytes: int
    stack: tuple[str, ...]  # of operators and autograd nodes, the outermost first
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class AllocationRecorder(Protocol):
    """Records from its construction to close()."""

    def count(self) -> int: ...  # of the events so far
    def close(self) -> list[AllocationEvent]: ...


def open_recorder(device: torch.device) -> AllocationRecorder:
    return CudaRecorder(device.index) if device.type == "cuda" else CpuRecorder()


def allocated_by(stack: Sequence[str]) -> str:
    """The innermost operator that does more than allocate; within a backward, the node that torch wrote."""
    nodes = [name.removeprefix(NODE) for name in stack if name.startswith(NODE)]
    if nodes and "CppNode<" not in nodes[-1]:
        return nodes[-1].removeprefix("torch::autograd::")
    operators = [name for name in stack if not FACTORIES.fullmatch(name)] or stack
    return operators[-1] if operators else NOWHERE


class CpuRecorder:
    """What the tracking allocator sees, which must be installed."""

    def __init__(self) -> None:
        self._timeline = _C.AllocationTimeline()

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


@contextmanager
def cuda_memory_history() -> Iterator[None]:
    """torch records, anew, what its CUDA allocator does, with tracebacks of allocations."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="all", clear_history=True)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


class CudaRecorder:
    """What torch's CUDA caching allocator traces, in bytes requested. A recording of the user's own is ended."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._history = ExitStack()
        self._history.enter_context(cuda_memory_history())

    def count(self) -> int:
        return sum(1 for _ in self._entries())

    def close(self) -> list[AllocationEvent]:
        with self._history:  # with its end torch forgets
            entries = list(self._entries())
        return [
            AllocationEvent(entry["addr"], entry["size"], stack_of(entry.get("frames", ())))
            if entry["action"] == "alloc"
            else AllocationEvent(entry["addr"], -entry["size"], ())
            for entry in entries
        ]

    def _entries(self) -> Iterator[dict[str, Any]]:
        # A block counts as requested until its free is completed: other streams may still be reading it.
        trace = torch.cuda.memory._snapshot()["device_traces"][self._device]
        return (entry for entry in trace if entry["action"] in ("alloc", "free_completed"))


def stack_of(frames: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Operators and nodes of a C++ and Python traceback, whose innermost frame comes first; else its Python frame."""
    frames = list(frames)
    stack: list[str] = []
    for frame in reversed(frames):
        name = _known_name(frame["name"])
        if name is not None and stack[-1:] != [name]:
            stack.append(name)
    python = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames if _is_python(frame)]
    return tuple(stack or python[:1])


def _known_name(function: str) -> str | None:
    if found := re.search(r"\bat::_ops::(\w+?)(?:_[A-Z]\w*)?::(?:call|redispatch)\b", function):
        return f"aten::{found[1]}"  # without the overload's name: mul_Tensor
    if found := re.search(r"(\w+Backward\d*|\bAccumulateGrad|\bCppNode<.*>)::apply\b", function):
        return NODE + found[1]
    return None


def _is_python(frame: dict[str, Any]) -> bool:
    return str(frame["filename"]).endswith(".py")

"""Autograd's engine: how a backward runs, whether the engine calls an operator, and which numbers its nodes keep.

Nodes keep the Python numbers that become tensors on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes

from memcheck.predict.known_contents import is_meta
from memcheck.predict.operators import facts_of
from memcheck.predict.operators.elementwise import NUMBERS
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

if TYPE_CHECKING:
    from memcheck.predict.allocation_log import LiveStorages


def run_backward(
    roots: Sequence[Tensor], incoming: Sequence[Tensor], keep_graph: bool = False, inputs: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Calls autograd's engine directly. Returns the gradients of the inputs; without any, leaves accumulate theirs.

    torch.autograd.backward would be a call under a function mode, which is inactive meanwhile; what a checkpoint runs
    again would then be without the mode.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    options = {"allow_unreachable": True, "accumulate_grad": not inputs}
    gradients: tuple[Tensor, ...] = engine.run_backward(
        tuple(roots), tuple(incoming), keep_graph, False, tuple(inputs), **options
    )
    return gradients


# Codes that call autograd's engine.
ENGINES = (run_backward.__code__, _engine_run_backward.__code__)


# Frames between an operator and a mode's __torch_dispatch__, including the latter.
AROUND_A_MODE = (
    *("memcheck/predict/allocation_mode.py", "memcheck/predict/engine.py"),
    *("torch/_dynamo/eval_frame.py", "torch/_compile.py", "_python_dispatch.py"),
)


def engine_calls() -> bool:
    """Whether the operator was called by autograd's engine without a Python function in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in ENGINES:
        if not frame.f_code.co_filename.endswith(AROUND_A_MODE):
            return False
        frame = frame.f_back
    return frame is not None


def running_node() -> str:
    """The name of the autograd node that runs; empty if none does."""
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements, in some order of the dimensions, fill the memory from the first to the last, each once."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return tensor.numel() < 2
        filled *= size
    return True


def use_counts(tensor: Tensor) -> tuple[int, int]:
    """Reference counts of the tensor and of its storage."""
    held: Any = tensor
    return held._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


NUMBER = "number"
OF_VIEWS = "torch::autograd::CopySlices"  # The node of an operator that writes into a view; its own node is inside.


class NumberHandle:
    """Its finalizer frees the number."""


class KeptNumbers:
    """Logs the numbers that the node of each operator keeps, when the node exists: after the operator has returned."""

    def __init__(self, storages: LiveStorages) -> None:
        self.storages = storages
        # What the last operator returned, or the tensor of which it changed a view; its numbers' bytes by name.
        self._last: tuple[weakref.ref[Tensor], dict[str, int]] | None = None

    def await_node(self, call: OperatorCall, numbers: dict[str, int], is_mutable: bool) -> None:
        """Remembers the numbers of an operator that is about to return."""
        base = call.outputs[0]._base if is_mutable else None
        if base is None or facts_of(call.name).keeps_number_of_a_view:
            self._last = weakref.ref(call.outputs[0] if base is None else base), numbers

    def note(self) -> None:
        """Allocates the numbers that the last operator's autograd node keeps."""
        noted, self._last = self._last, None
        changed = noted[0]() if noted is not None else None
        if noted is None or changed is None or changed.grad_fn is None:
            return
        for name, size in noted[1].items():
            if changed.grad_fn.name() == OF_VIEWS:
                self._allocate_hidden(changed.grad_fn, size)
            elif (kept := kept_number(changed.grad_fn, name)) is None:
                continue
            elif kept.untyped_storage() not in self.storages:  # It may be one that another node keeps.
                self.storages.keep(kept.untyped_storage(), self.storages.allocate(NUMBER, size))

    def _allocate_hidden(self, node: Any, size: int) -> None:
        """Allocates a number that the node keeps out of sight, until the node has run or is freed."""
        held = {NumberHandle()}
        weakref.finalize(next(iter(held)), self.storages.log.free, self.storages.allocate(NUMBER, size))
        node.register_hook(lambda *_: held.clear())  # The node owns this closure, and so the number.


def kept_bytes(numbers: dict[str, int]) -> int:
    """Bytes of those operands that are numbers which the running node keeps. A hook's numbers are its own."""
    node = torch._C._current_autograd_node() if numbers and engine_calls() else None
    if node is not None and node.name() == OF_VIEWS:
        return sum(numbers.values())
    return sum(size for name, size in numbers.items() if kept_number(node, name) is not None)


def kept_number(node: Any, name: str) -> Tensor | None:
    """The tensor of a number that the node keeps as its operand of that name."""
    with _disable_current_modes():
        kept = getattr(node, f"_saved_{name}", None)
    return kept if isinstance(kept, Tensor) and not is_meta(kept) else None


def numbers_for_tensors(func: Any, call: OperatorCall) -> dict[str, int]:
    """The operands that are Python numbers in place of tensors: the bytes of their tensors by name."""
    given = [(name, call.arguments[name]) for name in tensor_arguments_of(func)]
    return {name: NUMBERS[type(value)].itemsize for name, value in given if isinstance(value, int | float | complex)}


@functools.cache
def tensor_arguments_of(func: Any) -> tuple[str, ...]:
    """The names of the operator's arguments that are tensors by its schema."""
    arguments = func._schema.arguments
    return tuple(argument.name for argument in arguments if isinstance(argument.type, torch.TensorType))


def without_kept(parts: Iterable[Scratch | Unknown], kept: int) -> list[Scratch | Unknown]:
    """The parts without that many bytes of numbers, which rules and probes count as new."""
    found: list[Scratch | Unknown] = []
    for part in parts:
        if isinstance(part, Scratch) and kept:
            spared = min(kept, part.bytes)
            kept -= spared
            part = dataclasses.replace(part, bytes=part.bytes - spared)
        found.append(part)
    return found

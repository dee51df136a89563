"""Autograd's engine: how a backward is run, and whether the engine itself calls an operator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


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
    *("memcheck/predict/allocation_mode.py", "memcheck/predict/kept_numbers.py"),
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

"""Where memory was allocated, from the frames of a recorded traceback, innermost first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from memcheck.core.script_record import Line, Origin
from memcheck.measure.allocation_events import NODE, NOWHERE, allocated_by, stack_of

TORCH = re.compile(r"[/\\]torch[/\\](?!ests?[/\\])")
LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
STANDARD = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\]|^<(?!ipython|stdin|string)")
MODULES = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\](\w+)\.py$")
OPTIMIZERS = re.compile(r"[/\\]torch[/\\]optim[/\\]")
MOST_MODULES = 3  # Of a path of modules, the innermost.


def origin_of(frames: Sequence[dict[str, Any]]) -> Origin:
    """The operator, phase, kind, module and line of Python of an allocation."""
    python = [frame for frame in frames if is_python(str(frame["filename"]))]
    has_native = len(python) < len(frames)
    stack = stack_of(frames) if has_native else ()
    if len(stack) == 1 and ":" in stack[0] and not stack[0].startswith((NODE, "aten::")):
        stack = ()  # Of a traceback without operators, stack_of returns the Python frame.
    phase = phase_of(frames, python)
    return Origin(
        allocated_by(stack) if stack else NOWHERE, phase, kind_of(stack, python), module_of(python), line_of(python)
    )


def is_python(file: str) -> bool:
    return file.endswith(".py") or file.startswith(("<ipython", "<stdin", "<string"))


def phase_of(frames: Sequence[dict[str, Any]], python: Sequence[dict[str, Any]]) -> str:
    """One of memcheck.core.script_record.PHASES."""
    if any("autograd::Engine::" in frame["name"] or frame["name"] == "_engine_run_backward" for frame in frames):
        return "backward"
    files = [str(frame["filename"]) for frame in python]
    if any(OPTIMIZERS.search(file) for file in files):
        return "optimizer step"
    calls = (MODULES.search(file) and frame["name"] == "_call_impl" for file, frame in zip(files, python, strict=True))
    return "forward" if any(calls) else "elsewhere"


def kind_of(stack: Sequence[str], python: Sequence[dict[str, Any]]) -> str | None:
    """The kind of the memory, if the frames show it: one of memcheck.core.script_record.KINDS."""
    if any("AccumulateGrad" in name for name in stack):
        return "gradients"
    for frame in python:
        file = str(frame["filename"])
        if frame["name"] == "_init_group" and OPTIMIZERS.search(file):
            return "optimizer state"
        if frame["name"] in ("_apply", "reset_parameters") and MODULES.search(file):
            return "parameters"
    return None


def module_of(python: Sequence[dict[str, Any]]) -> str | None:
    """The path of the forward functions, such as "model.py:41 > nn.linear". None: outside of modules."""
    path = list(_forwards(python))
    return " > ".join(path[-MOST_MODULES:]) or None


def _forwards(python: Sequence[dict[str, Any]]) -> Iterator[str]:
    for frame in reversed(python):
        if frame["name"] != "forward":
            continue
        file = str(frame["filename"])
        found = MODULES.search(file)
        name = file.replace("\\", "/").rpartition("/")[2]
        yield f"nn.{found[1]}" if found else f"{name}:{frame['line']}"


def line_of(python: Sequence[dict[str, Any]]) -> Line | None:
    """The innermost line of the project or of a library's forward, else of any library, else of torch or Python."""
    found: dict[str, Any] | None = None
    for frame in python:
        file = str(frame["filename"])
        if TORCH.search(file) or (STANDARD.search(file) and not LIBRARIES.search(file)):
            continue
        if frame["name"] == "forward" or not LIBRARIES.search(file):
            found = frame
            break
        found = found or frame
    found = found or (python[0] if python else None)
    return None if found is None else Line(str(found["filename"]), found["line"], found["name"])

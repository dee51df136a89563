"""Reads the files of memory snapshots as plain data, and where memory was allocated. Nothing in a file is run."""

from __future__ import annotations

import gc
import gzip
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from memcheck.core.errors import UsageError
from memcheck.core.script_record import Line, Origin
from memcheck.measure.recorders import NODE, NOWHERE, allocated_by, stack_of

GZIP = b"\x1f\x8b"
# What a torn or foreign file makes the readers raise.
TORN = (
    *(pickle.UnpicklingError, EOFError, gzip.BadGzipFile, zlib.error, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, RecursionError, MemoryError, AssertionError),
)


def read_data(path: Path, progress: Callable[[int], object] | None = None) -> Any:
    """What a pickle or JSON file holds: numbers, texts, lists, tuples and dicts. Either may be compressed by gzip.

    progress: is called with the number of bytes of the file that were read since the last call.

    UsageError: the file cannot be read, is torn, is neither format, or holds objects of classes.
    """
    try:
        with path.open("rb") as file:
            return parsed(Watched(file, progress))
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise UsageError(f"{path} is no memory snapshot: {error}") from None
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except ForeignClassError as error:
        raise UsageError(f"{path} is no memory snapshot: it holds {error}, and only plain data is read") from None
    except TORN as error:
        words = str(error).partition("\n")[0][:100] or type(error).__name__
        raise UsageError(f"{path} is torn, or is no memory snapshot: {words}") from None


def parsed(file: Watched) -> Any:
    begin = file.peek(2)
    if begin.startswith(GZIP):
        unpacked = io.BufferedReader(gzip.GzipFile(fileobj=file))
        begin = unpacked.peek(1)
        return unpickled(unpacked) if begin[:1] == pickle.PROTO else json.load(unpacked)
    if begin[:1] == pickle.PROTO:
        return unpickled(file)
    return json.loads(file.read())


class ForeignClassError(Exception):
    """A pickle names a class or a function."""


class PlainUnpickler(pickle.Unpickler):
    """Refuses every class and every function, so that no code of a file runs."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ForeignClassError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ForeignClassError("objects outside of the file")


def unpickled(file: Any) -> Any:
    return PlainUnpickler(file).load()


class Watched(io.RawIOBase):
    """A file whose reading is told to `progress`."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], object] | None) -> None:
        self._file, self._progress = file, progress or (lambda size: None)

    def read(self, size: int | None = -1) -> bytes:
        return self._told(self._file.read(-1 if size is None else size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._told(self._file.readline(-1 if size is None else size))

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        return True

    def peek(self, size: int) -> bytes:
        return self._file.peek(size)[:size] if isinstance(self._file, io.BufferedReader) else b""

    def _told(self, data: bytes) -> bytes:
        self._progress(len(data))
        return data


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: it would visit the millions of objects of a large file again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


TORCH = re.compile(r"[/\\]torch[/\\](?!ests?[/\\])")
LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
STANDARD = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\]|^<(?!ipython|stdin|string)")
MODULES = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\](\w+)\.py$")
OPTIMIZERS = re.compile(r"[/\\]torch[/\\]optim[/\\]")
MOST_MODULES = 3  # Of a path of modules, the innermost.
MOST_CALLS = 40  # Of a stack, the innermost.


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


def calls_of(frames: Sequence[dict[str, Any]]) -> tuple[Line, ...]:
    """The lines of Python that call each other, outermost first, without torch's own and Python's."""
    python = [frame for frame in frames if is_python(str(frame["filename"]))]
    own = [frame for frame in python if not is_foreign(str(frame["filename"]))]
    calls = [Line(str(frame["filename"]), frame["line"], frame["name"]) for frame in own or python]
    return tuple(reversed(calls[:MOST_CALLS]))


def is_foreign(file: str) -> bool:
    """Whether the file is torch's or Python's."""
    return bool(TORCH.search(file) or (STANDARD.search(file) and not LIBRARIES.search(file)))


def line_of(python: Sequence[dict[str, Any]]) -> Line | None:
    """The innermost line of the project or of a library's forward, else of any library, else of torch or Python."""
    found: dict[str, Any] | None = None
    for frame in python:
        file = str(frame["filename"])
        if is_foreign(file):
            continue
        if frame["name"] == "forward" or not LIBRARIES.search(file):
            found = frame
            break
        found = found or frame
    found = found or (python[0] if python else None)
    return None if found is None else Line(str(found["filename"]), found["line"], found["name"])

"""Reads the files of memory snapshots as plain data. Nothing in a file is run."""

from __future__ import annotations

import gc
import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from memcheck.core.errors import UsageError

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

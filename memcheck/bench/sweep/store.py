"""Stores records in DIR/records.jsonl, one line per case, written as soon as the case is done.

DIR/models.jsonl, the records of whole models, is read here, too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.model_record import ModelRecord
from memcheck.core.record import Record

try:
    import fcntl
except ImportError:  # Windows
    WINDOWS: Any = importlib.import_module("msvcrt")
else:
    WINDOWS = None

R = TypeVar("R", bound=Record)
FILE = "records.jsonl"
MODELS = "models.jsonl"


class StoreError(MemcheckError):
    """A row could not be written. Earlier rows are intact."""


def read_records(folder: Path | str) -> list[Record]:
    """The newest record of each key, in order of the keys' first appearance. A line without a key counts as its own."""
    return list(read_rows(Path(folder)).values())


def read_results(folder: Path | str) -> list[Record]:
    """The records of operators, as read_records gives them, and then those of whole models, each a ModelRecord."""
    models = Path(folder) / MODELS
    if not models.exists():
        return read_records(folder)
    records = read_records(folder) if (Path(folder) / FILE).exists() else []
    return [*records, *read_lines(models, ModelRecord).values()]


def read_rows(folder: Path) -> dict[str, Record]:
    """The newest record of each key, by key. The file may be read while a sweep is writing it."""
    return read_lines(folder / FILE, Record)


def read_lines(path: Path, kind: type[R]) -> dict[str, R]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path.parent} holds no {path.name} that can be read: {error.strerror}") from None
    if data and not data.endswith(b"\n"):
        note(path, "its last line was left out: it was never finished")
    return dict(rows(data, path, kind))


def replace_row(folder: Path, key: str, record: Record) -> Path:
    """Writes the record in place of the one with that key, else as the last; all other lines stay as they are.

    Processes may do so in a folder at the same time. Returns the path of the file.
    """
    path = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    with locked(path):
        lines = whole_lines(path).splitlines(keepends=True)
        place = next((place for place, line in enumerate(lines) if key_of(line) == key), len(lines))
        lines[place : place + 1] = [line_of(key, record)]
        replace_lines(path, lines)
    return path


def replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Writes the lines in place of the file, which must be locked. A reader sees all of them or the old ones."""
    beside = path.with_suffix(".tmp")
    beside.write_bytes(b"".join(lines))
    beside.replace(path)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Waits until no other process writes the file, and keeps them waiting. It is created if needed.

    The system ends a lock with the process, however that ends. Windows replaces no open file; there the lock is of a
    file beside it.

    BlockingIOError: another process writes the file, and `wait` is False.
    """
    own = path
    if WINDOWS:
        path.touch()
        own = path.with_suffix(".lock")
    while True:
        with own.open("ab") as file:
            lock(file.fileno(), wait)
            # Another process may have replaced the file while this one waited for the lock.
            if os.path.samestat(os.fstat(file.fileno()), own.stat()):
                yield
                return


def lock(file: int, wait: bool) -> None:
    if not WINDOWS:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    os.lseek(file, 0, os.SEEK_SET)  # The lock begins at the position.
    while True:
        try:
            return WINDOWS.locking(file, WINDOWS.LK_NBLCK, 1)
        except PermissionError:
            if not wait:
                raise BlockingIOError from None
        time.sleep(0.1)


def line_of(key: str, record: Record) -> bytes:
    return json.dumps({"key": key, **json.loads(record.to_json())}).encode() + b"\n"


def key_of(line: bytes) -> object:
    """The key of a line; None if it has none or is no JSON."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values.get("key") if isinstance(values, dict) else None


class Store:
    """The rows of a folder, locked by one sweep at a time. A line is written completely and synced, or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.folder / FILE, wait=False))
                # Windows would write another end of line.
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
                self._file = os.open(self.folder / FILE, flags, 0o666)
            except BlockingIOError:
                raise UsageError(
                    f"--output {folder} is in use by another sweep: wait for it, or name another folder"
                ) from None
            except OSError as error:
                raise UsageError(f"--output {folder} cannot be written to: {error.strerror}") from None
            stack.callback(os.close, self._file)
            self.records = self._load()
            self._open = stack.pop_all()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def append(self, key: str, record: Record) -> None:
        line = line_of(key, record)
        end = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, end)  # Drop the partial line; truncating needs no space.
            raise StoreError(f"{self.folder / FILE} takes no more rows: {error.strerror}") from None
        self.records[key] = record

    def _load(self) -> dict[str, Record]:
        path = self.folder / FILE
        records = dict(rows(whole_lines(path), path, Record))
        if any(key.startswith("line ") for key in records):
            raise UsageError(f"--output {self.folder} holds records that no sweep wrote: name another folder")
        return records


def whole_lines(path: Path) -> bytes:
    """The lines of the file. An unfinished last line is cut off, with a note on stderr."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
        print(f"note: {path}: its last line was cut off: it was never finished", file=sys.stderr)
    return data[:whole]


def rows(data: bytes, path: Path, kind: type[R]) -> Iterator[tuple[str, R]]:
    """(key, record) of each line; the key of a line without one is "line N"."""
    *lines, _ = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = kind.from_json(line.decode())
            key = json.loads(line).get("key")
            yield key if key and isinstance(key, str) else f"line {number}", record
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            note(path, f"line {number} was left out: it is no JSON")
        except ValueError as error:
            note(path, f"line {number} was left out: {error}")


def note(path: Path, what: str) -> None:
    """Prints what was wrong with the file on stderr."""
    print(f"note: {path}: {what}", file=sys.stderr)

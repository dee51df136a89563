"""Stores records in DIR/records.jsonl: a line per case, written as soon as the case is done."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.files import whole_file
from memcheck.core.options import named
from memcheck.core.record import Record

try:
    import fcntl
except ImportError:  # Windows
    WINDOWS: Any = importlib.import_module("msvcrt")
else:
    WINDOWS = None

FILE = "records.jsonl"
MANIFEST = "sweep.json"


class StoreError(MemcheckError):
    """A row could not be written. Earlier rows are intact."""


def read_records(folder: Path | str) -> list[Record]:
    """The newest record of each key, in order of the keys' first appearance. A line without a key counts as its own."""
    return list(Store(folder).read().values())


class Store:
    """The records in a folder's file. Processes may write to it at the same time: each change waits for the others.

    A line is written completely and synced, or not at all. All lines but those that a method replaces stay as they are,
    also those that this version cannot read.

    records: within owned(), the newest record of each key, by key.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE
        self.records: dict[str, Record] = {}
        self._is_locked = False

    def read(self) -> dict[str, Record]:
        """The newest record of each key, by key; "line N" for a line without one. The file may be written meanwhile.

        UsageError: the file cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"{self.folder} holds no {self.path.name} that can be read: {error.strerror}") from None
        if data and not data.endswith(b"\n"):
            self._note("its last line was left out: it was never finished")
        found = {}
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                key, record = parse_line(line)
            except ValueError as error:
                self._note(f"line {number} was left out: {error}")
            else:
                found[key or f"line {number}"] = record
        return found

    def begin(self) -> None:
        """Creates the folder and the file if needed, for rows without keys. UsageError: it fails, or a sweep's rows are
        there.
        """
        if (self.folder / MANIFEST).exists():
            words = "holds a sweep, whose rows would be replaced: name another folder"
            raise UsageError(f"{named('output')} {self.folder} {words}")
        try:
            with self.locked():
                self._whole_lines()
        except OSError as error:
            raise UsageError(f"{named('output')} {self.folder} cannot be written to: {error.strerror}") from None

    def append(self, record: Record, key: str | None = None) -> None:
        """Adds a line. StoreError: the file takes no more."""
        # Windows would write another end of line.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            with self.locked():
                write_line(os.open(self.path, flags, 0o666), line_of(record, key))
        except OSError as error:
            raise StoreError(f"{self.path} takes no more rows: {error.strerror}") from None
        if key is not None:
            self.records[key] = record

    def replace(self, key: str, record: Record) -> Path:
        """Writes the record in place of the one with that key, else as the last. Returns the path of the file."""
        with self.locked():
            lines = self._whole_lines().splitlines(keepends=True)
            place = next((place for place, line in enumerate(lines) if key_of(line) == key), len(lines))
            lines[place : place + 1] = [line_of(record, key)]
            self._rewrite(lines)
        return self.path

    def keep_newest(self, same: Callable[[Record], Hashable]) -> list[Record]:
        """Keeps the newest of the records that `same` maps to one key, and returns what is kept."""
        lines: dict[tuple[str, Hashable], tuple[bytes, Record | None]] = {}
        with self.locked():
            for number, line in enumerate(self._whole_lines().splitlines(keepends=True)):
                try:
                    _, record = parse_line(line)
                except ValueError:
                    lines["unread", number] = line, None
                else:
                    name = "read", same(record)
                    lines.pop(name, None)
                    lines[name] = line, record
            self._rewrite(line for line, _ in lines.values())
        return [record for _, record in lines.values() if record is not None]

    @contextmanager
    def owned(self) -> Iterator[Store]:
        """Reads `records`, and keeps every other process from writing, as a sweep does.

        UsageError: another process does so, the folder cannot be written to, or holds rows that have no key.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self.locked(wait=False))
            except BlockingIOError:
                raise UsageError(
                    f"{named('output')} {self.folder} is in use by another sweep: wait for it, or name another folder"
                ) from None
            except OSError as error:
                raise UsageError(f"{named('output')} {self.folder} cannot be written to: {error.strerror}") from None
            self._whole_lines()
            self.records = self.read()
            if any(key.startswith("line ") for key in self.records):
                words = "holds records that no sweep wrote: name another folder"
                raise UsageError(f"{named('output')} {self.folder} {words}")
            yield self

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Waits until no other process writes the file, and keeps them waiting. It is created if needed.

        BlockingIOError: another process writes the file, and `wait` is False.
        """
        if self._is_locked:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.path, wait):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def _whole_lines(self) -> bytes:
        """The lines of the locked file. An unfinished last line is cut off, with a note on stderr."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
            self._note("its last line was cut off: it was never finished")
        return data[:whole]

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Writes the lines in place of the locked file. A reader sees all of them or the old ones."""
        with whole_file(self.path) as file:
            file.writelines(lines)

    def _note(self, what: str) -> None:
        """Prints what was wrong with the file on stderr."""
        print(f"note: {self.path}: {what}", file=sys.stderr)


def write_record(folder: Path | str, record: Record, *, name: str) -> Path:
    """Writes the `record` to records.jsonl in `folder` as the case `name`, for memcheck compare, report and plot.

    A measured record replaces the measured one of that name, and a predicted record the predicted one; all other lines
    stay as they are. Processes may write to a folder at the same time. The folder is created if needed.

    Returns the path of the file.

    Raises:
        TypeError: it is no record; that of a prediction is prediction.record.
        ValueError: the name is empty or longer than a line.
    """
    if not isinstance(record, Record):
        raise TypeError(f"write_record takes a Record, such as prediction.record, got {type(record).__name__}")
    if len(name.splitlines()) != 1 or not name.strip():
        raise ValueError(f"name must be one line of text, got {name!r}")
    return Store(folder).replace(f"{record.source}: {name}", dataclasses.replace(record, operator=name))


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Locks the file, which is created if needed. The system ends a lock with the process, however that ends.

    Windows replaces no open file; there the lock is of a file beside it.
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


def write_line(file: int, line: bytes) -> None:
    """Appends the line to the open file, syncs and closes it. If that fails, nothing of the line is left."""
    end = os.fstat(file).st_size
    try:
        while line:
            line = line[os.write(file, line) :]
        os.fsync(file)
    except OSError:
        os.ftruncate(file, end)  # Truncating needs no space.
        raise
    finally:
        os.close(file)


def line_of(record: Record, key: str | None) -> bytes:
    values = json.loads(record.to_json())
    return json.dumps(values if key is None else {"key": key, **values}).encode() + b"\n"


def key_of(line: bytes) -> str | None:
    """The key of a line; None if it has none or is no JSON."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    key = values.get("key") if isinstance(values, dict) else None
    return key if isinstance(key, str) else None


def parse_line(line: bytes) -> tuple[str | None, Record]:
    """The key of a line, None without one, and its record. ValueError: it is no record."""
    try:
        record = Record.from_json(line.decode())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not json.loads(line).keys() & {field.name for field in dataclasses.fields(Record)} - {"schema"}:
        raise ValueError("it has no field of a record")
    return key_of(line) or None, record

"""stdout and stderr whose readers may leave: what is printed then goes nowhere, and the command goes on."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READER_LEFT = 141  # The exit code of a program that SIGPIPE ends.


class Patient(io.FileIO):
    """Writes to a file descriptor, and to nowhere once its reader has left, as `| head` does."""

    reader_left = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.reader_left = True
            lead_nowhere(self.fileno())
            return len(data)


def lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def patient_streams() -> Iterator[list[Patient]]:
    """Inside, a reader of stdout or stderr may leave. Streams that are no files of the system's stay as they are."""
    before, files = (sys.stdout, sys.stderr), list[Patient]()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream.closed:
            continue
        if isinstance(stream.buffer, io.BufferedWriter | io.FileIO):  # FileIO: with PYTHONUNBUFFERED.
            flush(stream)
            file = Patient(stream.fileno(), "wb", closefd=False)
            files.append(file)
            how: Any = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            buffer: Any = file if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(file)
            setattr(sys, name, io.TextIOWrapper(buffer, write_through=stream.write_through, **how))
    try:
        yield files
    finally:
        for stream, own in zip((sys.stdout, sys.stderr), before, strict=True):
            if stream is not own and not stream.closed:
                flush(stream, OSError)
        sys.stdout, sys.stderr = before


def flush(stream: Any, error: type[OSError] = BrokenPipeError) -> None:
    """Writes what the stream has kept, to nowhere if that fails with this error."""
    try:
        stream.flush()
    except error:
        lead_nowhere(stream.fileno())
        stream.flush()

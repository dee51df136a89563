"""stdout and stderr whose readers may leave: what is printed then goes nowhere, and the command goes on."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
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
    with ExitStack() as stack:
        files = list[Patient]()
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if type(stream) is not io.TextIOWrapper or stream.closed:
                continue
            if isinstance(stream.buffer, io.BufferedWriter | io.FileIO):  # FileIO: with PYTHONUNBUFFERED.
                flush(stream, BrokenPipeError)
                files.append(Patient(stream.fileno(), "wb", closefd=False))
                how: Any = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering")}
                raw: Any = files[-1] if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(files[-1])
                patient = io.TextIOWrapper(raw, write_through=stream.write_through, **how)
                stack.callback(flush, patient, OSError)
                stack.enter_context(redirect(patient))
        yield files


def flush(stream: io.TextIOWrapper, error: type[OSError]) -> None:
    """Writes what the stream has kept, to nowhere if that fails with this error."""
    if stream.closed:
        return
    try:
        stream.flush()
    except error:
        lead_nowhere(stream.fileno())
        stream.flush()

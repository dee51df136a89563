"""A line below the output of a script, on a terminal, that says what is alive while the script runs."""

from __future__ import annotations

import _thread
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from memcheck.core.units import format_bytes
from memcheck.measure.script_now import Now

SECONDS = 0.25  # Between two looks.
# The line stands below the cursor, which returns to its place, so that the script may be in the middle of its own line.
CLEAR = "\x1b[J"  # From the cursor to the end of the screen.
BELOW = "\x1bD\x1b[A"  # At the bottom of the screen this makes room for a line.
THERE, BACK = "\x1b7\r\x1b[B", "\x1b8"
MOVES = re.compile(r"\x1b(\[[\d;?]*[A-HJSTdfhlsu]|[78DM])")


@contextmanager
def live_line(now: Callable[[], Now | None]) -> Iterator[None]:
    """Inside, the line is shown, if stderr is a terminal. What Python writes to the terminal removes it first."""
    if not is_shown():
        yield
        return
    line, owner = LiveLine(now), os.getpid()
    with ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            if type(stream) is io.TextIOWrapper and stream.isatty():
                stack.callback(line.clears_before(stream))
        try:
            yield
        finally:
            if os.getpid() == owner:  # A child of the script's own has no line.
                line.close()


def is_shown() -> bool:
    """Whether stderr is a terminal that moves its cursor, and no other process shows a line there."""
    return (
        type(sys.stderr) is io.TextIOWrapper
        and sys.stderr.isatty()
        and os.environ.get("TERM") != "dumb"
        and os.environ.get("LOCAL_RANK", "0") == "0"
        and "JPY_PARENT_PID" not in os.environ  # What a notebook calls a terminal is none.
    )


class LiveLine:
    """The line, drawn from its construction to close().

    Its thread is none that threading.enumerate() lists, as a script may wait for all of these.
    """

    def __init__(self, now: Callable[[], Now | None]) -> None:
        self._now, self._owner = now, os.getpid()
        self._terminal = os.dup(sys.stderr.fileno())  # The script may close its own.
        self._lock, self._stop, self._stopped = threading.RLock(), threading.Lock(), threading.Lock()
        self._drawn, self._is_off = "", False
        self._stop.acquire()
        self._stopped.acquire()
        _thread.start_new_thread(self._run, ())

    def close(self) -> None:
        self._stop.release()
        self._stopped.acquire()
        with suppress(OSError):
            self.clear()
        os.close(self._terminal)

    def clear(self) -> None:
        with self._lock:
            if self._drawn:
                self._drawn = ""
                os.write(self._terminal, CLEAR.encode())

    def clears_before(self, stream: io.TextIOWrapper) -> Callable[[], None]:
        """Makes the stream remove the line before it writes. Returns what undoes that."""
        write = stream.write

        def cleared_write(text: str, /) -> int:
            if self._is_off or os.getpid() != self._owner:
                return write(text)
            with self._lock:
                with suppress(OSError):
                    self.clear()
                # A script that moves the cursor draws lines of its own, such as several bars.
                self._is_off = isinstance(text, str) and MOVES.search(text) is not None
                return write(text)

        stream.write = cleared_write  # type: ignore[method-assign]
        return partial(restore, stream, cleared_write)

    def _run(self) -> None:
        with suppress(Exception):  # A line that fails is none of the script's troubles.
            while not self._stop.acquire(timeout=SECONDS):
                if (now := self._now()) is not None and not self._is_off and not in_background(self._terminal):
                    self._draw(fitted(now, os.get_terminal_size(self._terminal).columns - 1))
        self._stopped.release()

    def _draw(self, text: str) -> None:
        with self._lock:
            if text != self._drawn and not self._is_off:
                self._drawn = text
                os.write(self._terminal, f"{CLEAR}{BELOW}{THERE}{text}{BACK}".encode(errors="replace"))


def restore(stream: io.TextIOWrapper, write: Callable[[str], int]) -> None:
    """Gives the stream its own write() again, unless the script has replaced it."""
    if vars(stream).get("write") is write:
        del stream.write


def in_background(terminal: int) -> bool:
    """Whether another job of the shell has the terminal."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # It is not the one that controls the process.
        return False


def fitted(now: Now, width: int) -> str:
    """ "memcheck: step 120, 1.24 GiB alive, peak 1.9 GiB, train.py:52 holds 812 MiB", as far as it fits."""
    name, _, called = now.step_name.partition(" ")  # "call of Net"
    steps = f"{name} {now.steps:,}{f' {called}' * bool(called)}, " if now.steps else ""
    words = f"memcheck: {steps}{format_bytes(now.bytes)} alive, peak {format_bytes(now.peak_bytes)}"
    place, held = str(now.line).rpartition(" (")[0], f"holds {format_bytes(now.line_bytes)}"
    longer = [] if now.line is None else [f"{words}, {at} {held}" for at in (place, Path(place).name)]
    return next((text for text in longer if len(text) <= width), words[:width])

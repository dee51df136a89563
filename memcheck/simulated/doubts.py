"""Answers of a simulated GPU that depend on numbers which it does not compute, by the line that asked."""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
STANDARD = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Doubt:
    """An answer that a line of Python got, and how often."""

    what: str
    file: str
    line: int
    count: int


_counts: Counter[tuple[str, str, int]] = Counter()
_listeners: list[Callable[[Doubt], None]] = []
_hearers: list[Callable[[str], None]] = []


def note(what: str) -> None:
    """Counts an answer at the line of Python that runs."""
    for hear in _hearers:
        hear(what)
    key = what, *line_of_user()
    _counts[key] += 1
    if _counts[key] == 1:
        for listener in _listeners:
            listener(Doubt(*key, 1))


def doubts() -> list[Doubt]:
    """All answers, in the order of their first time."""
    return [Doubt(*key, count) for key, count in _counts.items()]


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def note_of_library(words: bytes) -> None:
    """The same for the library, which calls it from any thread."""
    note(words.decode())


def listen(listener: Callable[[Doubt], None]) -> None:
    """Calls the function with each answer at its first time."""
    _listeners.append(listener)


@contextmanager
def heard_by(hear: Callable[[str], None]) -> Iterator[None]:
    """Inside, the function is called with the words of every answer."""
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.remove(hear)


def line_of_user() -> tuple[str, int]:
    """The innermost line outside of packages, the standard library and memcheck; else the innermost one at all."""
    frame = sys._getframe(1)
    first: tuple[str, int] | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, "<")) and "/ctypes/" not in file:
            first = first or (file, frame.f_lineno)
            if "site-packages" not in file and not file.startswith(STANDARD):
                return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return first or ("?", 0)

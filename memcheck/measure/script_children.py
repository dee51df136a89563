"""Counts the processes that a script starts."""

from __future__ import annotations

import functools
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any


class Children:
    """Between open() and close(), counts the processes that multiprocessing starts: DataLoader workers, mp.spawn."""

    def __init__(self) -> None:
        self.started = 0
        self.most_bytes: int | None = None  # After close(): the resident memory of the largest that has ended.
        self._before = largest_child()

    def open(self) -> None:
        self._start: Any = BaseProcess.start

        @functools.wraps(self._start)
        def start(process: BaseProcess) -> None:
            self._start(process)
            self.started += 1

        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        BaseProcess.start = self._start  # type: ignore[method-assign]
        largest = largest_child()
        self.most_bytes = largest if self.started and largest > self._before else None


def largest_child() -> int:
    """The most resident memory of a child that was waited for; 0 where it cannot be read."""
    with suppress(ImportError, OSError):  # Windows has no such module.
        import resource
        import sys

        size = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024
    return 0

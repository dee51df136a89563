"""What is alive in a script while it runs: steps, bytes, and the line of Python that holds the most."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcheck.core.script_record import Line

if TYPE_CHECKING:
    from memcheck.measure.recorders import Recorder


class Now(NamedTuple):
    step_name: str  # "step", or "call of Net".
    steps: int
    bytes: int
    peak_bytes: int
    line: Line | None  # That holds the most; None if no block has a line.
    line_bytes: int


class LargestLine:
    """Finds the line of Python that holds the most bytes now. Any thread may ask, one at a time.

    Sites keep their places, so their lines are read again only if there are new ones.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._line_of_site = np.zeros(0, np.int64)
        self._lines: list[Line | None] = []

    def __call__(self) -> tuple[Line | None, int]:
        sizes = np.frombuffer(self._recorder.counts_so_far(), np.int64)[::2]
        if len(sizes) > len(self._line_of_site):
            sites = self._recorder.sites_so_far()
            self._line_of_site = np.fromiter((line for _, line, *_ in sites), np.int64)
            self._lines = list(self._recorder.lines())
        if not len(sizes):
            return None, 0
        by_line = np.bincount(self._line_of_site[: len(sizes)], sizes)
        by_line[0] = 0  # Blocks without a line.
        most = int(by_line.argmax())
        return self._lines[most], int(by_line[most])

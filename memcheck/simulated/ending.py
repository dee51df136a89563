"""Ends a script when its optimizer steps allocate the same, so that a run on a simulated GPU takes a few of them."""

from __future__ import annotations

from collections import deque

from memcheck.core.options import named
from memcheck.core.units import counted

EQUAL = 3  # Steps in a row that allocate the same, or periods of steps, as of optimizers that take turns.
ROUNDS = {1: "", 2: "rounds of two steps ", 3: "rounds of three steps ", 4: "rounds of four steps "}


class Ended(SystemExit):
    """Ends the script with exit code 0. No `except Exception` catches it, and frameworks take it for no failure."""


class Ending:
    """Decides after each optimizer step whether the script ends.

    steps: it ends after so many. None: as soon as three steps, or periods of up to four steps, have allocated the same.
    """

    def __init__(self, steps: int | None = None) -> None:
        self._steps = steps
        self._end: tuple[int, str] | None = None  # The last step, and why.
        self._last: deque[tuple[int, ...]] = deque(maxlen=EQUAL * max(ROUNDS))

    def after_step(self, step: int, allocated: tuple[int, ...]) -> None:
        """Ended: the script ends, from this step on at each that it still makes.

        step: its number from 1, which comes again when another optimizer is counted.
        """
        if step == 1:
            self._last.clear()
        self._last.append(allocated)
        if self._end is None and (reason := self._reason(step)):
            self._end = step, reason
        if self._end is not None:
            raise Ended(0)

    def sentence(self, steps: int) -> str | None:
        """Says why the script ended; None if it was not ended. steps: those of all optimizers."""
        if self._end is None:
            return None
        step, reason = self._end
        those = "" if step == steps else " of the optimizer that steps most often"
        return (
            f"Ended after {counted(step, 'step' if those else 'optimizer step')}{those}, as {reason}; what would come "
            f"later, such as evaluation or saving, was not run: {named('whole')} runs it."
        )

    def _reason(self, step: int) -> str | None:
        """Why the script ends after this step; None if it goes on."""
        if self._steps is not None:
            return f"{named('steps')} asks" if step >= self._steps else None
        period = next(filter(self._repeats, ROUNDS), None)
        return None if period is None else f"the last three {ROUNDS[period]}allocated the same"

    def _repeats(self, period: int) -> bool:
        last = list(self._last)[-EQUAL * period :]
        return len(last) == EQUAL * period and last == last[:period] * EQUAL

"""Ends a script when its optimizer steps allocate the same, so that a run on a simulated GPU takes a few of them."""

from __future__ import annotations

from collections import deque

from memcheck.core.units import counted

EQUAL = 3  # Steps in a row that allocate the same, or rounds of steps, as of optimizers that take turns.
ROUNDS = {1: "", 2: "rounds of two steps ", 3: "rounds of three steps ", 4: "rounds of four steps "}


class Ending:
    """Decides after each optimizer step whether the script ends.

    steps: it ends after so many. None: as soon as three steps, or rounds of up to four steps, have allocated the same.
    sentence: why it ended; None as long as it has not.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.sentence: str | None = None
        self._steps = steps
        self._last: deque[tuple[int, ...]] = deque(maxlen=EQUAL * max(ROUNDS))

    def after_step(self, step: int, of_all: int, allocated: tuple[int, ...]) -> None:
        """Raises a SystemExit of 0, which no `except Exception` catches and no framework takes for a failure, if the
        script ends after this step, and after each that it still makes.

        step: its number from 1, which comes again when another optimizer is counted. of_all: steps of all optimizers.
        """
        if step == 1:
            self._last.clear()
        self._last.append(allocated)
        if self.sentence is None and (reason := self._reason(step)):
            steps = counted(step, "optimizer step")
            if step != of_all:
                steps = f"{counted(step, 'step')} of the optimizer that steps most often"
            self.sentence = (
                f"Ended after {steps}, as {reason}; what would come later, such as evaluation or saving, was not run: "
                "--whole runs it."
            )
        if self.sentence is not None:
            raise SystemExit(0)

    def _reason(self, step: int) -> str | None:
        """Why the script ends after this step; None if it goes on."""
        if self._steps is not None:
            return "--steps asks" if step >= self._steps else None
        length = next(filter(self._repeats, ROUNDS), None)
        return None if length is None else f"the last three {ROUNDS[length]}allocated the same"

    def _repeats(self, length: int) -> bool:
        """Whether the last rounds of this length allocated the same."""
        last = list(self._last)[-EQUAL * length :]
        return len(last) == EQUAL * length and last == last[:length] * EQUAL

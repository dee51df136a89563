"""Conditions on values that are not known, such as checks of arguments: those are assumed to pass."""

from __future__ import annotations

import sys

OF_ALL = ("aten::all", "aten::_is_all_true")
# Modules that ask for the code that calls them; pytest asks once more for the message of an assert that failed.
ASKING_FOR_OTHERS = ("torch", "memcheck.predict", "_pytest")


class AssumedValues:
    """The values that unknown conditions are assumed to have, by the operator and the line of code that asks.

    A prediction is of a program that runs, so checks are assumed to pass. At first, "all" is assumed to be True and
    everything else False. If the model raises an error, the condition that it asked for last may be a check that does
    not pass: its value is turned, and the model is traced again.
    """

    def __init__(self) -> None:
        self._turned: set[tuple[str, str, int]] = set()
        self._last: tuple[str, str, int] | None = None

    def value(self, made_by: str) -> bool:
        """The value of a condition, which that operator returned."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(ASKING_FOR_OTHERS):
            frame = frame.f_back
        self._last = made_by, frame.f_code.co_filename, frame.f_lineno
        return (made_by in OF_ALL) != (self._last in self._turned)

    def turn_last(self) -> bool:
        """Turns the condition that was asked for last, after an error. False: there is none, or it was turned."""
        if self._last is None or self._last in self._turned:
            return False
        self._turned.add(self._last)
        return True

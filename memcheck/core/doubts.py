"""The first words of doubts about times, by which reports recognise them."""

from __future__ import annotations

from collections.abc import Sequence

from memcheck.core.record import PHASES

FEW_PASSES = 5
# The first words of every doubt about times, and the reason in short. "{phase} times" concerns a single phase.
ABOUT_TIMES = {
    "{phase} times scatter": "passes scatter",
    "{phase} times drift": "passes drift",
    "the time limit left no pass to warm up": "no pass to warm up",
    "times of only": "few passes",
    "the machine was busy": "the machine was busy",
    "the GPU is shared": "the GPU was shared",
    "timed with": "several cases ran at once",
    "the timing was cut off": "the timing was cut off",
    "there are no times": "no time was left for timed passes",
}


def doubts_about(phase: str, doubts: Sequence[str]) -> tuple[str, ...]:
    """The doubts that concern the times of the phase."""
    beginnings = tuple(beginning.format(phase=phase) for beginning in ABOUT_TIMES)
    return tuple(doubt for doubt in doubts if doubt.startswith(beginnings))


def reason_in_short(doubt: str) -> str | None:
    """Why times are doubtful, in a few words. None if the doubt is not about times."""
    for beginning, reason in ABOUT_TIMES.items():
        if doubt.startswith(tuple(beginning.format(phase=phase) for phase in PHASES)):
            return reason
    return None

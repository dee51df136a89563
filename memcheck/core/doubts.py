"""The wording of doubts about times, by which a record's reader recognises them."""

from __future__ import annotations

from collections.abc import Sequence

FEW_PASSES = 5
# The first words of every doubt about times; "{phase} times" concerns a single phase.
ABOUT_TIMES = (
    "{phase} times",
    "the time limit left no pass to warm up",
    "times of only",
    "the machine was busy",
    "the GPU is shared",
    "timed with",
    "the timing was cut off",
)


def doubts_about(phase: str, doubts: Sequence[str]) -> tuple[str, ...]:
    """The doubts that concern the times of the phase."""
    beginnings = tuple(beginning.format(phase=phase) for beginning in ABOUT_TIMES)
    return tuple(doubt for doubt in doubts if doubt.startswith(beginnings))

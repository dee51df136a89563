"""Statistics of repeated passes: median, quartiles, and doubts about them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from memcheck.core.record import FEW_PASSES, Doubt
from memcheck.core.units import format_time

# A doubt is noted if the middle half of the passes spreads over more than this share of the median, ...
WIDE = 0.20
# ... or if the medians of the first and second half differ by more than this share.
DRIFT = 0.10


def summary(name: str, times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles under a record's field names; None without passes."""
    if not times:
        return {name: None, f"{name}_quartiles": None}
    low, middle, high = _quartiles(times)
    return {name: middle, f"{name}_quartiles": (low, high)}


def doubts_of_times(phase: str, times: Sequence[float]) -> tuple[Doubt, ...]:
    """Reasons why the median of these times may be off, as sentences."""
    if len(times) < FEW_PASSES:
        return ()  # Too few passes are a doubt of their own.
    low, middle, high = _quartiles(times)
    early, late = (statistics.median(half) for half in (times[: len(times) // 2], times[(len(times) + 1) // 2 :]))
    doubts = []
    if high - low > WIDE * middle:
        words = f"{phase} times scatter: the middle half of them spans {(high - low) / middle:.0%} of the median"
        doubts.append(Doubt(words, "scatter", (f"{phase}_ms",)))
    if abs(late - early) > DRIFT * early:
        halves = f"{format_time(early)} in the first half of the passes, {format_time(late)} in the second"
        doubts.append(Doubt(f"{phase} times drift: median {halves}", "drift", (f"{phase}_ms",)))
    return tuple(doubts)


def doubts_of_passes(passes: int, asked: int, warmed_up: bool) -> tuple[Doubt, ...]:
    """Doubts about the number of passes."""
    doubts = []
    if not warmed_up:
        words = "the time limit left no pass to warm up: the times include what a first call does once"
        doubts.append(Doubt(words, "cold"))
    if passes < FEW_PASSES:
        cut = f" of the {asked} asked for" if passes < asked else ""
        doubts.append(Doubt(f"times of only {passes} pass{'es' if passes > 1 else ''}{cut}", "few passes"))
    return tuple(doubts)


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high

"""Two folders of results, case by case: bytes to the byte, times by their quartiles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memcheck.core import html
from memcheck.core.record import FEW_PASSES, Record
from memcheck.core.units import Growth, counted, format_bytes
from memcheck.report import cases
from memcheck.report.cases import NEEDS, describe, pair
from memcheck.report.tables import Column, Table, to_html, to_text

# Requested bytes, and so the same on every run. Blocks and segments of a caching allocator depend on what ran before.
EXACT_BYTES = (
    *NEEDS,
    *("input_bytes", "output_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "optimizer_peak_bytes"),
    *("buffer_bytes", "workspace_bytes", "library_workspace_bytes", "state_bytes"),
)
ENVIRONMENT = (
    *("source", "device", "device_name", "device_total_bytes"),
    *("torch_version", "memcheck_version", "allocator", "threads"),
)
MAIN_BYTES = (*NEEDS, "optimizer_peak_bytes")  # Those with a column of their own.
NONE = Growth()
Key = tuple[Any, ...]
# The medians of identical code differ by up to this factor from one day to the next, however steady each day is.
DRIFT = 1.02
OUTCOMES = ("took the same memory to the byte", "took more memory", "took less memory", "ended in another way")
MOST_LISTED = 5  # Items of a list in a sentence.
# Statuses of a case that did not fit, and of one that gave no figures for another reason.
DOES_NOT_FIT = ("oom", "killed", "skipped")
NO_FIGURES = ("error", "timeout", "unsupported")


@dataclass
class Comparison:
    pairs: list[tuple[Record, Record]] = field(default_factory=list)
    only_before: list[Record] = field(default_factory=list)
    only_after: list[Record] = field(default_factory=list)
    beside: dict[int, str] = field(default_factory=dict)  # of measured records, by id: measured / predicted

    def grown(self, allowed: Growth = NONE) -> list[tuple[Record, Record]]:
        """The pairs in which a memory figure grew by more than is allowed, or a case that fitted does not fit."""
        return [pair for pair in self.pairs if fits_no_longer(*pair) or growths(*pair, allowed)]

    def __repr__(self) -> str:
        return "\n".join([to_text(comparison_table(self)), "", *comparison_words(self)])

    def _repr_html_(self) -> str:
        return html.fragment(html.macros().listed(comparison_words(self)), to_html(comparison_table(self)))

    def missing(self) -> list[Record]:
        """The records of `before` whose case is not in `after`, or has lost its memory figures there."""
        return self.only_before + [before for before, after in self.pairs if lost_figures(before, after)]


def compare(before: Sequence[Record], after: Sequence[Record]) -> Comparison:
    """Matches records by case, and also by device if a folder holds a case of several devices.

    Measurements are compared with measurements and predictions with predictions, unless one folder holds only
    measurements and the other only predictions.
    """
    sources = [{record.source for record in records} for records in (before, after)]
    across = all(len(names) == 1 for names in sources) and sources[0] != sources[1]

    def case(record: Record) -> Key:
        return cases.case_of(record) if across else (*cases.case_of(record), record.source)

    several = any(len({*map(case, records)}) < len(records) for records in (before, after))

    def key(record: Record) -> Key:
        return (*case(record), cases.place_of(record), record.device_name) if several else case(record)

    old, new = {key(record): record for record in before}, {key(record): record for record in after}
    return Comparison(
        [(record, new[name]) for name, record in old.items() if name in new],
        [record for name, record in old.items() if name not in new],
        [record for name, record in new.items() if name not in old],
        beside(before, after),
    )


def beside(*folders: Sequence[Record]) -> dict[int, str]:
    """Id of a measured record -> how it compares with its prediction."""
    pairs = [both for records in folders for both in pair(records)]
    return {id(both[0]): words for both in pairs if (words := peak_ratio(*both))}


def peak_ratio(measured: Record, predicted: Record) -> str | None:
    """The ratio of the main figure that is furthest from its prediction: "same", or "1.02 x"."""
    known = {name: found for name in NEEDS if (found := cases.ratio(measured, predicted, name)) is not None}
    furthest = max(known, key=lambda name: abs((known[name] or 1) - 1), default=None)
    return cases.ratio_words(measured, predicted, furthest) if furthest else None


def byte_differences(before: Record, after: Record) -> dict[str, int]:
    """Figures that both know and that differ."""
    pairs: dict[str, list[Any]] = {
        name: [getattr(record, name, None) for record in (before, after)] for name in EXACT_BYTES
    }
    return {name: new - old for name, (old, new) in pairs.items() if None not in (old, new) and new != old}


def largest_growth(before: Record, after: Record) -> int:
    return max(byte_differences(before, after).values(), default=0)


def outcome(before: Record, after: Record) -> str:
    """One of OUTCOMES."""
    changed = byte_differences(before, after)
    if fits_no_longer(before, after) or any(size > 0 for size in changed.values()):
        return OUTCOMES[1]
    return OUTCOMES[2] if changed else OUTCOMES[0 if before.status == after.status else 3]


def lost_figures(before: Record, after: Record) -> bool:
    """Whether a case that was ok now ended without figures, or has lost one of the figures that are compared."""
    if before.status != "ok" or after.status in DOES_NOT_FIT:
        return False
    return after.status in NO_FIGURES or any(
        getattr(before, name) is not None and getattr(after, name) is None for name in MAIN_BYTES
    )


def fits_no_longer(before: Record, after: Record) -> bool:
    return before.status == "ok" and after.status in DOES_NOT_FIT


def growths(before: Record, after: Record, allowed: Growth = NONE) -> list[str]:
    """Figures that grew by more than is allowed. The parts of a peak have no percentage of their own."""
    changed = byte_differences(before, after)
    return [
        name
        for name in ((*MAIN_BYTES, "state_bytes") if allowed.percent else changed)
        if name in changed and not allowed.allows(getattr(before, name), getattr(after, name))
    ]


def growth_words(before: Record, after: Record, allowed: Growth) -> str:
    """ "peak forward 4 KiB -> 5 KiB, +1,024 B (+25 %)", of each figure that grew too much."""
    words = [verdict_change(before, after)] if fits_no_longer(before, after) else []
    for name in growths(before, after, allowed):
        old, new = (format_bytes(getattr(record, name)) for record in (before, after))
        words.append(f"{cases.FIELD_WORDS[name]} {old} -> {new}, {byte_change(before, after, name)}")
    return "; ".join(words)


def byte_change(before: Record, after: Record, name: str) -> str | None:
    """ "same", or "+4,096 B (+0.13 %)"."""
    old, new = getattr(before, name), getattr(after, name)
    if old is None or new is None:
        return None if old == new else "known only before" if new is None else "known only now"
    if old == new:
        return "same"
    percent = 100 * (new - old) / old if old else 0
    share = f" ({percent:{'+.2g' if abs(percent) < 99.5 else '+,.0f'}} %)" if old else ""
    return f"{new - old:+,} B{share}"


def time_change(before: Record, after: Record, phase: str) -> str | None:
    """ "faster 1.3x", where neither record has doubts about its times and their quartiles do not overlap."""
    old, new = getattr(before, f"{phase}_ms"), getattr(after, f"{phase}_ms")
    if not old or not new:
        return None
    factor = max(old, new) / min(old, new)
    words = f"{'faster' if new < old else 'slower'} {factor:.{1 if factor >= 1.095 else 2}f}x"
    ranges = getattr(before, f"{phase}_ms_quartiles"), getattr(after, f"{phase}_ms_quartiles")
    if None in ranges:
        return "noise unknown"
    (old_low, old_high), (new_low, new_high) = ranges
    if (new_low <= old_high and old_low <= new_high) or factor < DRIFT:
        return "within noise"
    doubtful = any(time_doubts(record, phase) for record in (before, after))
    return "doubtful" if doubtful else words


def time_doubts(record: Record, phase: str) -> list[str]:
    """Why the times of the phase may be off, in words."""
    few = record.passes is not None and record.passes < FEW_PASSES
    doubts = [doubt.partition(":")[0] for doubt in record.doubts if doubt.concerns(f"{phase}_ms")]
    return doubts or ([f"times of only {record.passes} passes"] if few else [])


def verdict_change(before: Record, after: Record) -> str:
    return after.status if before.status == after.status else f"{before.status} -> {after.status}"


def other_changes(before: Record, after: Record) -> str | None:
    changes = [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {size:+,} B"
        for name, size in byte_differences(before, after).items()
        if name not in MAIN_BYTES
    ]
    if before.backend != after.backend:
        changes.append(f"backend {before.backend} -> {after.backend}")
    if before.oom_phase != after.oom_phase and "oom" in (before.status, after.status):
        changes.append(f"out of memory in {before.oom_phase or 'no phase'} -> {after.oom_phase or 'no phase'}")
    return "; ".join(changes) or None


def comparison_table(comparison: Comparison) -> Table:
    """A row for each case in both, the largest growth first."""
    ordered = sorted(comparison.pairs, key=lambda pair: (not fits_no_longer(*pair), -largest_growth(*pair)))
    both = [record for pair in comparison.pairs for record in pair]
    always = {"operator", "size", "query_len", "kv_len"}
    fields = [name for name in cases.CASE_FIELDS if name in {*always, *cases.varying(both)}]
    sizes = [name for name in MAIN_BYTES if name in NEEDS or any(getattr(record, name) is not None for record in both)]

    def column(key: str, title: str, words: Callable[..., str | None], rank: int = 0, *more: str) -> Column:
        return Column(key, title, read=lambda pair: words(*pair, *more), rank=rank)

    columns = [
        Column("case", "case", read=lambda pair: describe(pair[1], fields)),
        column("status", "verdict", verdict_change),
        *(column(name.replace("_bytes", "_change"), cases.FIELD_WORDS[name], byte_change, 0, name) for name in sizes),
        *(column(f"{phase}_time_change", f"{phase} time", time_change, 2, phase) for phase in ("forward", "backward")),
        Column("other_changes", "other changes", audience="programs", read=lambda pair: other_changes(*pair)),
        column("measured_by_predicted", "measured / predicted", partial(prediction_change, comparison), 1),
    ]
    others = [(describe(pair[1], fields), changes) for pair in ordered if (changes := other_changes(*pair))]
    notes = [
        *(f"{case}: {changes}." for case, changes in others),
        "same: equal to the byte. within noise: the quartiles of the two times overlap, or the medians are within 2 %; "
        "otherwise the ratio of the medians.",
        *doubt_notes(comparison),
    ]
    return Table.of("comparison", f"{cases.count_of(comparison.pairs)} in both", columns, ordered, notes)


def doubt_notes(comparison: Comparison) -> list[str]:
    """Why times are not compared, each reason once."""
    reasons = {
        f"{doubt} ({when})": None
        for before, after in comparison.pairs
        for phase in ("forward", "backward")
        if (time_change(before, after, phase) or "").endswith("doubtful")
        for record, when in ((before, "before"), (after, "now"))
        for doubt in time_doubts(record, phase)
    }
    return [f"times are doubtful: {first_few(list(reasons))}."] if reasons else []


def prediction_change(comparison: Comparison, before: Record, after: Record) -> str | None:
    """ "same -> 1.02 x", if a folder also holds a prediction of the case."""
    if before.source != after.source:
        measured, predicted = (before, after) if after.source == "predicted" else (after, before)
        return peak_ratio(measured, predicted)
    words = [comparison.beside.get(id(record)) for record in (before, after)]
    if words == [None, None]:
        return None
    return words[0] if words[0] == words[1] else " -> ".join(word or "-" for word in words)


def environment_changes(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """Environment fields whose values differ: "torch_version: 2.11.0 -> 2.13.0"."""
    values = {name: [sorted(map(str, cases.values_of(some, name))) for some in (before, after)] for name in ENVIRONMENT}
    return [
        f"{name}: {', '.join(old) or 'unknown'} -> {', '.join(new) or 'unknown'}"
        for name, (old, new) in values.items()
        if old != new
    ]


def comparison_words(comparison: Comparison) -> list[str]:
    """What changed, counted, and the cases that are in one folder only."""
    pairs = comparison.pairs
    counts = Counter(itertools.starmap(outcome, pairs))
    found = [f"{counts[words]} {words}" for words in OUTCOMES if counts[words]]
    lines = [f"Of {counted(len(pairs), 'case')}, {', '.join(found) or 'none is in both'}."]
    for records, which in ((comparison.only_before, "before"), (comparison.only_after, "now")):
        if records:
            lines.append(f"Only {which}: {first_few([describe(record, cases.CASE_FIELDS) for record in records])}.")
    return lines


def first_few(words: Sequence[str]) -> str:
    """The first items of a list, and how many more there are."""
    more = f"; and {len(words) - MOST_LISTED} more" if len(words) > MOST_LISTED else ""
    return "; ".join(words[:MOST_LISTED]) + more

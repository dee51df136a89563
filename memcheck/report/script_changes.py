"""Compares two runs of a script: sentences and tables of what changed."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memcheck.core import units
from memcheck.core.script_record import Line, Origin, ScriptRecord
from memcheck.core.units import format_bytes
from memcheck.report.alive import change_table, unit_of
from memcheck.report.memory import NO_LINE, OUTSIDE
from memcheck.report.script_tables import figures_of, rank_words
from memcheck.report.tables import Table

# What makes two lines the same, the best match first: nothing changed, the line moved, its file has another folder, or
# its text was edited.
MATCHES: tuple[Callable[[Line], Any], ...] = (
    lambda line: (line.file, line.function, line.text, line.number),
    lambda line: line.text and (line.file, line.function, line.text),
    lambda line: line.text and (Path(line.file).name, line.function, line.text),
    lambda line: (line.file, line.function, line.number),
)


COMPARED = ("peak", "growth per step")  # By --fail-on-growth.


def run_sentences(before: ScriptRecord, now: ScriptRecord) -> list[str]:
    """How the runs ended if they failed, and which settings differ."""
    lines = [f"{when} it failed: {record.error}." for when, record in sides(before, now) if record.error]
    settings = [settings_of(record) for _, record in sides(before, now)]
    names = [name for name in settings[0] | settings[1] if settings[0].get(name) != settings[1].get(name)]
    different = [f"{name}: {' -> '.join(str(each.get(name, 'unknown')) for each in settings)}" for name in names]
    return [*lines, *([f"These differ: {'; '.join(different)}."] if different else [])]


def sides(before: ScriptRecord, now: ScriptRecord) -> Iterable[tuple[str, ScriptRecord]]:
    return ("Before", before), ("Now", now)


def settings_of(record: ScriptRecord) -> dict[str, object]:
    limit = "none" if record.limit_bytes is None else format_bytes(record.limit_bytes)
    given = {"command": shlex.join(record.command), "device": record.device_words, "limit": limit}
    if record.rank is not None:
        given["rank"] = rank_words(record)
    return {**given, "optimizer steps": record.steps, **record.environment}


def run_tables(before: ScriptRecord, now: ScriptRecord, most: int) -> list[Table]:
    """Figures, and what was alive by line and by module, each before and now."""
    unit = unit_of(max(before.peak.bytes, now.peak.bytes))
    old, new = figures_of(before), figures_of(now)
    # The process's own figures differ from run to run.
    names = [name for name in {**old, **new} if not name.startswith("process")]
    known = {name: (old.get(name, 0), new.get(name, 0)) for name in names}
    modules = by_name(before, now, lambda place, _: place.module or OUTSIDE)
    moment = "when memory ran out" if before.ran_out and now.ran_out else "at the peak"
    return [
        change_table("figures", f"Figures, {unit}", "figure", known, unit),
        change_table("lines", f"Alive {moment}, by line of Python, {unit}", "line", by_line(before, now), unit, most),
        change_table("modules", f"Alive {moment}, by module, {unit}", "module", modules, unit, most),
    ]


def by_name(
    before: ScriptRecord, now: ScriptRecord, name_of: Callable[[Origin, bool], str]
) -> dict[str, tuple[int, int]]:
    """Name -> bytes alive before and now. name_of: is given a place, and whether it is one of before."""
    old, new = Counter[str](), Counter[str]()
    for sums, record in ((old, before), (new, now)):
        for each in record.alive_then:
            sums[name_of(each.place, sums is old)] += each.bytes
    return {name: (old[name], new[name]) for name in {**old, **new}}


def by_line(before: ScriptRecord, now: ScriptRecord) -> dict[str, tuple[int, int]]:
    """Line -> bytes before and now. A line that moved has its number of now, and says that of before."""
    lines = [{each.place.line for each in record.alive_then if each.place.line} for record in (before, now)]
    same = matched(*lines)
    moved = {new: f"{new}, was {old.number}" for old, new in same.items() if old.number != new.number}

    def name_of(place: Origin, is_before: bool) -> str:
        line = place.line
        if line is not None and is_before:
            line = same.get(line, line)
        return NO_LINE if line is None else moved.get(line, str(line))

    return by_name(before, now, name_of)


def matched(before: Iterable[Line], now: Iterable[Line]) -> dict[Line, Line]:
    """Line of before -> the line of now that is the same code, see MATCHES. Each has at most one."""
    found: dict[Line, Line] = {}
    for key in MATCHES:
        free = defaultdict(list)
        for line in sorted(set(now) - set(found.values()), key=lambda line: line.number):
            free[key(line)].append(line)
        for line in sorted(set(before) - found.keys(), key=lambda line: line.number):
            if key(line) and free[key(line)]:
                found[line] = free[key(line)].pop(0)
    return found


def growth_of_runs(before: ScriptRecord, now: ScriptRecord, allowed: units.Growth) -> list[str]:
    """Figures that grew by more than is allowed, and that the script failed where it did not before."""
    sides = [figures_of(record) for record in (before, now)]
    pairs = {name: (sides[0].get(name, 0), sides[1].get(name, 0)) for name in COMPARED}
    grown = [
        f"The {name} grew by more than {allowed}: {format_bytes(old)} -> {format_bytes(new)}, {new - old:+,} B."
        for name, (old, new) in pairs.items()
        if not allowed.allows(old, new)
    ]
    return grown + ([f"It fails now: {now.error}."] if now.error and not before.error else [])

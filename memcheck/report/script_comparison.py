"""Compares two runs of a script: the peak, what was alive then by line and by module, and what else differs."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from memcheck.core.script_record import Line, Origin, ScriptRecord
from memcheck.core.units import Growth, format_bytes
from memcheck.report.script_tables import FORMAT, NO_LINE, OUTSIDE, figures_of, in_unit, unit_of
from memcheck.report.tables import Column, Table

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
    """How the peak and the growth changed, how the runs ended if they failed, and which settings differ."""
    old, new = figures_of(before), figures_of(now)
    lines = [
        f"The {name} {went(old.get(name, 0), new.get(name, 0))}."
        for name in COMPARED
        if name == "peak" or name in old | new
    ]
    lines += [f"{when} it failed: {record.error}." for when, record in sides(before, now) if record.error]
    settings = [settings_of(record) for _, record in sides(before, now)]
    names = [name for name in settings[0] | settings[1] if settings[0].get(name) != settings[1].get(name)]
    different = [f"{name}: {' -> '.join(str(each.get(name, 'unknown')) for each in settings)}" for name in names]
    return [*lines, *([f"These differ: {'; '.join(different)}."] if different else [])]


def sides(before: ScriptRecord, now: ScriptRecord) -> Iterable[tuple[str, ScriptRecord]]:
    return ("Before", before), ("Now", now)


def settings_of(record: ScriptRecord) -> dict[str, object]:
    limit = "none" if record.limit_bytes is None else format_bytes(record.limit_bytes)
    named = {"command": shlex.join(record.command), "device": record.device, "limit": limit}
    return {**named, "optimizer steps": record.steps, **record.environment}


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


def change_table(
    name: str, title: str, heading: str, sizes: Mapping[str, tuple[int, ...]], unit: str, most: int | None = None
) -> Table:
    """Bytes before and now, sorted by their difference.

    most: rows of names that changed. The others are added up in one row, and all in another.
    """
    names = sorted(sizes, key=lambda name: -abs(sizes[name][1] - sizes[name][0]))
    rows = [(name, *sizes[name]) for name in names]
    if most is not None:
        changed = [row for row in rows if row[1] != row[2]][:most]
        others = rows[len(changed) :]
        rest = [(f"{len(others)} others", *sums(others))] if others and changed else []
        rows = [*changed, *rest, ("all", *sums(rows))]
    columns = [
        Column(heading, heading, read=lambda row: row[0]),
        Column(f"before_{unit.lower()}", "before", unit, FORMAT, read=lambda row: in_unit(row[1], unit)),
        Column(f"now_{unit.lower()}", "now", unit, FORMAT, read=lambda row: in_unit(row[2], unit)),
        Column(f"change_{unit.lower()}", "change", unit, f"+{FORMAT}", read=lambda row: in_unit(row[2] - row[1], unit)),
    ]
    return Table.of(name, title, columns, rows)


def sums(rows: Iterable[tuple[Any, ...]]) -> tuple[int, int]:
    return sum(row[1] for row in rows), sum(row[2] for row in rows)


def growth_of_runs(before: ScriptRecord, now: ScriptRecord, allowed: Growth) -> list[str]:
    """Figures that grew by more than is allowed, and that the script failed where it did not before."""
    sides = [figures_of(record) for record in (before, now)]
    pairs = {name: (sides[0].get(name, 0), sides[1].get(name, 0)) for name in COMPARED}
    grown = [
        f"The {name} grew by more than {allowed}: {format_bytes(old)} -> {format_bytes(new)}, {new - old:+,} B."
        for name, (old, new) in pairs.items()
        if not allowed.allows(old, new)
    ]
    return grown + ([f"It fails now: {now.error}."] if now.error and not before.error else [])


def went(old: int, new: int) -> str:
    if new == old:
        return f"stayed at {format_bytes(old)} ({old:,} bytes)"
    return f"went from {format_bytes(old)} to {format_bytes(new)}: {change(new - old)} ({new - old:+,} bytes)"


def change(size: int) -> str:
    """ "1.5 MiB less"."""
    return f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'}" if size else "no change"

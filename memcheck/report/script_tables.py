"""Reports what a script needed, and what changed between two runs: text, tables and an HTML page."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from memcheck.core import units
from memcheck.core.options import named
from memcheck.core.script_record import LAYERS, Alive, Growth, Line, LineDoubt, Moment, Origin, ScriptRecord
from memcheck.core.units import counted, format_bytes
from memcheck.report.memory import HELD, MODULES, NO_LINE, OUTSIDE, MemoryPicture, marks_of
from memcheck.report.page import render_page
from memcheck.report.tables import Column, Screen, Table, by_size, in_unit, size_cells, to_text, unit_of

# Rows of a table in text and on the page; the rest is combined in one row.
MOST_ROWS, MOST_ROWS_OF_PAGE = 12, 200
MOST_FILES = 4  # Of those that were not written.
LINE_DOUBTS = "line_doubts"
FORMAT = ",.2f"
# On a narrow screen the last of these columns are left out first.
IMPORTANCE = (
    *("from forward", "from backward", "parameters", "optimizer state", "gradients"),
    *("from elsewhere", "from optimizer step", "buffers"),
)


def script_report(record: ScriptRecord, screen: Screen | None = None, *, doubts: bool = False) -> str:
    """The report as text: how the script ended, then the tables. doubts: with those of lines."""
    screen = screen or Screen()
    first = paragraphs(record)
    if record.line_doubts and not doubts:
        lines = counted(len({(each.file, each.line) for each in record.line_doubts}), "line")
        first.append(f"What the simulated GPU answered at {lines} is not known: {named('doubts')} lists it.")
    first = [screen.fill(line) if screen.width else line for line in first]
    shown = [table for table in tables(record, MOST_ROWS) if doubts or table.name != LINE_DOUBTS]
    return "\n\n".join(["\n".join(first), *(to_text(table, screen) for table in shown)])


def limit_report(record: ScriptRecord, limit_bytes: int, peaks: Mapping[str, int]) -> str:
    """Why a test is above its limit: its peaks by device, and what was alive at the peak of the recorded one."""
    limit = f"its limit is {format_bytes(limit_bytes)}"
    lines = [
        f"The test needed {format_bytes(peak)} of torch memory on {device}, and {limit} "
        f"({peak:,} and {limit_bytes:,} bytes)."
        for device, peak in peaks.items()
    ]
    if record.device not in peaks:
        return "\n".join(lines)
    place = record.peak.place
    lines.append(f"It was highest when {place.operator} allocated {where(record.peak, record)}.")
    unit = unit_of(record.peak.bytes)
    title = f"Alive at the peak, by operator and line of Python, {unit}"
    table = group_table(record.alive, "alive", title, "operator and line", operator_and_line, unit, MOST_ROWS)
    return "\n".join([*lines, "", to_text(table, Screen())])


def script_page(record: ScriptRecord) -> str:
    """The report as an HTML page. A record of an earlier version has no picture."""
    return render_page(
        title=script_title(record),
        paragraphs=paragraphs(record),
        pictures=[script_picture(record)] if record.course.points else [],
        tables=tables(record, MOST_ROWS_OF_PAGE),
        facts={"device": record.device_words, **record.environment},
        sweeps=[{"command": f"memcheck run {shlex.join(record.command)}", "started": None, "facts": {}}],
    )


def script_picture(record: ScriptRecord) -> MemoryPicture:
    peak, last = record.peak, record.refusal if record.ran_out else None
    # A limit so far above the peak that it would flatten the picture is left out.
    limit = record.limit_bytes or 0
    lines = {f"limit {format_bytes(limit)}": [limit] * len(record.course.points)} if 0 < limit < 3 * peak.bytes else {}
    return MemoryPicture(
        f"{script_title(record)} on {record.device_words}",
        "Each point is the highest sum of some allocations and frees in a row.",
        record.course,
        {**HELD, "line of Python": line_of, **MODULES},
        marks_of((peak.event, peak.bytes), (last.moment.event, last.requested_bytes) if last else None),
        "module, line and operator",
        lines,
    )


def script_title(record: ScriptRecord) -> str:
    name = record.command[1] if record.command[:1] == ["-m"] else Path(record.command[0]).name
    return f"Memory of {name}"


def paragraphs(record: ScriptRecord) -> list[str]:
    """Whether it fits a simulated GPU, how the script ended, what grew, and its peak."""
    lines = [simulated_verdict(record)] if record.simulated else []
    lines += [ending(record), *filter(None, [record.ended]), *out_of_memory(record)]
    lines += [*growth_sentences(record), peak_sentence(record), *unwritten_sentences(record)]
    if record.steps and not record.phase_peaks.get("backward"):
        lines.append(f"{counted(record.steps, 'optimizer step')} ran, and no backward did.")
    if record.snapshot is not None:
        lines.append(f"memcheck snapshot reads {record.snapshot} and says what would have fitted.")
    return [*lines, *(f"Doubt: {doubt}." for doubt in record.doubts)]


def simulated_verdict(record: ScriptRecord) -> str:
    """Whether what ran fits the GPU, the peak, and the line that allocated it.

    "Simulated RTX-4090 (22.9 GiB for torch): it fits. Peak 12.3 GiB of tensors, 13 GiB reserved, at train.py:41."
    """
    ended = "was stopped" if record.error == "KeyboardInterrupt" else "failed"
    until = ", and fitted until then" if record.peak.bytes else " before it allocated memory"
    fits = "it does not fit" if record.ran_out else f"it {ended}{until}" if record.error else "it fits"
    verdict = f"Simulated {record.device_name} ({format_bytes(record.usable_bytes or 0)} for torch): {fits}."
    if not record.peak.bytes:
        return verdict
    reserved = format_bytes(record.reserved_bytes or 0)
    return f"{verdict} Peak {format_bytes(record.peak.bytes)} of tensors, {reserved} reserved, {at(record.peak.place)}."


def at(place: Origin) -> str:
    """ "at train.py:41", "in the optimizer step, at train.py:41", or without a line "in the backward, MulBackward0"."""
    if place.line is not None:
        phase = "in the optimizer step, " if place.phase == "optimizer step" else ""
        return f"{phase}at {place.line.short}"
    return f"in {place.operator}" if place.phase == "elsewhere" else f"in the {place.phase}, {place.operator}"


def unwritten_sentences(record: ScriptRecord) -> Iterator[str]:
    if record.unwritten:
        files = ", ".join(f"{file.path} ({format_bytes(file.bytes)})" for file in record.unwritten[:MOST_FILES])
        more = f" and {len(record.unwritten) - MOST_FILES} more" if len(record.unwritten) > MOST_FILES else ""
        yield (
            f"Not written, as their tensors are not computed: {files}{more}. Such files are missing or empty, and "
            "loading them fails."
        )


def ending(record: ScriptRecord) -> str:
    steps = f", {counted(record.steps, 'optimizer step')}" if record.steps else ""
    error = record.error and (record.error.partition(":")[0] if record.ran_out else record.error)
    how = f"failed ({error})" if error else "ended"
    return (
        f"{shlex.join(record.command)} {how} after {record.seconds:.3g} s with exit code {record.exit_code}: "
        f"{record.events:,} allocations and frees on {record.device_words}{steps}."
    )


def out_of_memory(record: ScriptRecord) -> list[str]:
    last = record.refusal
    if last is None:
        return ["Memory ran out."] if record.ran_out else []
    limit = "" if record.limit_bytes is None else f" of {format_bytes(record.limit_bytes)}"
    asked = (
        f"{last.moment.place.operator} asked for {format_bytes(last.requested_bytes)} with "
        f"{format_bytes(last.moment.bytes)}{limit} in use, {where(last.moment, record)}"
    )
    if record.ran_out:
        return [f"Memory ran out: {asked}."]
    counts = Counter[str]()
    for each in record.refused:
        counts[at(each.place)] += each.count
    places = ", ".join(f"{count} {place}" for place, count in counts.items())
    caught = f"and the script caught the error and went on: {places}" if places else "and the script went on"
    return [f"{counted(record.refusals, 'allocation')} failed, {caught}. The last one: {asked}."]


def growth_sentences(record: ScriptRecord) -> Iterator[str]:
    if record.growing:
        first, *others = record.growing
        part = f"{format_bytes(first.bytes_per_step)} of it " if others else ""
        module = f", in {first.place.module}" if first.place.module else ""
        whole = format_bytes(record.growth_per_step)
        yield f"Grows {whole} a {record.step_name}, {part}from {first.place.where}{module}."
    if record.process.growth_per_step:
        more = format_bytes(record.process.growth_per_step)
        yield (
            f"The process grows {more} a {record.step_name} beside its tensors: NumPy arrays, Python objects or a C "
            "library hold it."
        )


def peak_sentence(record: ScriptRecord) -> str:
    peak = record.peak
    if not peak.bytes:
        return f"It allocated no memory of tensors on {record.device_words}."
    return (
        f"The peak was {format_bytes(peak.bytes)} ({peak.bytes:,} bytes) after {peak.seconds:.3g} s, when "
        f"{peak.place.operator} allocated {where(peak, record)}."
    )


def where(moment: Moment, record: ScriptRecord) -> str:
    place = moment.place
    phase = "outside of any phase" if place.phase == "elsewhere" else f"in the {place.phase}"
    step = f" of step {moment.step}" if record.steps and place.phase != "elsewhere" else ""
    module = f", in {place.module}" if place.module else ""
    line = f", at {place.line}" if place.line else ""
    return f"{phase}{step}{module}{line}"


def figures_of(record: ScriptRecord) -> dict[str, int]:
    """The figures of a run, of its tensors and of its process (RSS), as far as they are known and not 0."""
    process = record.process
    figures = {
        "peak": record.peak.bytes,
        "growth per step": record.growth_per_step,
        **{f"highest, {phase}": size for phase, size in record.phase_peaks.items()},
        "allocated, at most": record.allocated_bytes,
        "reserved, at most": record.reserved_bytes,
        "alive at the end": record.left_bytes,
        **{f"peak of {device}": size for device, size in record.other_peaks.items()},
        "process, at the beginning": process.begin_bytes,
        "process, at most": process.peak_bytes,
        "process, at the end": process.end_bytes,
    }
    return {name: size for name, size in figures.items() if size}


def tables(record: ScriptRecord, most: int) -> list[Table]:
    """The figures, what grows, and what was alive at the peak by module, operator and line."""
    moment = "when memory ran out" if record.ran_out and record.refusal else "at the peak"
    alive, unit = record.alive_then, unit_of(size_of(record.alive_then))
    found = [figures_table(record)] if record.peak.bytes or record.other_peaks else []
    found += [growth_table(record.growing, record.step_name)] if record.growing else []
    if alive:
        by = f"Alive {moment}, by"
        lines = group_table(alive, "lines", f"{by} line of Python", "line", line_of, unit, most)
        lines.notes += [f"Blocks below {format_bytes(record.least_bytes)} have no line."] if record.least_bytes else []
        if record.device.startswith("cuda") and not all(each.place.line for each in alive):
            lines.notes.append(f"{NO_LINE}: such as the backward, which autograd runs in a thread of its own.")
        found.append(module_table(alive, f"{by} module, {unit}", unit, most))
        found.append(group_table(alive, "operators", f"{by} operator", "operator", attrgetter("operator"), unit, most))
        found.append(lines)
    return found + ([line_doubt_table(record.line_doubts)] if record.line_doubts else [])


def figures_table(record: ScriptRecord) -> Table:
    columns = [
        Column("figure", "figure", read=lambda pair: pair[0]),
        Column("mib", "MiB", "", FORMAT, read=lambda pair: in_unit(pair[1], "MiB")),
        Column("bytes", "bytes", "", ",", read=lambda pair: pair[1]),
    ]
    notes = ["highest: after an allocation in the phase."]
    if record.allocated_bytes:
        notes.append(
            "allocated: torch.cuda.max_memory_allocated(), the tensors and what the allocator rounds them up by."
        )
    if record.process.peak_bytes:
        notes.append("process: its resident memory (RSS), with its tensors on the CPU and all else.")
    return Table.of("figures", "Figures", columns, figures_of(record).items(), notes)


def module_table(alive: Sequence[Alive], title: str, unit: str, most: int) -> Table:
    """What is alive by module, in a column per layer; each row adds up to its sum."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for each in alive:
        sums[each.place.module or OUTSIDE][each.place.layer] += each.bytes
    names, rest = by_size(sums, most)
    groups = [(name, [name]) for name in names]
    groups += [(f"{len(rest)} others", rest)] if rest else []
    groups += [("all", [*sums])] if len(sums) > 1 else []
    rows = [[label, *size_cells(sums, members, LAYERS, unit)] for label, members in groups]
    keys = [f"{layer.replace(' ', '_')}_{unit.lower()}" for layer in LAYERS]
    pairs = zip(keys, LAYERS, strict=True)
    columns = [
        Column("module", "module"),
        *(Column(key, layer, "", FORMAT, rank=1 + IMPORTANCE.index(layer)) for key, layer in pairs),
        Column(unit.lower(), "sum", "", FORMAT),
    ]
    notes = ["from forward, from backward, ...: all other blocks, by the phase that allocated them."]
    return Table("modules", title, columns, rows, notes)


def group_table(
    alive: Sequence[Alive], name: str, title: str, heading: str, key: Callable[[Origin], str], unit: str, most: int
) -> Table:
    """What is alive by the key, largest first, and the rest combined; the rows add up to the whole."""
    groups: dict[str, list[Alive]] = defaultdict(list)
    for each in alive:
        groups[key(each.place)].append(each)
    ordered = sorted(groups.items(), key=lambda item: -size_of(item[1]))
    if rest := ordered[most:]:
        ordered = [*ordered[:most], (f"{len(rest)} others", [each for _, members in rest for each in members])]
    whole = size_of(alive) or 1
    columns = [
        Column(heading, heading, read=lambda group: group[0]),
        Column(unit.lower(), unit, "", FORMAT, read=lambda group: in_unit(size_of(group[1]), unit)),
        Column("percent", "%", "", ".1f", read=lambda group: 100 * size_of(group[1]) / whole),
        Column("blocks", "blocks", "", ",", read=lambda group: sum(each.blocks for each in group[1])),
    ]
    return Table.of(name, title, columns, ordered)


def growth_table(growing: Sequence[Growth], step_name: str = "step") -> Table:
    unit, one = "MiB", step_name.partition(" ")[0]
    columns = [
        Column("line", "line", read=lambda growth: growth.place.where),
        Column("per_step", f"per {one}", unit, FORMAT, read=lambda growth: in_unit(growth.bytes_per_step, unit)),
        Column("blocks", f"blocks per {one}", "", ".3g", read=lambda growth: growth.blocks_per_step),
        Column("alive", "alive", unit, FORMAT, read=lambda growth: in_unit(growth.bytes, unit)),
    ]
    title = f"Alive more and more, by line of Python, and at the last {step_name}"
    return Table.of("growing", title, columns, growing[:MOST_ROWS])


def line_doubt_table(line_doubts: Sequence[LineDoubt]) -> Table:
    columns = [
        Column("line", "line", read=lambda each: Line(each.file, each.line, "").short if each.line else NO_LINE),
        Column("times", "times", "", ",", read=attrgetter("count")),
        Column("what", "not known", read=attrgetter("what")),
    ]
    title = "What the simulated GPU answered and does not know, by line of Python"
    return Table.of(LINE_DOUBTS, title, columns, line_doubts)


def size_of(alive: Iterable[Alive]) -> int:
    return sum(each.bytes for each in alive)


def operator_and_line(place: Origin) -> str:
    name = f"{place.kind} ({place.operator})" if place.kind else place.operator
    return f"{name}, {line_of(place)}"


def line_of(place: Origin) -> str:
    return str(place.line) if place.line else NO_LINE


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
    given = {"command": shlex.join(record.command), "device": record.device_words, "limit": limit}
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


def went(old: int, new: int) -> str:
    if new == old:
        return f"stayed at {format_bytes(old)} ({old:,} bytes)"
    return f"went from {format_bytes(old)} to {format_bytes(new)}: {change(new - old)} ({new - old:+,} bytes)"


def change(size: int) -> str:
    """ "1.5 MiB less"."""
    return f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'}" if size else "no change"

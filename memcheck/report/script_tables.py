"""Reports what a script needed: text, tables and an HTML page."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from memcheck.core.script_record import LAYERS, Alive, Growth, Moment, Origin, ScriptRecord
from memcheck.core.units import UNITS, counted, format_bytes
from memcheck.report.page import render_page
from memcheck.report.tables import Cell, Column, Screen, Table, to_text

K = TypeVar("K")
# Rows of a table in text and on the page; the rest is combined in one row.
MOST_ROWS, MOST_ROWS_OF_PAGE = 12, 200
OUTSIDE = "outside of modules"
NO_LINE = "no line of Python"
FORMAT = ",.2f"
# On a narrow screen the last of these columns are left out first.
IMPORTANCE = (
    *("from forward", "from backward", "parameters", "optimizer state", "gradients"),
    *("from elsewhere", "from optimizer step", "buffers"),
)


def script_report(record: ScriptRecord, screen: Screen | None = None) -> str:
    """The report as text: how the script ended, then the tables."""
    screen = screen or Screen()
    first = [screen.fill(line) if screen.width else line for line in paragraphs(record)]
    return "\n\n".join(["\n".join(first), *(to_text(table, screen) for table in tables(record, MOST_ROWS))])


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


def script_page(record: ScriptRecord, picture: str) -> str:
    """The report as an HTML page. picture: an HTML element."""
    title = script_title(record)
    rest = record.events_per_level
    points = f"; each point is the highest of {rest} allocations and frees in a row" if rest > 1 else ""
    return render_page(
        title=title,
        paragraphs=paragraphs(record),
        plots=[(f"{title}: what was alive, by what it holds{points}", picture)],
        tables=tables(record, MOST_ROWS_OF_PAGE),
        facts={"device": record.device, **record.environment},
        sweeps=[{"command": f"memcheck run {shlex.join(record.command)}", "started": None, "facts": {}}],
    )


def script_title(record: ScriptRecord) -> str:
    name = record.command[1] if record.command[:1] == ["-m"] else Path(record.command[0]).name
    return f"Memory of {name}"


def paragraphs(record: ScriptRecord) -> list[str]:
    """How the script ended, what grew, and its peak."""
    lines = [ending(record), *out_of_memory(record), *growth_sentences(record), peak_sentence(record)]
    if record.steps and not record.phase_peaks.get("backward"):
        lines.append(f"{counted(record.steps, 'optimizer step')} ran, and no backward did.")
    if record.snapshot is not None:
        lines.append(f"memcheck snapshot reads {record.snapshot} and says what would have fitted.")
    return [*lines, *(f"Doubt: {doubt}." for doubt in record.doubts)]


def ending(record: ScriptRecord) -> str:
    steps = f", {counted(record.steps, 'optimizer step')}" if record.steps else ""
    how = "ended" if record.error is None else f"failed ({record.error})"
    return (
        f"{shlex.join(record.command)} {how} after {record.seconds:.3g} s with exit code {record.exit_code}: "
        f"{record.events:,} allocations and frees on {record.device}{steps}."
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
    return [f"{counted(record.refusals, 'allocation')} failed, and the script went on. The last one: {asked}."]


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
        return f"It allocated no memory of tensors on {record.device}."
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
        found.append(module_table(alive, f"{by} module, {unit}", unit, most))
        found.append(group_table(alive, "operators", f"{by} operator", "operator", attrgetter("operator"), unit, most))
        found.append(lines)
    return found


def figures_table(record: ScriptRecord) -> Table:
    columns = [
        Column("figure", "figure", read=lambda pair: pair[0]),
        Column("mib", "MiB", "", FORMAT, read=lambda pair: in_unit(pair[1], "MiB")),
        Column("bytes", "bytes", "", ",", read=lambda pair: pair[1]),
    ]
    notes = ["highest: after an allocation in the phase."]
    if record.process.peak_bytes:
        notes.append("process: its resident memory (RSS), with its tensors on the CPU and all else.")
    return Table.of("figures", "Figures", columns, figures_of(record).items(), notes)


def unit_of(whole: int) -> str:
    return "KiB" if whole < 8 * UNITS["MIB"] else "MiB" if whole < 64 * UNITS["GIB"] else "GiB"


def in_unit(size: int, unit: str) -> float:
    return size / UNITS[unit.upper()]


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


def by_size(sums: Mapping[K, Mapping[str, int]], most: int) -> tuple[list[K], list[K]]:
    """The names with the largest sums, and all other names."""
    names = sorted(sums, key=lambda name: -sum(sums[name].values()))
    return names[:most], names[most:]


def size_cells(
    sums: Mapping[K, Mapping[str, int]], members: Sequence[K], kinds: Sequence[str], unit: str
) -> list[Cell]:
    """The bytes of the members by kind, and their sum."""
    sizes = [sum(sums[name][kind] for name in members) for kind in kinds]
    return [*(in_unit(size, unit) if size else None for size in sizes), in_unit(sum(sizes), unit)]


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


def size_of(alive: Iterable[Alive]) -> int:
    return sum(each.bytes for each in alive)


def operator_and_line(place: Origin) -> str:
    name = f"{place.kind} ({place.operator})" if place.kind else place.operator
    return f"{name}, {line_of(place)}"


def line_of(place: Origin) -> str:
    return str(place.line) if place.line else NO_LINE

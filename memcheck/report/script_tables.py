"""Reports what a script needed: text, tables and an HTML page."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from memcheck.core.options import named
from memcheck.core.script_record import Line, LineDoubt, Moment, Origin, ScriptRecord
from memcheck.core.units import counted, format_bytes
from memcheck.report import alive, page
from memcheck.report.alive import group_table
from memcheck.report.memory import HELD, MODULES, NO_LINE, MemoryPicture, marks_of
from memcheck.report.tables import BYTES, Cell, Column, Screen, Table, to_text

MOST_FILES = 4  # Of those that were not written.
LINE_DOUBTS = "line_doubts"


def script_report(record: ScriptRecord, screen: Screen | None = None, *, doubts: bool = False) -> str:
    """The report as text: how the script ended, then the tables. doubts: with those of lines."""
    screen = screen or Screen()
    first = paragraphs(record)
    if record.line_doubts and not doubts:
        lines = counted(len({(each.file, each.line) for each in record.line_doubts}), "line")
        first.append(f"What the simulated GPU answered at {lines} is not known: {named('doubts')} lists it.")
    first = [screen.fill(line) if screen.width else line for line in first]
    shown = [table for table in tables(record, alive.MOST_ROWS) if doubts or table.name != LINE_DOUBTS]
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
    unit = alive.unit_of(record.peak.bytes)
    title = f"Alive at the peak, by operator and line of Python, {unit}"
    table = group_table(record.alive, "alive", title, "operator and line", operator_and_line, unit, alive.MOST_ROWS)
    return "\n".join([*lines, "", to_text(table, Screen())])


def script_page(record: ScriptRecord) -> str:
    """The report as an HTML page. A record of an earlier version has no picture."""
    return page.render_page(
        title=script_title(record),
        paragraphs=paragraphs(record),
        pictures=[script_picture(record)] if record.course.points else [],
        tables=tables(record, alive.MOST_ROWS_OF_PAGE),
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
        {**HELD, "line of Python": alive.line_of, **MODULES},
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
    lines += [*growth_sentences(record), peak_sentence(record), *other_gpus(record), *child_sentences(record)]
    lines += unwritten_sentences(record)
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
    usable, several = format_bytes(record.usable_bytes or 0), record.gpus > 1 and record.rank is None
    gpus = f"{record.gpus} {record.device_name} ({usable} for torch on each)"
    one = f"{record.device_name} ({usable} for torch)" + ("" if record.rank is None else f", {rank_words(record)}")
    verdict = f"Simulated {gpus if several else one}: {fits}."
    if not record.peak.bytes:
        return verdict
    place = f"{at(record.peak.place)}{f', on {record.device}' if several else ''}"
    reserved = format_bytes(record.reserved_bytes or 0)
    return f"{verdict} Peak {format_bytes(record.peak.bytes)} of tensors, {reserved} reserved, {place}."


def rank_words(record: ScriptRecord) -> str:
    return f"rank {record.rank} of {record.ranks}"


def other_gpus(record: ScriptRecord) -> Iterator[str]:
    """The peaks of the other GPUs that the script used."""
    others = {name: peak for name, peak in record.other_peaks.items() if name in record.other_reserved}
    if others:
        peaks = (
            f"{format_bytes(peak)} on {name} ({format_bytes(record.other_reserved[name])} reserved)"
            for name, peak in others.items()
        )
        yield f"Peaks of the other GPUs: {', '.join(peaks)}."


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
        since = f" since step {first.since}" if first.since else ""
        yield f"Grows {whole} a {record.step_name}{since}, {part}from {first.place.where}{module}."
    if record.process.growth_per_step:
        more = format_bytes(record.process.growth_per_step)
        yield (
            f"The process grows {more} a {record.step_name} beside its tensors: NumPy arrays, Python objects or a C "
            "library hold it."
        )


def child_sentences(record: ScriptRecord) -> Iterator[str]:
    if record.children:
        started = "a process" if record.children == 1 else f"{record.children:,} processes"
        largest = f" The largest took {format_bytes(record.children_bytes)} (RSS)." if record.children_bytes else ""
        yield (
            f"The script started {started}, whose tensors are not part of these figures.{largest} To measure them, "
            "call what they run in the script itself, as with num_workers=0."
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
        **{f"reserved of {device}": size for device, size in record.other_reserved.items()},
        "process, at the beginning": process.begin_bytes,
        "process, at most": process.peak_bytes,
        "process, at the end": process.end_bytes,
    }
    return {name: size for name, size in figures.items() if size}


def tables(record: ScriptRecord, most: int) -> list[Table]:
    """The figures, what grows, and what was alive at the peak by module, operator and line."""
    moment = "when memory ran out" if record.ran_out and record.refusal else "at the peak"
    there, unit = record.alive_then, alive.unit_of(alive.size_of(record.alive_then))
    found = [figures_table(record)] if record.peak.bytes or record.other_peaks else []
    found += [alive.growth_table(record.growing, record.step_name)] if record.growing else []
    if there:
        by = f"Alive {moment}, by"
        lines = group_table(there, "lines", f"{by} line of Python", "line", alive.line_of, unit, most)
        lines.notes += [f"Blocks below {format_bytes(record.least_bytes)} have no line."] if record.least_bytes else []
        if record.device.startswith("cuda") and not all(each.place.line for each in there):
            lines.notes.append(f"{NO_LINE}: such as the backward, which autograd runs in a thread of its own.")
        found.append(alive.module_table(there, f"{by} module, {unit}", unit, most))
        found.append(group_table(there, "operators", f"{by} operator", "operator", attrgetter("operator"), unit, most))
        found.append(lines)
    return found + ([line_doubt_table(record.line_doubts)] if record.line_doubts else [])


def figures_table(record: ScriptRecord) -> Table:
    columns = [
        Column("figure", "figure", read=lambda pair: pair[0]),
        Column("mib", "MiB", "", alive.FORMAT, read=lambda pair: alive.in_unit(pair[1], "MiB")),
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


def ranks_table(records: Sequence[ScriptRecord]) -> Table:
    """What each rank needed, and the most of them."""
    rows: list[list[Cell]] = [
        [str(each.rank), each.peak.bytes, each.reserved_bytes, not each.ran_out] for each in records
    ]
    if len(rows) > 1:
        most = (max(value for row in rows if isinstance(value := row[place], int)) for place in (1, 2))
        rows.append(["most", *most, not any(each.ran_out for each in records)])
    columns = [
        Column("rank", "rank"),
        Column("peak_bytes", "peak", "", BYTES),
        Column("reserved_bytes", "reserved", "", BYTES),
        Column("fits", "fits"),
    ]
    return Table("ranks", f"Ranks of {script_title(records[0]).removeprefix('Memory of ')}", columns, rows)


def line_doubt_table(line_doubts: Sequence[LineDoubt]) -> Table:
    columns = [
        Column("line", "line", read=lambda each: Line(each.file, each.line, "").short if each.line else NO_LINE),
        Column("times", "times", "", ",", read=attrgetter("count")),
        Column("what", "not known", read=attrgetter("what")),
    ]
    title = "What the simulated GPU answered and does not know, by line of Python"
    return Table.of(LINE_DOUBTS, title, columns, line_doubts)


def operator_and_line(place: Origin) -> str:
    name = f"{place.kind} ({place.operator})" if place.kind else place.operator
    return f"{name}, {alive.line_of(place)}"

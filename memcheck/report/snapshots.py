"""Reports what a snapshot of torch's CUDA allocator says: sentences, tables, data and an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from memcheck.core.script_record import Alive, Origin
from memcheck.core.snapshot_record import Holes, Moment, SnapshotRecord, WhatIf
from memcheck.core.units import counted, format_bytes
from memcheck.report import alive, page
from memcheck.report.alive import FORMAT, in_unit
from memcheck.report.memory import HELD, MODULES, MemoryPicture, marks_of
from memcheck.report.tables import Column, Screen, Table, to_text

BEFORE_THE_FIRST = -1


def snapshot_report(record: SnapshotRecord, screen: Screen | None = None) -> str:
    """The report as text: the answer, then the tables."""
    screen = screen or Screen()
    sentences = "\n".join(map(screen.fill, snapshot_sentences(record)))
    return "\n\n".join([sentences, *(to_text(table, screen) for table in snapshot_tables(record, alive.MOST_ROWS))])


def snapshot_page(records: Sequence[SnapshotRecord], command: str) -> str:
    """The reports as an HTML page."""
    return page.render_page(
        title=f"Memory snapshot {', '.join(dict.fromkeys(Path(record.file).name for record in records))}",
        paragraphs=[sentence for record in records for sentence in snapshot_sentences(record)],
        pictures=[snapshot_picture(record) for record in records],
        tables=[table for record in records for table in snapshot_tables(record, alive.MOST_ROWS_OF_PAGE)],
        facts={name_of(record): record.settings or "default settings of the allocator" for record in records},
        sweeps=[{"command": command, "started": None, "facts": {}}],
    )


def snapshot_picture(record: SnapshotRecord) -> MemoryPicture:
    course, peak, oom = record.course, record.peak, record.oom
    modules = MODULES if any(place.module for place in course.places) else {}
    return MemoryPicture(
        f"Memory of {name_of(record)}",
        "Each point is the highest sum of some events in a row. Dashed: what the allocator had reserved.",
        course,
        {"line of Python": attrgetter("where"), **modules, **HELD},
        marks_of((peak.event, peak.allocated_bytes), (oom.moment.event, oom.requested_bytes) if oom else None),
        "calls of Python, outermost first, and operator",
        {"reserved": course.reserved},
    )


def name_of(record: SnapshotRecord) -> str:
    return f"{Path(record.file).name}, cuda:{record.device}"


def snapshot_sentences(record: SnapshotRecord) -> list[str]:
    """Whether memory ran out and why, the peak, and what would have fitted."""
    sentences = [
        *out_of_memory(record),
        peak_sentence(record),
        *what_if_sentence(record),
        *([] if record.what_if else [replay_words(record)]),
    ]
    return [*sentences, *(f"Doubt: {doubt}." for doubt in record.doubts)]


def when(moment: Moment) -> str:
    seconds = "" if moment.seconds is None else f" after {moment.seconds:.3g} s"
    return f"at event {moment.event:,}{seconds}"


def place_words(place: Origin | None) -> str:
    if place is None:
        return ""
    phase = "" if place.phase == "elsewhere" else f" in the {place.phase}"
    return f"{phase}, at {place.line}" if place.line else f"{phase} ({place.operator})" if phase else ""


def out_of_memory(record: SnapshotRecord) -> Iterator[str]:
    oom = record.oom
    if oom is None:
        return
    many = f", the last of {record.ooms} times" if record.ooms > 1 else ""
    yield (
        f"Memory ran out on cuda:{record.device} {when(oom.moment)}{many}: "
        f"{format_bytes(oom.requested_bytes)} were requested{place_words(oom.moment.place)}, "
        f"with {format_bytes(oom.free_bytes)} of the GPU free and {format_bytes(oom.moment.reserved_bytes)} reserved "
        f"by torch, of which {format_bytes(oom.moment.allocated_bytes)} were in use."
    )
    if oom.free_bytes >= oom.requested_bytes:
        yield (
            "The GPU had room for it: the process had a limit (torch.cuda.set_per_process_memory_fraction), or asked "
            "for more than the request because of its settings."
        )


def peak_sentence(record: SnapshotRecord) -> str:
    peak = record.peak
    if not record.events:
        return (
            f"cuda:{record.device} has no recorded events: {format_bytes(peak.allocated_bytes)} are in use, and "
            f"{format_bytes(record.reserved_bytes)} reserved. torch.cuda.memory._record_memory_history() records them."
        )
    return (
        f"The peak on cuda:{record.device} was {format_bytes(peak.allocated_bytes)} allocated "
        f"({peak.allocated_bytes:,} bytes) {when(peak)}{place_words(peak.place)}; at most "
        f"{format_bytes(record.peak_reserved_bytes)} were reserved."
    )


def what_if_sentence(record: SnapshotRecord) -> Iterator[str]:
    """The setting that would have reserved least, if it differs from what was recorded."""
    fitting = [case for case in record.what_if if case.fits]
    limit = record.what_if[0].limit_bytes if record.what_if else None
    room = "" if limit is None else f" in {format_bytes(limit)}"
    if len(record.what_if) < 2:
        return
    if not fitting:
        yield f"No setting that was tried gives every recorded request room{room}."
        return
    recorded, best = record.what_if[0], min(fitting, key=attrgetter("peak_reserved_bytes"))
    if not recorded.fits:
        # Expandable segments are the usual remedy, and depend least on what else runs.
        best = next((case for case in fitting if case.settings.startswith("expandable_segments")), best)
        most = format_bytes(best.peak_reserved_bytes)
        yield f"With {best.settings} every recorded request would have had room{room}: at most {most} reserved."
    elif best.peak_reserved_bytes <= 0.99 * recorded.peak_reserved_bytes:
        yield f"With {best.settings} at most {format_bytes(best.peak_reserved_bytes)} would have been reserved."


def replay_words(record: SnapshotRecord) -> str:
    """How true the model of the allocator is for this recording."""
    replay = record.replay
    if replay.reason is not None:
        return f"The recorded requests were not replayed: {replay.reason}."
    peaks = (
        f"{format_bytes(replay.peak_reserved_bytes)} reserved, {format_bytes(record.peak_reserved_bytes)} as recorded"
    )
    how = (
        "every segment and reserved byte as recorded" if replay.exact else f"a peak of {peaks}; all rows are uncertain"
    )
    return (
        f"The model of the allocator replayed {replay.at_recorded_address:,} of {replay.allocations:,} allocations at "
        f"their recorded addresses, with {how}."
    )


def snapshot_tables(record: SnapshotRecord, most: int) -> list[Table]:
    """What would have fitted, what was alive by line, module and size, holes, and what grows."""
    moment = record.moment
    words = "when memory ran out" if record.oom else "at the peak"
    unit = alive.unit_of(moment.allocated_bytes)
    there = moment.alive
    tables = [what_if_table(record)] if record.what_if else []
    title = f"Alive {words}, by line of Python, {unit}"
    lines = alive.group_table(there, "lines", title, "line", attrgetter("where"), unit, most)
    size, blocks = record.before
    if blocks and record.events:
        before = f"{format_bytes(size)} in {counted(blocks, 'block')} were in use before the recording began"
        lines.notes.append(f"{before}; what was released since has no line.")
    tables.append(lines)
    if any(each.place.module for each in there):
        tables.append(alive.module_table(there, f"Alive {words}, by module, {unit}", unit, most))
    tables.append(size_table(moment, f"Alive {words}, by size of block, {unit}", unit))
    tables.append(holes_table(moment.holes, f"Reserved {words}, by pool, {alive.unit_of(moment.reserved_bytes)}"))
    if record.growing:
        tables.append(alive.growth_table(record.growing))
    return tables


def what_if_table(record: SnapshotRecord) -> Table:
    unit = alive.unit_of(record.peak_reserved_bytes)
    limit = record.what_if[0].limit_bytes
    room = "without a limit" if limit is None else f"in {format_bytes(limit)}"
    columns = [
        Column("settings", "settings"),
        Column("fits", "fits"),
        Column(
            "peak_reserved", "peak reserved", unit, FORMAT, read=lambda case: in_unit(case.peak_reserved_bytes, unit)
        ),
        Column("failing_event", "fails at event", "", ",", read=lambda case: case.failing_event),
        Column("failing_line", "line", read=failing_line),
    ]
    notes = ["Each row is the recorded requests in the model of the allocator; nothing ran.", replay_words(record)]
    return Table.of("what-if", f"The same requests under other settings, {room}", columns, record.what_if, notes)


def failing_line(case: WhatIf) -> str | None:
    if case.failing_event == BEFORE_THE_FIRST:
        return "what was in use before"
    return None if case.failing_place is None else case.failing_place.where


def size_table(moment: Moment, title: str, unit: str) -> Table:
    columns = [
        Column("block", "block", read=lambda row: f"{format_bytes(row[0])} or more" if row[0] else "below 1 MiB"),
        Column(unit.lower(), unit, "", FORMAT, read=lambda row: in_unit(row[1], unit)),
        Column("blocks", "blocks", "", ",", read=lambda row: row[2]),
    ]
    return Table.of("sizes", title, columns, moment.sizes)


def holes_table(holes: Iterable[Holes], title: str) -> Table:
    unit = title.rpartition(" ")[2]
    columns = [
        Column("pool", "pool"),
        Column("reserved", "reserved", "", FORMAT, read=lambda pool: in_unit(pool.reserved_bytes, unit)),
        Column("free", "free", "", FORMAT, read=lambda pool: in_unit(pool.free_bytes, unit)),
        Column("largest_hole", "largest hole", "", FORMAT, read=lambda pool: in_unit(pool.largest_bytes, unit)),
        Column("holes", "holes", "", ","),
    ]
    return Table.of("pools", title, columns, holes)


def comparison_of(before: SnapshotRecord, after: SnapshotRecord) -> tuple[list[str], Table]:
    """Two snapshots: what was reserved in a sentence, and what was alive at the peaks by line, by change."""
    sides = [{line["line"]: line["bytes"] for line in line_objects(record.peak.alive)} for record in (before, after)]
    unit = alive.unit_of(max(before.peak.allocated_bytes, after.peak.allocated_bytes))
    lines = {line: (sides[0].get(line, 0), sides[1].get(line, 0)) for line in sides[0] | sides[1]}
    title = f"Alive at the peaks, by line: {name_of(before)}, then {name_of(after)}"
    reserved = [format_bytes(record.peak_reserved_bytes) for record in (before, after)]
    sentences = [f"Reserved at most: {reserved[0]}, then {reserved[1]}."]
    return sentences, alive.change_table("comparison", title, "line", lines, unit, 2 * alive.MOST_ROWS)


def overview_table(records: Sequence[SnapshotRecord]) -> Table:
    """A row for each device of each file."""
    columns = [
        Column("file", "file", read=lambda record: Path(record.file).name),
        Column("source", "source"),
        Column("device", "device", rank=2, read=lambda record: f"cuda:{record.device}"),
        Column("settings", "settings", rank=1, read=lambda record: record.settings or None),
        Column("allocations", "allocations", "", ","),
        Column("replayed", "at recorded address", "", ",", read=lambda record: record.replay.at_recorded_address),
        Column("exact", "exact", read=lambda record: record.replay.exact),
        Column(
            "allocated",
            "peak allocated",
            "MiB",
            FORMAT,
            read=lambda record: in_unit(record.peak.allocated_bytes, "MiB"),
        ),
        Column(
            "reserved", "peak reserved", "MiB", FORMAT, read=lambda record: in_unit(record.peak_reserved_bytes, "MiB")
        ),
        Column("expandable", "expandable segments switched", "MiB", FORMAT, read=switched),
        Column("oom", "OOM at event", "", ",", read=lambda record: record.oom and record.oom.moment.event),
    ]
    notes = ["exact: every address, segment and reserved byte of the replay is as recorded."]
    return Table.of("snapshots", "Memory snapshots, replayed in the model of the allocator", columns, records, notes)


def switched(record: SnapshotRecord) -> float | None:
    """Reserved MiB if expandable segments had been on, or off where they were on."""
    found = (case for case in record.what_if if case.settings.startswith("expandable_segments"))
    return next((in_unit(case.peak_reserved_bytes, "MiB") for case in found if case.fits), None)


def line_objects(some: Iterable[Alive]) -> list[dict[str, Any]]:
    """What is alive by line, largest first."""
    lines: dict[str, dict[str, Any]] = {}
    for each in some:
        line = lines.setdefault(each.place.where, {"line": each.place.where, "bytes": 0, "blocks": 0})
        line["bytes"] += each.bytes
        line["blocks"] += each.blocks
    return sorted(lines.values(), key=lambda line: -line["bytes"])


def snapshot_object(record: SnapshotRecord) -> dict[str, Any]:
    """The record as data: plain names, bytes as integers."""
    return {
        "file": record.file,
        "device": record.device,
        "settings": record.settings,
        "events": record.events,
        "peak_allocated_bytes": record.peak.allocated_bytes,
        "peak_event": record.peak.event,
        "peak_reserved_bytes": record.peak_reserved_bytes,
        "replay": {
            "allocations": record.replay.allocations,
            "at_recorded_address": record.replay.at_recorded_address,
            "peak_reserved_bytes": record.replay.peak_reserved_bytes,
            "exact": record.replay.exact,
            "reason": record.replay.reason,
        },
        "oom": record.oom
        and {
            "requested_bytes": record.oom.requested_bytes,
            "free_bytes": record.oom.free_bytes,
            "event": record.oom.moment.event,
            "allocated_bytes": record.oom.moment.allocated_bytes,
            "reserved_bytes": record.oom.moment.reserved_bytes,
            "line": record.oom.moment.place and record.oom.moment.place.where,
            "alive": line_objects(record.oom.moment.alive),
        },
        "alive_at_peak": line_objects(record.peak.alive),
        "pools": [vars(holes) for holes in record.moment.holes],
        "before_recording": {"bytes": record.before[0], "blocks": record.before[1]},
        "steps": record.steps,
        "growing": [
            {"line": growth.place.where, "bytes_per_step": growth.bytes_per_step, "bytes": growth.bytes}
            for growth in record.growing
        ],
        "what_if": [
            {
                "settings": case.settings,
                "limit_bytes": case.limit_bytes,
                "fits": case.fits,
                "peak_reserved_bytes": case.peak_reserved_bytes,
                "failing_event": case.failing_event,
                "failing_line": failing_line(case),
            }
            for case in record.what_if
        ],
        "doubts": record.doubts,
    }

"""`memcheck snapshot`: what a recorded GPU run says, and what would have fitted."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from memcheck.cli.output import check_picture, make_room, progress_bar
from memcheck.cli.requests import Snapshot as Request
from memcheck.core.errors import UsageError
from memcheck.core.files import write_text
from memcheck.core.snapshot_record import SnapshotRecord
from memcheck.report import alive, snapshots
from memcheck.report.plots.timeline import plot_timeline
from memcheck.report.tables import Screen, Table, render, to_text
from memcheck.snapshot.snapshot import Snapshot


def run(request: Request) -> int:
    if request.html is not None:
        make_room("html", request.html)
    if request.plot is not None:
        check_picture("plot", request.plot)
        make_room("plot", request.plot)
    how = {"settings": request.settings, "device": request.device, "memory_limit": request.memory_limit}
    loaded = [load(path, **how) for path in request.files]
    records = [record for snapshot in loaded for record in snapshot.records]
    written = write(records, request)
    if request.format == "json":
        objects = [snapshots.snapshot_object(record) for record in records]
        print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=1))
    else:
        show(loaded, request.format)
    if written:
        print(f"\nWrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def load(path: Path, **how: Any) -> Snapshot:
    """Reads a snapshot, and replays what it recorded, beside a bar."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    with progress_bar(size, path.name) as bar:

        def progress(read: int) -> None:
            bar.update(read)
            if bar.n >= size:
                bar.set_description_str(f"{path.name}: read, replaying")

        return Snapshot.load(path, progress=progress, **how)


def show(loaded: Sequence[Snapshot], form: str) -> None:
    """Prints a report of each device; of two files first what differs, of more a row each."""
    screen = Screen.of(sys.stdout)
    records = [record for snapshot in loaded for record in snapshot.records]
    sentences, tables = list[str](), list[Table]()
    if len(loaded) == 2:
        sentences, table = snapshots.comparison_of(*(snapshot.record for snapshot in loaded))
        tables = [table]
    elif len(loaded) > 2:
        tables = [snapshots.overview_table(records)]
    if form != "table":
        whole = [table for record in records for table in snapshots.snapshot_tables(record, alive.MOST_ROWS_OF_PAGE)]
        print(render(tables or whole, form))
        return
    parts = ["\n".join(map(screen.fill, sentences))] if sentences else []
    parts += [to_text(table, screen) for table in tables]
    if len(loaded) < 3:
        for record in records:
            parts.append(f"{screen.fill(heading(record))}\n\n{snapshots.snapshot_report(record, screen)}")
    print("\n\n".join(parts))


def heading(record: SnapshotRecord) -> str:
    return f"{snapshots.name_of(record)}: {record.settings or 'default settings'}, {record.events:,} events"


def write(records: Sequence[SnapshotRecord], request: Request) -> list[Path]:
    written = []
    if request.html is not None:
        command = f"memcheck snapshot {shlex.join(map(str, request.files))}"
        write_text(request.html, snapshots.snapshot_page(records, command))
        written.append(request.html)
    if request.plot is not None:
        record = max(records, key=attrgetter("peak_reserved_bytes"))
        plot_timeline(record, request.plot, title=f"Memory of {snapshots.name_of(record)}", subtitle=record.settings)
        written.append(request.plot)
    return written

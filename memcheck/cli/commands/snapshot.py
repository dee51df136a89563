"""`memcheck snapshot`: what a recorded GPU run says, and what would have fitted."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from memcheck.cli.output import check_picture, make_room, progress_bar
from memcheck.cli.requests import Snapshot as Request
from memcheck.core.errors import UsageError
from memcheck.core.snapshot_record import SnapshotRecord
from memcheck.report.plots.snapshot_plot import plot_snapshot
from memcheck.report.plots.style import inline_svg
from memcheck.report.snapshots import comparison_of, name_of, snapshot_object, snapshot_page, snapshot_report
from memcheck.report.tables import Screen, to_text
from memcheck.snapshot.snapshot import Snapshot, figure_of


def run(request: Request) -> int:
    if request.html is not None:
        make_room("html", request.html)
    if request.plot is not None:
        check_picture("plot", request.plot)
        make_room("plot", request.plot)
    snapshots = [load(path, request) for path in request.files]
    records = [record for snapshot in snapshots for record in snapshot.records]
    written = write(records, request)
    if request.format == "json":
        objects = [snapshot_object(record) for record in records]
        print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=1))
    else:
        show(snapshots)
    if written:
        print(f"\nWrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def load(path: Path, request: Request) -> Snapshot:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    with progress_bar(size, path.name) as bar:
        return Snapshot.load(
            path,
            settings=request.settings,
            device=request.device,
            memory_limit=request.memory_limit,
            progress=bar.update,
        )


def show(snapshots: Sequence[Snapshot]) -> None:
    screen = Screen.of(sys.stdout)
    if len(snapshots) == 2:
        sentences, table = comparison_of(*(snapshot.record for snapshot in snapshots))
        print(*map(screen.fill, sentences), "", to_text(table, screen), "", "", sep="\n")
    parts = []
    for record in (record for snapshot in snapshots for record in snapshot.records):
        title = f"{name_of(record)}: {record.settings or 'default settings'}, {record.events:,} events"
        parts.append(f"{screen.fill(title)}\n\n{snapshot_report(record, screen)}")
    print("\n\n\n".join(parts))


def write(records: Sequence[SnapshotRecord], request: Request) -> list[Path]:
    written = []
    if request.html is not None:
        pictures = [
            (name_of(record), inline_svg(partial(figure_of, record), f"snapshot-{number}", name_of(record)))
            for number, record in enumerate(records)
        ]
        command = f"memcheck snapshot {shlex.join(map(str, request.files))}"
        request.html.write_text(snapshot_page(records, pictures, command), encoding="utf-8")
        written.append(request.html)
    if request.plot is not None:
        record = max(records, key=lambda record: record.peak_reserved_bytes)
        plot_snapshot(record, request.plot, title=f"Memory of {name_of(record)}", subtitle=record.settings)
        written.append(request.plot)
    return written

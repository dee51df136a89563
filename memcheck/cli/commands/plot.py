"""`memcheck plot`: pictures of the records in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memcheck.bench.catalog import styles_of_contenders
from memcheck.bench.sweep.store import read_results
from memcheck.cli.commands.snapshot import draw, load
from memcheck.cli.output import watch
from memcheck.cli.requests import Plot
from memcheck.cli.runs import check_only
from memcheck.core.errors import MemcheckError, UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.record import Record
from memcheck.report.plots.pictures import KINDS, PictureRequest, write_plots
from memcheck.report.plots.series import quantity_of
from memcheck.report.plots.style import check_formats

AXES = {"seq-len": "length", "query-len": "query_len", "kv-len": "kv_len", "dim": "dim", "counted": "counted"}


def run(request: Plot) -> int:
    asked = make_request(request.kind, request.x, request.y, request.log)
    formats = check_formats(request.format or ["png", "svg"])
    if request.folder.is_file():
        check_only(request, ("folder", "format", "output"), "folders of results, not for memory snapshots")
        return plot_file(request.folder, request.output or request.folder.parent, formats)
    records = chosen(read_results(request.folder), request.attention_type or [])
    output = request.output or request.folder
    try:
        how: dict[str, Any] = {"formats": formats, "request": asked, "watch": watch}
        paths = write_plots(records, output, styles=styles_of_contenders(), title=request.title, **how)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written to: {error.strerror}") from None
    if not paths:
        raise MemcheckError(f"there is nothing to draw in the {len(records)} records of {request.folder}")
    print("\n".join(f"Wrote {path}" for path in paths))
    return 0


def plot_file(file: Path, folder: Path, formats: Sequence[str]) -> int:
    """Draws a memory snapshot as FOLDER/NAME.png and so on."""
    record = load(file, settings=[]).record
    for suffix in formats:
        path = folder / f"{file.name.partition('.')[0]}.{suffix}"
        draw(record, path, "output")
        print(f"Wrote {path}")
    return 0


def make_request(kinds: Sequence[str] | None, x: str | None, y: str | None, log: bool | None) -> PictureRequest:
    for kind in kinds or ():
        if kind not in KINDS:
            raise unknown_name(named("kind"), kind, KINDS)
    if kinds and y:
        raise UsageError(f"{named('y')} draws a single field, {named('kind')} a set of pictures: leave one of them out")
    axis = AXES.get((x or "").replace("_", "-"))
    if x and axis is None:
        raise unknown_name(named("x"), x, AXES)
    field = (y or "").replace("-", "_")
    fields = [field.name for field in dataclasses.fields(Record) if field.name.endswith(("_bytes", "_ms"))]
    if y and field not in fields:
        raise unknown_name(named("y"), y, fields)
    return PictureRequest(kinds, axis, quantity_of(field) if field else None, log)


def chosen(records: list[Record], names: list[str]) -> list[Record]:
    held = {record.operator for record in records}
    for name in names:
        if name not in held:
            raise UsageError(
                f"--attention-type {name} is not among the records, only {', '.join(sorted(map(str, held)))}"
            )
    return [record for record in records if not names or record.operator in names]

"""`memcheck report`: tables, scaling, accounting and a page for a browser."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memcheck.bench.catalog import styles_of_contenders
from memcheck.bench.sweep.store import read_records
from memcheck.cli.commands import snapshot
from memcheck.cli.output import make_room, watch
from memcheck.cli.requests import Report, Snapshot
from memcheck.cli.runs import check_only, runs_in
from memcheck.core.errors import MemcheckError, UsageError, unknown_name
from memcheck.core.files import write_text
from memcheck.core.options import named
from memcheck.core.record import Record
from memcheck.core.script_record import ScriptRecord
from memcheck.report import alive, models
from memcheck.report.accounting import accounting_table, doubt_details, scaling_table
from memcheck.report.cases import has_sizes, is_model, models_among, parse_wanted, select
from memcheck.report.page import html_page
from memcheck.report.plots import pictures, style
from memcheck.report.records import check_pivot, cs336_tables, main_tables, pivot_tables, standard_tables
from memcheck.report.script_tables import script_page, script_report
from memcheck.report.script_tables import tables as script_tables
from memcheck.report.tables import Screen, Table, render, write_files


def run(request: Report) -> int:
    if runs := runs_in(request.folders):
        return report_runs(runs, request)
    if all(path.is_file() for path in request.folders):
        check_only(request, ("folders", "format", "html"), "folders of results, not for memory snapshots")
        return snapshot.run(Snapshot(files=request.folders, format=request.format, html=request.html))
    records = read_selected(request.folders, request.case)
    tables = requested_tables(records, request)
    usual = not tables
    tables = tables or main_tables(records, request.units)
    # Printed first, so that files are written even if the reader of stdout leaves, as `| head` does.
    written = write_output(standard_tables(records) if usual else tables, request.output) if request.output else []
    if request.html:
        written.append(write_page(records, request.folders, request.html))
    if request.plot:
        written += write_plots(records, request)
    print(render(tables, request.format, sys.stdout))
    if request.doubts:
        print("", *doubt_details(records), sep="\n", file=sys.stdout if request.format == "table" else sys.stderr)
    if written:
        print(f"\nWrote {', '.join(map(str, written[:4]))}{' ...' if len(written) > 4 else ''}", file=sys.stderr)
    return 0


def report_runs(runs: Sequence[ScriptRecord], request: Report) -> int:
    """Reports what memcheck run recorded, as it printed it."""
    check_only(request, ("folders", "format", "output", "html"), "records of cases, not for a run of a script")
    if request.html and len(runs) > 1:
        raise UsageError(f"{named('html')} is a page of one run, got {len(runs)}")
    tables = [table for record in runs for table in script_tables(record, alive.MOST_ROWS_OF_PAGE)]
    written = write_output(tables, request.output) if request.output else []
    if request.html:
        make_room("html", request.html)
        write_text(request.html, script_page(runs[0]))
        written.append(request.html)
    screen = Screen.of(sys.stdout)
    if request.format == "table":
        print(*(script_report(record, screen) for record in runs), sep="\n\n\n")
    else:
        print(render(tables, request.format))
    if written:
        print(f"\nWrote {', '.join(map(str, written[:4]))}{' ...' if len(written) > 4 else ''}", file=sys.stderr)
    return 0


def write_output(tables: Sequence[Table], folder: Path) -> list[Path]:
    try:
        return write_files(tables, folder)
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be written to: {error.strerror}") from None


def read_selected(folders: Sequence[Path], case: str | None) -> list[Record]:
    wanted = parse_wanted(case) if case else {}
    records = [record for folder in folders for record in read_records(folder)]
    selected = select(records, wanted)
    if not selected:
        where = ", ".join(map(str, folders))
        raise UsageError(
            f"--case {case} fits none of the {len(records)} rows of {where}" if records else f"{where} holds no rows"
        )
    return selected


def requested_tables(records: Sequence[Record], request: Report) -> list[Table]:
    sized = [record for record in records if has_sizes(record) and not is_model(record)]
    if not sized and (request.pivot or request.scaling or request.cs336):
        raise UsageError("--pivot, --scaling and --cs336 need cases of operators: these folders hold none")
    tables = [table for field in map(check_pivot, request.pivot or ()) for table in pivot_tables(sized, field)]
    tables += [scaling_table(sized)] if request.scaling else []
    if request.accounting:
        tables += [accounting_table(record) for record in records if not is_model(record)]
        tables += models.parts_tables(models_among(records))
    return tables + (cs336_tables(sized) if request.cs336 else [])


def write_plots(records: Sequence[Record], request: Report) -> list[Path]:
    """Writes the pictures of --plot to --output, or beside the records of the first folder."""
    folder, paths = request.output or request.folders[0], list[Path]()
    x = pictures.check_axis(request.x, named("x"))
    for word in request.plot or ():
        kind, dot, suffix = word.partition(".")
        if dot and suffix not in style.FORMATS:
            raise unknown_name(named("plot"), word, [f"{kind}.{known}" for known in style.FORMATS])
        kinds = pictures.KINDS if kind == "all" else [pictures.check_kind(kind, named("plot"))]
        how: dict[str, Any] = {"formats": [suffix] if dot else ["png", "svg"], "watch": watch, "title": request.title}
        try:
            made = pictures.write_pictures(
                records, folder, styles=styles_of_contenders(), kinds=kinds, x=x, log=not request.linear, **how
            )
        except OSError as error:
            raise UsageError(f"{named('output')} {folder} cannot be written to: {error.strerror}") from None
        if not made:
            raise MemcheckError(f"there is nothing to draw of {kind} in these {len(records)} records")
        paths += made
    return paths


def write_page(records: Sequence[Record], folders: Sequence[Path], path: Path) -> Path:

    make_room("html", path)
    styles = styles_of_contenders()
    sweeps = [sweep for folder in folders if (sweep := read_sweep(folder))]
    operators = [record for record in records if not is_model(record)]
    plots = pictures.inline_pictures(pictures.pictures_of(records, styles=styles), watch)
    title = "What attention costs" if any(map(has_sizes, operators)) else "Peak memory"
    page = html_page(records, title=title, plots=plots, sweeps=sweeps)
    try:
        write_text(path, page)
    except OSError as error:
        raise UsageError(f"--html {path} cannot be written: {error.strerror}") from None
    return path


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """The sweep's manifest: command, environment and start. None if no sweep wrote the folder."""
    try:
        manifest = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None

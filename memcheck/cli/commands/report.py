"""Tables, scaling, accounting and a page for a browser, from folders of results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memcheck.bench.catalog import CONTENDERS
from memcheck.bench.sweep.store import read_records
from memcheck.cli.cases import add_table_arguments, make_room
from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.report import (
    Screen,
    Table,
    accounting_table,
    check_pivot,
    cs336_tables,
    doubt_details,
    html_page,
    main_tables,
    parse_wanted,
    pivot_tables,
    render,
    scaling_table,
    select,
    standard_tables,
    summary,
    write_files,
)
from memcheck.studies.published import published_rows, published_tables

FORMATS = ("table", "markdown", "csv", "latex", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders with a records.jsonl")
    parser.add_argument(
        "--case", metavar="NAME=VALUE[,..]", help="only these rows: operator=softplus,seq-len=512,dim=64"
    )
    parser.add_argument(
        "--pivot",
        action="append",
        default=[],
        metavar="FIELD[,..]",
        help="length by dimension: forward_ms, saved_bytes",
    )
    parser.add_argument("--scaling", action="store_true", help="factors per doubling and fitted exponents")
    parser.add_argument(
        "--accounting", action="store_true", help="what each case's memory went to, predicted beside measured"
    )
    parser.add_argument("--cs336", action="store_true", help="every row under the columns of cs336's published table")
    parser.add_argument("--format", choices=FORMATS, default="table", help="of stdout; default: table")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write the tables there, too: Markdown, LaTeX, JSON and CSV"
    )
    add_table_arguments(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")


def run(args: argparse.Namespace) -> int:
    records = read_selected(args.folders, args.case)
    tables = asked_tables(records, args)
    usual = not tables
    tables = tables or main_tables(records, args.units)
    # Printed first, so that files are written even if the reader of stdout leaves, as `| head` does.
    written = write_output(standard_tables(records) if usual else tables, args.output) if args.output else []
    if args.html:
        written.append(write_page(records, args))
    if usual and args.format == "table":
        print(*map(Screen.of(sys.stdout).fill, summary(records)), sep="\n", end="\n\n")
    print(render(tables, args.format, sys.stdout))
    if args.doubts:
        print("", *doubt_details(records), sep="\n", file=sys.stdout if args.format == "table" else sys.stderr)
    if written:
        print(f"\nWrote {', '.join(map(str, written[:4]))}{' ...' if len(written) > 4 else ''}", file=sys.stderr)
    return 0


def write_output(tables: Sequence[Table], folder: Path, stem: str = "tables") -> list[Path]:
    try:
        return write_files(tables, folder, stem)
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


def asked_tables(records: Sequence[Record], args: argparse.Namespace) -> list[Table]:
    fields = [check_pivot(word.strip()) for words in args.pivot for word in words.split(",")]
    tables = [table for field in fields for table in pivot_tables(records, field)]
    tables += [scaling_table(records)] if args.scaling else []
    tables += [accounting_table(record) for record in records] if args.accounting else []
    return tables + (cs336_tables(records) if args.cs336 else [])


def write_page(records: Sequence[Record], args: argparse.Namespace) -> Path:
    from memcheck.report.plots import svg_plots
    from memcheck.studies.published_plot import published_picture

    make_room("--html", args.html)
    styles = {name: contender.style for name, contender in CONTENDERS.items()}
    sweeps = [sweep for folder in args.folders if (sweep := read_sweep(folder))]
    rows = published_rows(records)
    plots = svg_plots(records, styles=styles, more=[published_picture(rows, styles)] if rows else [])
    more = published_tables([record for record in records if record.mode != "decode"])
    page = html_page(records, title="What attention costs", plots=plots, sweeps=sweeps, more_tables=more)
    try:
        args.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {args.html} cannot be written: {error.strerror}") from None
    return Path(args.html)


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """The sweep's manifest: command, environment and start. None if no sweep wrote the folder."""
    try:
        said = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None

"""Our rows beside published tables: of a folder of results, or by formula without a run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memcheck.bench.catalog import CONTENDERS, Case, make_case, make_combinator_case
from memcheck.bench.predict import closed_terms
from memcheck.bench.sweep.store import read_records
from memcheck.cli.cases import make_room
from memcheck.cli.commands.report import FORMATS, write_output
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.report import render
from memcheck.studies.published import published_rows, published_table, published_tables
from memcheck.studies.published_plot import plot_published


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="folders with a records.jsonl; default: every published row by formula",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="of stdout; default: table")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write the tables there, too: Markdown, LaTeX, JSON and CSV"
    )
    parser.add_argument(
        "--predict", action="store_true", help="every published row predicted for the GPU that it was measured on"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    if args.predict:
        return show_predictions(args)
    records = (
        [record for folder in args.folders for record in read_records(folder)] if args.folders else list(by_formula())
    )
    tables = published_tables(records)
    if not tables:
        raise MemcheckError(
            f"none of the {len(records)} rows of {', '.join(map(str, args.folders))} has a published counterpart: "
            "memcheck_pyt's are of batch 64 in fp32, cs336's of batch 8 with one head"
        )
    written = write_output(tables, args.output, "published") if args.output else []
    if args.plot:
        written.append(draw(records, args.plot))
    print(render(tables, args.format, sys.stdout))
    if written:
        print(f"\nWrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def show_predictions(args: argparse.Namespace) -> int:
    from memcheck.studies.published_predictions import cs336_predictions, memcheck_pyt_predictions

    if args.folders or args.plot:
        raise UsageError("--predict takes no folders and draws no --plot: it is about the published rows alone")
    tables = [memcheck_pyt_predictions(), cs336_predictions()]
    written = write_output(tables, args.output, "published") if args.output else []
    print(render(tables, args.format, sys.stdout))
    if written:
        print(f"\nWrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def draw(records: Sequence[Record], path: Path) -> Path:
    rows = published_rows(records)
    if not rows:
        raise MemcheckError("--plot draws rows that memcheck_pyt published, and there are none")
    sources = ", ".join(dict.fromkeys(row["ours_source"] for row in rows))
    styles = {name: contender.style for name, contender in CONTENDERS.items()}
    make_room("--plot", path)
    try:
        plot_published(rows, path, styles=styles, subtitle=f"{len(rows)} rows of an A100 with 40 GB; ours {sources}")
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path} cannot be written: {error}") from None
    return path


def by_formula() -> Iterator[Record]:
    """A record for each published row, with our closed terms instead of a run."""
    for row in published_table():
        for case in cases_of(row):
            values = {name: value for name, value in dataclasses.asdict(case).items() if name != "device"}
            yield Record(**values, status="skipped", reason="by formula", device=case.device, terms=closed_terms(case))


def cases_of(row: dict[str, Any]) -> list[Case]:
    sizes = {"bsz": row["batch"], "query_len": row["query_len"], "dim": row["dim"]}
    if row["operator"] == "combinator":
        return [make_combinator_case(name, **sizes) for name in ("combinator", "combinator-low-memory")]
    if row["operator"] == "softplus":
        return [make_case("softplus", heads=1, core_dim=None, factor=None, kv_len=row["kv_len"], **sizes)]
    return []

"""`memcheck published`: our figures beside published tables."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memcheck._extension import extension
from memcheck.bench.case_predictions import closed_terms
from memcheck.bench.catalog import Case, make_case, make_combinator_case, styles_of_contenders
from memcheck.bench.sweep.store import read_records
from memcheck.cli.commands.report import write_output
from memcheck.cli.output import make_room, watch
from memcheck.cli.requests import Published
from memcheck.core.errors import ExtensionError, MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.predict.evidence import write_evidence
from memcheck.report.tables import Table, render
from memcheck.studies.field import (
    RESULTS,
    Result,
    Study,
    evidence_in,
    read_results,
    results_of,
    rows_table,
    sampled,
    study_named,
    summary_of,
    write_results,
)
from memcheck.studies.field_plot import plot_field
from memcheck.studies.published import published_rows, published_table, published_tables
from memcheck.studies.published_plot import plot_published
from memcheck.studies.published_predictions import cs336_predictions, memcheck_pyt_predictions


def run(request: Published) -> int:
    if request.studies:
        return run_studies(request, [study_named(name) for name in request.studies])
    if request.predict:
        tables = [memcheck_pyt_predictions(functools.partial(watch, title="predict")), cs336_predictions()]
    else:
        read = (record for folder in request.folders or () for record in read_records(folder))
        records = list(read if request.folders else by_formula())
        tables = published_tables(records)
        if not tables:
            where = ", ".join(map(str, request.folders or ()))
            raise MemcheckError(
                f"none of the {len(records)} rows of {where} has a published counterpart: memcheck_pyt's "
                "are of batch 64 in fp32, cs336's of batch 8 with one head"
            )
    written = write_output(tables, request.output, "published") if request.output else []
    if not request.folders and not request.predict:
        note_missing_plans()
    if request.plot:
        written.append(draw(records, request.plot))
    print(render(tables, request.format, sys.stdout))
    if written:
        print(f"\nWrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def run_studies(request: Published, studies: Sequence[Study]) -> int:
    """Prints summaries of the studies' results: predicted now, or those of the repository."""
    tables: list[Table] = []
    found: dict[str, list[Result]] = {}
    for study in studies:
        results = found[study.name] = list(study_results(request, study))
        tables.append(summary_of(study, results))
        if request.limit is not None or request.rows is not None:
            tables.append(rows_table(study, results))
        if request.output:
            path = request.output / f"{study.name}.csv"
            make_room("output", path)
            write_results(results, path)
            if request.predict and path.resolve() == (RESULTS / path.name).resolve():
                write_evidence(study.name, evidence_in(results))
    if request.plot:
        make_room("plot", request.plot)
        plot_field(found, request.plot)
    print(render(tables, request.format, sys.stdout))
    return 0


def study_results(request: Published, study: Study) -> Iterable[Result]:
    if request.predict:
        return results_of(study, watch(sampled(study.rows(request.rows), request.limit), "predict"))
    path = RESULTS / f"{study.name}.csv"
    if not path.is_file():
        raise UsageError(f"{study.name} has no results yet: memcheck published {study.name} --predict makes them")
    return read_results(path)


def draw(records: Sequence[Record], path: Path) -> Path:
    rows = published_rows(records)
    if not rows:
        raise MemcheckError("--plot draws rows that memcheck_pyt published, and there are none")
    sources = ", ".join(dict.fromkeys(row["ours_source"] for row in rows))
    make_room("plot", path)
    try:
        subtitle = f"{len(rows)} rows of an A100 with 40 GB; ours {sources}"
        plot_published(rows, path, styles=styles_of_contenders(), subtitle=subtitle)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path} cannot be written: {error}") from None
    return path


def by_formula() -> Iterator[Record]:
    """A record for each published row, with our closed terms instead of a run."""
    for row in published_table():
        for case in cases_of(row):
            values = {name: value for name, value in dataclasses.asdict(case).items() if name != "device"}
            yield Record(**values, status="skipped", reason="by formula", device=case.device, terms=closed_terms(case))


def note_missing_plans() -> None:
    """Says on stderr why our figures are missing, if they are."""
    try:
        extension("our column, by formula,")
    except ExtensionError as error:
        print(f"note: {error}", file=sys.stderr)


def cases_of(row: dict[str, Any]) -> list[Case]:
    sizes = {"bsz": row["batch"], "query_len": row["query_len"], "dim": row["dim"]}
    if row["operator"] == "combinator":
        return [make_combinator_case(name, **sizes) for name in ("combinator", "combinator-low-memory")]
    if row["operator"] == "softplus":
        return [make_case("softplus", heads=1, core_dim=None, factor=None, kv_len=row["kv_len"], **sizes)]
    return []

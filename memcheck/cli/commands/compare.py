"""`memcheck compare`: two folders of results, case by case."""

from __future__ import annotations

import sys
from typing import TextIO

from memcheck.bench.sweep.store import read_records
from memcheck.cli.requests import Compare
from memcheck.cli.runs import check_only, runs_in
from memcheck.core.errors import UsageError
from memcheck.core.script_record import ScriptRecord
from memcheck.core.units import Growth
from memcheck.report.alive import MOST_ROWS
from memcheck.report.cases import CASE_FIELDS, describe
from memcheck.report.comparison import (
    Comparison,
    compare,
    comparison_table,
    comparison_words,
    environment_changes,
    growth_words,
)
from memcheck.report.script_changes import growth_of_runs, run_sentences, run_tables
from memcheck.report.tables import Screen, render


def run(request: Compare) -> int:
    if runs := runs_in([request.before, request.after]):
        return compare_runs(request, *runs)
    before, after = read_records(request.before), read_records(request.after)
    comparison = compare(before, after)
    if not comparison.pairs:
        raise UsageError(f"{request.before} and {request.after} have no case in common")
    print(render([comparison_table(comparison)], request.format, sys.stdout))
    # Sentences accompany the table, but not data that a program reads.
    out = sys.stdout if request.format == "table" else sys.stderr
    print("", *comparison_words(comparison), sep="\n", file=out)
    changes = environment_changes(before, after)
    print(
        *(f"The environment differs: {change}." for change in changes), sep="\n", end="\n" if changes else "", file=out
    )
    if request.fail_on_growth is not None:
        return verdict(comparison, request, request.fail_on_growth, out)
    return 0


def compare_runs(request: Compare, before: ScriptRecord, now: ScriptRecord) -> int:
    """Prints how the memory of a script changed. The exit code is 1 where it grew by more than is allowed."""
    check_only(request, ("before", "after", "format", "fail_on_growth"), "records of cases, not for runs of a script")
    out = sys.stdout if request.format == "table" else sys.stderr
    fill = Screen.of(out).fill
    if sentences := run_sentences(before, now):
        print(*map(fill, sentences), sep="\n", end="\n\n", file=out)
    print(render(run_tables(before, now, MOST_ROWS), request.format, sys.stdout))
    grown = [] if request.fail_on_growth is None else growth_of_runs(before, now, request.fail_on_growth)
    if grown:
        print("", *map(fill, grown), sep="\n", file=out)
    return int(bool(grown))


def verdict(comparison: Comparison, request: Compare, allowed: Growth, out: TextIO) -> int:
    """The exit code of --fail-on-growth. Each case that grew or is missing is named."""
    missing = [] if request.allow_missing else comparison.missing()
    if missing:
        total = len(comparison.pairs) + len(comparison.only_before)
        print(f"{len(missing)} of {total} cases of {request.before} have no figures in {request.after}:", file=out)
        for record in missing:
            print(f"  {describe(record, CASE_FIELDS)}", file=out)
    grown = comparison.grown(allowed)
    if grown:
        count = f"{len(grown)} of {len(comparison.pairs)} cases"
        print(f"{count} grew by more than {allowed}, or fit no longer:", file=out)
        for before, after in grown:
            print(f"  {describe(after, CASE_FIELDS)}: {growth_words(before, after, allowed)}", file=out)
    return int(bool(missing or grown))

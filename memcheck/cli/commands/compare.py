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
from memcheck.report import alive, cases, comparison, script_changes, tables


def run(request: Compare) -> int:
    if runs := runs_in([request.before, request.after]):
        return compare_runs(request, *runs)
    before, after = read_records(request.before), read_records(request.after)
    compared = comparison.compare(before, after)
    if not compared.pairs:
        raise UsageError(f"{request.before} and {request.after} have no case in common")
    print(tables.render([comparison.comparison_table(compared)], request.format, sys.stdout))
    # Sentences accompany the table, but not data that a program reads.
    out = sys.stdout if request.format == "table" else sys.stderr
    print("", *comparison.comparison_words(compared), sep="\n", file=out)
    changes = comparison.environment_changes(before, after)
    print(
        *(f"The environment differs: {change}." for change in changes), sep="\n", end="\n" if changes else "", file=out
    )
    if request.fail_on_growth is not None:
        return verdict(compared, request, request.fail_on_growth, out)
    return 0


def compare_runs(request: Compare, before: ScriptRecord, now: ScriptRecord) -> int:
    """Prints how the memory of a script changed. The exit code is 1 where it grew by more than is allowed."""
    check_only(request, ("before", "after", "format", "fail_on_growth"), "records of cases, not for runs of a script")
    out = sys.stdout if request.format == "table" else sys.stderr
    fill = tables.Screen.of(out).fill
    if sentences := script_changes.run_sentences(before, now):
        print(*map(fill, sentences), sep="\n", end="\n\n", file=out)
    print(tables.render(script_changes.run_tables(before, now, alive.MOST_ROWS), request.format, sys.stdout))
    grown = [] if request.fail_on_growth is None else script_changes.growth_of_runs(before, now, request.fail_on_growth)
    if grown:
        print("", *map(fill, grown), sep="\n", file=out)
    return int(bool(grown))


def verdict(compared: comparison.Comparison, request: Compare, allowed: Growth, out: TextIO) -> int:
    """The exit code of --fail-on-growth. Each case that grew or is missing is named."""
    missing = [] if request.allow_missing else compared.missing()
    if missing:
        total = len(compared.pairs) + len(compared.only_before)
        print(f"{len(missing)} of {total} cases of {request.before} have no figures in {request.after}:", file=out)
        for record in missing:
            print(f"  {cases.describe(record, cases.CASE_FIELDS)}", file=out)
    grown = compared.grown(allowed)
    if grown:
        count = f"{len(grown)} of {len(compared.pairs)} cases"
        print(f"{count} grew by more than {allowed}, or fit no longer:", file=out)
        for before, after in grown:
            words = comparison.growth_words(before, after, allowed)
            print(f"  {cases.describe(after, cases.CASE_FIELDS)}: {words}", file=out)
    return int(bool(missing or grown))

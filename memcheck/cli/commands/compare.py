"""`memcheck compare`: two folders of results, case by case."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from memcheck.bench.sweep.store import read_results
from memcheck.core.errors import UsageError
from memcheck.report import compare, comparison_table, comparison_words, environment_changes, render
from memcheck.report.cases import CASE_FIELDS, describe
from memcheck.report.comparison import Comparison, growth_words


def run(args: argparse.Namespace) -> int:
    if args.allow_missing and args.fail_on_growth is None:
        raise UsageError("--allow-missing is for --fail-on-growth: without it nothing fails")
    before, after = read_results(args.before), read_results(args.after)
    comparison = compare(before, after)
    if not comparison.pairs:
        raise UsageError(f"{args.before} and {args.after} have no case in common")
    print(render([comparison_table(comparison)], args.format, sys.stdout))
    # Sentences accompany the table, but not data that a program reads.
    out = sys.stdout if args.format == "table" else sys.stderr
    print("", *comparison_words(comparison), sep="\n", file=out)
    changes = environment_changes(before, after)
    print(
        *(f"The environment differs: {change}." for change in changes), sep="\n", end="\n" if changes else "", file=out
    )
    return 0 if args.fail_on_growth is None else verdict(comparison, args, out)


def verdict(comparison: Comparison, args: argparse.Namespace, out: TextIO) -> int:
    """The exit code of --fail-on-growth. Each case that grew or is missing is named."""
    missing = [] if args.allow_missing else comparison.missing()
    if missing:
        total = len(comparison.pairs) + len(comparison.only_before)
        print(f"{len(missing)} of {total} cases of {args.before} have no figures in {args.after}:", file=out)
        for record in missing:
            print(f"  {describe(record, CASE_FIELDS)}", file=out)
    grown = comparison.grown(args.fail_on_growth)
    if grown:
        count = f"{len(grown)} of {len(comparison.pairs)} cases"
        print(f"{count} grew by more than {args.fail_on_growth}, or fit no longer:", file=out)
        for before, after in grown:
            print(f"  {describe(after, CASE_FIELDS)}: {growth_words(before, after, args.fail_on_growth)}", file=out)
    return int(bool(missing or grown))

"""Two folders of results, case by case: memory to the byte, time beyond noise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memcheck.bench.sweep.store import read_records
from memcheck.cli.commands.report import FORMATS
from memcheck.core.errors import UsageError
from memcheck.core.units import parse_bytes
from memcheck.report import compare, comparison_table, comparison_words, environment_changes, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a folder with a records.jsonl")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another")
    parser.add_argument(
        "--fail-on-growth",
        nargs="?",
        const=0,
        type=growth,
        metavar="SIZE",
        help="exit code 1 where a memory figure is higher (by more than, say, 4KiB), or a case fits no longer",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="of stdout; default: table")


def growth(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--fail-on-growth {error}") from None


def run(args: argparse.Namespace) -> int:
    before, after = read_records(args.before), read_records(args.after)
    comparison = compare(before, after)
    if not comparison.pairs:
        raise UsageError(f"{args.before} and {args.after} have no case in common")
    print(render([comparison_table(comparison)], args.format))
    # Sentences beside the table, but not inside what a program reads.
    out = sys.stdout if args.format == "table" else sys.stderr
    print("", *comparison_words(comparison), sep="\n", file=out)
    changes = environment_changes(before, after)
    print(
        *(f"The environment differs: {change}." for change in changes), sep="\n", end="\n" if changes else "", file=out
    )
    return int(args.fail_on_growth is not None and bool(comparison.grown(args.fail_on_growth)))

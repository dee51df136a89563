"""Pictures of the records in a folder of results, drawn anew."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from memcheck.bench.sweep.store import read_records
from memcheck.cli.cases import folder
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.report.plots import Request, write_plots
from memcheck.report.plots.pictures import KINDS
from memcheck.report.plots.series import Quantity, quantity_of
from memcheck.report.plots.style import FORMATS, check_formats

AXES = {"seq-len": "length", "query-len": "query_len", "kv-len": "kv_len", "dim": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where records.jsonl is")
    parser.add_argument(
        "--kind",
        action="append",
        metavar="KIND[,KIND]",
        help=f"repeatable; {', '.join(KINDS)}; of a kind that is named, every picture; default: what makes sense",
    )
    parser.add_argument("--x", metavar="AXIS", help=f"{', '.join(AXES)}; default: whatever varies")
    parser.add_argument("--y", metavar="FIELD", help="a field of the records in bytes or ms, as saved_bytes")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--log", dest="log", action="store_true", default=None, help="logarithmic axes only")
    scale.add_argument("--linear", dest="log", action="store_false", help="linear axes only; default: both")
    parser.add_argument("--attention-type", action="append", metavar="NAME[,NAME]", help="repeatable; default: all")
    parser.add_argument("--title", default="", help="before what each picture shows")
    parser.add_argument(
        "--output", type=folder, metavar="DIR", help="files there are replaced; default: beside the records"
    )
    parser.add_argument(
        "--format", default="png,svg", metavar="NAME[,NAME]", help=f"{', '.join(FORMATS)}; default: png,svg"
    )


def run(args: argparse.Namespace) -> int:
    from memcheck.bench.catalog import CONTENDERS

    request = make_request(args)
    formats = check_formats(words_of([args.format]))
    records = chosen(read_records(args.folder), words_of(args.attention_type or []))
    styles = {name: contender.style for name, contender in CONTENDERS.items()}
    output = args.output or args.folder
    try:
        paths = write_plots(records, output, styles=styles, title=args.title, formats=formats, request=request)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written to: {error.strerror}") from None
    if not paths:
        raise MemcheckError(f"there is nothing to draw of {len(records)} records in {args.folder}")
    print("\n".join(f"Wrote {path}" for path in paths))
    return 0


def make_request(args: argparse.Namespace) -> Request:
    kinds = words_of(args.kind or []) or None
    for kind in kinds or ():
        if kind not in KINDS:
            raise UsageError(f"--kind {kind} is unknown; known: {', '.join(KINDS)}")
    if kinds and args.y:
        raise UsageError("--y draws one field, and --kind what belongs together: leave one of them out")
    return Request(kinds, axis(args.x) if args.x else None, quantity(args.y) if args.y else None, args.log)


def axis(name: str) -> str:
    found = AXES.get(name.replace("_", "-"))
    if found is None:
        raise UsageError(f"--x {name} is unknown; known: {', '.join(AXES)}")
    return found


def quantity(name: str) -> Quantity:
    fields = [field.name for field in dataclasses.fields(Record) if field.name.endswith(("_bytes", "_ms"))]
    if name.replace("-", "_") not in fields:
        raise UsageError(f"--y {name} is unknown; known: {', '.join(fields)}")
    return quantity_of(name.replace("-", "_"))


def chosen(records: list[Record], names: list[str]) -> list[Record]:
    held = {record.operator for record in records}
    for name in names:
        if name not in held:
            raise UsageError(
                f"--attention-type {name} is not among the records, only {', '.join(sorted(map(str, held)))}"
            )
    return [record for record in records if not names or record.operator in names]


def words_of(values: list[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]

"""What the profile commands share: flags, running cases one by one, and the files that come out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from memcheck.catalog import CONTENDERS, Case
from memcheck.errors import UsageError
from memcheck.plotting import plot_memory
from memcheck.profiling import profile_case
from memcheck.quantities import parse_bytes
from memcheck.records import Record, write_csv
from memcheck.reports import common_case, legend, table_header, table_row


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that mean the same for every operator."""
    parser.add_argument("--dtype", default="float32", help="fp32, bf16, fp16, fp64 or torch's names; default: fp32")
    parser.add_argument("--mode", choices=("train", "inference"), default="train", help="default: train")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda where there is one")
    parser.add_argument(
        "--memory-limit", type=size("--memory-limit"), metavar="40GiB", help="OOM above this; bytes, KiB..GB"
    )
    parser.add_argument(
        "--passes", type=count("--passes"), metavar="N", help="timed passes; default: 10, or 1.5 s of them"
    )
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument(
        "--output",
        type=folder,
        default=Path("results"),
        metavar="DIR",
        help="files there are replaced; default: results",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")


def run_cases(cases: list[Case], args: argparse.Namespace, *, title: str) -> int:
    """A row as soon as a case is done; title: of the plot. Returns the exit code."""
    out = sys.stderr if args.format == "json" else sys.stdout
    files = ResultFiles.open(args.output)
    note_unused_flags(args, cases)
    records = []
    for record in profile_all(cases, args, out):
        files.append(record)
        records.append(record)
    files.finish(records, title)
    print(f"\n{legend(records)}\n\nWrote {files}", file=out)
    if args.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in records) + "]")
    return exit_code(records)


def profile_all(cases: list[Case], args: argparse.Namespace, out: TextIO) -> Iterator[Record]:
    for number, case in enumerate(cases):
        record = profile_case(case, passes=args.passes, timed=not args.no_time, limit_bytes=args.memory_limit)
        if number == 0:
            print(f"{common_case(cases)}\n\n{table_header()}", file=out)
        print(table_row(record), file=out, flush=True)
        yield record


def exit_code(records: list[Record]) -> int:
    """An OOM is a result; an error is not, nor is a run in which torch refused every case."""
    statuses = {record.status for record in records}
    return int("error" in statuses or not statuses & {"ok", "oom"})


def note_unused_flags(args: argparse.Namespace, cases: list[Case]) -> None:
    for field in ("heads", "core_dim", "factor"):
        without = dict.fromkeys(case.operator for case in cases if getattr(case, field) is None)
        if getattr(args, field, None) is not None and without:
            print(f"note: --{field.replace('_', '-')} is not used by {', '.join(without)}", file=sys.stderr)


@dataclass
class ResultFiles:
    """records.jsonl grows a line per case, so that a crash loses none; what is drawn from it is written at the end."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> ResultFiles:
        files = cls(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in files.paths():
                path.unlink(missing_ok=True)
            files.paths()[0].touch()
        except OSError as error:
            raise UsageError(f"--output {folder} cannot be written to: {error.strerror}") from None
        return files

    def paths(self) -> tuple[Path, Path, Path]:
        return self.folder / "records.jsonl", self.folder / "records.csv", self.folder / "memory.png"

    def append(self, record: Record) -> None:
        with self.paths()[0].open("a") as lines:
            lines.write(record.to_json() + "\n")

    def finish(self, records: list[Record], title: str) -> None:
        _, table, picture = self.paths()
        write_csv(records, table)
        styles = {name: contender.style for name, contender in CONTENDERS.items()}
        plot_memory(records, picture, styles=styles, title=title, subtitle=common_case(records))

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths()))


def count(flag: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{flag} must be a whole number, got {text!r}") from None
        if number < 1:
            raise UsageError(f"{flag} must be at least 1, got {number}")
        if number >= 2**63:
            raise UsageError(f"{flag} must be below 2^63, got {number}")
        return number

    return parse


def counts(flag: str) -> Callable[[str], list[int]]:
    return lambda text: [count(flag)(word) for word in text.split(",")]


def folder(text: str) -> Path:
    if not text:
        raise UsageError("--output must name a folder, got ''")
    return Path(text)


def size(flag: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise UsageError(f"{flag} {error}") from None

    return parse

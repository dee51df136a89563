"""Shared parts of the profile commands: flags, running cases one by one, and the result files."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from memcheck.bench.catalog import CONTENDERS, MODES, Case
from memcheck.bench.plugins import load_plugin
from memcheck.bench.profile import CPU_SECONDS, profile_case, snapshot_case, timeline_of_case, trace_case
from memcheck.bench.sweep.grid import parse_sizes
from memcheck.bench.sweep.predict import predicted_record
from memcheck.bench.sweep.store import whole_lines
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import UsageError
from memcheck.core.record import Record, write_csv
from memcheck.core.units import parse_bytes
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.report import (
    LiveRows,
    Screen,
    answer,
    common_case,
    doubt_details,
    doubt_lines,
    explanation,
    next_step,
    unknown_words,
)
from memcheck.report.cases import case_of, place_of
from memcheck.report.plots import plot_memory, plot_timeline
from memcheck.report.plots.style import FORMATS
from memcheck.report.rows import PREDICTED

R = TypeVar("R", bound=Record)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every command that runs operators shares."""
    parser.add_argument("--dtype", default="float32", help="fp32, bf16, fp16, fp64 or torch's names; default: fp32")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="train",
        help="decode: one step from a state of --kv-len tokens; default: train",
    )
    parser.add_argument("--compile", action="store_true", help="under torch.compile, which compiles once before")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda where there is one")
    parser.add_argument(
        "--memory-limit",
        type=size("--memory-limit"),
        metavar="40GiB",
        help="OOM above this; B, KiB, MiB, GiB, KB, MB or GB",
    )
    parser.add_argument(
        "--passes", type=count("--passes"), metavar="N", help="timed passes; default: 10, or 3 s of them"
    )
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument(
        "--max-seconds-per-case",
        type=seconds("--max-seconds-per-case"),
        metavar="S",
        help="of a case: no timed pass begins after; 0: no end; default: 60 on a CPU, else 0",
    )
    parser.add_argument(
        "--predict", action="store_true", help="a row beside each: what shapes alone say, and measured / predicted"
    )
    parser.add_argument(
        "--output",
        type=folder,
        default=Path("results"),
        metavar="DIR",
        help="records of the same cases there are replaced, others stay; default: results",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")
    add_table_arguments(parser)
    parser.add_argument(
        "--plugin",
        type=load_plugin,
        action="append",
        metavar="FILE.py",
        help="a file or module that registers operators of yours (memcheck.bench.catalog.register); repeatable",
    )


def add_table_arguments(parser: argparse.ArgumentParser, *, units: bool = True) -> None:
    """Adds the flags that say how much a table shows."""
    if units:
        parser.add_argument("--units", action="store_true", help="U and bytes per query and key besides MiB")
    parser.add_argument("--doubts", action="store_true", help="every doubt about a figure, below the table")


def add_inspection_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that inspect single cases."""
    parser.add_argument(
        "--explain",
        type=count("--explain"),
        nargs="?",
        const=10,
        metavar="N",
        help="the N largest (10) alive at the peaks and kept for backward, by what allocated them",
    )
    for flag, meaning in (
        ("--timeline", "a picture of the memory over time, by what allocated it: .png, .svg or .pdf"),
        ("--snapshot", "the memory over time, for the viewer at pytorch.org/memory_viz"),
        ("--trace", "torch.profiler's trace, and a table of who took the time"),
    ):
        parser.add_argument(flag, type=file(flag), metavar="FILE", help=f"{meaning}; a file for each case")
    parser.add_argument("--nvtx", action="store_true", help="NVTX ranges around passes, for Nsight Systems")


def run_cases(cases: list[Case], args: argparse.Namespace, *, title: str) -> int:
    """Runs the cases and prints each row when it is done. title: of the plot. Returns the exit code."""
    out = sys.stderr if args.format == "json" else sys.stdout
    inspection = Inspection.of(args, len(cases))
    files = ResultFiles.open(args.output)
    note_unused_flags(args, cases)
    records: list[Record] = []
    predictions: list[Record] = []
    how = {"units": args.units, "predicted": args.predict, "timed": not args.no_time}
    rows = LiveRows(cases, **how, screen=Screen.of(out))
    for record, prediction in profile_all(cases, args, rows, out):
        records.append(record)
        predictions += [prediction] if prediction else []
        for kept in (record, prediction):
            files.append(kept)
    files.finish(records, predictions, title)
    print(f"\n{rows.legend()}", file=out)
    if predictions:
        print(*map(rows.screen.fill, [PREDICTED, *unknown_words(predictions)]), sep="\n", file=out)
    print_doubts(records, args.doubts, rows.screen, out)
    for case, record in zip(cases, records, strict=True):
        inspection.run(case, record, out)
    print(f"\nWrote {', '.join(map(str, (*files.paths(), *inspection.written)))}", file=out)
    print_answer([*answer(records), next_step(records, args.memory_limit)], rows.screen, out)
    if args.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in [*records, *predictions]) + "]")
    return exit_code(records)


def print_doubts(records: list[R], in_detail: bool, screen: Screen, out: TextIO) -> None:
    """Prints a line for the doubts about the records, or each doubt."""
    lines = doubt_lines(records)
    hint = [] if in_detail or not lines else ["--doubts lists each of them."]
    for line in [*lines, *hint, *(doubt_details(records) if in_detail else [])]:
        print(screen.fill(line), file=out)


def print_answer(sentences: Sequence[str], screen: Screen, out: TextIO) -> None:
    """Prints the sentences that end a command. The lines of a next step are kept as they are."""
    *answers, step = sentences
    print("", *map(screen.fill, answers), step, sep="\n", file=out)


def profile_all(
    cases: list[Case], args: argparse.Namespace, rows: LiveRows, out: TextIO
) -> Iterator[tuple[Record, Record | None]]:
    """The measured record of each case, and its prediction if requested."""
    devices: dict[str, Device] = {}
    if args.predict:  # Queried before anything runs, as the free memory of a GPU counts.
        devices = {name: device_named(name) for name in {case.device for case in cases}}
    for number, case in enumerate(cases):
        with nvtx_ranges(args.nvtx), redirect_stdout(sys.stderr):  # Output of operators is discarded.
            record = profile_case(
                case,
                details=args.explain is not None,
                max_seconds=seconds_per_case(args, case.device),
                passes=args.passes,
                timed=not args.no_time,
                limit_bytes=args.memory_limit,
            )
        if number == 0:
            print(f"{common_case(cases)}\n\n{rows.header()}", file=out)
        print(rows.row(record), file=out, flush=True)
        prediction = predicted_record(case, devices[case.device], args.memory_limit) if args.predict else None
        if prediction is not None:
            print(rows.predicted_row(record, prediction), file=out, flush=True)
        yield record, prediction


def seconds_per_case(args: argparse.Namespace, device: str) -> float | None:
    """Seconds per case; None: unlimited."""
    given = args.max_seconds_per_case
    if given is None:
        given = CPU_SECONDS if device == "cpu" else 0
    return given or None


@dataclass
class Inspection:
    """The inspections requested besides the rows, and the files they wrote."""

    explain: int | None
    timeline: Path | None
    snapshot: Path | None
    trace: Path | None
    single: bool  # With several cases, each gets files of its own.
    written: list[Path]

    @classmethod
    def of(cls, args: argparse.Namespace, cases: int) -> Inspection:
        for flag in ("timeline", "snapshot", "trace"):
            path = getattr(args, flag)
            if path is not None:
                make_room(f"--{flag}", path)
        if args.timeline is not None and args.timeline.suffix.removeprefix(".") not in FORMATS:
            raise UsageError(f"--timeline {args.timeline} must end in one of .{', .'.join(FORMATS)}")
        return cls(args.explain, args.timeline, args.snapshot, args.trace, cases == 1, [])

    def run(self, case: Case, record: Record, out: TextIO) -> None:
        if self.explain is not None:
            print(f"\n{explanation(record, self.explain)}", file=out)
        if record.status != "ok":
            return
        if self.timeline is not None:
            path = self.path(self.timeline, case)
            lengths = f"S {case.query_len}" + (f", T {case.kv_len}" if case.kv_len else "")
            title = f"{case.operator}: what is alive, by what allocated it"
            plot_timeline(timeline_of_case(case), path, title=title, subtitle=f"{common_case([case])}, {lengths}")
            self.written.append(path)
        if self.snapshot is not None:
            self.written.append(snapshot_case(case, self.path(self.snapshot, case)))
        if self.trace is not None:
            path = self.path(self.trace, case)
            print(f"\n{case.operator}, who took the time:\n{format_shares(trace_case(case, path))}", file=out)
            self.written.append(path)

    def path(self, path: Path, case: Case) -> Path:
        """FILE.json, or FILE-naive-1024x1024.json if there are several cases."""
        if self.single:
            return path
        name = f"-{case.operator.replace('/', '-')}-{case.query_len}" + (f"x{case.kv_len}" if case.kv_len else "")
        stem, dot, suffixes = path.name.partition(".")
        return path.with_name(stem + name + dot + suffixes)


def exit_code(records: list[Record]) -> int:
    """1 on any error, or if every case is unsupported. Running out of memory is a result."""
    statuses = {record.status for record in records}
    return int("error" in statuses or not statuses & {"ok", "oom", "skipped"})


def note_unused_flags(args: argparse.Namespace, cases: list[Case]) -> None:
    for field in ("heads", "core_dim", "factor"):
        without = dict.fromkeys(case.operator for case in cases if getattr(case, field) is None)
        if getattr(args, field, None) is not None and without:
            print(f"note: --{field.replace('_', '-')} is not used by {', '.join(without)}", file=sys.stderr)


def begin_records(path: Path) -> None:
    """Creates the folder and the file if needed. UsageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        whole_lines(path)
    except OSError as error:
        raise UsageError(f"--output {path.parent} cannot be written to: {error.strerror}") from None


def append_record(path: Path, record: Record) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(record.to_json() + "\n")


def drop_replaced(path: Path, kind: type[R], same: Callable[[R], Hashable]) -> list[R]:
    """Keeps the newest record of each case in the file, and every line that this version cannot read."""
    left: dict[Hashable, tuple[bytes, R | None]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
        try:
            record = kind.from_json(line.decode())
        except (ValueError, RecursionError):
            left[number] = line, None
        else:
            left.pop(same(record), None)
            left[same(record)] = line, record
    beside = path.with_suffix(".tmp")
    beside.write_bytes(b"".join(line for line, _ in left.values()))
    beside.replace(path)
    return [record for _, record in left.values() if record is not None]


def case_and_place(record: Record) -> Hashable:
    return case_of(record), place_of(record), record.device_name, record.source


@dataclass
class ResultFiles:
    """records.jsonl grows a line per case, so that a crash loses none.

    At the end the earlier records of the same cases are dropped, those of others stay, and the other files are written.
    """

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> ResultFiles:
        files = cls(folder)
        if (folder / "sweep.json").exists():
            raise UsageError(f"--output {folder} holds a sweep, whose rows would be replaced: name another folder")
        begin_records(files.paths()[0])
        return files

    def paths(self) -> tuple[Path, Path, Path]:
        return self.folder / "records.jsonl", self.folder / "records.csv", self.folder / "memory.png"

    def append(self, record: Record | None) -> None:
        if record is None:
            return
        append_record(self.paths()[0], record)

    def finish(self, records: list[Record], predictions: list[Record], title: str) -> None:
        lines, table, picture = self.paths()
        write_csv(drop_replaced(lines, Record, case_and_place), table)
        styles = {name: contender.style for name, contender in CONTENDERS.items()}
        plot_memory([*records, *predictions], picture, styles=styles, title=title, subtitle=common_case(records))


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


def file(flag: str) -> Callable[[str], Path]:
    def parse(text: str) -> Path:
        if not text or Path(text).is_dir():
            raise UsageError(f"{flag} must name a file, got {text!r}")
        return Path(text)

    return parse


def make_room(flag: str, path: Path) -> None:
    """Creates the folder of an output file. UsageError if that fails or the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written to: {error.strerror}") from None


def seconds(flag: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise UsageError(f"{flag} must be a number of seconds, 0 or more, got {text!r}")
        return number

    return parse


def sizes(flag: str) -> Callable[[str], list[int]]:
    """Parses lists and ranges: "8", "16,32", "256:16384:x2"."""

    def parse(text: str) -> list[int]:
        try:
            return parse_sizes(text)
        except ValueError as error:
            raise UsageError(f"{flag} {error}") from None

    return parse


def size(flag: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise UsageError(f"{flag} {error}") from None

    return parse

"""Running cases one by one, and their result files."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from memcheck.bench.catalog import (
    CONTENDERS,
    SHORT_DTYPES,
    Case,
    batch_of,
    combinator_types,
    make_case,
    make_combinator_case,
)
from memcheck.bench.profile import check_can_measure, profile_case, snapshot_case, timeline_of_case, trace_case
from memcheck.bench.sweep.predict import predicted_record
from memcheck.bench.sweep.run import Settings
from memcheck.bench.sweep.store import Store
from memcheck.cli.options import make_lengths
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import UsageError
from memcheck.core.record import Record, write_csv
from memcheck.core.style import Style
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
from memcheck.report.cases import case_and_place
from memcheck.report.plots import plot_memory, plot_timeline
from memcheck.report.plots.style import FORMATS
from memcheck.report.rows import PREDICTED

R = TypeVar("R", bound=Record)
T = TypeVar("T")
DOES_NOT_FIT = 3  # The exit code of --fail-on-oom.
LENGTHS = ("seq_len", "query_len", "kv_len")
LAYOUTS = ("padded", "packed")


def make_any_case(name: str, attention_fields: dict[str, Any], **fields: Any) -> Case:
    """A checked case of an attention, or of a combinator, which has no keys and heads."""
    fields["dtype"] = SHORT_DTYPES.get(fields["dtype"], fields["dtype"])
    if name in combinator_types():
        fields.pop("kv_len", None)
        return make_combinator_case(name, **fields)
    return make_case(name, **attention_fields, **fields)


def batches_of(given: Mapping[str, Any], default: list[int]) -> Iterator[dict[str, Any]]:
    """The lengths of each case, and the batch that --lengths makes of them: without --packed or --padded, both.

    given: the values of the flags, each a list; the mode is one word.
    """
    layouts = [name for name in LAYOUTS if given.get(name)]
    if not given.get("lengths"):
        if layouts:
            raise UsageError(f"--{layouts[0]} needs --lengths, the positions of each sequence")
        for query_len, kv_len in make_lengths(given.get("mode"), *map(given.get, LENGTHS), default=default):
            yield {"query_len": query_len, "kv_len": kv_len}
        return
    for name in ("bsz", *LENGTHS):
        if given.get(name):
            raise UsageError(f"--lengths has the number and lengths of sequences: leave out --{name.replace('_', '-')}")
    for lengths in sorted(given["lengths"], key=sum):
        for layout in layouts or LAYOUTS:
            yield batch_of(lengths, layout)


def styles_of_contenders() -> dict[str, Style]:
    return {name: contender.style for name, contender in CONTENDERS.items()}


def progress_bar(total: float, title: str = "") -> tqdm[Any]:
    """A bar on stderr with the estimated time left, on a terminal. Rows are printed above it by tqdm.write."""
    words = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    hidden = not sys.stderr.isatty()
    tqdm.monitor_interval = 0  # No thread of tqdm beside a measurement.
    return tqdm(desc=title, total=total, file=sys.stderr, disable=hidden, bar_format=words, leave=False)


def watch(items: Sequence[T], title: str = "plots") -> Iterator[T]:
    """The items one by one, beside a bar."""
    with progress_bar(len(items), title) as bar:
        for item in items:
            yield item
            bar.update()


def run_cases(cases: list[Case], args: argparse.Namespace, *, title: str, note: str = "") -> int:
    """Runs the cases and prints each row when it is done. Returns the exit code.

    title: of the plot. note: a line of the header.

    records.jsonl grows a line per case, so that a crash loses none. At the end, the earlier records of the same cases
    are dropped, those of others stay, and the other files are written.
    """
    out = sys.stderr if args.format == "json" else sys.stdout
    store, table, picture = Store(args.output), args.output / "records.csv", args.output / "memory.png"
    check_inspection(args)
    store.begin()
    note_unused_flags(args, cases)
    records: list[Record] = []
    predictions: list[Record] = []
    how = {"units": args.units, "predicted": args.predict, "timed": not args.no_time}
    rows = LiveRows(cases, **how, screen=Screen.of(out))
    if note:
        print(rows.screen.fill(note), file=out, flush=True)
    show = functools.partial(tqdm.write, file=out)
    for record, prediction in profile_all(cases, args):
        if not records:
            show(f"{common_case(cases)}\n\n{rows.header()}")
        records.append(record)
        store.append(record)
        show(rows.row(record))
        if prediction is not None:
            predictions.append(prediction)
            store.append(prediction)
            show(rows.predicted_row(record, prediction))
        out.flush()
    write_csv(store.keep_newest(case_and_place), table)
    plot_memory(
        [*records, *predictions], picture, styles=styles_of_contenders(), title=title, subtitle=common_case(records)
    )
    print(f"\n{rows.legend()}", file=out)
    if predictions:
        print(*map(rows.screen.fill, [PREDICTED, *unknown_words(predictions)]), sep="\n", file=out)
    print_doubts(records, args.doubts, rows.screen, out)
    written = [store.path, table, picture]
    for case, record in zip(cases, records, strict=True):
        written += inspect_case(case, record, args, out, single=len(cases) == 1)
    print(f"\nWrote {', '.join(map(str, written))}", file=out)
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


def profile_all(cases: list[Case], args: argparse.Namespace) -> Iterator[tuple[Record, Record | None]]:
    """The measured record of each case, and its prediction if requested."""
    for case in cases:
        check_can_measure(case.device)
    devices: dict[str, Device] = {}
    if args.predict:  # Queried before anything runs, as the free memory of a GPU counts.
        devices = {name: device_named(name) for name in {case.device for case in cases}}
    settings = Settings(args.memory_limit, args.max_seconds_per_case, args.passes, not args.no_time)
    with progress_bar(sum(map(settings.expected_seconds, cases)), "profile") as bar:
        for case in cases:
            with nvtx_ranges(args.nvtx), redirect_stdout(sys.stderr):  # Output of operators is discarded.
                record = profile_case(
                    case,
                    details=args.explain is not None,
                    max_seconds=settings.seconds(case),
                    passes=args.passes,
                    timed=not args.no_time,
                    limit_bytes=args.memory_limit,
                )
            yield record, predicted_record(case, devices[case.device], args.memory_limit) if args.predict else None
            bar.update(settings.expected_seconds(case))


def check_inspection(args: argparse.Namespace) -> None:
    for flag in ("timeline", "snapshot", "trace"):
        if (path := getattr(args, flag)) is not None:
            make_room(f"--{flag}", path)
    if args.timeline is not None:
        check_picture("--timeline", args.timeline)


def inspect_case(case: Case, record: Record, args: argparse.Namespace, out: TextIO, *, single: bool) -> Iterator[Path]:
    """Shows and writes what the flags ask for besides the row. Returns the files.

    single: there is one case, whose files have the names that were given.
    """
    if args.explain is not None:
        print(f"\n{explanation(record, args.explain)}", file=out)
    if record.status != "ok":
        return
    lengths = f"{case.query_len}" + (f"x{case.kv_len}" if case.kv_len else "")

    def path_of(path: Path) -> Path:
        """FILE.json, or FILE-naive-1024x1024.json if there are several cases."""
        stem, dot, suffixes = path.name.partition(".")
        own = "" if single else f"-{case.operator.replace('/', '-')}-{lengths}"
        return path.with_name(f"{stem}{own}{dot}{suffixes}")

    if args.timeline is not None:
        path = path_of(args.timeline)
        title = f"{case.operator}: what is alive, by what allocated it"
        both = f"S {case.query_len}" + (f", T {case.kv_len}" if case.kv_len else "")
        plot_timeline(timeline_of_case(case), path, title=title, subtitle=f"{common_case([case])}, {both}")
        yield path
    if args.snapshot is not None:
        yield snapshot_case(case, path_of(args.snapshot))
    if args.trace is not None:
        path = path_of(args.trace)
        print(f"\n{case.operator}, what took the time:\n{format_shares(trace_case(case, path))}", file=out)
        yield path


def exit_code(records: list[Record]) -> int:
    """1 on any error, or if every case is unsupported. Running out of memory is a result."""
    statuses = {record.status for record in records}
    return int("error" in statuses or not statuses & {"ok", "oom", "skipped"})


def note_unused_flags(args: argparse.Namespace, cases: list[Case]) -> None:
    for field in ("heads", "core_dim", "factor"):
        without = dict.fromkeys(case.operator for case in cases if getattr(case, field) is None)
        if getattr(args, field, None) is not None and without:
            print(f"note: --{field.replace('_', '-')} is not used by {', '.join(without)}", file=sys.stderr)


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


def check_picture(flag: str, path: Path) -> None:
    if path.suffix.removeprefix(".") not in FORMATS:
        raise UsageError(f"{flag} {path} must end in one of .{', .'.join(FORMATS)}")

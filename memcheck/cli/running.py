"""Running cases one by one, with their rows, files and answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from memcheck.bench.case import Case
from memcheck.bench.catalog import styles_of_contenders
from memcheck.bench.profile import check_can_measure, profile_case, snapshot_case, trace_case
from memcheck.bench.sweep import predicted_sweep, run
from memcheck.bench.sweep.store import Store
from memcheck.cli.cases import note_unused_options
from memcheck.cli.options import Request
from memcheck.cli.output import check_picture, make_room, print_details, progress_bar
from memcheck.core.record import Record, write_csv
from memcheck.core.step import Place
from memcheck.core.units import format_bytes, format_time
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.measure.timeline import record_timeline
from memcheck.report.cases import case_and_place, common_case, failure_note, is_predicted
from memcheck.report.plots import figure, timeline
from memcheck.report.predictions import prediction_table, unknown_words
from memcheck.report.records import main_tables
from memcheck.report.rows import explanation
from memcheck.report.tables import Screen, to_text


def run_cases(cases: list[Case], request: Request, *, title: str, note: str = "") -> int:
    """Runs the cases of operators. Returns the exit code. title: of the plot. note: a line of the header."""
    out = sys.stderr if request.format == "json" else sys.stdout
    check_inspection(request)
    Store(request.output).begin()
    note_unused_options(request, cases)
    if note:
        print(Screen.of(out).fill(note), file=out, flush=True)
    pairs = profile_all(cases, request)
    records, predictions, written = keep(pairs, len(cases), request, out, title, common_case, request.units)
    for case, record in zip(cases, records, strict=True):
        written += inspect_case(case, record, request, out, single=len(cases) == 1)
    return finish(records, predictions, written, request, out)


def keep(
    pairs: Iterable[tuple[Record, Record | None]],
    number: int,
    request: Request,
    out: TextIO,
    title: str,
    subtitle: Callable[[Sequence[Record]], str],
    units: bool = False,
) -> tuple[list[Record], list[Record], list[Path]]:
    """Keeps and prints the record of each case, and its predicted one. Returns both, and the files.

    records.jsonl grows a line per case, so that a crash loses none. At the end, the earlier records of the same cases
    are dropped, those of others stay, and the other files are written.
    """
    store, table, picture = Store(request.output), request.output / "records.csv", request.output / "memory.png"
    records, predictions, screen = list[Record](), list[Record](), Screen.of(out)
    for record, prediction in pairs:
        records.append(record)
        predictions += [] if prediction is None else [prediction]
        for one in filter(None, (record, prediction)):
            store.append(one)
        tqdm.write(f"[{len(records)}/{number}] {case_line(record)}", file=sys.stderr)
    both = [*records, *predictions]
    write_csv(store.keep_newest(case_and_place), table)
    kind, title = ("decode", "") if records[0].mode == "decode" else ("memory", title)
    figure.plot_figure(both, picture, kind, styles=styles_of_contenders(), title=title, subtitle=subtitle(records))
    tables = [*main_tables(records, units), *([prediction_table(both)] if predictions else [])]
    print("\n\n".join(to_text(table, screen) for table in tables), file=out)
    for line in unknown_words([record for record in both if is_predicted(record)]):
        print(screen.fill(line), file=out)
    print_details([record for record in records if not is_predicted(record)], request.doubts, screen, out)
    return records, predictions, [store.path, table, picture]


def finish(
    records: Sequence[Record], predictions: Sequence[Record], written: Sequence[Path], request: Request, out: TextIO
) -> int:
    """Prints the files and, in JSON, the records. Returns the exit code.

    It is 1 on any error, or if every case is unsupported. Running out of memory is a result.
    """
    print(f"\nWrote {', '.join(map(str, written))}", file=out)
    if request.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in [*records, *predictions]) + "]")
    statuses = {record.status for record in records}
    return int("error" in statuses or not statuses & {"ok", "oom", "skipped"})


def case_title(case: Case | Record) -> str:
    """ "naive  B1 S256 T256 E256 H4 float32 inference" """
    compiled, mode = "compiled" if case.compiled else "", "" if case.mode == "train" else case.mode
    return " ".join(filter(None, (f"{case.operator:<23}", run.shape(case), case.dtype, compiled, mode)))


def case_line(record: Record) -> str:
    return f"{case_title(record)}: {'predicted ' if is_predicted(record) else ''}{record.status}{figures(record)}"


def figures(record: Record) -> str:
    if record.status != "ok":
        return f", {note}" if (note := failure_note(record)) and note != record.status else ""
    sizes = {"peak forward": record.forward_peak_bytes, "kept": record.saved_bytes}
    sizes["peak backward"] = record.backward_peak_bytes
    parts = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
    times = [format_time(time) for time in (record.forward_ms, record.backward_ms) if time is not None]
    return ", " + ", ".join(parts + ([" + ".join(times)] if times else []))


def profile_all(cases: list[Case], request: Request) -> Iterator[tuple[Record, Record | None]]:
    """The measured record of each case, and its prediction if requested."""
    for case in cases:
        check_can_measure(case.device)
    places: dict[str, Place] = {}
    if request.predict:  # Queried before anything runs, as the free memory of a GPU counts.
        places = {name: Place(name, request.memory_limit).resolved() for name in {case.device for case in cases}}
    settings = run.Settings(request.memory_limit, request.max_seconds_per_case, request.passes, not request.no_time)
    with progress_bar(sum(map(settings.expected_seconds, cases)), "profile") as bar:
        for case in cases:
            with nvtx_ranges(request.nvtx), redirect_stdout(sys.stderr):  # Output of operators is discarded.
                record = profile_case(
                    case,
                    details=request.explain is not None,
                    max_seconds=settings.seconds(case),
                    passes=request.passes,
                    timed=not request.no_time,
                    memory_limit=request.memory_limit,
                )
            yield record, predicted_sweep.predicted_record(case, places[case.device]) if request.predict else None
            bar.update(settings.expected_seconds(case))


def check_inspection(request: Request) -> None:
    for flag in ("timeline", "snapshot", "trace"):
        if (path := getattr(request, flag)) is not None:
            make_room(flag, path)
    if request.timeline is not None:
        check_picture("timeline", request.timeline)


def inspect_case(case: Case, record: Record, request: Request, out: TextIO, *, single: bool) -> Iterator[Path]:
    """Shows and writes what the flags ask for besides the row. Returns the files.

    single: there is one case, whose files have the names that were given.
    """
    if request.explain is not None:
        print(f"\n{explanation(record, request.explain)}", file=out)
    if record.status != "ok":
        return
    lengths = f"{case.query_len}" + (f"x{case.kv_len}" if case.kv_len else "")

    def path_of(path: Path) -> Path:
        """FILE.json, or FILE-naive-1024x1024.json if there are several cases."""
        stem, dot, suffixes = path.name.partition(".")
        own = "" if single else f"-{case.operator.replace('/', '-')}-{lengths}"
        return path.with_name(f"{stem}{own}{dot}{suffixes}")

    if request.timeline is not None:
        path = path_of(request.timeline)
        title = f"{case.operator}: what is alive, by what allocated it"
        both = f"S {case.query_len}" + (f", T {case.kv_len}" if case.kv_len else "")
        subtitle = f"{common_case([case])}, {both}"
        timeline.plot_timeline(record_timeline(case.step()), path, title=title, subtitle=subtitle)
        yield path
    if request.snapshot is not None:
        yield snapshot_case(case, path_of(request.snapshot))
    if request.trace is not None:
        path = path_of(request.trace)
        print(f"\n{case.operator}, what took the time:\n{format_shares(trace_case(case, path))}", file=out)
        yield path

"""Running cases one by one, and their result files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from memcheck.bench.catalog import (
    CONTENDERS,
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
from memcheck.cli.options import DEFAULT_SIZES, GPU_LENGTHS, GPU_SIZES, LAYOUTS, Operators
from memcheck.cli.requests import Cases
from memcheck.core.errors import UsageError
from memcheck.core.options import Request, named
from memcheck.core.place import Place
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


def make_any_case(name: str, attention_fields: dict[str, Any], **fields: Any) -> Case:
    """A checked case of an attention, or of a combinator, which has no keys and heads."""
    if name in combinator_types():
        fields.pop("kv_len", None)
        return make_combinator_case(name, **fields)
    return make_case(name, **attention_fields, **fields)


def batches_of(given: Mapping[str, Any], default: list[int]) -> Iterator[dict[str, Any]]:
    """The lengths of each case, and the batch that `lengths` makes of them: without `packed` or `padded`, both.

    given: the options by name, each a list; the mode is one word.
    """
    layouts = [name for name in LAYOUTS if given.get(name)]
    if not given.get("lengths"):
        if layouts:
            raise UsageError(f"{named(layouts[0])} needs {named('lengths')}, the positions of each sequence")
        for query_len, kv_len in make_lengths(given.get("mode"), *map(given.get, LENGTHS), default=default):
            yield {"query_len": query_len, "kv_len": kv_len}
        return
    for name in ("bsz", *LENGTHS):
        if given.get(name):
            rule = f"{named('lengths')} has the number and lengths of sequences"
            raise UsageError(f"{rule}: leave out {named(name)}")
    for lengths in sorted(given["lengths"], key=sum):
        for layout in layouts or LAYOUTS:
            yield batch_of(lengths, layout)


def make_lengths(
    mode: str | None,
    seq_len: list[int] | None,
    query_len: list[int] | None,
    kv_len: list[int] | None,
    *,
    default: list[int],
) -> list[tuple[int, int]]:
    """(S, T) pairs. Two lists of equal length are paired; a single length is combined with every one of the other list.

    A decoding step takes one token, so S is 1 and the lengths are those of the state.
    """
    names = {name: named(name) for name in ("seq_len", "query_len", "kv_len", "mode")}
    queries_name, keys_name = names["query_len"], names["kv_len"]
    if seq_len and (query_len or kv_len):
        both = f"{queries_name} and {keys_name}, or {names['seq_len']}"
        raise UsageError(f"{names['seq_len']} sets both lengths: leave out {both}")
    if mode == "decode":
        if query_len not in (None, [1]):
            given = ",".join(map(str, query_len))
            rule = f"must be 1 in {names['mode']} decode, got {given}"
            raise UsageError(f"{queries_name} {rule}; {keys_name} says how many tokens the state holds")
        return [(1, key) for key in sorted(kv_len or seq_len or default)]
    queries, keys = query_len or kv_len or seq_len or default, kv_len or query_len or seq_len or default
    longest = max(len(queries), len(keys))
    if {len(queries), len(keys)} - {1, longest}:
        lengths = f"{len(queries)} and {len(keys)}"
        raise UsageError(f"{queries_name} and {keys_name} must be as long as each other, got {lengths}")
    return sorted(zip(queries * (longest // len(queries)), keys * (longest // len(keys)), strict=True))


def attention_fields_of(request: Operators) -> dict[str, Any]:
    """The sizes and the mask that only attentions have, one of each."""
    (heads,), core_dim, factor = request.heads or [DEFAULT_SIZES["heads"]], request.core_dim, request.factor
    return {
        "heads": heads,
        "core_dim": core_dim and core_dim[0],
        "factor": factor and factor[0],
        "causal": request.causal is not False,
    }


def gpu_words(given: Container[str]) -> str:
    """Says which defaults of a GPU hold for the options that are not given. "" if all are given."""
    words = {
        "dtype": "bf16",
        "bsz": f"batch {GPU_SIZES['bsz']}",
        "dim": f"dim {GPU_SIZES['dim']}",
        "heads": f"{GPU_SIZES['heads']} heads",
        "seq_len": f"lengths {GPU_LENGTHS[0]} to {GPU_LENGTHS[-1]}",
    }
    used = ", ".join(text for name, text in words.items() if name not in given)
    return f"defaults of a GPU, where no flag says otherwise: {used}" if used else ""


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


def run_cases(cases: list[Case], request: Cases, *, title: str, note: str = "") -> int:
    """Runs the cases and prints each row when it is done. Returns the exit code.

    title: of the plot. note: a line of the header.

    records.jsonl grows a line per case, so that a crash loses none. At the end, the earlier records of the same cases
    are dropped, those of others stay, and the other files are written.
    """
    out = sys.stderr if request.format == "json" else sys.stdout
    store, table, picture = Store(request.output), request.output / "records.csv", request.output / "memory.png"
    check_inspection(request)
    store.begin()
    note_unused_options(request, cases)
    records: list[Record] = []
    predictions: list[Record] = []
    how = {"units": request.units, "predicted": request.predict, "timed": not request.no_time}
    rows = LiveRows(cases, **how, screen=Screen.of(out))
    if note:
        print(rows.screen.fill(note), file=out, flush=True)
    show = functools.partial(tqdm.write, file=out)
    for record, prediction in profile_all(cases, request):
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
    print_doubts(records, request.doubts, rows.screen, out)
    written = [store.path, table, picture]
    for case, record in zip(cases, records, strict=True):
        written += inspect_case(case, record, request, out, single=len(cases) == 1)
    print(f"\nWrote {', '.join(map(str, written))}", file=out)
    print_answer([*answer(records), next_step(records, request.memory_limit)], rows.screen, out)
    if request.format == "json":
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


def profile_all(cases: list[Case], request: Cases) -> Iterator[tuple[Record, Record | None]]:
    """The measured record of each case, and its prediction if requested."""
    for case in cases:
        check_can_measure(case.device)
    places: dict[str, Place] = {}
    if request.predict:  # Queried before anything runs, as the free memory of a GPU counts.
        places = {name: Place(name, request.memory_limit).resolved() for name in {case.device for case in cases}}
    settings = Settings(request.memory_limit, request.max_seconds_per_case, request.passes, not request.no_time)
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
            yield record, predicted_record(case, places[case.device]) if request.predict else None
            bar.update(settings.expected_seconds(case))


def check_inspection(request: Cases) -> None:
    for flag in ("timeline", "snapshot", "trace"):
        if (path := getattr(request, flag)) is not None:
            make_room(flag, path)
    if request.timeline is not None:
        check_picture("timeline", request.timeline)


def inspect_case(case: Case, record: Record, request: Cases, out: TextIO, *, single: bool) -> Iterator[Path]:
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
        plot_timeline(timeline_of_case(case), path, title=title, subtitle=f"{common_case([case])}, {both}")
        yield path
    if request.snapshot is not None:
        yield snapshot_case(case, path_of(request.snapshot))
    if request.trace is not None:
        path = path_of(request.trace)
        print(f"\n{case.operator}, what took the time:\n{format_shares(trace_case(case, path))}", file=out)
        yield path


def exit_code(records: list[Record]) -> int:
    """1 on any error, or if every case is unsupported. Running out of memory is a result."""
    statuses = {record.status for record in records}
    return int("error" in statuses or not statuses & {"ok", "oom", "skipped"})


def note_unused_options(request: Request, cases: list[Case]) -> None:
    for field in ("heads", "core_dim", "factor"):
        without = dict.fromkeys(case.operator for case in cases if getattr(case, field) is None)
        if getattr(request, field, None) is not None and without:
            print(f"note: {named(field)} is not used by {', '.join(without)}", file=sys.stderr)


def make_room(name: str, path: Path) -> None:
    """Creates the folder of an output file. name: the option that gives the path.

    UsageError: that fails, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{named(name)} {path} cannot be written to: {error.strerror}") from None


def check_picture(name: str, path: Path) -> None:
    if path.suffix.removeprefix(".") not in FORMATS:
        raise UsageError(f"{named(name)} {path} must end in one of .{', .'.join(FORMATS)}")

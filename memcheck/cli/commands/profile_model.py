"""`memcheck profile-model`: memory and time of a whole decoder, measured and predicted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from memcheck.bench.catalog import styles_of_contenders
from memcheck.bench.decoders import (
    SIZES,
    DecoderCase,
    predict_decoder,
    profile_decoder,
    snapshot_decoder,
    trace_decoder,
)
from memcheck.bench.profile import find_device
from memcheck.bench.sweep.store import Store
from memcheck.cli.cases import check_takes_window
from memcheck.cli.output import make_room, print_details, progress_bar
from memcheck.cli.run_requests import ProfileModel
from memcheck.cli.running import exit_code
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.record import Record
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.report.cases import case_and_place
from memcheck.report.models import model_title, models_table, parts_tables
from memcheck.report.plots.figure import plot_figure
from memcheck.report.predictions import prediction_table, unknown_words
from memcheck.report.tables import Screen, to_text


def run(request: ProfileModel) -> int:
    """Runs or predicts the cases. records.jsonl grows a line per case, so that a crash loses none.

    At the end, the earlier records of the same cases are dropped, those of others stay, and the picture is drawn.
    """
    out = sys.stderr if request.format == "json" else sys.stdout
    cases, device = make_cases(request), "cpu" if request.predict else find_device(request.device)
    check_single(request, cases)
    store = Store(request.output)
    store.begin()
    records: list[Record] = []
    predictions: list[Record] = []
    screen = Screen.of(out)
    with progress_bar(len(cases), "profile") as bar:
        for case in cases:
            record, predicted = records_of(case, device, request)
            records.append(record)
            predictions += [] if predicted is None else [predicted]
            for one in filter(None, (record, predicted)):
                store.append(one)
            bar.update()
    store.keep_newest(case_and_place)
    both = [*records, *predictions]
    picture = request.output / "memory.png"
    plot_figure(
        both, picture, styles=styles_of_contenders(), title="Memory of a decoder", subtitle=model_title(records[0])
    )
    print(to_text(models_table(records), screen), file=out)
    if predictions:
        print(f"\n{to_text(prediction_table(both), screen)}", file=out)
    print_details([record for record in records if record.source == "measured"], request.doubts, screen, out)
    if request.components or len(cases) == 1:
        print(*(f"\n{to_text(table, screen)}" for table in parts_tables(both)), sep="\n", file=out)
    for words in unknown_words([record for record in both if record.source == "predicted"]):
        print(screen.fill(words), file=out)
    written = [store.path, picture, *inspect(cases[0], device, records[0], request, out)]
    print(f"\nWrote {', '.join(map(str, written))}", file=out)
    if request.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in both) + "]")
    return exit_code(records)


def make_cases(request: ProfileModel) -> list[DecoderCase]:
    """The cases from small to large, so that an early end loses only the largest."""
    check_takes_window(request.window, request.attention_type)
    sizes = list(SIZES) if "all" in request.size else request.size
    return [
        DecoderCase(
            size_,
            attention_type,
            feed_forward,
            request.bsz,
            context,
            request.factor,
            request.window,
            mode,
            dtype,
            request.autocast,
            request.checkpointing,
            request.compile,
        )
        for size_, context, dtype, mode, feed_forward, attention_type in itertools.product(
            dict.fromkeys(sizes),
            sorted(request.context),
            *map(dict.fromkeys, (request.dtype, request.mode, request.feed_forward, request.attention_type)),
        )
    ]


def check_single(request: ProfileModel, cases: list[DecoderCase]) -> None:
    for name in ("snapshot", "trace"):
        path = getattr(request, name)
        if path is None:
            continue
        if request.predict or len(cases) > 1:
            got = f"got {len(cases)} cases and {named('predict')} {request.predict}"
            raise UsageError(f"{named(name)} needs a single case that runs, {got}")
        make_room(name, path)


def records_of(case: DecoderCase, device: str, request: ProfileModel) -> tuple[Record, Record | None]:
    """The record and its prediction; with --predict the prediction alone."""
    if request.predict:
        return predict_decoder(case, request.place()), None
    how: Any = {"timed": not request.no_time, "passes": request.passes, "memory_limit": request.memory_limit}
    with nvtx_ranges(request.nvtx), redirect_stdout(sys.stderr):
        return profile_decoder(case, device, **how, nvtx=request.nvtx)


def inspect(case: DecoderCase, device: str, record: Record, request: ProfileModel, out: TextIO) -> Iterator[Path]:
    """Writes what the flags ask for besides the row. Returns the files."""
    if request.snapshot is not None and record.status == "ok":
        yield snapshot_decoder(case, device, request.snapshot)
    if request.trace is not None and record.status == "ok":
        shares = format_shares(trace_decoder(case, device, request.trace))
        print(f"\nwhat took the time:\n{shares}", file=out)
        yield request.trace

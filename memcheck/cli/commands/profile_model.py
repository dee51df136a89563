"""`memcheck profile-model`: memory and time of a whole decoder, measured and predicted."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from memcheck.bench.decoders import SIZES, DecoderCase
from memcheck.bench.profile import check_can_measure, find_device, profile_case, snapshot_case, trace_case
from memcheck.bench.sweep.predicted_sweep import predicted_record
from memcheck.bench.sweep.store import Store
from memcheck.cli import output, running
from memcheck.cli.cases import check_takes_window
from memcheck.cli.run_requests import ProfileModel
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.report.models import model_title, parts_tables
from memcheck.report.tables import Screen, to_text


def run(request: ProfileModel) -> int:
    """Runs or predicts the cases."""
    out = sys.stderr if request.format == "json" else sys.stdout
    cases = make_cases(request)
    check_single(request, cases)
    Store(request.output).begin()
    pairs = profiled(cases, request)
    records, predictions, written = running.keep(
        pairs, len(cases), request, out, "Memory of a decoder", lambda records: model_title(records[0])
    )
    if request.components or len(cases) == 1:
        screen = Screen.of(out)
        print(*(f"\n{to_text(table, screen)}" for table in parts_tables([*records, *predictions])), sep="\n", file=out)
    if records[0].status == "ok":
        written += inspect(cases[0], request, out)
    return running.finish(records, predictions, written, request, out)


def make_cases(request: ProfileModel) -> list[DecoderCase]:
    """The cases from small to large, so that an early end loses only the largest."""
    check_takes_window(request.window, request.attention_type)
    device = "cpu" if request.predict else find_device(request.device)
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
            device,
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
        output.make_room(name, path)


def profiled(cases: list[DecoderCase], request: ProfileModel) -> Iterator[tuple[Record, Record | None]]:
    """The record and the prediction of each case; with --predict the prediction alone."""
    there = request.place() if request.predict else Place(cases[0].device).unlimited
    if not request.predict:
        check_can_measure(cases[0].device)
        there = dataclasses.replace(there, memory_limit=request.memory_limit)
    how: Any = {"timed": not request.no_time, "passes": request.passes, "memory_limit": request.memory_limit}
    with output.progress_bar(len(cases), "profile") as bar:
        for case in cases:
            with nvtx_ranges(request.nvtx), redirect_stdout(sys.stderr):
                predicted = predicted_record(case, there)
                record = None if request.predict else profile_case(case, **how, nvtx=request.nvtx)
            yield (predicted, None) if record is None else (record, predicted)
            bar.update()


def inspect(case: DecoderCase, request: ProfileModel, out: TextIO) -> Iterator[Path]:
    """Writes what the flags ask for besides the row. Returns the files."""
    if request.snapshot is not None:
        yield snapshot_case(case, request.snapshot)
    if request.trace is not None:
        print(f"\nwhat took the time:\n{format_shares(trace_case(case, request.trace))}", file=out)
        yield request.trace

"""`memcheck profile-model`: memory and time of a whole decoder, measured and predicted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from memcheck.bench.models.case import SIZES, ModelCase, make_model_case
from memcheck.bench.models.model_predictions import predict_model
from memcheck.bench.models.profile import profile_model_case, snapshot_model, trace_model
from memcheck.bench.profile import find_device
from memcheck.bench.sweep.store import Store
from memcheck.cli.cases import check_takes_window
from memcheck.cli.output import make_room, print_details, progress_bar
from memcheck.cli.run_requests import ProfileModel
from memcheck.cli.running import exit_code
from memcheck.core.errors import UsageError
from memcheck.core.model_record import ModelRecord
from memcheck.core.options import named
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.report.cases import case_and_place
from memcheck.report.models import LETTERS, model_title, models_table, parts_table
from memcheck.report.plots.figure import plot_figure
from memcheck.report.tables import Screen, to_text


def run(request: ProfileModel) -> int:
    """Runs or predicts the cases. models.jsonl grows a line per case, so that a crash loses none.

    At the end, the earlier records of the same cases are dropped, those of others stay, and the picture is drawn.
    """
    out = sys.stderr if request.format == "json" else sys.stdout
    cases = make_cases(request)
    check_single(request, cases)
    store, picture = Store(request.output, ModelRecord), request.output / "models.png"
    store.begin()
    records: list[ModelRecord] = []
    screen = Screen.of(out)
    with progress_bar(len(cases), "profile") as bar:
        for case in cases:
            record = record_of(case, request)
            store.append(record)
            records.append(record)
            bar.update()
    store.keep_newest(case_and_place)
    plot_figure(records, picture, title="Memory of a decoder", subtitle=model_title(records))
    print(to_text(models_table(records), screen), file=out)
    print_details([record for record in records if record.source == "measured"], request.doubts, screen, out)
    if request.components or len(records) == 1:
        parts = "\n\n".join(to_text(parts_table(record), screen) for record in records)
        print(f"\n{parts}\n\n{screen.fill(LETTERS)}", file=out)
    for line in unknown_words(records):
        print(line, file=out)
    written = [store.path, picture, *inspect(cases[0], records[0], request, out)]
    print(f"\nWrote {', '.join(map(str, written))}", file=out)
    if request.format == "json":
        print(json.dumps([dataclasses.asdict(record) for record in records]))
    return exit_code(list(records))


def make_cases(request: ProfileModel) -> list[ModelCase]:
    """The cases from small to large, so that an early end loses only the largest."""
    device = "cpu" if request.predict else find_device(request.device)
    check_takes_window(request.window, request.attention_type)
    sizes = list(SIZES) if "all" in request.size else request.size
    return [
        make_model_case(
            size_,
            attention_type=attention_type,
            feed_forward=feed_forward,
            bsz=request.bsz,
            context=context,
            factor=request.factor,
            window=request.window,
            mode=mode,
            dtype=dtype,
            autocast=request.autocast,
            checkpointing=request.checkpointing,
            compiled=request.compile,
            device=device,
        )
        for size_, context, dtype, mode, feed_forward, attention_type in itertools.product(
            dict.fromkeys(sizes),
            sorted(request.context),
            *map(dict.fromkeys, (request.dtype, request.mode, request.feed_forward, request.attention_type)),
        )
    ]


def check_single(request: ProfileModel, cases: list[ModelCase]) -> None:
    for name in ("snapshot", "trace"):
        path = getattr(request, name)
        if path is None:
            continue
        if request.predict or len(cases) > 1:
            got = f"got {len(cases)} cases and {named('predict')} {request.predict}"
            raise UsageError(f"{named(name)} needs a single case that runs, {got}")
        make_room(name, path)


def record_of(case: ModelCase, request: ProfileModel) -> ModelRecord:
    if request.predict:
        return cast(ModelRecord, predict_model(case, request.place()).record)
    with nvtx_ranges(request.nvtx), redirect_stdout(sys.stderr):
        return profile_model_case(
            case, timed=not request.no_time, passes=request.passes, memory_limit=request.memory_limit, nvtx=request.nvtx
        )


def unknown_words(records: list[ModelRecord]) -> Iterator[str]:
    """The unknowns of the predictions, without duplicates."""
    unknown: dict[str, None] = {}
    for record in records:
        words = record.doubts if record.source == "predicted" else (record.predicted or {}).get("unknown", ())
        unknown |= dict.fromkeys(words)
    if unknown:
        yield f"\nnot predicted: {'; '.join(unknown)}"


def inspect(case: ModelCase, record: ModelRecord, request: ProfileModel, out: TextIO) -> Iterator[Path]:
    """Writes what the flags ask for besides the row. Returns the files."""
    if request.snapshot is not None and record.status == "ok":
        yield snapshot_model(case, request.snapshot)
    if request.trace is not None and record.status == "ok":
        print(f"\nwhat took the time:\n{format_shares(trace_model(case, request.trace))}", file=out)
        yield request.trace

"""`memcheck profile-model`: memory and time of a whole decoder, measured and predicted."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from tqdm import tqdm

from memcheck.bench.models.case import SIZES, ModelCase, make_model_case
from memcheck.bench.models.predict import predict_model
from memcheck.bench.models.profile import profile_model_case, snapshot_model, trace_model
from memcheck.bench.profile import find_device
from memcheck.bench.sweep.store import Store
from memcheck.cli.cases import (
    exit_code,
    make_room,
    print_answer,
    print_doubts,
    progress_bar,
)
from memcheck.cli.options import predicted_device
from memcheck.core.case import SHORT_DTYPES
from memcheck.core.errors import UsageError
from memcheck.core.model_record import ModelRecord
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.report import Screen, to_text
from memcheck.report.cases import case_and_place
from memcheck.report.models import LETTERS, ModelRows, model_title, parts_table
from memcheck.report.plots.models import plot_models
from memcheck.report.summary import model_answer, next_model_step

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16", None: None}


def run(args: argparse.Namespace) -> int:
    """Runs or predicts the cases. models.jsonl grows a line per case, so that a crash loses none.

    At the end, the earlier records of the same cases are dropped, those of others stay, and the picture is drawn.
    """
    out = sys.stderr if args.format == "json" else sys.stdout
    cases = make_cases(args)
    check_single(args, cases)
    store, picture = Store(args.output, ModelRecord), args.output / "models.png"
    store.begin()
    records: list[ModelRecord] = []
    rows = ModelRows(Screen.of(out), timed=not (args.no_time or args.predict))
    with progress_bar(len(cases), "profile") as bar:
        for case in cases:
            record = record_of(case, args)
            if not records:
                tqdm.write(f"{model_title([record])}\n\n{rows.header()}", file=out)
            tqdm.write(rows.row(record), file=out)
            out.flush()
            store.append(record)
            records.append(record)
            bar.update()
    store.keep_newest(case_and_place)
    plot_models(records, picture, title="Memory of a decoder", subtitle=model_title(records))
    print(f"\n{rows.legend()}", file=out)
    print_doubts([record for record in records if record.source == "measured"], args.doubts, rows.screen, out)
    if args.components or len(records) == 1:
        parts = "\n\n".join(to_text(parts_table(record), rows.screen) for record in records)
        print(f"\n{parts}\n\n{rows.screen.fill(LETTERS)}", file=out)
    for line in unknown_words(records):
        print(line, file=out)
    written = [store.path, picture, *inspect(cases[0], records[0], args, out)]
    print(f"\nWrote {', '.join(map(str, written))}", file=out)
    print_answer([*model_answer(records), next_model_step(records, args.memory_limit)], rows.screen, out)
    if args.format == "json":
        print(json.dumps([dataclasses.asdict(record) for record in records]))
    return exit_code(list(records))


def make_cases(args: argparse.Namespace) -> list[ModelCase]:
    """The cases from small to large, so that an early end loses only the largest."""
    device = "cpu" if args.predict else find_device(args.device)
    if args.device_from_this_gpu is not None and not args.predict:
        raise UsageError("--device-from-this-gpu is for --predict; a run takes --device")
    if args.torch_version is not None and not args.predict:
        raise UsageError("--torch-version is for --predict; a run has the installed torch")
    if args.autocast not in AUTOCAST:
        raise UsageError(f"--autocast must be bf16 or fp16, got {args.autocast}")
    sizes = list(SIZES) if "all" in args.size else args.size
    return [
        make_model_case(
            size_,
            attention_type=attention_type,
            feed_forward=feed_forward,
            bsz=args.bsz,
            context=context,
            factor=args.factor,
            mode=mode,
            dtype=SHORT_DTYPES.get(dtype, dtype),
            autocast=AUTOCAST[args.autocast],
            checkpointing=args.checkpointing,
            compiled=args.compile,
            device=device,
        )
        for size_, context, dtype, mode, feed_forward, attention_type in itertools.product(
            dict.fromkeys(sizes),
            sorted(args.context),
            *map(dict.fromkeys, (args.dtype, args.mode, args.feed_forward, args.attention_type)),
        )
    ]


def check_single(args: argparse.Namespace, cases: list[ModelCase]) -> None:
    for flag in ("snapshot", "trace"):
        path = getattr(args, flag)
        if path is None:
            continue
        if args.predict or len(cases) > 1:
            raise UsageError(
                f"--{flag} needs a single case that runs, got {len(cases)} cases and --predict {args.predict}"
            )
        make_room(f"--{flag}", path)


def record_of(case: ModelCase, args: argparse.Namespace) -> ModelRecord:
    if args.predict:
        where = {"limit_bytes": args.memory_limit, "torch_version": args.torch_version}
        prediction = predict_model(case, predicted_device(args), **where)
        return cast(ModelRecord, prediction.record)
    with nvtx_ranges(args.nvtx), redirect_stdout(sys.stderr):
        return profile_model_case(
            case, timed=not args.no_time, passes=args.passes, limit_bytes=args.memory_limit, nvtx=args.nvtx
        )


def unknown_words(records: list[ModelRecord]) -> Iterator[str]:
    """What predictions could not know, each once."""
    unknown: dict[str, None] = {}
    for record in records:
        words = record.doubts if record.source == "predicted" else (record.predicted or {}).get("unknown", ())
        unknown |= dict.fromkeys(words)
    if unknown:
        yield f"\nnot predicted: {'; '.join(unknown)}"


def inspect(case: ModelCase, record: ModelRecord, args: argparse.Namespace, out: TextIO) -> Iterator[Path]:
    """Writes what the flags ask for besides the row. Returns the files."""
    if args.snapshot is not None and record.status == "ok":
        yield snapshot_model(case, args.snapshot)
    if args.trace is not None and record.status == "ok":
        print(f"\nwhat took the time:\n{format_shares(trace_model(case, args.trace))}", file=out)
        yield args.trace

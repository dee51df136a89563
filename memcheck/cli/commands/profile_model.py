"""Memory and time of a whole decoder: parameters, gradients, AdamW and activations, measured and predicted."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Hashable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from memcheck.bench.models.case import MODES, SIZES, ModelCase, make_model_case
from memcheck.bench.models.predict import predict_model
from memcheck.bench.models.profile import profile_model_case, snapshot_model, trace_model
from memcheck.bench.profile import find_device
from memcheck.cli.cases import (
    add_table_arguments,
    append_record,
    begin_records,
    case_and_place,
    count,
    counts,
    drop_replaced,
    exit_code,
    file,
    folder,
    make_room,
    print_answer,
    print_doubts,
    size,
)
from memcheck.cli.options import add_gpu_argument, predicted_device
from memcheck.core.case import SHORT_DTYPES
from memcheck.core.devices import DEVICES
from memcheck.core.errors import UsageError
from memcheck.core.model_record import ModelRecord
from memcheck.measure.export import format_shares, nvtx_ranges
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS
from memcheck.report import Screen, to_text
from memcheck.report.models import LETTERS, ModelRows, model_answer, model_title, next_model_step, parts_table
from memcheck.report.plots.models import plot_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, known, default, more in (
        ("size", (*SIZES, "all"), "tiny", ""),
        ("attention-type", tuple(ATTENTIONS), "softmax", "all are causal"),
        ("feed-forward", FEED_FORWARDS, "swiglu", ""),
        ("mode", MODES, "train", "forward: no gradients; train: with a step of AdamW"),
        ("dtype", tuple(SHORT_DTYPES), "fp32", "of the parameters"),
    ):
        text = "; ".join(part for part in (", ".join(known), more, f"default: {default}") if part)
        parser.add_argument(f"--{flag}", type=names, default=[default], metavar="NAME[,NAME]", help=text)
    parser.add_argument(
        "--context", type=counts("--context"), default=[128], metavar="S[,S]", help="lengths; default: 128"
    )
    parser.add_argument("--bsz", type=count("--bsz"), default=1, metavar="N", help="batch size B; default: 1")
    parser.add_argument("--factor", type=count("--factor"), metavar="C", help="compressed only; default: 8")
    parser.add_argument(
        "--autocast",
        nargs="?",
        const="bf16",
        metavar="DTYPE",
        help="bf16 (where no name is given) or fp16: products in it, parameters in fp32",
    )
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep each layer's input alone, and run the layer again in the backward; default: --no-checkpointing",
    )
    parser.add_argument("--compile", action="store_true", help="under torch.compile, of which nothing is predicted")
    parser.add_argument("--predict", action="store_true", help="predict alone: nothing is run or allocated")
    add_device_arguments(parser)
    parser.add_argument("--memory-limit", type=size("--memory-limit"), metavar="40GiB", help="OOM above this")
    parser.add_argument("--passes", type=count("--passes"), metavar="N", help="timed; default: 10, or 10 s of them")
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument(
        "--components", action="store_true", help="of every case what each part keeps; of a single case it is shown"
    )
    for flag, meaning in (
        ("--snapshot", "memory over time, for pytorch.org/memory_viz"),
        ("--trace", "torch.profiler's trace, and who took the time"),
    ):
        parser.add_argument(flag, type=file(flag), metavar="FILE", help=f"{meaning}; of a single case")
    parser.add_argument("--nvtx", action="store_true", help="NVTX ranges around passes and modules, for Nsight Systems")
    parser.add_argument(
        "--output",
        type=folder,
        default=Path("results"),
        metavar="DIR",
        help="records of the same cases there are replaced, others stay; default: results",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")
    add_table_arguments(parser, units=False)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"cpu, cuda or cuda:1; with --predict {', '.join(DEVICES)}, or a size; default: cuda where there is one",
    )
    add_gpu_argument(parser)


def names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def run(args: argparse.Namespace) -> int:
    out = sys.stderr if args.format == "json" else sys.stdout
    cases = make_cases(args)
    check_single(args, cases)
    files = ModelFiles.open(args.output)
    records: list[ModelRecord] = []
    rows = ModelRows(Screen.of(out), timed=not (args.no_time or args.predict))
    for case in cases:
        record = record_of(case, args)
        if not records:
            print(f"{model_title([record])}\n\n{rows.header()}", file=out)
        print(rows.row(record), file=out, flush=True)
        files.append(record)
        records.append(record)
    print(f"\n{rows.legend()}", file=out)
    measured = [record for record in records if record.source == "measured"]
    print_doubts(measured, args.doubts, rows.screen, out)
    if args.components or len(records) == 1:
        parts = "\n\n".join(to_text(parts_table(record), rows.screen) for record in records)
        print(f"\n{parts}\n\n{rows.screen.fill(LETTERS)}", file=out)
    for line in unknown_words(records):
        print(line, file=out)
    written = files.finish(records) + inspect(cases[0], records[0], args, out)
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
            autocast=autocast(args.autocast),
            checkpointing=args.checkpointing,
            compiled=args.compile,
            device=device,
        )
        for size_, context, dtype, mode, feed_forward, attention_type in itertools.product(
            sizes, sorted(args.context), args.dtype, args.mode, args.feed_forward, args.attention_type
        )
    ]


def autocast(name: str | None) -> str | None:
    if name is None:
        return None
    known = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16"}
    if name not in known:
        raise UsageError(f"--autocast must be bf16 or fp16, got {name}")
    return known[name]


def check_single(args: argparse.Namespace, cases: list[ModelCase]) -> None:
    for flag in ("snapshot", "trace"):
        path = getattr(args, flag)
        if path is None:
            continue
        if args.predict or len(cases) > 1:
            raise UsageError(
                f"--{flag} is of a single case that runs, got {len(cases)} cases and --predict {args.predict}"
            )
        make_room(f"--{flag}", path)


def record_of(case: ModelCase, args: argparse.Namespace) -> ModelRecord:
    if args.predict:
        prediction = predict_model(case, predicted_device(args), limit_bytes=args.memory_limit)
        return cast(ModelRecord, prediction.record)
    with nvtx_ranges(args.nvtx), redirect_stdout(sys.stderr):
        return profile_model_case(
            case, timed=not args.no_time, passes=args.passes, limit_bytes=args.memory_limit, nvtx=args.nvtx
        )


def unknown_words(records: list[ModelRecord]) -> Iterator[str]:
    """What predictions could not know, each once."""
    said: dict[str, None] = {}
    for record in records:
        words = record.doubts if record.source == "predicted" else (record.predicted or {}).get("unknown", ())
        said |= dict.fromkeys(words)
    if said:
        yield f"\nnot predicted: {'; '.join(said)}"


def inspect(case: ModelCase, record: ModelRecord, args: argparse.Namespace, out: TextIO) -> list[Path]:
    written = []
    if args.snapshot is not None and record.status == "ok":
        written.append(snapshot_model(case, args.snapshot))
    if args.trace is not None and record.status == "ok":
        print(f"\nwho took the time:\n{format_shares(trace_model(case, args.trace))}", file=out)
        written.append(args.trace)
    return written


def model_and_place(record: ModelRecord) -> Hashable:
    more = (record.size, record.feed_forward, record.autocast, record.checkpointing)
    return *more, case_and_place(record)


@dataclass
class ModelFiles:
    """models.jsonl grows a line per case, so that a crash loses none.

    At the end the earlier records of the same cases are dropped, those of others stay, and the picture is drawn.
    """

    folder: Path

    @classmethod
    def open(cls, place: Path) -> ModelFiles:
        files = cls(place)
        begin_records(files.paths()[0])
        return files

    def paths(self) -> tuple[Path, Path]:
        return self.folder / "models.jsonl", self.folder / "models.png"

    def append(self, record: ModelRecord) -> None:
        append_record(self.paths()[0], record)

    def finish(self, records: list[ModelRecord]) -> list[Path]:
        lines, picture = self.paths()
        drop_replaced(lines, ModelRecord, model_and_place)
        plot_models(records, picture, title="Memory of a decoder", subtitle=model_title(records))
        return [lines, picture]

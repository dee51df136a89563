"""What a case would take on a device that need not be here, as sums of named terms; nothing is run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from memcheck.bench.catalog import (
    CONTENDERS,
    MODES,
    SHORT_DTYPES,
    Case,
    attention_types,
    combinator_types,
    make_case,
    make_combinator_case,
)
from memcheck.bench.plugins import load_plugin
from memcheck.bench.predict import predict_memory
from memcheck.cli.cases import count, note_unused_flags, size
from memcheck.cli.options import add_device_arguments, predicted_device
from memcheck.core.errors import UsageError
from memcheck.predict.replay import Prediction
from memcheck.report import render, terms_table
from memcheck.report.cases import need

DEFAULTS = {"bsz": 1, "dim": 256, "heads": 4}
LENGTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention-type", default="naive", metavar="NAME", help=f"{', '.join(CONTENDERS)}; default: naive"
    )
    for flag, meaning in (("bsz", "batch size B"), ("dim", "token dimension E"), ("heads", "H, where there are heads")):
        help_ = f"{meaning}; default: {DEFAULTS[flag]}"
        parser.add_argument(f"--{flag}", type=count(f"--{flag}"), metavar="N", help=help_)
    lengths = (("seq-len", "S and T at once; default: 1024"), ("query-len", "S; default: --kv-len"))
    for flag, help_ in (*lengths, ("kv-len", "T, in --mode decode tokens of the state; default: --query-len")):
        parser.add_argument(f"--{flag}", type=count(f"--{flag}"), metavar="N", help=help_)
    parser.add_argument("--core-dim", type=count("--core-dim"), metavar="R", help="softplus only; default: --dim")
    parser.add_argument("--factor", type=count("--factor"), metavar="C", help="compressed only; default: 8")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: --causal")
    parser.add_argument("--dtype", default="float32", help="fp32, bf16, fp16, fp64 or torch's names; default: fp32")
    parser.add_argument("--mode", choices=MODES, default="train", help="decode: one step; default: train")
    parser.add_argument("--compile", action="store_true", help="under torch.compile, of which nothing is predicted")
    add_device_arguments(parser)
    parser.add_argument("--memory-limit", type=size("--memory-limit"), metavar="40GiB", help="if less than it has")
    parser.add_argument("--threads", type=count("--threads"), metavar="N", help="of a CPU; default: as torch has here")
    parser.add_argument("--dense-grad", action="store_true", help="the gradient of y is a full tensor")
    parser.add_argument(
        "--expandable-segments", action="store_true", help="as in PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")
    parser.add_argument("--plugin", type=load_plugin, action="append", metavar="FILE.py", help="operators of yours")


def run(args: argparse.Namespace) -> int:
    case, device = make_one(args), predicted_device(args)
    note_unused_flags(args, [case])
    how = {
        "dense_grad": args.dense_grad,
        "threads": args.threads,
        "expandable_segments": args.expandable_segments,
    }
    prediction = predict_memory(case, device, limit_bytes=args.memory_limit, **how)
    if args.format == "json":
        print(json.dumps(prediction_object(prediction)), flush=True)
        return 0
    whole = None
    if prediction.record.status == "oom" and prediction.record.oom_phase:
        unlimited = predict_memory(case, dataclasses.replace(device, usable_bytes=None), **how)
        whole = need(unlimited.record) if not unlimited.bounds else None
    print(render([terms_table(prediction, whole)], "table", sys.stdout), flush=True)
    return 0


def prediction_object(prediction: Prediction) -> dict[str, object]:
    """The record's fields, and what the prediction adds to them."""
    return {
        **dataclasses.asdict(prediction.record),
        "terms": prediction.terms,
        "unknown": prediction.unknown,
        "bounds": sorted(prediction.bounds),
        "device_source": prediction.device.source,
    }


def make_one(args: argparse.Namespace) -> Case:
    name, (query_len, kv_len) = args.attention_type, make_lengths(args)
    fields = {
        "bsz": args.bsz or DEFAULTS["bsz"],
        "query_len": query_len,
        "dim": args.dim or DEFAULTS["dim"],
        "dtype": SHORT_DTYPES.get(args.dtype, args.dtype),
        "mode": args.mode,
        "compiled": args.compile,
    }
    if name in combinator_types():
        return make_combinator_case(name, **fields)
    if name not in attention_types() and "," in name:
        raise UsageError(f"--attention-type {name}: predict takes one; memcheck sweep --predict-only takes several")
    sizes = {"heads": args.heads or DEFAULTS["heads"], "core_dim": args.core_dim, "factor": args.factor}
    return make_case(name, **sizes, kv_len=kv_len, causal=args.causal, **fields)


def make_lengths(args: argparse.Namespace) -> tuple[int, int]:
    """Returns S and T."""
    if args.seq_len and (args.query_len or args.kv_len):
        raise UsageError("--seq-len sets both lengths: leave out --query-len and --kv-len, or --seq-len")
    if args.mode == "decode":
        if args.query_len not in (None, 1):
            raise UsageError(f"--query-len must be 1 in --mode decode, got {args.query_len}")
        return 1, args.kv_len or args.seq_len or LENGTH
    query_len = args.query_len or args.kv_len or args.seq_len or LENGTH
    return query_len, args.kv_len or args.query_len or args.seq_len or LENGTH

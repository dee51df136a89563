"""`memcheck predict`: the memory of one case on a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from memcheck.bench.predict import predict_memory
from memcheck.cli.cases import DOES_NOT_FIT, make_any_case, note_unused_flags
from memcheck.cli.options import DEFAULT_SIZES, make_lengths, predicted_device
from memcheck.core.errors import UsageError
from memcheck.report import render, terms_table
from memcheck.report.cases import need


def run(args: argparse.Namespace) -> int:
    if "," in args.attention_type:
        raise UsageError(
            f"--attention-type {args.attention_type}: predict takes one; memcheck sweep --predict-only takes several"
        )
    given = ([length] if length else None for length in (args.seq_len, args.query_len, args.kv_len))
    ((query_len, kv_len),) = make_lengths(args.mode, *given, default=[1024])
    sizes = {name: getattr(args, name) or default for name, default in DEFAULT_SIZES.items()}
    attention_fields = {
        "kv_len": kv_len,
        "heads": sizes.pop("heads"),
        "core_dim": args.core_dim,
        "factor": args.factor,
        "causal": args.causal,
    }
    case = make_any_case(
        args.attention_type,
        attention_fields,
        **sizes,
        query_len=query_len,
        dtype=args.dtype,
        mode=args.mode,
        compiled=args.compile,
    )
    device = predicted_device(args)
    note_unused_flags(args, [case])
    how = {"dense_grad": args.dense_grad, "threads": args.threads, "expandable_segments": args.expandable_segments}
    prediction = predict_memory(case, device, limit_bytes=args.memory_limit, **how)
    if args.format == "json":
        more = {
            "terms": prediction.terms,
            "unknown": prediction.unknown,
            "bounds": sorted(prediction.bounds),
            "device_source": prediction.device.source,
        }
        print(json.dumps({**dataclasses.asdict(prediction.record), **more}))
    else:
        whole = None
        if prediction.record.status == "oom" and prediction.record.oom_phase:
            unlimited = predict_memory(case, dataclasses.replace(device, usable_bytes=None), **how)
            whole = need(unlimited.record) if not unlimited.bounds else None
        print(render([terms_table(prediction, whole)], "table", sys.stdout))
    return DOES_NOT_FIT if args.fail_on_oom and prediction.record.status != "ok" else 0

"""`memcheck predict`: the memory of an operator or a model on a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from memcheck.bench.changes import single_changes
from memcheck.bench.predict import predict_memory
from memcheck.cli.cases import DOES_NOT_FIT, make_any_case, note_unused_flags
from memcheck.cli.decoding import check_flags, of_case, of_configuration, predict_decoding
from memcheck.cli.models import Study, classes_of
from memcheck.cli.options import DEFAULT_SIZES, make_lengths, predicted_device
from memcheck.core.case import Case
from memcheck.core.errors import UsageError
from memcheck.predict.replay import Prediction
from memcheck.report import render, terms_table
from memcheck.report.cases import need
from memcheck.report.model_prediction import (
    Change,
    buffers_words,
    certainty,
    changes_table,
    modules_table,
    need_of,
    room_of,
    verdict,
)
from memcheck.report.tables import Screen


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    if args.mode == "decode":
        prediction = predict_decoding(
            args, of_configuration(args) if args.hf_config else of_case(args, make_case(args))
        )
    elif args.model or args.hf_config:
        prediction = predict_model(args)
    else:
        prediction = predict_operator(args)
    return DOES_NOT_FIT if args.fail_on_oom and prediction.record.status != "ok" else 0


def predict_model(args: argparse.Namespace) -> Prediction:
    study = Study.of(args)
    prediction = study.predict()
    changes = [] if args.no_changes or prediction.fits is None else study.predict_changes(prediction)
    if args.format == "json":
        print(json.dumps(model_object(prediction, changes, args.memory_limit)))
        return prediction
    screen = Screen.of(sys.stdout)
    print(screen.fill(verdict(prediction, args.memory_limit)))
    print(screen.fill(f"{study.words(prediction)}; {certainty(prediction)}"))
    if buffers := buffers_words(prediction):
        print(screen.fill(buffers))
    if args.doubts:
        print(*(screen.fill(f"doubt: {doubt}") for doubt in prediction.record.doubts), sep="\n")
    tables = [modules_table(prediction, classes_of(prediction))] if prediction.peak else []
    tables += [changes_table(prediction, changes, args.memory_limit)] if changes else []
    if tables:
        print(f"\n{render(tables, 'table', sys.stdout)}")
    return prediction


def model_object(prediction: Prediction, changes: list[Change], limit_bytes: int | None) -> dict[str, Any]:
    """The prediction for JSON, with its changes."""
    peak = prediction.peak
    return {
        **prediction_object(prediction),
        "fits": prediction.fits,
        "need_bytes": need_of(prediction),
        "usable_bytes": room_of(prediction.device, limit_bytes),
        "peak_phase": peak and peak.phase,
        "peak_module": peak and peak.module,
        "oom_module": prediction.refused and prediction.refused.module,
        "modules": prediction.by_module,
        "buffers": prediction.buffers,
        "changes": [
            {
                "change": change.flags,
                "need_bytes": need_of(change.prediction),
                "fits": change.prediction.fits,
                "oom_phase": change.prediction.record.oom_phase,
            }
            for change in changes
        ],
    }


def prediction_object(prediction: Prediction) -> dict[str, Any]:
    """The record for JSON, and how it is known."""
    return {
        **dataclasses.asdict(prediction.record),
        "terms": prediction.terms,
        "unknown": prediction.unknown,
        "bounds": sorted(prediction.bounds),
        "device_source": prediction.device.source,
    }


def predict_operator(args: argparse.Namespace) -> Prediction:
    case, device = make_case(args), predicted_device(args)
    how = {"dense_grad": args.dense_grad, "threads": args.threads, "expandable_segments": args.expandable_segments}
    prediction = predict_memory(case, device, limit_bytes=args.memory_limit, **how)
    if args.format == "json":
        print(json.dumps(prediction_object(prediction)))
        return prediction
    whole, tables = None, []
    if prediction.record.status == "oom" and prediction.record.oom_phase:
        unlimited = predict_memory(case, dataclasses.replace(device, usable_bytes=None), **how)
        whole = need(unlimited.record) if not unlimited.bounds else None
        changes = [
            Change(flag, predict_memory(other, device, limit_bytes=args.memory_limit, **how))
            for flag, other in single_changes(case)
        ]
        tables = [changes_table(prediction, changes, args.memory_limit)]
    print(render([terms_table(prediction, whole), *tables], "table", sys.stdout))
    return prediction


def make_case(args: argparse.Namespace) -> Case:
    """The case of the flags."""
    name = args.attention_type or ("naive" if args.attention_type is None else "")
    if "," in name:
        raise UsageError(f"--attention-type {name}: predict takes one; memcheck sweep --predict-only takes several")
    given = ([length] if length else None for length in (args.seq_len, args.query_len, args.kv_len))
    ((query_len, kv_len),) = make_lengths(args.mode, *given, default=[1024])
    sizes = {size: getattr(args, size) or default for size, default in DEFAULT_SIZES.items()}
    attention_fields = {
        "kv_len": kv_len,
        "heads": sizes.pop("heads"),
        "core_dim": args.core_dim,
        "factor": args.factor,
        "causal": args.causal is not False,
    }
    more = {"query_len": query_len, "dtype": args.dtype or "float32", "mode": args.mode, "compiled": args.compile}
    case = make_any_case(name, attention_fields, **sizes, **more)
    note_unused_flags(args, [case])
    return case

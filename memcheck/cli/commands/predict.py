"""`memcheck predict`: the memory of an operator or a model on a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from memcheck.bench.changes import single_changes
from memcheck.bench.predict import predict_memory, predicted_or_skipped
from memcheck.cli.cases import DOES_NOT_FIT, LENGTHS, batches_of, make_any_case, note_unused_flags
from memcheck.cli.decoding import check_flags, of_case, of_configuration, predict_decoding
from memcheck.cli.models import ModelPredictor, classes_of
from memcheck.cli.options import DEFAULT_SIZES, predicted_device
from memcheck.core.case import Case
from memcheck.core.errors import UsageError
from memcheck.predict.replay import Prediction
from memcheck.report import render, terms_table
from memcheck.report.cases import need
from memcheck.report.model_prediction import (
    SettingChange,
    buffers_words,
    certainty,
    changes_table,
    modules_table,
    need_of,
    room_of,
    verdict,
)
from memcheck.report.summary import padded_against_packed
from memcheck.report.tables import Screen, Table


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    if args.mode == "decode":
        model = of_configuration(args) if args.hf_config else of_case(args, make_cases(args)[0])
        predictions = [predict_decoding(args, model)]
    elif args.model or args.hf_config:
        predictions = [predict_model(args)]
    else:
        predictions = predict_operator(args)
    fits = all(prediction.record.status == "ok" for prediction in predictions)
    return DOES_NOT_FIT if args.fail_on_oom and not fits else 0


def predict_model(args: argparse.Namespace) -> Prediction:
    predictor = ModelPredictor.of(args)
    prediction = predictor.predict()
    changes = [] if args.no_changes or prediction.fits is None else predictor.predict_changes(prediction)
    if args.format == "json":
        print(json.dumps(model_object(prediction, changes, args.memory_limit)))
        return prediction
    screen = Screen.of(sys.stdout)
    print(screen.fill(verdict(prediction, args.memory_limit)))
    print(screen.fill(f"{predictor.words(prediction)}; {certainty(prediction)}"))
    if buffers := buffers_words(prediction):
        print(screen.fill(buffers))
    if args.doubts:
        print(*(screen.fill(f"doubt: {doubt}") for doubt in prediction.record.doubts), sep="\n")
    tables = [modules_table(prediction, classes_of(prediction))] if prediction.peak else []
    tables += [changes_table(prediction, changes, args.memory_limit)] if changes else []
    if tables:
        print(f"\n{render(tables, 'table', sys.stdout)}")
    return prediction


def model_object(prediction: Prediction, changes: list[SettingChange], limit_bytes: int | None) -> dict[str, Any]:
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


def predict_operator(args: argparse.Namespace) -> list[Prediction]:
    """Prints the prediction of each case: one, or a padded and a packed batch."""
    cases, device = make_cases(args), predicted_device(args)
    names = ("dense_grad", "threads", "expandable_segments", "torch_version")
    how = {name: getattr(args, name) for name in names}
    predictions = [predict_memory(case, device, limit_bytes=args.memory_limit, **how) for case in cases]
    if args.format == "json":
        lines = [json.dumps(prediction_object(prediction)) for prediction in predictions]
        print(lines[0] if len(lines) == 1 else "[" + ",\n ".join(lines) + "]")
        return predictions
    tables = [table for prediction in predictions for table in tables_of(prediction, args.memory_limit, how)]
    print(render(tables, "table", sys.stdout))
    for words in padded_against_packed([prediction.record for prediction in predictions]):
        print(f"\n{Screen.of(sys.stdout).fill(words)}")
    return predictions


def tables_of(prediction: Prediction, limit_bytes: int | None, how: dict[str, Any]) -> list[Table]:
    """The terms, and what would help if the case does not fit. how: it was predicted."""
    case, device = prediction.case, prediction.device
    whole, tables = None, []
    if prediction.record.status == "oom" and prediction.record.oom_phase:
        unlimited = predict_memory(case, dataclasses.replace(device, usable_bytes=None), **how)
        whole = need(unlimited.record) if not unlimited.bounds else None
        changes = [
            SettingChange(flag, predicted_or_skipped(other, device, limit_bytes=limit_bytes, **how))
            for flag, other in single_changes(case)
        ]
        changes = [change for change in changes if change.prediction.record.status != "skipped"]
        tables = [changes_table(prediction, changes, limit_bytes)]
    return [terms_table(prediction, whole), *tables]


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The case of the flags, or with --lengths that of each batch."""
    name = args.attention_type or ("naive" if args.attention_type is None else "")
    if "," in name:
        raise UsageError(f"--attention-type {name}: predict takes one; memcheck sweep --predict-only takes several")
    if len(args.lengths or ()) > 1:
        raise UsageError("--lengths given twice: predict takes one; memcheck sweep --predict-only takes several")
    given = {size: [value] if (value := getattr(args, size)) else None for size in LENGTHS}
    sizes = {size: getattr(args, size) or default for size, default in DEFAULT_SIZES.items()}
    attention_fields = {
        "heads": sizes.pop("heads"),
        "core_dim": args.core_dim,
        "factor": args.factor,
        "causal": args.causal is not False,
    }
    more = {"dtype": args.dtype or "float32", "mode": args.mode, "compiled": args.compile}
    batches = batches_of({**vars(args), **given}, default=[1024])
    cases = [make_any_case(name, attention_fields, **{**sizes, **more, **batch}) for batch in batches]
    note_unused_flags(args, cases)
    return cases

"""`memcheck predict`: the memory of an operator or a model on a device that need not be here."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from memcheck.bench.case_predictions import predict_case, predicted_or_skipped
from memcheck.bench.changes import single_changes
from memcheck.cli.cases import attention_fields_of, batches_of, make_any_case, note_unused_options
from memcheck.cli.decoding import of_case, of_configuration, predict_decoding
from memcheck.cli.models import SIZES, ModelPredictor, Setting, classes_of
from memcheck.cli.options import DEFAULT_SIZES
from memcheck.cli.output import DOES_NOT_FIT
from memcheck.cli.requests import Predict
from memcheck.core.case import Case
from memcheck.predict.replay import Prediction
from memcheck.report.cases import need
from memcheck.report.model_prediction import (
    SettingChange,
    buffers_words,
    certainty,
    changes_table,
    modules_table,
    need_of,
    nvidia_smi_words,
    verdict,
)
from memcheck.report.predictions import terms_table
from memcheck.report.summary import padded_against_packed
from memcheck.report.tables import Screen, Table, render


def run(request: Predict) -> int:
    if request.mode == "decode":
        model = of_configuration(request) if request.hf_config else of_case(request, make_cases(request)[0])
        predictions = [predict_decoding(request, model)]
    elif request.model or request.hf_config:
        predictions = [predict_model(request)]
    else:
        predictions = predict_operator(request)
    fits = all(prediction.record.status == "ok" for prediction in predictions)
    return DOES_NOT_FIT if request.fail_on_oom and not fits else 0


def predict_model(request: Predict) -> Prediction:
    setting = Setting.of(request, **{name: request.single(name, "for a model") for name in SIZES})
    predictor = ModelPredictor.of(request, request.place(), setting=setting)
    prediction = predictor.predict()
    changes = [] if request.no_changes or prediction.fits is None else predictor.predict_changes(prediction)
    if request.format == "json":
        print(json.dumps(model_object(prediction, changes)))
        return prediction
    screen = Screen.of(sys.stdout)
    print(screen.fill(verdict(prediction, request.memory_limit)))
    print(screen.fill(f"{predictor.words(prediction)}; {certainty(prediction)}"))
    for words in filter(None, (nvidia_smi_words(prediction), buffers_words(prediction))):
        print(screen.fill(words))
    if request.doubts:
        print(*(screen.fill(f"doubt: {doubt}") for doubt in prediction.record.doubts), sep="\n")
    tables = [modules_table(prediction, classes_of(prediction))] if prediction.peak else []
    tables += [changes_table(prediction, changes, request.memory_limit)] if changes else []
    if tables:
        print(f"\n{render(tables, 'table', sys.stdout)}")
    return prediction


def model_object(prediction: Prediction, changes: list[SettingChange]) -> dict[str, Any]:
    """The prediction for JSON, with its changes."""
    peak = prediction.peak
    return {
        **prediction_object(prediction),
        "fits": prediction.fits,
        "need_bytes": need_of(prediction),
        "usable_bytes": prediction.place.room_bytes,
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


def predict_operator(request: Predict) -> list[Prediction]:
    """Prints the prediction of each case: one, or a padded and a packed batch."""
    cases, place = make_cases(request), request.place()
    predictions = [predict_case(case, place, dense_grad=request.dense_grad) for case in cases]
    if request.format == "json":
        lines = [json.dumps(prediction_object(prediction)) for prediction in predictions]
        print(lines[0] if len(lines) == 1 else "[" + ",\n ".join(lines) + "]")
        return predictions
    tables = [table for prediction in predictions for table in tables_of(prediction, request.dense_grad)]
    print(render(tables, "table", sys.stdout))
    for words in padded_against_packed([prediction.record for prediction in predictions]):
        print(f"\n{Screen.of(sys.stdout).fill(words)}")
    return predictions


def tables_of(prediction: Prediction, dense_grad: bool) -> list[Table]:
    """The terms, and what would help if the case does not fit."""
    case, place = prediction.case, prediction.place
    whole, tables = None, []
    if prediction.record.status == "oom" and prediction.record.oom_phase:
        unlimited = predict_case(case, place.unlimited, dense_grad=dense_grad)
        whole = need(unlimited.record) if not unlimited.bounds else None
        changes = [
            SettingChange(flag, predicted_or_skipped(other, place, dense_grad=dense_grad))
            for flag, other in single_changes(case)
        ]
        changes = [change for change in changes if change.prediction.record.status != "skipped"]
        tables = [changes_table(prediction, changes, place.limit_bytes)]
    return [terms_table(prediction, whole), *tables]


def make_cases(request: Predict) -> list[Case]:
    """The case of the flags, or with --lengths that of each batch."""
    (name,), (bsz,) = request.attention_type or ["naive"], request.bsz or [1]
    (dim,) = request.dim or [DEFAULT_SIZES["dim"]]
    more = {"dtype": request.dtype or "float32", "mode": request.mode, "compiled": request.compile}
    batches = batches_of(vars(request), default=[1024])
    fields = attention_fields_of(request)
    cases = [make_any_case(name, fields, **{"bsz": bsz, "dim": dim, **more, **batch}) for batch in batches]
    note_unused_options(request, cases)
    return cases

"""`memcheck predict`: the memory of an operator or a model on a device that need not be here."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from memcheck.bench.case import Case
from memcheck.bench.predict import predict_case
from memcheck.cli import cases, models, options, output
from memcheck.cli.model_predictor import ModelPredictor
from memcheck.cli.requests import Predict
from memcheck.core.files import write_text
from memcheck.core.prediction import EXPANDABLE, Prediction, certainty, has_fragments, verdict
from memcheck.report import layers, predictions
from memcheck.report.prediction_page import prediction_page
from memcheck.report.tables import Screen, render

FEW = 2  # Doubts of a case that are shown without --doubts.


def run(request: Predict) -> int:
    prediction = predict_model(request) if request.source else predict_operator(request)
    return output.DOES_NOT_FIT if request.fail_on_oom and prediction.record.status != "ok" else 0


def predict_model(request: Predict) -> Prediction:
    if request.html is not None:
        output.make_room("html", request.html)
    setting = models.Setting.of(request, **{name: request.single(name, "for a model") for name in models.SIZES})
    predictor = ModelPredictor.of(request, setting)
    with output.progress_bar(1, "predict"):
        prediction = predictor.predict()
    changes = {} if request.no_changes or prediction.fits is None else predictor.predict_changes(prediction)
    words = [
        verdict(prediction),
        certainty(prediction),
        f"{predictor.words(prediction)}.",
        predictions.buffers_words(prediction),
    ]
    words += [f"doubt: {doubt}" for doubt in prediction.record.doubts] if request.doubts else []
    words = list(filter(None, words))
    tables = []
    if prediction.peak:
        tables = [layers.layers_table(prediction.layers) if request.layers else predictions.modules_table(prediction)]
        tables += [predictions.operators_table(prediction)] if request.explain else []
    tables += [predictions.changes_table(prediction, changes)] if changes else []
    if request.html is not None:
        command = shlex.join(["memcheck", *(request.words or ["predict"])])
        write_text(request.html, prediction_page(prediction, words, tables, command))
    if request.format == "json":
        more = {"layers": prediction.layers.rows()} if request.layers else {}
        print(json.dumps(model_object(prediction, changes) | more))
        return prediction
    print(*map(Screen.of(sys.stdout).fill, words), sep="\n")
    if tables:
        print(f"\n{render(tables, 'table', sys.stdout)}")
    return prediction


def model_object(prediction: Prediction, changes: Mapping[str, Prediction]) -> dict[str, Any]:
    """The prediction for JSON, with its changes."""
    peak = prediction.peak
    return {
        **prediction_object(prediction),
        "fits": prediction.fits,
        "need_bytes": predictions.tensors_of(prediction),
        "usable_bytes": prediction.place.room_bytes,
        "peak_phase": peak and peak.phase,
        "peak_module": peak and peak.module,
        "oom_module": prediction.refused and prediction.refused.module,
        "modules": prediction.by_module,
        "buffers": prediction.buffers,
        "changes": [
            {
                "change": flags,
                "need_bytes": predictions.tensors_of(found),
                "fits": found.fits,
                "oom_phase": found.record.oom_phase,
            }
            for flags, found in changes.items()
        ],
    }


def prediction_object(prediction: Prediction) -> dict[str, Any]:
    """The record for JSON, and how it is known."""
    return {
        **prediction.record.values(),
        "terms": prediction.terms,
        "unknown": prediction.unknown,
        "bounds": sorted(prediction.bounds),
        "device_source": prediction.device.source,
    }


def predict_operator(request: Predict) -> Prediction:
    """Prints the prediction of the case, and returns it."""
    prediction = predict_case(make_case_of(request), request.place(), dense_grad=request.dense_grad)
    if request.format == "json":
        print(json.dumps(prediction_object(prediction)))
    else:
        print_case(request, prediction)
    return prediction


def print_case(request: Predict, prediction: Prediction) -> None:
    """Prints the verdict, how it is known, the figures, and what would help if the case does not fit."""
    screen, place, doubts = Screen.of(sys.stdout), prediction.place, prediction.record.doubts
    words = [verdict(prediction), certainty(prediction), predictions.alive_sentence(prediction)]
    words += [f"doubt: {doubt}" for doubt in doubts[: None if request.doubts else FEW]]
    print(*map(screen.fill, filter(None, words)), sep="\n")
    changes: dict[str, Prediction] = {}
    if prediction.record.oom_phase and not request.no_changes:
        others = cases.single_changes(prediction.case)
        changes = {flag: predict_case(it, place, dense_grad=request.dense_grad) for flag, it in others}
        if has_fragments(prediction):
            there = dataclasses.replace(place, expandable_segments=True)
            changes[EXPANDABLE] = predict_case(prediction.case, there, dense_grad=request.dense_grad)
        changes = {flag: found for flag, found in changes.items() if found.record.status != "skipped"}
    tables = [predictions.changes_table(prediction, changes)] if changes else []
    if prediction.terms and (request.explain or not changes):
        tables.insert(0, predictions.figures_table(prediction, with_terms=request.explain))
    else:
        print(screen.fill(f"{predictions.case_words(prediction.record)}."))
    if tables:
        print(f"\n{render(tables, 'table', sys.stdout)}")


def make_case_of(request: Predict) -> Case:
    """The case of the flags."""
    (name,), (bsz,) = request.attention_type or ["naive"], request.bsz or [1]
    (dim,) = request.dim or [options.DEFAULT_SIZES["dim"]]
    ((query_len, kv_len),) = cases.lengths_of(vars(request), [1024])
    cases.check_takes_window(request.window, [name])
    sizes = {"bsz": bsz, "query_len": query_len, "kv_len": kv_len, "dim": dim}
    more = {"dtype": request.dtype or "float32", "mode": request.mode, "compiled": request.compile}
    case = cases.make_any_case(name, cases.attention_fields_of(request), **sizes, **more)
    cases.note_unused_options(request, [case])
    return case

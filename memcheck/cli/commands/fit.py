"""`memcheck fit`: the largest length, batch or dimension that fits a device."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memcheck.bench.capacity import capacity_object, check_has_limit, largest_case, resized
from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.catalog import styles_of_contenders
from memcheck.bench.sweep.grid import check_names
from memcheck.cli.cases import attention_fields_of, check_takes_window, lengths_of, make_any_case
from memcheck.cli.model_predictor import ModelPredictor
from memcheck.cli.models import SIZES, Setting
from memcheck.cli.options import DEFAULT_TYPES
from memcheck.cli.output import DOES_NOT_FIT, check_picture, make_room, progress_bar
from memcheck.cli.requests import Fit
from memcheck.core.errors import MemcheckError, UsageError, failure
from memcheck.core.options import named
from memcheck.core.prediction import SIZES as SIZES_IN_WORDS
from memcheck.core.prediction import Largest, Prediction, certainty
from memcheck.core.step import Place
from memcheck.predict.api import Search, fits_by_interpolation
from memcheck.report import predictions, tables
from memcheck.report.capacity import capacity_table, room_words, shared_words
from memcheck.report.plots.savings import Limit, plot_capacity

DEFAULTS = {"bsz": [1], "seq_len": [1024], "dim": [256]}
# The axis of the picture if no size has several values, and the factors of the given value.
DRAWN_AGAINST = {"seq_len": "bsz", "bsz": "seq_len", "dim": "bsz"}
# For models: the steps of a search, and the first sizes that are tried.
STEPS = {"bsz": 1, "seq_len": 64}
FIRST_SIZES = {"bsz": 8, "seq_len": 1024}
AS_IT_IS = "as it is"  # The row of the setting without a change.
FACTORS = (1, 2, 4, 8, 16, 32, 64)


def run(request: Fit) -> int:
    if request.model or request.hf_config:
        return fit_model(request)
    axis, place = request.axis, request.place()
    cases = list(make_cases(request, axis))
    along = None
    if request.plot:
        check_picture("plot", request.plot)
        along = drawn_against(request, axis)
        make_room("plot", request.plot)
    search: dict[str, Any] = {"step": request.step, "up_to": request.up_to}
    capacities: list[Largest] = []
    curves: dict[str, list[tuple[int, Largest]]] = {}
    with progress_bar(len(cases), "fit") as bar:
        for case in cases:
            capacities.append(look(case, axis, place, search))
            if along and case.operator not in curves:
                curves[case.operator] = curve_of(case, axis, along, drawn_sizes(request, along), place, search)
            bar.update()
    if request.format == "json":
        found = {
            "device": asdict(place.for_device),
            "limit_bytes": request.memory_limit,
            "find": request.find,
            "capacities": [capacity_object(case, axis, found) for case, found in zip(cases, capacities, strict=True)],
        }
        print(json.dumps(found, indent=1))
    else:
        print(tables.render([capacity_table(capacities, axis, request.memory_limit)], "table", sys.stdout))
    if along and request.plot:
        draw(curves, capacities, axis, along, request)
        print(f"\nWrote {request.plot}", file=sys.stderr if request.format == "json" else sys.stdout)
    return DOES_NOT_FIT if request.fail_on_oom and any(capacity.at is None for capacity in capacities) else 0


def fit_model(request: Fit) -> int:
    axis = request.axis
    setting = model_setting(request, axis)
    predictor = ModelPredictor.of(request, setting)
    check_has_limit(predictor.place)
    step = request.step or STEPS[axis]
    with progress_bar(0, "fit") as bar:
        edges = edges_of(predictor, axis, step, request, bar)
    first = edges[AS_IT_IS]
    if request.format == "json":
        print(json.dumps(model_object(edges, predictor, axis), indent=1))
    else:
        screen = tables.Screen.of(sys.stdout)
        print(screen.fill(predictions.edge_verdict(first, axis)))
        known = first.at or first.beyond
        if known is not None:
            words = predictor.words(known, predictor.setting.but(**{axis: first.size or step}))
            print(*map(screen.fill, filter(None, [certainty(known), f"{words}."])), sep="\n")
            if request.doubts:
                print(*(screen.fill(f"doubt: {doubt}") for doubt in known.record.doubts), sep="\n")
        print(f"\n{tables.render([predictions.edges_table(edges, axis)], 'table', sys.stdout)}")
    return DOES_NOT_FIT if request.fail_on_oom and first.at is None else 0


def model_setting(request: Fit, axis: str) -> Setting:
    """The setting of the flags, with a first value for the size that is searched."""
    if axis not in FIRST_SIZES:
        raise UsageError(f"{named('find')} dim is for operators; of models: bsz and seq-len")
    sizes = {name: request.single(name, "for a model") for name in SIZES}
    return Setting.of(request, **{**sizes, axis: min(FIRST_SIZES[axis], request.up_to)})


def edges_of(predictor: ModelPredictor, axis: str, step: int, request: Fit, bar: Any) -> dict[str, Largest]:
    """The largest size that fits, as it is and with each single change."""

    def search(setting: Setting) -> Search:
        def predict(size: int) -> Prediction:
            bar.set_description_str(f"fit: trying {predictions.SIZE_WORDS[axis]} {size:,}")
            return predictor.predict(setting.but(**{axis: size}))

        return Search(predict, step, request.up_to, fits_by_interpolation)

    first = search(predictor.setting).largest(getattr(predictor.setting, axis))
    edges, base = {AS_IT_IS: first}, first.at or first.beyond
    if request.no_changes or base is None or base.fits is None or first.beyond is None:
        return edges
    for flag, change in predictor.changes(base, axis).items():
        with suppress(MemcheckError):  # The model or the optimizer does not allow the change.
            edges[flag] = search(predictor.setting.but(**change)).nearest(max(first.size, step))
    return edges


def model_object(edges: Mapping[str, Largest], predictor: ModelPredictor, axis: str) -> dict[str, Any]:
    """The largest sizes for JSON."""
    first = edges[AS_IT_IS]
    return {
        "device": asdict(predictor.place.for_device),
        "limit_bytes": predictor.place.limit_bytes,
        "find": axis.replace("_", "-"),
        "step": first.step,
        "largest": first.size if first.at else None if first.beyond and first.beyond.fits is None else 0,
        "record": first.at.record.values() if first.at else None,
        "next_record": first.beyond.record.values() if first.beyond else None,
        "changes": [
            {"change": flags, "largest": edge.size, "need_bytes": edge.at and predictions.tensors_of(edge.at)}
            for flags, edge in edges.items()
            if flags != AS_IT_IS
        ],
    }


def look(case: Case, axis: str, place: Place, search: dict[str, Any]) -> Largest:
    try:
        return largest_case(case, axis, place, **search)
    except MemcheckError:
        raise
    except Exception as error:  # The operator's own code fails on meta tensors.
        raise MemcheckError(f"{case.operator} cannot be predicted: {failure(error)}") from error


def curve_of(
    case: Case, axis: str, along: str, sizes: Sequence[int], place: Place, search: dict[str, Any]
) -> list[tuple[int, Largest]]:
    """(size, the largest of the axis) for each size along another axis. Each search starts at the previous result."""
    curve: list[tuple[int, Largest]] = []
    for size in sorted(sizes):
        start = curve[-1][1].size or None if curve else None
        curve.append((size, largest_case(resized(case, along, size), axis, place, start=start, **search)))
    return curve


def make_cases(request: Fit, axis: str) -> Iterator[Case]:
    """Every combination of the given sizes. The searched axis gets any valid value."""
    names = list(dict.fromkeys(request.attention_type or DEFAULT_TYPES))
    check_names(named("attention_type"), names, list(CONTENDERS))
    given = {name: getattr(request, name) or default for name, default in DEFAULTS.items()}
    check_takes_window(request.window, names)
    fields = attention_fields_of(request)
    heads = fields["heads"]
    # A multiple of the heads that differs from a given core dimension.
    given[axis] = [2 * heads if fields["core_dim"] == heads else heads]
    lengths = lengths_of(vars(request), given["seq_len"])
    for bsz, dim, (query_len, kv_len), name in itertools.product(given["bsz"], given["dim"], lengths, names):
        sizes = {"bsz": bsz, "query_len": query_len, "kv_len": kv_len, "dim": dim}
        yield make_any_case(name, fields, **sizes, dtype=request.dtype or "float32", mode=request.mode)


def draw(
    curves: dict[str, list[tuple[int, Largest]]], capacities: list[Largest], axis: str, along: str, request: Fit
) -> None:
    device, path = capacities[0].edge.device, request.plot or Path()
    known = {name: curve for name, curve in curves.items() if not curve[0][1].unpredicted}
    left_out = [name for name in curves if name not in known]
    try:
        plot_capacity(
            {name: [Limit(x, found.size, open=found.beyond is None) for x, found in known[name]] for name in known},
            path,
            styles=styles_of_contenders(),
            found=axis,
            along=along,
            title=f"The largest {SIZES_IN_WORDS[axis]} that fits {device.name} "
            f"({room_words(device, request.memory_limit)})",
            subtitle=f"predicted: {shared_words(capacities, axis, along)}",
            note=f"not predicted: {', '.join(left_out)}" if left_out else "",
        )
    except OSError as error:
        raise UsageError(f"{named('plot')} {path} cannot be written: {error}") from None


def drawn_against(request: Fit, axis: str) -> str:
    """The x axis of the plot: the size with several values, or a default."""
    several = [name for name in DEFAULTS if name != axis and len(getattr(request, name) or ()) > 1]
    if len(several) > 1:
        flags = " and ".join(map(named, several))
        raise UsageError(f"{named('plot')} draws against one size: give a single value to one of {flags}")
    return several[0] if several else DRAWN_AGAINST[axis]


def drawn_sizes(request: Fit, along: str) -> list[int]:
    given: list[int] = getattr(request, along) or DEFAULTS[along]
    return given if len(given) > 1 else [given[0] * factor for factor in FACTORS]

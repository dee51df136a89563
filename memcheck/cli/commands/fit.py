"""`memcheck fit`: the largest length, batch or dimension that fits a device."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from memcheck.bench.capacity import FLAGS, Capacity, Search, capacity_curve, capacity_object, find_capacity
from memcheck.bench.catalog import CONTENDERS, DTYPES, SHORT_DTYPES, Case
from memcheck.bench.predict import predicted_or_skipped
from memcheck.bench.sweep.grid import check_names
from memcheck.cli.cases import (
    DOES_NOT_FIT,
    batches_of,
    check_picture,
    make_any_case,
    make_room,
    progress_bar,
    styles_of_contenders,
)
from memcheck.cli.models import SIZES, ModelPredictor, Setting
from memcheck.cli.options import DEFAULT_SIZES, DEFAULT_TYPES, predicted_device
from memcheck.core.devices import Device
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.failures import failure
from memcheck.core.record import sequence_words
from memcheck.predict.replay import Prediction
from memcheck.report import Screen, render
from memcheck.report.capacity import capacity_table, room_words, shared_words, size_words
from memcheck.report.model_prediction import (
    SIZE_WORDS,
    Edge,
    certainty,
    edge_verdict,
    edges_table,
    need_of,
    room_of,
)
from memcheck.report.plots.capacity import Limit, plot_capacity

DEFAULTS = {"bsz": [1], "seq_len": [1024], "dim": [256]}
# The axis of the picture if no size has several values, and the factors of the given value.
DRAWN_AGAINST = {"seq_len": "bsz", "bsz": "seq_len", "dim": "bsz"}
# Of models: the steps of a search, and the sizes that are tried first.
STEPS = {"bsz": 1, "seq_len": 64}
FIRST_SIZES = {"bsz": 8, "seq_len": 1024}
FACTORS = (1, 2, 4, 8, 16, 32, 64)


def run(args: argparse.Namespace) -> int:
    if args.model or args.hf_config:
        return fit_model(args)
    axis, device = args.find.replace("-", "_"), predicted_device(args)
    cases = list(make_cases(args, axis))
    layouts = len({case.layout for case in cases})
    along = None
    if args.plot:
        check_picture("--plot", args.plot)
        along = drawn_against(args, axis)
        make_room("--plot", args.plot)
    how: dict[str, Any] = {"limit_bytes": args.memory_limit, "step": args.step or 1, "most": args.up_to}
    if args.torch_version:
        known = {"limit_bytes": args.memory_limit, "torch_version": args.torch_version}
        how["predict"] = functools.partial(predicted_or_skipped, device=device, **known)
    capacities: list[Capacity] = []
    curves: dict[str, list[tuple[int, Capacity]]] = {}
    with progress_bar(len(cases), "fit") as bar:
        for case in cases:
            capacities.append(look(case, axis, device, how))
            name = f"{case.operator}, {case.layout}" if case.layout and layouts > 1 else case.operator
            if along and name not in curves:
                curves[name] = capacity_curve(case, axis, along, drawn_sizes(args, along), device, **how)
            bar.update()
    if args.format == "json":
        found = {
            "device": asdict(device),
            "limit_bytes": args.memory_limit,
            "find": args.find,
            "capacities": [capacity_object(capacity) for capacity in capacities],
        }
        print(json.dumps(found, indent=1))
    else:
        print(render([capacity_table(capacities, args.memory_limit)], "table", sys.stdout))
    if along:
        draw(curves, capacities, along, args)
        print(f"\nWrote {args.plot}", file=sys.stderr if args.format == "json" else sys.stdout)
    return DOES_NOT_FIT if args.fail_on_oom and any(capacity.at is None for capacity in capacities) else 0


def fit_model(args: argparse.Namespace) -> int:
    axis = args.find.replace("-", "_")
    setting = model_setting(args, axis)
    predictor = ModelPredictor.of(args, setting)
    if room_of(predictor.device, args.memory_limit) is None:
        raise UsageError(f"--device {predictor.device.name} has no limit to find: give it one, as --memory-limit 16GiB")
    step = args.step or STEPS[axis]
    if args.up_to < step:
        raise UsageError(f"--up-to must be at least the step of {step}, got {args.up_to}")
    with progress_bar(0, "fit") as bar:
        edges = list(edges_of(predictor, axis, step, args, bar))
    if args.format == "json":
        print(json.dumps(model_object(edges, predictor, axis, step, args.memory_limit), indent=1))
    else:
        screen = Screen.of(sys.stdout)
        print(screen.fill(edge_verdict(edges[0], axis, step, args.memory_limit)))
        known = edges[0].at or edges[0].beyond
        if known is not None:
            words = predictor.words(known, predictor.setting.but(**{axis: edges[0].size or step}))
            print(screen.fill(f"{words}; {certainty(known)}"))
            if args.doubts:
                print(*(screen.fill(f"doubt: {doubt}") for doubt in known.record.doubts), sep="\n")
        print(f"\n{render([edges_table(edges, axis, step)], 'table', sys.stdout)}")
    return DOES_NOT_FIT if args.fail_on_oom and edges[0].at is None else 0


def model_setting(args: argparse.Namespace, axis: str) -> Setting:
    """The setting of the flags, with a first value for the size that is searched."""
    if axis not in FIRST_SIZES:
        raise UsageError("--find dim is for operators; of models: bsz and seq-len")
    if getattr(args, axis) is not None:
        raise UsageError(f"--find {args.find} searches for this size: leave out {FLAGS[axis]}, or find another one")
    for name in SIZES:
        given = getattr(args, name)
        if given is not None and len(given) > 1:
            raise UsageError(f"{FLAGS[name]} must be a single value for a model, got {len(given)}")
        setattr(args, name, given[0] if given else None)
    return Setting.of(args).but(**{axis: min(FIRST_SIZES[axis], args.up_to)})


def edges_of(predictor: ModelPredictor, axis: str, step: int, args: argparse.Namespace, bar: Any) -> Iterator[Edge]:
    """The largest size that fits, as it is and with each single change."""

    def search(setting: Setting) -> Search:
        def predict(size: int) -> Prediction:
            bar.set_description_str(f"fit: trying {SIZE_WORDS[axis]} {size:,}")
            return predictor.predict(setting.but(**{axis: size}))

        return Search(predict, step, args.up_to, predictor.guess)

    def edge(flags: str, found: Search, size: int) -> Edge:
        return Edge(flags, size, found.found.get(size), found.found.get(size + step))

    whole = search(predictor.setting)
    size = whole.largest(getattr(predictor.setting, axis))
    first = edge("as it is", whole, size)
    yield first
    base = first.at or first.beyond
    if args.no_changes or base is None or base.fits is None or first.beyond is None:
        return
    for flag, setting in predictor.changes(base, axis).items():
        other = search(setting)
        with suppress(MemcheckError):  # The model or the optimizer does not allow the change.
            yield edge(flag, other, other.nearest(max(size, step)))


def model_object(
    edges: list[Edge], predictor: ModelPredictor, axis: str, step: int, limit_bytes: int | None
) -> dict[str, Any]:
    first = edges[0]
    return {
        "device": asdict(predictor.device),
        "limit_bytes": limit_bytes,
        "find": axis.replace("_", "-"),
        "step": step,
        "largest": first.size if first.at else None if first.beyond and first.beyond.fits is None else 0,
        "record": asdict(first.at.record) if first.at else None,
        "next_record": asdict(first.beyond.record) if first.beyond else None,
        "changes": [
            {"change": edge.flags, "largest": edge.size, "need_bytes": edge.at and need_of(edge.at)}
            for edge in edges[1:]
        ],
    }


def look(case: Case, axis: str, device: Device, how: dict[str, Any]) -> Capacity:
    try:
        return find_capacity(case, axis, device, **how)
    except MemcheckError:
        raise
    except Exception as error:  # The operator's own code fails on meta tensors.
        raise MemcheckError(f"{case.operator} cannot be predicted: {failure(error)}") from error


def make_cases(args: argparse.Namespace, axis: str) -> Iterator[Case]:
    """Every combination of the given sizes. The searched axis gets any valid value."""
    if getattr(args, axis) is not None:
        raise UsageError(f"--find {args.find} searches for this size: leave out {FLAGS[axis]}, or find another one")
    names = list(dict.fromkeys(args.attention_type or DEFAULT_TYPES))
    check_names("--attention-type", names, list(CONTENDERS))
    check_names("--dtype", [args.dtype or "float32"], [*SHORT_DTYPES, *DTYPES])
    given = {name: getattr(args, name) or default for name, default in DEFAULTS.items()}
    heads = args.heads or DEFAULT_SIZES["heads"]
    # A multiple of the heads that differs from a given core dimension.
    given[axis] = [2 * heads if args.core_dim == heads else heads]
    batches = list(batches_of(vars(args), default=given["seq_len"]))
    sizes = [given["bsz"][:1] if args.lengths else given["bsz"], given["dim"]]
    for bsz, dim, batch, name in itertools.product(*sizes, batches, names):
        attention_fields = {
            "heads": heads,
            "core_dim": args.core_dim,
            "factor": args.factor,
            "causal": args.causal is not False,
        }
        fields = {"bsz": bsz, "dim": dim, "dtype": args.dtype or "float32", "mode": args.mode, **batch}
        yield make_any_case(name, attention_fields, **fields)


def draw(
    curves: dict[str, list[tuple[int, Capacity]]], capacities: list[Capacity], along: str, args: argparse.Namespace
) -> None:
    axis, case, device = capacities[0].axis, capacities[0].case, capacities[0].device
    known = {name: curve for name, curve in curves.items() if not curve[0][1].unpredicted}
    left_out = [name for name in curves if name not in known]
    notes = [f"in the proportions of {sequence_words(args.lengths[0])}"] if args.lengths else []
    notes += [f"not predicted: {', '.join(left_out)}"] if left_out else []
    try:
        plot_capacity(
            {name: [Limit(x, found.largest, open=found.beyond is None) for x, found in known[name]] for name in known},
            args.plot,
            styles=styles_of_contenders(),
            found=axis if case.lengths is None else size_words(axis, case),
            along=along if case.lengths is None else size_words(along, case),
            title=f"The largest {size_words(axis, case)} that fits {device.name} "
            f"({room_words(capacities[0], args.memory_limit)})",
            subtitle=f"predicted: {shared_words(capacities, axis, along)}",
            note="; ".join(notes),
        )
    except OSError as error:
        raise UsageError(f"--plot {args.plot} cannot be written: {error}") from None


def drawn_against(args: argparse.Namespace, axis: str) -> str:
    """The size with several values, or one that gets several."""
    if len(args.lengths or ()) > 1:
        raise UsageError(f"--plot draws against one size: give --lengths once, got {len(args.lengths)}")
    several = [name for name in DEFAULTS if name != axis and len(getattr(args, name) or ()) > 1]
    if len(several) > 1:
        flags = " and ".join(FLAGS[name] for name in several)
        raise UsageError(f"--plot draws against one size: give a single value to one of {flags}")
    return several[0] if several else DRAWN_AGAINST[axis]


def drawn_sizes(args: argparse.Namespace, along: str) -> list[int]:
    given: list[int] = getattr(args, along) or DEFAULTS[along]
    if args.lengths and along != "dim":
        given = [len(args.lengths[0]) if along == "bsz" else max(args.lengths[0])]
    return given if len(given) > 1 else [given[0] * factor for factor in FACTORS]

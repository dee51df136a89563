"""`memcheck fit`: the largest length, batch or dimension that fits a device."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memcheck.bench.capacity import FLAGS, Capacity, capacity_curve, capacity_object, find_capacity
from memcheck.bench.catalog import CONTENDERS, DTYPES, SHORT_DTYPES, Case
from memcheck.bench.sweep.grid import check_names
from memcheck.cli.cases import (
    DOES_NOT_FIT,
    check_picture,
    make_any_case,
    make_room,
    progress_bar,
    styles_of_contenders,
)
from memcheck.cli.options import DEFAULT_TYPES, predicted_device
from memcheck.core.devices import Device
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.report import render
from memcheck.report.capacity import FOUND, capacity_table, room_words, shared_words
from memcheck.report.plots.capacity import Edge, plot_capacity

DEFAULTS = {"bsz": [1], "seq_len": [1024], "dim": [256]}
# The axis of the picture if no size has several values, and the factors of the given value.
DRAWN_AGAINST = {"seq_len": "bsz", "bsz": "seq_len", "dim": "bsz"}
FACTORS = (1, 2, 4, 8, 16, 32, 64)


def run(args: argparse.Namespace) -> int:
    axis, device = args.find.replace("-", "_"), predicted_device(args)
    cases = list(make_cases(args, axis))
    along = None
    if args.plot:
        check_picture("--plot", args.plot)
        along = drawn_against(args, axis)
        make_room("--plot", args.plot)
    how: dict[str, Any] = {"limit_bytes": args.memory_limit, "step": args.step, "most": args.up_to}
    capacities: list[Capacity] = []
    curves: dict[str, list[tuple[int, Capacity]]] = {}
    with progress_bar(len(cases), "fit") as bar:
        for case in cases:
            capacities.append(look(case, axis, device, how))
            if along and case.operator not in curves:
                curves[case.operator] = capacity_curve(
                    capacities[-1].case, axis, along, drawn_sizes(args, along), device, **how
                )
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


def look(case: Case, axis: str, device: Device, how: dict[str, Any]) -> Capacity:
    try:
        return find_capacity(case, axis, device, **how)
    except MemcheckError:
        raise
    except Exception as error:  # The operator's own code fails on meta tensors.
        raise MemcheckError(f"{case.operator} cannot be predicted: {type(error).__name__}: {error}") from error


def make_cases(args: argparse.Namespace, axis: str) -> Iterator[Case]:
    """Every combination of the given sizes. The searched axis gets any valid value."""
    if getattr(args, axis) is not None:
        raise UsageError(f"--find {args.find} searches for this size: leave out {FLAGS[axis]}, or find another one")
    names = list(dict.fromkeys(args.attention_type or DEFAULT_TYPES))
    check_names("--attention-type", names, list(CONTENDERS))
    check_names("--dtype", [args.dtype], [*SHORT_DTYPES, *DTYPES])
    given = {name: getattr(args, name) or default for name, default in DEFAULTS.items()}
    # A multiple of the heads that differs from a given core dimension.
    given[axis] = [2 * args.heads if args.core_dim == args.heads else args.heads]
    for bsz, dim, length, name in itertools.product(given["bsz"], given["dim"], given["seq_len"], names):
        attention_fields = {
            "kv_len": length,
            "heads": args.heads,
            "core_dim": args.core_dim,
            "factor": args.factor,
            "causal": args.causal,
        }
        query_len = 1 if args.mode == "decode" else length
        yield make_any_case(
            name, attention_fields, bsz=bsz, dim=dim, query_len=query_len, dtype=args.dtype, mode=args.mode
        )


def draw(
    curves: dict[str, list[tuple[int, Capacity]]], capacities: list[Capacity], along: str, args: argparse.Namespace
) -> None:
    axis, device = capacities[0].axis, capacities[0].device
    known = {name: curve for name, curve in curves.items() if not curve[0][1].unpredicted}
    left_out = [name for name in curves if name not in known]
    try:
        plot_capacity(
            {name: [Edge(x, found.largest, open=found.beyond is None) for x, found in known[name]] for name in known},
            args.plot,
            styles=styles_of_contenders(),
            found=axis,
            along=along,
            title=f"The largest {FOUND[axis]} that fits {device.name} ({room_words(capacities[0], args.memory_limit)})",
            subtitle=f"predicted: {shared_words(capacities, axis, along)}",
            note=f"not predicted: {', '.join(left_out)}" if left_out else "",
        )
    except OSError as error:
        raise UsageError(f"--plot {args.plot} cannot be written: {error}") from None


def drawn_against(args: argparse.Namespace, axis: str) -> str:
    """The size with several values, or one that gets several."""
    several = [name for name in DEFAULTS if name != axis and len(getattr(args, name) or ()) > 1]
    if len(several) > 1:
        flags = " and ".join(FLAGS[name] for name in several)
        raise UsageError(f"--plot draws against one size: give a single value to one of {flags}")
    return several[0] if several else DRAWN_AGAINST[axis]


def drawn_sizes(args: argparse.Namespace, along: str) -> list[int]:
    given: list[int] = getattr(args, along) or DEFAULTS[along]
    return given if len(given) > 1 else [given[0] * factor for factor in FACTORS]

"""The largest length, batch or dimension that fits a device, operators side by side; nothing is run."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memcheck.bench.capacity import FLAGS, MOST, Capacity, capacity_curve, capacity_object, find_capacity, known_axes
from memcheck.bench.catalog import CONTENDERS, DTYPES, MODES, SHORT_DTYPES, Case
from memcheck.bench.plugins import load_plugin
from memcheck.bench.sweep.grid import any_case, check_names, refusal
from memcheck.cli.cases import count, file, make_room, size, sizes
from memcheck.cli.options import add_device_arguments, predicted_device
from memcheck.core.devices import Device
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.report import render
from memcheck.report.capacity import FOUND, capacity_table, room_words, shared_words
from memcheck.report.plots.capacity import Edge, plot_capacity
from memcheck.report.plots.style import FORMATS

DEFAULTS = {"bsz": [1], "seq_len": [1024], "dim": [256]}
DEFAULT_TYPES = "naive,softmax,softplus,linear-causal,compressed"
# The axis of the picture if no size has several values, and the factors of the given value.
DRAWN_AGAINST = {"seq_len": "bsz", "bsz": "seq_len", "dim": "bsz"}
FACTORS = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--find", choices=known_axes(), default="seq-len", help="what is to be as large as can be; default: seq-len"
    )
    parser.add_argument(
        "--attention-type",
        action="append",
        metavar="NAME[,NAME]",
        help=f"repeatable; {', '.join(CONTENDERS)}; default: {DEFAULT_TYPES}",
    )
    for flag, meaning in (
        ("bsz", "batch sizes B; default: 1"),
        ("seq-len", "S and T at once; in --mode decode the tokens of the state; default: 1024"),
        ("dim", "token dimensions E; default: 256"),
    ):
        parser.add_argument(f"--{flag}", type=sizes(f"--{flag}"), metavar="N[,N]", help=meaning)
    parser.add_argument(
        "--heads", type=count("--heads"), default=4, metavar="H", help="where there are any; default: 4"
    )
    parser.add_argument("--core-dim", type=count("--core-dim"), metavar="R", help="softplus only; default: --dim")
    parser.add_argument("--factor", type=count("--factor"), metavar="C", help="compressed only; default: 8")
    parser.add_argument("--dtype", default="float32", help="fp32, bf16, fp16 or fp64; default: fp32")
    parser.add_argument("--mode", choices=MODES, default="train", help="default: train")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: --causal")
    add_device_arguments(parser)
    parser.add_argument("--memory-limit", type=size("--memory-limit"), metavar="40GiB", help="if less than it has")
    parser.add_argument("--step", type=count("--step"), default=1, metavar="N", help="only multiples of N; default: 1")
    parser.add_argument("--up-to", type=count("--up-to"), default=MOST, metavar="N", help="look no further")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="the capacity as .png, .svg or .pdf")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")
    parser.add_argument("--plugin", type=load_plugin, action="append", metavar="FILE.py", help="operators of yours")


def run(args: argparse.Namespace) -> int:
    axis, device = args.find.replace("-", "_"), predicted_device(args)
    cases = list(make_cases(args, axis))
    along = drawn_against(args, axis) if args.plot else None
    if args.plot:
        make_room("--plot", args.plot)
    how: dict[str, Any] = {"limit_bytes": args.memory_limit, "step": args.step, "most": args.up_to}
    capacities = [look(case, axis, device, how) for case in cases]
    if args.format == "json":
        print(json.dumps(result(args, device, capacities), indent=1))
    else:
        print(render([capacity_table(capacities, args.memory_limit)], "table", sys.stdout))
    if along:
        draw(capacities, along, args, how)
        print(f"\nWrote {args.plot}", file=sys.stderr if args.format == "json" else sys.stdout)
    return 0


def look(case: Case, axis: str, device: Device, how: dict[str, Any]) -> Capacity:
    try:
        return find_capacity(case, axis, device, **how)
    except MemcheckError:
        raise
    except Exception as error:  # The operator's own code fails on meta tensors.
        raise MemcheckError(f"{case.operator} cannot be predicted: {type(error).__name__}: {error}") from error


def result(args: argparse.Namespace, device: Device, capacities: list[Capacity]) -> dict[str, object]:
    return {
        "device": asdict(device),
        "limit_bytes": args.memory_limit,
        "find": args.find,
        "capacities": [capacity_object(capacity) for capacity in capacities],
    }


def make_cases(args: argparse.Namespace, axis: str) -> Iterator[Case]:
    """Every combination of the given sizes. The searched axis gets any valid value."""
    if getattr(args, axis) is not None:
        raise UsageError(f"--find {args.find} looks for it: leave out {FLAGS[axis]}, or find another one")
    names = [name.strip() for given in args.attention_type or [DEFAULT_TYPES] for name in given.split(",")]
    check_names("--attention-type", names, list(CONTENDERS))
    check_names("--dtype", [args.dtype], [*SHORT_DTYPES, *DTYPES])
    given = {name: getattr(args, name) or DEFAULTS[name] for name in DEFAULTS}
    # A multiple of the heads that differs from a given core dimension.
    given[axis] = [2 * args.heads if args.core_dim == args.heads else args.heads]
    for bsz, dim, length, name in itertools.product(given["bsz"], given["dim"], given["seq_len"], dict.fromkeys(names)):
        yield make_one(args, name, bsz=bsz, dim=dim, length=length)


def make_one(args: argparse.Namespace, name: str, *, bsz: int, dim: int, length: int) -> Case:
    fields = {
        "bsz": bsz,
        "dim": dim,
        "query_len": 1 if args.mode == "decode" else length,
        "dtype": SHORT_DTYPES.get(args.dtype, args.dtype),
        "mode": args.mode,
    }
    attention_fields = {
        "kv_len": length,
        "heads": args.heads,
        "core_dim": args.core_dim,
        "factor": args.factor,
        "causal": args.causal,
    }
    case = any_case(name, fields, attention_fields)
    if reason := refusal(case):
        raise UsageError(reason)
    return case


def draw(capacities: list[Capacity], along: str, args: argparse.Namespace, how: dict[str, Any]) -> None:
    axis, device = capacities[0].axis, capacities[0].device
    curves = {
        case.operator: capacity_curve(case, axis, along, drawn_sizes(args, along, case), device, **how)
        for case in first_of_each(capacities)
    }
    edges = {name: edges_of(curve) for name, curve in curves.items() if not curve[0][1].unpredicted}
    left_out = [name for name in curves if name not in edges]
    try:
        plot_capacity(
            edges,
            args.plot,
            styles={name: contender.style for name, contender in CONTENDERS.items()},
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


def drawn_sizes(args: argparse.Namespace, along: str, case: Case) -> list[int]:
    given: list[int] = getattr(args, along) or DEFAULTS[along]
    return given if len(given) > 1 else [given[0] * factor for factor in FACTORS]


def first_of_each(capacities: list[Capacity]) -> list[Case]:
    return list({capacity.case.operator: capacity.case for capacity in reversed(capacities)}.values())[::-1]


def edges_of(curve: list[tuple[int, Capacity]]) -> list[Edge]:
    return [Edge(x, capacity.largest, open=capacity.beyond is None) for x, capacity in curve]


def picture(text: str) -> Path:
    path = file("--plot")(text)
    if path.suffix.removeprefix(".") not in FORMATS:
        raise UsageError(f"--plot {path} must end in one of .{', .'.join(FORMATS)}")
    return path

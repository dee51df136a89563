"""`memcheck predict --mode decode`: what the KV cache or the state of a model takes, and how many sequences fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping

from memcheck.bench.kv_cache import CachedModel
from memcheck.cli.options import predicted_device
from memcheck.core.case import Case
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError
from memcheck.core.units import format_bytes
from memcheck.predict.replay import Prediction
from memcheck.report import render, terms_table
from memcheck.report.rows import MIB
from memcheck.report.tables import THREE_DIGITS, Cell, Column, Table

# Flags of a model that decodes, with the values that stand for one layer alone.
FLAGS = {"kv_heads": None, "layers": None, "block_size": None, "weights": None, "concatenate": False}


def check_flags(args: argparse.Namespace) -> None:
    """UsageError: a flag of decoding is given in another mode."""
    for name, absent in FLAGS.items():
        if args.mode != "decode" and getattr(args, name) != absent:
            raise UsageError(f"--{name.replace('_', '-')} is for --mode decode, got --mode {args.mode}")


def predict_decoding(args: argparse.Namespace, case: Case) -> Prediction:
    """Prints what the states of all layers take, and one layer's step. Returns the prediction that says if they fit."""
    if case.compiled or args.dense_grad or args.expandable_segments:
        raise UsageError("--compile, --dense-grad and --expandable-segments are not for --mode decode")
    device = predicted_device(args)
    sizes = {"layers": args.layers or 1, "block_size": args.block_size or 1, "weights_bytes": args.weights or 0}
    model = CachedModel(case, args.kv_heads, concatenates=args.concatenate, **sizes)
    whole = model.predict_step(device, limit_bytes=args.memory_limit, threads=args.threads)
    # For the figures, without a limit.
    step = model.predict_step(dataclasses.replace(device, usable_bytes=None), threads=args.threads)
    figures = {
        "layers": model.layers,
        "kv_heads": model.kv_heads or case.heads,
        "block_size": model.block_size,
        "bytes_per_token": model.bytes_per_token,
        "bytes_per_sequence": model.state_bytes(),
        "bytes": model.state_bytes(case.bsz),
        "weights_bytes": model.weights_bytes,
        "need_bytes": model.need_bytes(device, threads=args.threads),
        "sequences": model.most_sequences(device, limit_bytes=args.memory_limit, threads=args.threads),
    }
    if args.format == "json":
        known = {"terms": step.terms, "unknown": step.unknown, "bounds": sorted(step.bounds)}
        more = {**known, "device_source": device.source, "cache": figures}
        print(json.dumps({**dataclasses.asdict(whole.record), **more}))
    else:
        table = terms_table(step)
        table.title, table.notes = f"One layer's step. {table.title}", table.notes[1:]
        states = states_table(model, figures)
        states.notes = list(verdict(model, figures, whole, step, device, args.memory_limit))
        print(render([states, table], "table", sys.stdout))
    return whole


def states_table(model: CachedModel, figures: Mapping[str, Cell]) -> Table:
    """The bytes of all layers per token, per sequence and for all sequences, and what is beside them."""
    case, tokens = model.case, f"{model.layer(1).kv_len:,} tokens"
    state = "KV cache" if model.decoding.attend is not None else "state"
    rows: dict[str, Cell] = {
        f"{state} per token": figures["bytes_per_token"],
        f"{state} per sequence of {tokens}": figures["bytes_per_sequence"],
        f"{state} of {sequences(case.bsz)}": figures["bytes"],
        "weights": figures["weights_bytes"] or None,
        "all of it, and one layer's step": figures["need_bytes"],
    }
    words = [f"{counted(model.layers, 'layer')} of {case.operator}", str(case.dtype)]
    if case.heads:
        shared = f" for {case.heads} of the queries" if figures["kv_heads"] != case.heads else ""
        words.insert(1, f"{figures['kv_heads']} heads of {case.dim // case.heads}{shared}")
    words += [f"blocks of {model.block_size} tokens"] if model.block_size > 1 else []
    words += ["a step concatenates"] if model.concatenates else []
    columns = [
        Column("what", "what decoding keeps"),
        Column("mib", "MiB", format=THREE_DIGITS),
        Column("bytes", "bytes", format=",.0f"),
    ]
    cells: list[list[Cell]] = [[name, size / MIB, size] for name, size in rows.items() if isinstance(size, int | float)]
    return Table("states", ", ".join(words), columns, cells)


def verdict(
    model: CachedModel,
    figures: Mapping[str, Cell],
    whole: Prediction,
    step: Prediction,
    device: Device,
    limit_bytes: int | None,
) -> Iterator[str]:
    """Whether it fits, and how many sequences do."""
    rooms = [room for room in (device.usable_bytes, limit_bytes) if room is not None]
    record, need = whole.record, figures["need_bytes"]
    words = {"ok": "ok, it fits", "oom": "oom, it does not fit"}.get(record.status, f"{record.status}, {record.reason}")
    needed = f"; it needs {format_bytes(need)}" if isinstance(need, int) and record.status == "oom" else ""
    yield f"verdict: {words}{needed}"
    if not rooms:
        yield f"{device.name} has no limit of its own; with --memory-limit the largest batch is found"
        return
    count = sequences(int(figures["sequences"] or 0))
    but = ", at most, as something of a step is not known" if "forward_peak_bytes" in step.bounds else ""
    yield (
        f"largest batch: {count} of {model.layer(1).kv_len:,} tokens in the {format_bytes(min(rooms))} "
        f"of {device.name}{but}"
    )


def sequences(count: int) -> str:
    return counted(count, "sequence")


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

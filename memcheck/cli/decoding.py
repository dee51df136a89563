"""`memcheck predict --mode decode`: what the KV cache or the state of a model takes, and how many sequences fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memcheck.bench.catalog import make_case
from memcheck.bench.kv_cache import CachedModel
from memcheck.cli.models import Setting, dtype_of
from memcheck.cli.options import predicted_device
from memcheck.core.case import Case
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError
from memcheck.core.units import counted, format_bytes
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
    if args.mode == "inference" and args.dense_grad:
        raise UsageError("--dense-grad needs a backward, which --mode inference has not")


def of_case(args: argparse.Namespace, case: Case) -> CachedModel:
    """The model whose layers are the case of the flags."""
    if case.compiled:
        raise UsageError("--compile and compiled operators are not for --mode decode")
    sizes = {"layers": args.layers or 1, "block_size": args.block_size or 1, "weights_bytes": args.weights or 0}
    return CachedModel(case, args.kv_heads, concatenates=args.concatenate, **sizes)


def of_configuration(args: argparse.Namespace) -> CachedModel:
    """The model of --hf-config, with its own weights unless --weights is given.

    UsageError: its state is not a cache of keys and values.
    """
    others = ("layers", "kv_heads", "optimizer", "loss", "autocast", "checkpointing", "steps", "fsdp", "tp", "ddp")
    for name in (*others, "drop_outputs", "accumulate", "clip_grad_norm", "traceback"):
        if getattr(args, name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is not for --hf-config in --mode decode, got {getattr(args, name)}")
    from memcheck.cli.hugging_face import Configuration

    configuration = Configuration.read(args.hf_config)
    dtype = dtype_of("--dtype", args.dtype)
    setting = configuration.completed(Setting(args.bsz, args.seq_len, "inference", dtype, attention=args.attention))
    heads, kv_heads, head_dim, layers = cache_sizes(configuration.config(), args.hf_config)
    weights = args.weights
    if weights is None:
        model = configuration.model(setting)
        weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    operator = "naive" if setting.attention == "eager" else "softmax"
    sizes: dict[str, Any] = {"dim": heads * head_dim, "heads": heads, "core_dim": None, "factor": None}
    how: dict[str, Any] = {"bsz": setting.bsz, "kv_len": setting.seq_len, "dtype": setting.dtype, "mode": "decode"}
    case = make_case(operator, query_len=1, **sizes, **how)
    return CachedModel(case, kv_heads, layers, args.block_size or 1, args.concatenate, weights)


def cache_sizes(config: Any, path: Path) -> tuple[int, int, int, int]:
    """Heads of the queries, heads of the keys, the size of a head, and the number of layers."""
    text: Any = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    others = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    heads: Any = getattr(text, "num_attention_heads", None)
    why = (
        "is an encoder and a decoder"
        if config.is_encoder_decoder
        else "keeps compressed keys and values"
        if getattr(text, "kv_lora_rank", None)
        else f"has layers of {', '.join(others)}"
        if others
        else "has no heads of attention"
        if not heads
        else None
    )
    if why:
        raise UsageError(f"--mode decode knows caches of keys and values; the model of {path} {why}")
    if kinds != {"full_attention"} or getattr(text, "sliding_window", None):
        print("note: layers with a sliding window are counted with the whole length", file=sys.stderr)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, getattr(text, "num_key_value_heads", None) or heads, head_dim, text.num_hidden_layers


def predict_decoding(args: argparse.Namespace, model: CachedModel) -> Prediction:
    """Prints what the states of all layers take, and one layer's step. Returns the prediction that says if they fit."""
    if args.dense_grad or args.expandable_segments:
        raise UsageError("--dense-grad and --expandable-segments are not for --mode decode")
    case, device = model.case, predicted_device(args)
    where: dict[str, Any] = {"threads": args.threads, "torch_version": args.torch_version}
    whole = model.predict_step(device, limit_bytes=args.memory_limit, **where)
    # For the figures, without a limit.
    step = model.predict_step(dataclasses.replace(device, usable_bytes=None), **where)
    figures = {
        "layers": model.layers,
        "kv_heads": model.kv_heads or case.heads,
        "block_size": model.block_size,
        "bytes_per_token": model.bytes_per_token,
        "bytes_per_sequence": model.state_bytes(),
        "bytes": model.state_bytes(case.bsz),
        "weights_bytes": model.weights_bytes,
        "need_bytes": model.need_bytes(device, **where),
        "sequences": model.most_sequences(device, limit_bytes=args.memory_limit, **where),
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

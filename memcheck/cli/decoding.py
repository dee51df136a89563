"""`memcheck predict --mode decode`: what the KV cache or the state of a model takes, and how many sequences fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memcheck.bench.catalog import make_case
from memcheck.bench.kv_cache import CachedModel
from memcheck.cli.models import SIZES, Setting, unbuilt
from memcheck.cli.options import ModelStep
from memcheck.cli.requests import Predict
from memcheck.core.case import Case
from memcheck.core.errors import UsageError
from memcheck.core.options import named, options_of
from memcheck.core.place import Place
from memcheck.core.step import Step
from memcheck.core.units import counted, format_bytes
from memcheck.core.verdict import certainty
from memcheck.predict.replay import Prediction
from memcheck.report.predictions import figures_table
from memcheck.report.rows import MIB
from memcheck.report.tables import THREE_DIGITS, Cell, Column, Screen, Table, render


def of_case(request: Predict, case: Case) -> CachedModel:
    """The model whose layers are the case of the flags."""
    if case.compiled:
        raise UsageError(f"{named('compile')} and compiled operators are not for {named('mode')} decode")
    sizes = {
        "layers": request.layers or 1,
        "block_size": request.block_size or 1,
        "weights_bytes": request.weights or 0,
    }
    return CachedModel(case, request.kv_heads, concatenates=request.concatenate, **sizes)


# The catalog's attention that has the state of an attention of transformers, which for ours is a StateCache.
DECODED_AS = {"eager": "naive", "memcheck_compressed": "compressed", "memcheck_linear": "linear-causal"}


def of_configuration(request: Predict) -> CachedModel:
    """The model of --hf-config, with its own weights unless --weights is given.

    UsageError: its state is not a cache of keys and values, nor that of compressed or linear attention.
    """
    others = {*options_of(ModelStep), "layers", "kv_heads"} - {"model", "hf_config", "attention", "build_on"}
    if wrong := sorted(filter(request.given, others)):
        rule = f"is not for {named('hf_config')} in {named('mode')} decode"
        raise UsageError(f"{named(wrong[0])} {rule}, got {getattr(request, wrong[0])}")
    from memcheck.cli.hugging_face import Configuration

    assert request.hf_config is not None
    configuration = Configuration.read(request.hf_config)
    bsz, seq_len = (request.single(name, "for a model") for name in SIZES)
    step = Step(unbuilt, backward=False)
    setting = configuration.completed(Setting(step, bsz, seq_len, request.dtype, request.attention))
    heads, kv_heads, head_dim, layers = cache_sizes(configuration.config(), request.hf_config)
    weights = request.weights
    if weights is None:
        model = configuration.model(setting)
        weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    if setting.attention == "memcheck_softplus":
        rule = f"is not for {named('hf_config')} in {named('mode')} decode"
        raise UsageError(f"{named('attention')} {rule}, got {setting.attention}")
    operator = DECODED_AS.get(setting.attention or "", "softmax")
    sizes: dict[str, Any] = {"dim": heads * head_dim, "heads": heads, "core_dim": None}
    of_config = configuration.config()
    sizes |= {"factor": getattr(of_config, "memcheck_factor", 1), "window": getattr(of_config, "memcheck_window", None)}
    how: dict[str, Any] = {"bsz": setting.bsz, "kv_len": setting.seq_len, "dtype": setting.dtype, "mode": "decode"}
    case = make_case(operator, query_len=1, **sizes, **how)
    return CachedModel(case, kv_heads, layers, request.block_size or 1, request.concatenate, weights)


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


def predict_decoding(request: Predict, model: CachedModel) -> Prediction:
    """Prints what the states of all layers take, and one layer's step. Returns the prediction that says if they fit."""
    if request.dense_grad or request.expandable_segments:
        both = f"{named('dense_grad')} and {named('expandable_segments')}"
        raise UsageError(f"{both} are not for {named('mode')} decode")
    case, place = model.case, request.place()
    whole, step = model.predict_step(place), model.predict_step(place.unlimited)
    figures = {
        "layers": model.layers,
        "kv_heads": model.kv_heads or case.heads,
        "block_size": model.block_size,
        "bytes_per_token": model.bytes_per_token,
        "bytes_per_sequence": model.state_bytes(),
        "bytes": model.state_bytes(case.bsz),
        "weights_bytes": model.weights_bytes,
        "need_bytes": model.need_bytes(place),
        "sequences": model.most_sequences(place),
    }
    if request.format == "json":
        known = {"terms": step.terms, "unknown": step.unknown, "bounds": sorted(step.bounds)}
        more = {**known, "device_source": place.for_device.source, "cache": figures}
        print(json.dumps({**whole.record.values(), **more}))
    else:
        screen = Screen.of(sys.stdout)
        words = [*verdict(model, figures, whole, step, place), certainty(step)]
        words += [f"doubt: {doubt}" for doubt in step.record.doubts] if request.doubts else []
        print(*map(screen.fill, filter(None, words)), sep="\n")
        table = figures_table(step, with_terms=request.explain)
        table.title = f"One layer's step. {table.title}"
        tables = [states_table(model, figures), *([table] if table.rows else [])]
        print(f"\n{render(tables, 'table', sys.stdout)}")
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
    model: CachedModel, figures: Mapping[str, Cell], whole: Prediction, step: Prediction, place: Place
) -> Iterator[str]:
    """Whether it fits, and how many sequences do."""
    record, need, device = whole.record, figures["need_bytes"], place.for_device
    if whole.fits is None:
        yield f"{record.operator} is not predicted: {record.reason or record.status}."
        return
    needs = f"needs {format_bytes(need)}" if isinstance(need, int) else "is not known to the byte"
    batch = f"{sequences(model.case.bsz)} of {model.layer(1).kv_len:,} tokens"
    if (room := place.room_bytes) is None:
        yield f"Decoding {batch} {needs}. The {device.name} has no limit of its own (--memory-limit)."
        return
    fits, allocator = "fits" if whole.fits else "does not fit", " for torch's allocator" * (device.kind == "cuda")
    yield f"Decoding {batch} {fits} {device.name}: it {needs} of {format_bytes(room)}{allocator}."
    count = sequences(int(figures["sequences"] or 0))
    but = ", at most, as something of a step is not known" if "forward_peak_bytes" in step.bounds else ""
    yield f"The largest batch that fits is {count}{but}."


def sequences(count: int) -> str:
    return counted(count, "sequence")

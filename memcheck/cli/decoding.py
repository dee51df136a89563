"""Cases of a request's flags; and `memcheck predict --mode decode`: what a model's state takes, and how many fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memcheck.bench.capacity import CachedModel
from memcheck.bench.catalog import (
    CONTENDERS,
    batch_of,
    combinator_types,
    make_case,
    make_combinator_case,
)
from memcheck.cli.models import SIZES, Setting, unbuilt
from memcheck.cli.options import DEFAULT_SIZES, GPU_LENGTHS, GPU_SIZES, LAYOUTS, ModelStep, Operators, Request
from memcheck.cli.requests import Predict
from memcheck.core.errors import UsageError
from memcheck.core.options import named, options_of
from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.core.units import counted, format_bytes
from memcheck.core.verdict import certainty
from memcheck.core.workload import Case
from memcheck.report.predictions import figures_table
from memcheck.report.rows import MIB
from memcheck.report.tables import THREE_DIGITS, Cell, Column, Screen, Table, render

LENGTHS = ("seq_len", "query_len", "kv_len")


def make_any_case(name: str, attention_fields: dict[str, Any], **fields: Any) -> Case:
    """A checked case of an attention, or of a combinator, which has no keys and heads."""
    if name in combinator_types():
        fields.pop("kv_len", None)
        return make_combinator_case(name, **fields)
    return make_case(name, **attention_fields, **fields)


def batches_of(given: Mapping[str, Any], default: list[int]) -> Iterator[dict[str, Any]]:
    """The lengths of each case, and the batch that `lengths` makes of them: without `packed` or `padded`, both.

    given: the options by name, each a list; the mode is one word.
    """
    layouts = [name for name in LAYOUTS if given.get(name)]
    if not given.get("lengths"):
        if layouts:
            raise UsageError(f"{named(layouts[0])} needs {named('lengths')}, the positions of each sequence")
        for query_len, kv_len in make_lengths(given.get("mode"), *map(given.get, LENGTHS), default=default):
            yield {"query_len": query_len, "kv_len": kv_len}
        return
    for name in ("bsz", *LENGTHS):
        if given.get(name):
            rule = f"{named('lengths')} has the number and lengths of sequences"
            raise UsageError(f"{rule}: leave out {named(name)}")
    for lengths in sorted(given["lengths"], key=sum):
        for layout in layouts or LAYOUTS:
            yield batch_of(lengths, layout)


def make_lengths(
    mode: str | None,
    seq_len: list[int] | None,
    query_len: list[int] | None,
    kv_len: list[int] | None,
    *,
    default: list[int],
) -> list[tuple[int, int]]:
    """(S, T) pairs. Two lists of equal length are paired; a single length is combined with every one of the other list.

    A decoding step takes one token, so S is 1 and the lengths are those of the state.
    """
    names = {name: named(name) for name in ("seq_len", "query_len", "kv_len", "mode")}
    queries_name, keys_name = names["query_len"], names["kv_len"]
    if seq_len and (query_len or kv_len):
        both = f"{queries_name} and {keys_name}, or {names['seq_len']}"
        raise UsageError(f"{names['seq_len']} sets both lengths: leave out {both}")
    if mode == "decode":
        if query_len not in (None, [1]):
            given = ",".join(map(str, query_len))
            rule = f"must be 1 in {names['mode']} decode, got {given}"
            raise UsageError(f"{queries_name} {rule}; {keys_name} says how many tokens the state holds")
        return [(1, key) for key in sorted(kv_len or seq_len or default)]
    queries, keys = query_len or kv_len or seq_len or default, kv_len or query_len or seq_len or default
    longest = max(len(queries), len(keys))
    if {len(queries), len(keys)} - {1, longest}:
        lengths = f"{len(queries)} and {len(keys)}"
        raise UsageError(f"{queries_name} and {keys_name} must be as long as each other, got {lengths}")
    return sorted(zip(queries * (longest // len(queries)), keys * (longest // len(keys)), strict=True))


def attention_fields_of(request: Operators) -> dict[str, Any]:
    """The sizes and the mask that only attentions have, one of each."""
    (heads,) = request.heads or [DEFAULT_SIZES["heads"]]
    ones = {name: (getattr(request, name) or [None])[0] for name in ("core_dim", "factor", "window")}
    return {"heads": heads, **ones, "causal": request.causal is not False}


def gpu_words(given: Container[str]) -> str:
    """Says which defaults of a GPU hold for the options that are not given. "" if all are given."""
    words = {
        "dtype": "bf16",
        "bsz": f"batch {GPU_SIZES['bsz']}",
        "dim": f"dim {GPU_SIZES['dim']}",
        "heads": f"{GPU_SIZES['heads']} heads",
        "seq_len": f"lengths {GPU_LENGTHS[0]} to {GPU_LENGTHS[-1]}",
    }
    used = ", ".join(text for name, text in words.items() if name not in given)
    return f"defaults of a GPU, where no flag says otherwise: {used}" if used else ""


def check_takes_window(window: object, names: Iterable[str]) -> None:
    """UsageError: there is a window, and no operator of these names takes one."""
    names = dict.fromkeys(names)
    if window is not None and all(name in CONTENDERS and not CONTENDERS[name].has_window for name in names):
        others = ", ".join(names)
        windowed = ", ".join(name for name, contender in CONTENDERS.items() if contender.has_window)
        raise UsageError(f"{named('window')} is only for {windowed}, got {named('attention_type')} {others}")


def note_unused_options(request: Request, cases: list[Case]) -> None:
    for field in ("heads", "core_dim", "factor", "window"):
        without = dict.fromkeys(case.operator for case in cases if getattr(case, field) is None)
        if getattr(request, field, None) is not None and without:
            print(f"note: {named(field)} is not used by {', '.join(without)}", file=sys.stderr)


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

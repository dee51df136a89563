"""Cases of a request's flags."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.catalog import combinator_types, make_case, make_combinator_case
from memcheck.cli.options import DEFAULT_SIZES, GPU_LENGTHS, GPU_SIZES, Request
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.options import named

LENGTHS = ("seq_len", "query_len", "kv_len")


def make_any_case(name: str, attention_fields: dict[str, Any], **fields: Any) -> Case:
    """A checked case of an attention, or of a combinator, which has no keys and heads."""
    if name in combinator_types():
        fields.pop("kv_len", None)
        return make_combinator_case(name, **fields)
    return make_case(name, **attention_fields, **fields)


def lengths_of(given: Mapping[str, Any], default: list[int]) -> list[tuple[int, int]]:
    """(S, T) pairs. Two lists of equal length are paired; a single length is combined with every one of the other list.

    A decoding step takes one token, so S is 1 and the lengths are those of the state.

    given: the options by name, each a list; the mode is one word.
    """
    mode, seq_len, query_len, kv_len = map(given.get, ("mode", *LENGTHS))
    names = {name: named(name) for name in ("seq_len", "query_len", "kv_len", "mode")}
    queries_name, keys_name = names["query_len"], names["kv_len"]
    if seq_len and (query_len or kv_len):
        both = f"{queries_name} and {keys_name}, or {names['seq_len']}"
        raise UsageError(f"{names['seq_len']} sets both lengths: leave out {both}")
    if mode == "decode":
        if query_len not in (None, [1]):
            rule = f"must be 1 in {names['mode']} decode, got {','.join(map(str, query_len))}"
            raise UsageError(f"{queries_name} {rule}; {keys_name} says how many tokens the state holds")
        return [(1, key) for key in sorted(kv_len or seq_len or default)]
    queries, keys = query_len or kv_len or seq_len or default, kv_len or query_len or seq_len or default
    longest = max(len(queries), len(keys))
    if {len(queries), len(keys)} - {1, longest}:
        lengths = f"{len(queries)} and {len(keys)}"
        raise UsageError(f"{queries_name} and {keys_name} must be as long as each other, got {lengths}")
    return sorted(zip(queries * (longest // len(queries)), keys * (longest // len(keys)), strict=True))


def attention_fields_of(request: Request) -> dict[str, Any]:
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


# Attentions that are proposed in place of another; the first computes the same as naive.
OTHERS = ("softmax", "compressed", "linear-causal", "softplus")


def single_changes(case: Case) -> Iterator[tuple[str, Case]]:
    """The flags and the case of each change: half the batch, or half the length; a 16-bit dtype; other attentions."""
    if case.bsz > 1:
        yield f"--bsz {case.bsz // 2}", dataclasses.replace(case, bsz=case.bsz // 2)
    elif case.mode == "decode" and case.kv_len:
        yield f"--kv-len {case.kv_len // 2}", dataclasses.replace(case, kv_len=case.kv_len // 2)
    elif case.query_len > 1 and case.kv_len in (None, case.query_len):
        half = case.query_len // 2
        yield f"--seq-len {half}", dataclasses.replace(case, query_len=half, kv_len=case.kv_len and half)
    if case.dtype in ("float32", "float64"):
        yield "--dtype bf16", dataclasses.replace(case, dtype="bfloat16")
    for name in OTHERS if case.kv_len is not None else ():
        if name == case.operator.partition("/")[0]:
            continue
        try:
            yield f"--attention-type {name}", like(case, name)
        except MemcheckError:  # It does not take the sizes or the mask.
            continue


def like(case: Case, name: str) -> Case:
    """The case of another attention, with its default core dimension and factor."""
    sizes = {field: getattr(case, field) for field in ("bsz", "query_len", "kv_len", "dim", "dtype", "mode")}
    return make_case(
        name,
        **sizes,
        heads=case.heads or 1,
        core_dim=case.core_dim,
        factor=case.factor,
        causal=case.causal is not False,
        compiled=case.compiled,
    )

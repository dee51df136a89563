"""Cases of a request's flags."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from memcheck.bench.catalog import (
    CONTENDERS,
    batch_of,
    combinator_types,
    make_case,
    make_combinator_case,
)
from memcheck.cli.options import DEFAULT_SIZES, GPU_LENGTHS, GPU_SIZES, LAYOUTS, Operators, Request
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.workload import Case

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

"""Summarises records in sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.report.cases import CASE_FIELDS, describe, groups_besides, values_in_order, values_of
from memcheck.report.pairing import pair
from memcheck.report.predictions import agreement
from memcheck.report.rows import common_case, count_of, failure_note

# Sizes that only some operators have; cases that differ in nothing else are comparable.
OPERATORS_OWN = ("operator", "heads", "core_dim", "factor", "causal", "compiled")
STATUS_WORDS = {
    "unsupported": "unsupported here",
    "error": "ended in an error",
    "timeout": "out of time",
    "killed": "killed",
    "skipped": "skipped",
}
FACTS = {
    "device": "device",
    "device_name": "device name",
    "device_uuid": "device UUID",
    "device_total_bytes": "device memory",
    "torch_version": "torch",
    "memcheck_version": "memcheck",
    "allocator": "allocator",
    "threads": "threads",
}

NUMBER = re.compile(r"\d[\d.,]*")


def need(record: Record) -> int | None:
    """The highest peak over all phases of the case."""
    if record.mode == "train":
        sizes = [record.forward_peak_bytes, record.backward_peak_bytes]
        return None if None in sizes else max(size for size in sizes if size is not None)
    return record.forward_peak_bytes


def summary(records: Sequence[Record]) -> list[str]:
    """Paragraphs: what was measured where, which operators need least and most, which ran out, and what is missing or
    doubtful.
    """
    predictions = [record for record in records if record.source == "predicted"]
    if predictions and len(predictions) < len(records):
        measured = [record for record in records if record.source != "predicted"]
        return [*summary(measured), what_was_predicted(predictions), agreement(pair(records).both)]
    paragraphs = [
        what_was_predicted(records) if predictions else what_was_measured(records),
        *most_and_least(records),
        *who_ran_out(records),
        *what_is_missing(records),
    ]
    return [*paragraphs, *doubts(records)]


def what_was_measured(records: Sequence[Record]) -> str:
    operators = values_in_order(records, "operator")
    measured = sum(record.status == "ok" for record in records)
    where = common_case(records)
    cases = f"{count_of(records)} of {listed(operators)}" + (f" ({where})" if where else "")
    lengths = {record.kv_len or record.query_len for record in records} - {None}
    spans = [span for span in (span_of(lengths, "lengths"), span_of(values_of(records, "dim"), "dim")) if span]
    along = f", over {' and '.join(spans)}" if spans else ""
    done = {0: "none", len(records): "all"}.get(measured, str(measured))
    return f"{cases}{along}; {done} ran to the end."


def what_was_predicted(records: Sequence[Record]) -> str:
    """How many cases were predicted for which device, and how many fit."""
    counts = Counter(record.status for record in records)
    told = [f"{counts['ok']} fit", f"{counts['oom']} run out of memory"]
    rest = len(records) - counts["ok"] - counts["oom"]
    told += [f"of {rest} nothing is known"] if rest else []
    devices = listed(values_in_order(records, "device_name"))
    return f"{count_of(records)} predicted for {devices}: {', '.join(told)}; {bases_of(records)}."


def bases_of(records: Sequence[Record]) -> str:
    """ "3 verified, 2 derived, 1 with figures that are bounds": each record once."""
    kinds = ["bounds" if record.doubts else record.basis for record in records if record.status in ("ok", "oom")]
    counts = Counter(kinds)
    words = {"verified": "verified", "derived": "derived", "bounds": "with figures that are bounds"}
    return ", ".join(f"{counts[kind]} {said}" for kind, said in words.items() if counts[kind]) or "no figures"


def span_of(values: set[Any], word: str) -> str | None:
    return f"{word} {min(values)} to {max(values)}" if len(values) > 1 else None


def listed(words: Sequence[Any]) -> str:
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "nothing"


def most_and_least(records: Sequence[Record]) -> Iterator[str]:
    """Compares operators at the largest case that most of them finished, for each dtype, mode and device."""
    for group in groups_besides(records, ("bsz", "query_len", "kv_len", "dim", *OPERATORS_OWN)):
        shapes = groups_besides(group, OPERATORS_OWN)
        shapes = [done for shape in shapes if len(done := [record for record in shape if need(record) is not None]) > 1]
        if shapes:
            yield ranking(max(shapes, key=lambda shape: (len(shape), size_of(shape[0]))))


def size_of(record: Record) -> int:
    return (record.bsz or 1) * (record.query_len or 1) * (record.kv_len or 1) * (record.dim or 1)


def ranking(records: Sequence[Record]) -> str:
    """ "At batch 1, S = T = 4096, a needs least at its peak, 28.3 MiB, and b most, 804 MiB: 28.4 times as much." """
    ranked = sorted(records, key=lambda record: need(record) or 0)
    least, most = need(ranked[0]) or 0, need(ranked[-1]) or 0
    fields = [field for field in CASE_FIELDS if field not in OPERATORS_OWN]
    words = f"At {describe(ranked[0], fields)}, {ranked[0].operator} needs least at its peak, {format_bytes(least)}"
    words += f", and {ranked[-1].operator} most, {format_bytes(most)}"
    words += f": {most / least:.3g} times as much." if least and most > least else "."
    between = [f"{record.operator} {format_bytes(need(record) or 0)}" for record in ranked[1:-1]]
    return f"{words} Between them: {', '.join(between)}." if between else words


def who_ran_out(records: Sequence[Record]) -> Iterator[str]:
    """The smallest case at which each operator ran out of memory, for each line of lengths."""
    failed = [record for record in records if record.status == "oom"]
    for operator in values_in_order(failed, "operator"):
        mine = [record for record in failed if record.operator == operator]
        first = min(mine, key=size_of)
        more = f", and {len(mine) - 1} larger or like it" if len(mine) > 1 else ""
        where = describe(first, ("bsz", "query_len", "kv_len", "dim", "dtype"))
        yield f"{operator} ran out of memory at {where} ({failure_note(first)}){more}."


def what_is_missing(records: Sequence[Record]) -> Iterator[str]:
    """Why other cases have no figures; the most frequent reason is quoted."""
    for status, words in STATUS_WORDS.items():
        mine = [record for record in records if record.status == status]
        if mine:
            operators = Counter(record.operator for record in mine)
            names = [f"{name} ({count})" if len(mine) > 1 else f"{name}" for name, count in operators.items()]
            reasons = Counter(failure_note(record) for record in mine)
            reason, _ = reasons.most_common(1)[0]
            yield f"{count_of(mine)} {words}: {', '.join(names)}{'; for one' if len(reasons) > 1 else ''}: {reason}"


def doubts(records: Sequence[Record]) -> Iterator[str]:
    """The kinds of doubts, ignoring their numbers; the most frequent one is quoted."""
    kinds: dict[str, Counter[str]] = {}
    for record in records:
        for kind, doubt in {NUMBER.sub("", doubt): doubt for doubt in record.doubts}.items():
            kinds.setdefault(kind, Counter())[doubt] += 1
    for said in kinds.values():
        (doubt, _), *others = said.most_common()
        yield f"Doubtful in {said.total()} of {len(records)} cases: {doubt}{', for one' if others else ''}"


def environment_facts(records: Sequence[Record]) -> dict[str, str]:
    """The environment of the records: name -> values."""
    facts = {}
    for field, words in FACTS.items():
        values = values_in_order(records, field)
        if values:
            facts[words] = ", ".join(format_bytes(value) if field.endswith("bytes") else str(value) for value in values)
    return facts


def when(text: str | None) -> str | None:
    """Formats an ISO time for reading. None if the text is not an ISO time."""
    try:
        return datetime.fromisoformat(text or "").strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return None

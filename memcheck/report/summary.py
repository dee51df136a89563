"""Sentences about records: what ran, who needs least and most, what failed, what is doubtful, and what to do next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from memcheck.core.doubts import reason_in_short
from memcheck.core.model_record import ModelRecord
from memcheck.core.record import Record, sequence_words
from memcheck.core.units import format_bytes
from memcheck.report.cases import (
    CASE_FIELDS,
    OWN_SIZES,
    attention,
    common_case,
    count_of,
    counted_percent,
    describe,
    failure_note,
    groups_besides,
    has_sizes,
    is_predicted,
    models_among,
    need,
    operators_among,
    pair,
    phases_of,
    split_by_source,
    values_in_order,
    values_of,
    varying,
)
from memcheck.report.predictions import agreement

OPERATORS_OWN = ("operator", *OWN_SIZES, "compiled")  # Cases that differ in nothing else are comparable.
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

PHASE_WORDS = {"forward": "the forward", "backward": "the backward", "optimizer": "the optimizer's step"}
HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")  # What a model holds between steps.
NUMBER = re.compile(r"\d[\d.,]*")


def summary(records: Sequence[Record]) -> list[str]:
    """Paragraphs: what was measured where, the answer, what is missing or doubtful; whole models after operators."""
    if models := models_among(records):
        operators = operators_among(records)
        return [*(summary(operators) if operators else []), *model_summary(models)]
    measured, predicted = split_by_source(records)
    if measured and predicted:
        pairs = pair(records)
        return [*summary(measured), what_was_predicted(predicted), *([agreement(pairs)] if pairs else [])]
    first = what_was_predicted(records) if predicted else what_was_measured(records)
    return [first, *answer(records), *what_is_missing(records), *doubt_lines(records)]


def model_summary(records: Sequence[ModelRecord]) -> list[str]:
    """Paragraphs: which models were measured or predicted, what the largest needs, and what is doubtful."""
    measured, predicted = split_by_source(records)
    lines = [f"Whole models: {what_was_measured(measured)}"] if measured else []
    lines += [f"Whole models: {what_was_predicted(predicted)}"] if predicted else []
    return [*lines, *model_answer(measured or predicted), *doubt_lines(records)]


def answer(records: Sequence[Record]) -> list[str]:
    """Which operators need least and most, and which ran out of memory. Measurements, if there are any."""
    records = split_by_source(records)[0] or records
    return [*most_and_least(records), *padded_against_packed(records), *who_ran_out(records)]


def what_was_measured(records: Sequence[Record]) -> str:
    operators = values_in_order(records, "operator")
    measured = sum(record.status == "ok" for record in records)
    where = common_case(records)
    cases = f"{count_of(records)} of {listed(operators)}" + (f" ({where})" if where else "")
    lengths = {record.kv_len or record.query_len for record in records} - {None}
    sizes = {"lengths": lengths, "dim": values_of(records, "dim")}
    spans = [f"{word} {min(values)} to {max(values)}" for word, values in sizes.items() if len(values) > 1]
    along = f", over {' and '.join(spans)}" if spans else ""
    done = {0: "none", len(records): "all"}.get(measured, str(measured))
    return f"{cases}{along}; {done} ran to the end."


def what_was_predicted(records: Sequence[Record]) -> str:
    """How many cases were predicted for which device, and how many fit."""
    counts = Counter(record.status for record in records)
    parts = [f"{counts['ok']} fit", f"{counts['oom']} run out of memory"]
    rest = len(records) - counts["ok"] - counts["oom"]
    parts += [f"nothing is known of {rest}"] if rest else []
    devices = listed(values_in_order(records, "device_name") or values_in_order(records, "device"))
    kinds = Counter("bounds" if row.doubts else row.basis for row in records if row.status in ("ok", "oom"))
    words = {
        "verified": "by rules that measurements confirm",
        "derived": "from PyTorch's source alone",
        "bounds": "with figures that are bounds",
    }
    bases = ", ".join(f"{kinds[kind]} {word}" for kind, word in words.items() if kinds[kind])
    return f"{count_of(records)} predicted for {devices}: {', '.join(parts)}; {bases or 'no figures'}."


def listed(words: Sequence[Any]) -> str:
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "nothing"


def most_and_least(records: Sequence[Record]) -> Iterator[str]:
    """Compares operators at the largest case that most of them finished, for each dtype, mode and device.

    A single operator is compared with itself at a smaller size.
    """
    named = sorted((record for record in records if not has_sizes(record) and need(record)), key=need_or_0)
    if named:
        yield f"{growth(named[-1:], ()).removesuffix('.')}{f', the most of {len(named)}' if len(named) > 1 else ''}."
    records = [record for record in records if has_sizes(record)]
    changing = varying(records)
    for group in groups_besides(records, ("bsz", "query_len", "kv_len", "lengths", "dim", *OPERATORS_OWN)):
        known = [record for record in group if need(record) is not None]
        shapes = [shape for shape in groups_besides(known, OPERATORS_OWN) if len(shape) > 1]
        if shapes:
            yield ranking(max(shapes, key=lambda shape: (len(shape), size_of(shape[0]))), changing)
        elif known:
            yield growth(sorted(known, key=size_of), changing)


def need_or_0(record: Record) -> int:
    return need(record) or 0


def size_of(record: Record) -> int:
    return (record.bsz or 1) * (record.query_len or 1) * (record.kv_len or 1) * (record.dim or 1)


def place_words(record: Record, changing: Sequence[str]) -> str:
    """The case without its operator: the lengths, and what else changes among the records."""
    if record.lengths is not None:
        changing = [field for field in changing if field not in ("bsz", "query_len", "kv_len")]
        lengths: tuple[str, ...] = ("lengths",)
    else:
        lengths = ("kv_len",) if record.mode == "decode" and record.kv_len else ("query_len", "kv_len")
    fields = [field for field in CASE_FIELDS if field in lengths or field in changing]
    return describe(record, [field for field in fields if field not in OPERATORS_OWN])


def name_among(record: Record, records: Sequence[Record]) -> str:
    """The operator, and its own settings if they vary among the operator's records."""
    same = [other for other in records if other.operator == record.operator]
    fields = ["operator", *varying(same, OPERATORS_OWN[1:])]
    return describe(record, fields).removesuffix(", predicted")


def ranking(records: Sequence[Record], changing: Sequence[str]) -> str:
    """ "At S = T = 4096, naive needs 28 times as much as softplus: 804 MiB against 28.3." """
    ranked = sorted(records, key=need_or_0)
    sizes = [need_or_0(record) for record in ranked]
    names = [name_among(record, records) for record in ranked]
    where = f"At {place_words(ranked[0], changing)},"
    if sizes[-1] <= 1.05 * sizes[0]:
        texts = list(dict.fromkeys(map(format_bytes, (sizes[0], sizes[-1]))))
        return f"{where} {listed(names)} need {'about ' * (len(texts) - 1)}the same: {' to '.join(texts)}."
    factor = times_as_much(sizes[-1], sizes[0])
    words = f"{where} {names[-1]} needs {factor} {names[0]}: {against(sizes[-1], sizes[0])}."
    between = [f"{name} {format_bytes(size)}" for name, size in zip(names[1:-1], sizes[1:-1], strict=True)]
    return f"{words} Between them: {', '.join(between)}." if between else words


def growth(records: Sequence[Record], changing: Sequence[str]) -> str:
    """What the largest of the records needs, in which phase, and how much more than at a smaller size."""
    largest = records[-1]
    words = f"{name_among(largest, records)} {need_words(largest)}"
    words += f", at {place_words(largest, changing)}" if has_sizes(largest) else ""
    smaller = [record for record in records if size_of(record) < size_of(largest) and need(record)]
    if not smaller:
        return f"{words}."
    sizes = need_or_0(largest), need_or_0(smaller[-1])
    return f"{words}: {times_as_much(*sizes)} at {place_words(smaller[-1], changing)}, {against(*sizes)}."


def need_words(record: Record) -> str:
    """ "needs 1.97 GiB at its peak, in the optimizer's step", of a record whose peaks are known."""
    size = need_or_0(record)
    phase = next(name for name in phases_of(record) if getattr(record, f"{name}_peak_bytes") == size)
    return f"needs {format_bytes(size)} at its peak, in {PHASE_WORDS[phase]}"


def model_answer(records: Sequence[ModelRecord]) -> Iterator[str]:
    """The highest peak and what it consists of, how the attentions compare, and who ran out of memory."""
    known = [record for record in records if record.status == "ok" and need(record) is not None]
    if known:
        most, held = max(known, key=need_or_0), "Parameters, gradients and AdamW's state are"
        size = sum(getattr(most, field) or 0 for field in HELD)
        share = min(size / need_or_0(most), 1) if need(most) else 0
        where = f"{most.size} with {attention(most)} at S {most.query_len}"
        yield f"{where} {need_words(most)}. {held} {format_bytes(size)}, {share:.0%} of that."
        yield from dict.fromkeys(f"Backward from {record.backward_from}." for record in known if record.backward_from)
        largest = known[-1]
        alike = [record for record in known if (record.size, record.query_len) == (largest.size, largest.query_len)]
        ranked = sorted(alike, key=lambda record: record.saved_bytes or 0)
        low, high = ranked[0].saved_bytes or 0, ranked[-1].saved_bytes or 0
        if len(ranked) > 1 and high > 1.05 * low > 0:
            words = f"For backward, {attention(ranked[-1])} keeps {times_as_much(high, low)} {attention(ranked[0])}"
            yield f"{words}: {against(high, low)}."
        elif len(ranked) > 1:
            yield f"{listed(list(map(attention, ranked)))} keep about the same for backward."
    for record in records:
        if record.status == "oom":
            where = f"{record.size} with {attention(record)}, S {record.query_len}"
            yield f"{where}, does not fit: {failure_note(record)}."
            if size := sum(record.formulas.get(field, {}).get("value") or 0 for field in HELD):
                yield f"Its parameters, gradients and AdamW's state alone take {format_bytes(size)}."


def times_as_much(size: int, other: int) -> str:
    ratio = size / other if other else float("inf")
    return f"{ratio:.1f} times as much as" if ratio < 9.95 else f"{ratio:.0f} times as much as"


def against(size: int, other: int) -> str:
    """ "804 MiB against 28.3", with the second unit only where it differs."""
    texts = format_bytes(size).split(), format_bytes(other).split()
    return f"{' '.join(texts[0])} against {texts[1][0] if texts[0][1] == texts[1][1] else ' '.join(texts[1])}"


def padded_against_packed(records: Sequence[Record]) -> Iterator[str]:
    """What the padded batch with the most padding needs, against the same sequences packed."""
    known = [record for record in records if record.lengths is not None and need(record)]
    known = split_by_source(known)[0] or known
    pairs = [{row.layout: row for row in group} for group in groups_besides(known, ("bsz", "query_len", "kv_len"))]
    pairs = [pair for pair in pairs if len(pair) == 2]
    if not pairs:
        return
    lengths = min((pair["packed"] for pair in pairs), key=counted_percent).lengths or ()
    pairs = [pair for pair in pairs if pair["packed"].lengths == lengths]
    largest = max((pair["padded"] for pair in pairs), key=need_or_0)
    fields = [name for name in varying([pair["padded"] for pair in pairs]) if name not in OPERATORS_OWN]
    where = "".join(f", {describe(largest, [name])}" for name in fields).replace(", predicted", "")
    words = [
        f"{pair['packed'].operator} {against(need_or_0(pair['padded']), need_or_0(pair['packed']))}"
        for pair in pairs
        if all(getattr(pair["padded"], name) == getattr(largest, name) for name in fields)
    ]
    yield f"Padded against packed, {sequence_words(lengths)}{where}: {', '.join(words)}."


def who_ran_out(records: Sequence[Record]) -> Iterator[str]:
    """The smallest case at which each operator ran out of memory."""
    failed = [record for record in records if record.status == "oom"]
    for operator in values_in_order(failed, "operator"):
        mine = [record for record in failed if record.operator == operator]
        first = min(mine, key=size_of)
        more = f", and in {count_of(mine[1:])} more" if len(mine) > 1 else ""
        where = describe(first, ("bsz", "query_len", "kv_len", "dim", "dtype")).removesuffix("predicted").rstrip(", ")
        verb = "is predicted to run" if is_predicted(first) else "ran"
        yield f"{operator} {verb} out of memory{f' at {where}' if where else ''} ({failure_note(first)}){more}."


def what_is_missing(records: Sequence[Record]) -> Iterator[str]:
    """Why other cases have no figures; the most frequent reason is quoted."""
    for status, words in STATUS_WORDS.items():
        mine = [record for record in records if record.status == status]
        if mine:
            operators = Counter(record.operator for record in mine)
            names = [f"{name} ({count})" if len(mine) > 1 else f"{name}" for name, count in operators.items()]
            reasons = Counter(failure_note(record) for record in mine)
            reason = reasons.most_common(1)[0][0].rstrip(".")
            example = ", for example" if len(reasons) > 1 else ""
            yield f"{count_of(mine)} {words}: {', '.join(names)}{example}: {reason}."


def doubt_lines(records: Sequence[Record]) -> list[str]:
    """One line about times, one about bytes and one about predictions, for those that are doubtful."""
    lines = []
    measured, predicted = split_by_source(records)
    noisy = [record for record in measured if any(map(reason_in_short, record.doubts))]
    if noisy:
        reasons = Counter(reason for record in noisy for reason in {*map(reason_in_short, record.doubts)} if reason)
        why = ", ".join(sorted(reasons, key=lambda reason: (-reasons[reason], reason)))
        timed = [record for record in measured if record in noisy or record.forward_ms is not None]
        lines.append(f"{of_rows('Times', noisy, timed)} are noisy: {why}; bytes are not affected.")
    for rows, what, verb in ((measured, "Figures", "uncertain"), (predicted, "Predictions", "bounds")):
        found = Counter(doubt for record in rows for doubt in record.doubts if not reason_in_short(doubt))
        if found:
            doubtful = [record for record in rows if any(doubt in found for doubt in record.doubts)]
            # Doubts that differ only in their numbers are one reason.
            kinds = {NUMBER.sub("", doubt): doubt for doubt, _ in reversed(found.most_common())}
            more = f"; and {len(kinds) - 1} other reasons" if len(kinds) > 2 else "; and another" * (len(kinds) - 1)
            lines.append(f"{of_rows(what, doubtful, rows)} are {verb}: {found.most_common(1)[0][0]}{more}.")
    return lines


def of_rows(what: str, some: Sequence[Record], rows: Sequence[Record]) -> str:
    """ "Times of 2 of 5 rows", or "The times" of a single row."""
    return f"{what} of {len(some)} of {len(rows)} rows" if len(rows) > 1 else f"The {what.lower()}"


def doubt_details(records: Sequence[Record]) -> list[str]:
    """Every doubt, with its case."""
    fields = [field for field in CASE_FIELDS if field in ("operator", "query_len", "kv_len", *varying(records))]
    return [f"{describe(record, fields)}: {doubt}" for record in records for doubt in record.doubts]


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

"""Predictions: beside measurements of the same cases, and a single one as the sums of its terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memcheck.core.record import Record
from memcheck.core.verdict import alive_words
from memcheck.report.cases import (
    CASE_FIELDS,
    FIELD_WORDS,
    NEEDS,
    common_case,
    count_of,
    describe,
    pair,
    ratio,
    ratio_words,
    varying,
)
from memcheck.report.rows import MIB, PREDICTED, quotient
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.predict.replay import Prediction

COMPARED = (
    *NEEDS,
    *("state_bytes", "forward_max_allocated_bytes", "backward_max_allocated_bytes", "reserved_bytes"),
)
# The figures of a single prediction, in the order in which they are shown.
FIGURES = {
    "input_bytes": "inputs",
    "parameter_bytes": "parameters",
    "state_bytes": "state, part of the inputs",
    **{field: FIELD_WORDS[field] for field in NEEDS},
    "forward_max_allocated_bytes": "max_memory_allocated after the forward",
    "backward_max_allocated_bytes": "max_memory_allocated after the backward",
    "oom_in_use_bytes": "in use when there was no room",
    "reserved_bytes": "reserved: segments of the caching allocator",
}


def prediction_table(records: Sequence[Record]) -> Table:
    """One row for each case that was both measured and predicted."""
    pairs = pair(records)
    measured = [record for record, _ in pairs]
    fields = [name for name in CASE_FIELDS if name in {"operator", "query_len", "kv_len", *varying(measured)}]
    columns = [Column("case", "case"), Column("status", "measured"), Column("predicted_status", "predicted")]
    for name in COMPARED:
        stem, title = name.removesuffix("_bytes"), FIELD_WORDS[name]
        columns += [
            Column(f"{stem}_measured_mib", title, "MiB", ".2f", rank=2),
            Column(f"{stem}_predicted_mib", f"{title}, predicted", "MiB", ".2f", rank=3),
            Column(f"{stem}_words", f"{title}, measured / predicted", audience="people"),
            Column(f"{stem}_ratio", "measured / predicted", audience="programs"),
        ]
    columns += [Column("certainty", "predicted is", rank=4)]
    rows = [row_of(*both, fields) for both in pairs]
    title = f"Prediction beside measurement, {count_of(pairs)}: {common_case(measured)}"
    return Table("prediction", title, columns, rows, [PREDICTED, agreement(pairs)])


def row_of(measured: Record, predicted: Record, fields: Sequence[str]) -> list[Cell]:
    row: list[Cell] = [describe(measured, fields), status_words(measured), status_words(predicted)]
    for name in COMPARED:
        row += [quotient(getattr(record, name), MIB) for record in (measured, predicted)]
        row += [ratio_words(measured, predicted, name), ratio(measured, predicted, name)]
    return [*row, predicted.certainty]


def status_words(record: Record) -> str:
    """ "ok", or "oom in backward"."""
    return f"{record.status} in {record.oom_phase}" if record.oom_phase else record.status


def agreement(pairs: Sequence[tuple[Record, Record]]) -> str:
    """How many figures and verdicts agree with the prediction, and which figure is furthest off."""
    known = [
        (share, name, measured)
        for measured, predicted in pairs
        for name in COMPARED
        if (share := ratio(measured, predicted, name)) is not None
    ]
    same = sum(share == 1 for share, _, _ in known)
    judged = [both for both in pairs if {record.status for record in both} <= {"ok", "oom"}]
    right = sum(status_words(measured) == status_words(predicted) for measured, predicted in judged)
    counts = f"{same} of {len(known)} figures are as predicted, to the byte; {right} of {len(judged)} verdicts are."
    if same == len(known):
        return counts
    share, name, record = max(known, key=lambda one: abs(one[0] - 1))
    case = describe(record, CASE_FIELDS)
    return f"{counts} Furthest off: {FIELD_WORDS[name]} of {case}, {share:.4g} x the predicted."


def unknown_words(predictions: Sequence[Record]) -> list[str]:
    """A line for each unknown, with the operators that have it."""
    operators: dict[str, dict[str, None]] = {}
    for record in predictions:
        for doubt in record.doubts:
            operators.setdefault(doubt, {})[record.operator or "?"] = None
    return [f"not known of {', '.join(names)}: {doubt}" for doubt, names in operators.items()]


def figures_table(prediction: Prediction, *, with_terms: bool) -> Table:
    """The figures of a prediction; with their terms, each as a sum."""
    record = prediction.record
    columns = [
        Column("figure", "figure, and what it is the sum of" if with_terms else "figure"),
        Column("mib", "MiB", format=",.2f"),
        Column("bytes", "bytes", format=","),
    ]
    rows: list[list[Cell]] = []
    for field, title in FIGURES.items():
        if terms := prediction.terms.get(field):
            bound = ", not known to the byte" if field in prediction.bounds else ""
            rows.append([f"{title}{bound}", sum(terms.values()) / MIB, sum(terms.values())])
            largest = sorted(terms.items(), key=lambda it: -it[1]) if with_terms else ()
            rows += [[f"  {name}", size / MIB, size] for name, size in largest]
    return Table("terms", case_words(record), columns, rows)


def case_words(record: Record) -> str:
    """ "softplus: cuda, RTX-4090, float32, batch 8, dim 256, causal, train, predicted, S 4096, T 4096"."""
    lengths = f"S {record.query_len}" + (f", T {record.kv_len}" if record.kv_len else "")
    backend = f", {record.backend}" if record.backend else ""
    layout = f", {record.layout}" if record.layout else ""
    return f"{record.operator}: {common_case([record])}{layout}, {lengths}{backend}"


def alive_sentence(prediction: Prediction) -> str:
    """ "Alive at the peak: q 32 MiB, k 32 MiB, 7 more 1.5 MiB.", or "" without a peak."""
    peak = prediction.peak
    if peak is None or not peak.alive:
        return ""
    return f"Alive at the peak: {alive_words((allocation.name, allocation.bytes) for allocation in peak.alive)}."

"""Compares predictions with measurements of the same cases: bytes, ratios and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from memcheck.core.record import Record
from memcheck.report.cases import CASE_FIELDS, describe, varying
from memcheck.report.pairing import pair, ratio, ratio_words
from memcheck.report.rows import BYTES, DECODING, NAMES, common_case, count_of, number
from memcheck.report.tables import Cell, Column, Table

MIB = 2**20
FIGURES = {
    "forward_peak_bytes": "forward peak",
    "saved_bytes": "kept",
    "backward_peak_bytes": "backward peak",
    "state_bytes": "state",
    "forward_max_allocated_bytes": "max allocated, forward",
    "backward_max_allocated_bytes": "max allocated, backward",
    "reserved_bytes": "reserved",
}
LEGEND = "predicted: from the shapes alone, nothing run for it. same: to the byte, else measured / predicted."


def prediction_table(records: Sequence[Record]) -> Table:
    """One row for each case that was both measured and predicted."""
    pairs = pair(records).both
    measured = [record for record, _ in pairs]
    fields = [name for name in CASE_FIELDS if name in {"operator", "query_len", "kv_len", *varying(measured)}]
    columns = [Column("case", "case"), Column("status", "measured"), Column("predicted_status", "predicted")]
    for name, title in FIGURES.items():
        stem = name.removesuffix("_bytes")
        columns += [
            Column(f"{stem}_measured_mib", title, "MiB", ".2f"),
            Column(f"{stem}_predicted_mib", f"{title}, predicted", "MiB", ".2f"),
            Column(f"{stem}_words", "measured / predicted", audience="people"),
            Column(f"{stem}_ratio", "measured / predicted", audience="programs"),
        ]
    columns += [Column("basis", "predicted is"), Column("exact", "said to be exact")]
    rows = [row_of(*both, fields) for both in pairs]
    title = f"Prediction beside measurement, {count_of(pairs)}: {common_case(measured)}"
    return Table("prediction", title, columns, rows, [LEGEND, agreement(pairs)])


def row_of(measured: Record, predicted: Record, fields: Sequence[str]) -> list[Cell]:
    row: list[Cell] = [describe(measured, fields), verdict(measured), verdict(predicted)]
    for name in FIGURES:
        sizes = getattr(measured, name), getattr(predicted, name)
        row += [None if size is None else size / MIB for size in sizes]
        row += [ratio_words(measured, predicted, name), ratio(measured, predicted, name)]
    return [*row, predicted.basis, predicted.exact]


def verdict(record: Record) -> str:
    """ "ok", or "oom in backward"."""
    return f"{record.status} in {record.oom_phase}" if record.oom_phase else record.status


def agreement(pairs: Sequence[tuple[Record, Record]]) -> str:
    """How many figures and verdicts agree with the prediction, and which figure is furthest off."""
    known = [
        (share, name, measured)
        for measured, predicted in pairs
        for name in FIGURES
        if (share := ratio(measured, predicted, name)) is not None
    ]
    same = sum(share == 1 for share, _, _ in known)
    judged = [both for both in pairs if {record.status for record in both} <= {"ok", "oom"}]
    right = sum(verdict(measured) == verdict(predicted) for measured, predicted in judged)
    said = f"{same} of {len(known)} figures are as predicted, to the byte; {right} of {len(judged)} verdicts are."
    if same == len(known):
        return said
    share, name, record = max(known, key=lambda one: abs(one[0] - 1))
    return f"{said} Furthest off: {FIGURES[name]} of {describe(record, CASE_FIELDS)}, {share:.4g} x the predicted."


def prediction_row(measured: Record, predicted: Record) -> str:
    """The row below a measured one, in the same columns: "same", or measured / predicted, beside the MiB."""
    status = predicted.status if predicted.status != "ok" else "bound" if predicted.doubts else predicted.basis or ""
    names = NAMES.format("", "predicted", "", "", status)
    if predicted.status not in ("ok", "oom"):
        return f"{names}| {predicted.reason or predicted.status}"
    if predicted.mode == "decode":
        return names + decoding_cells(measured, predicted)
    row = names + "".join(
        byte_cells(measured, predicted, name) for name in ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes")
    )
    return f"{row}| OOM in {predicted.oom_phase}" if predicted.oom_phase else row.rstrip()


def byte_cells(measured: Record, predicted: Record, name: str) -> str:
    size = getattr(predicted, name)
    shown = number(None if size is None else size / MIB, 2)
    width = len(BYTES.format("", "", "")) - len("|") - 9 - 2
    return f"|{shown:>9} {ratio_words(measured, predicted, name) or '-':>{width}} "


def decoding_cells(measured: Record, predicted: Record) -> str:
    state, peak = predicted.state_bytes, predicted.forward_peak_bytes
    return DECODING.format(
        number(None if state is None else state / MIB, 3),
        ratio_words(measured, predicted, "state_bytes") or "-",
        "",
        number(None if peak is None else peak / MIB, 3),
        ratio_words(measured, predicted, "forward_peak_bytes") or "-",
    )


def unknown_words(predictions: Sequence[Record]) -> list[str]:
    """What could not be known, combined for all operators that share it."""
    operators: dict[str, dict[str, None]] = {}
    for record in predictions:
        for doubt in record.doubts:
            operators.setdefault(doubt, {})[record.operator or "?"] = None
    return [f"not known of {', '.join(names)}: {doubt}" for doubt, names in operators.items()]

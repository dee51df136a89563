"""Records of whole models as text: measured and predicted rows, and a table of parts by formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memcheck.core.model_record import ModelRecord, components_of, total
from memcheck.report.rows import doubts_note, failure_note, number

MIB = 2**20
SHORT_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
LETTERS = (
    "B: batch, S: context, E: dimension, D: of a head, H: heads, F: of the feed-forward, L: layers, V: vocabulary, "
    "P: parameters, N: parameter tensors,\nC: S/factor rounded up, K: S/256 rounded down. Bytes of a number: w of a "
    "parameter, a of an activation in a product, n of one that is summed up."
)
HELD = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "AdamW"}
PEAKS = {"forward_peak_bytes": "forward", "backward_peak_bytes": "backward", "optimizer_peak_bytes": "AdamW"}
COLUMNS = {**HELD, "saved_bytes": "kept", **PEAKS}
NAMES = "{:<6} {:<15} {:>5}  {:<8} {:<9} {:<9}"
BYTES = "|{:>10} {:>9} {:>9} |{:>10} |{:>10} {:>10} {:>9} "
TIMES = "|{:>9} {:>8} {:>9}"
PARTS = "{:<32} {:<38} {:>12} {:>12} {:>12}"
LEGEND = (
    "MiB. kept: for backward, by all layers. peak: the most that is alive in the phase, the model and AdamW's state "
    "included. ms: of a whole pass, its mean,\nstandard deviation and median. predicted: from the sizes alone; "
    "=: to the byte as measured; >=: at least, what is not known comes on top. -: there is none, or it is not known."
)


def model_header() -> str:
    groups = NAMES.format("", "", "", "", "", "") + f"|{'held, MiB':^31}|{'kept, MiB':^12}|{'peak, MiB':^32}|"
    columns = NAMES.format("size", "attention", "S", "mode", "dtype", "status")
    columns += BYTES.format(*COLUMNS.values()) + TIMES.format("ms, mean", "+-", "median")
    return f"{groups}\n{columns}\n{'-' * len(columns)}"


def model_row(record: ModelRecord) -> str:
    """The measured row, the predicted row below it, and notes on failures and doubts."""
    names = [record.size, attention(record), record.query_len, record.mode, precision(record), status(record)]
    cells = [mebibytes(getattr(record, field), bound=bound(record, field)) for field in COLUMNS]
    times = record.times.get("total", {})
    clock = [number(times.get(f"{name}_ms"), 1) for name in ("mean", "deviation", "median")]
    lines = [NAMES.format(*map(str, names)) + BYTES.format(*cells) + TIMES.format(*clock)]
    if record.predicted is not None:
        lines.append(predicted_row(record, record.predicted))
    lines += [f"{NAMES.format(*[''] * 6)}| {note}" for note in notes(record)]
    return "\n".join(line.rstrip() for line in lines)


def notes(record: ModelRecord) -> list[str]:
    """Notes on failures and doubts. Unknowns common to all predictions are listed once, below the table."""
    found = [failure_note(record)] if record.status != "ok" else []
    return [*found, *([doubts_note(record)] if record.doubts and record.source == "measured" else [])]


def predicted_row(record: ModelRecord, predicted: dict[str, Any]) -> str:
    cells = [
        "="
        if predicted[field] is not None and predicted[field] == getattr(record, field)
        else mebibytes(predicted[field], bound=field in predicted["bounds"])
        for field in COLUMNS
    ]
    words = ["", "  predicted", "", "", "", predicted["status"] if predicted["status"] != record.status else ""]
    return NAMES.format(*words) + BYTES.format(*cells) + "|"


def status(record: ModelRecord) -> str:
    return (
        record.status
        if record.source == "measured"
        else record.basis or "predicted"
        if record.status == "ok"
        else record.status
    )


def attention(record: ModelRecord) -> str:
    """The attention's name; whole models use the causal form of linear attention."""
    return "linear (causal)" if record.operator == "linear" else str(record.operator)


def precision(record: ModelRecord) -> str:
    name = SHORT_NAMES.get(record.dtype or "", str(record.dtype))
    return f"{name}/{SHORT_NAMES[record.autocast]}" if record.autocast else name


def bound(record: ModelRecord, field: str) -> bool:
    return field in record.bounds


def mebibytes(size: int | None, *, bound: bool = False) -> str:
    return "-" if size is None else f"{'>=' if bound else ''}{size / MIB:.2f}"


def model_title(records: Sequence[ModelRecord]) -> str:
    """The settings that all records share."""
    first = records[0]
    words = [str(first.device_name if first.source == "predicted" and first.device_name else first.device)]
    words += [f"batch {first.bsz}", f"feed-forward {first.feed_forward}"]
    words += ["activation checkpoints"] if first.checkpointing else []
    words += ["compiled"] if first.compiled else []
    return ", ".join(words)


def parts_table(record: ModelRecord) -> str:
    """Bytes kept for backward and held by each part of one case: by formula, predicted and measured."""
    measured, predicted = record.activations, (record.predicted or {}).get("activations")
    if record.source == "predicted":
        measured, predicted = None, record.activations
    columns = [components_of(found) if found else {} for found in (predicted, measured)]
    known = [name for name in record.formulas if name not in HELD_FORMULAS]
    names = list(dict.fromkeys([*known, *columns[0], *columns[1]]))
    names = [*(name for name in names if name.startswith("layer.")), *(n for n in names if not n.startswith("layer."))]
    title = f"{record.size}, {attention(record)}, S {record.query_len}, {record.mode}, {precision(record)}"
    lines = [
        f"{title}: {record.parameters:,} parameters",
        PARTS.format("kept for backward by", "formula", "bytes", "predicted", "measured"),
    ]
    for name in names:
        lines.append(part_line(name, record, [column.get(name) for column in columns]))
    sums = [total(found) if found else None for found in (predicted, measured)]
    lines.append(PARTS.format(f"all, of {record.layers} layers", "", "", *map(count, sums)))
    for name in HELD_FORMULAS:
        if name in record.formulas:
            figures = [(record.predicted or {}).get(name), getattr(record, name)]
            figures = [getattr(record, name), None] if record.source == "predicted" else figures
            lines.append(part_line(name, record, figures))
    return "\n".join(line.rstrip() for line in lines)


HELD_FORMULAS = ("parameters", "parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes")


def part_line(name: str, record: ModelRecord, figures: Sequence[int | None]) -> str:
    formula = record.formulas.get(name, {})
    return PARTS.format(
        name, formula.get("formula", "of the backend"), count(formula.get("value")), *map(count, figures)
    )


def count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"

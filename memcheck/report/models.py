"""Records of whole models: measured and predicted rows, and a table of parts by formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from memcheck.core.model_record import ModelRecord, components_of, total
from memcheck.report.cases import (
    FIELD_WORDS,
    NEEDS,
    attention,
    common_case,
    count_of,
    failure_note,
    ratio_words,
    varying,
)
from memcheck.report.rows import mib_column, named_columns, short_dtype
from memcheck.report.summary import doubt_lines
from memcheck.report.tables import SPREAD, TIME, Cell, Column, Table

LETTERS = (
    "B: batch, S: context, E: dimension, D: of a head, H: heads, F: of the feed-forward, L: layers, V: vocabulary, "
    "P: parameters, N: parameter tensors, C: S/factor rounded up, K: S/256 rounded down. Bytes of a number: w of a "
    "parameter, a of an activation in a product, n of one that is summed up."
)
LEGEND = (
    "kept for backward: by all layers. peak: the most that is alive in the phase, with the model and AdamW's state. "
    "time: the median of a whole pass, ± its standard deviation. predicted: from the sizes alone; same: equal to the "
    "byte, otherwise measured / predicted; >=: at least, as something is not known. -: none, or not known."
)
HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")  # What a model holds between steps.
TITLES = {"optimizer_bytes": "AdamW", "optimizer_peak_bytes": "peak AdamW"}


def total_time(record: ModelRecord, name: str) -> float | None:
    return record.times.get("total", {}).get(name)


def deviation(record: ModelRecord) -> Cell:
    """The standard deviation as a share of the mean. None for a single pass."""
    mean, spread = total_time(record, "mean_ms"), total_time(record, "deviation_ms")
    return spread / mean if mean and spread is not None and record.passes != 1 else None


def model_mib(field: str, rank: int) -> Column:
    """MiB, or a text for a lower bound."""
    column = mib_column(field, TITLES.get(field, FIELD_WORDS[field]), rank=rank)

    def read(record: ModelRecord) -> Cell:
        value = column.cell(record)
        return f">={value:.2f}" if field in record.bounds and isinstance(value, float) else value

    return dataclasses.replace(column, read=read)


def precision(record: ModelRecord) -> str:
    """ "fp32", or "fp32/bf16" under autocast."""
    name = str(short_dtype(record.dtype))
    return f"{name}/{short_dtype(record.autocast)}" if record.autocast else name


CASE = [
    Column("size", "size", rank=4),
    Column("operator", "attention", read=attention),
    Column("query_len", "S", read=lambda record: str(record.query_len)),
    Column("mode", "mode", rank=7),
    Column("dtype", "dtype", read=precision, rank=7),
]
FIGURES = [
    *(model_mib(field, rank=5) for field in HELD),
    *(model_mib(field, rank=0) for field in (*NEEDS, "optimizer_peak_bytes")),
    Column("median_ms", "time", format=TIME, read=lambda record: total_time(record, "median_ms")),
    Column("deviation", "±", format=SPREAD, read=deviation, rank=6),
]


def model_title(records: Sequence[ModelRecord]) -> str:
    """The settings that all records share."""
    first = records[0]
    words = [str(first.device_name if first.source == "predicted" and first.device_name else first.device)]
    words += [f"batch {first.bsz}", f"feed-forward {first.feed_forward}"]
    words += ["activation checkpoints"] if first.checkpointing else []
    words += ["compiled"] if first.compiled else []
    words += [f"predicted, {first.basis or 'unknown'}"] if first.source == "predicted" else []
    return ", ".join(words)


SETTINGS = (
    "bsz",
    "factor",
    "window",
    "feed_forward",
    "checkpointing",
    "compiled",
    "source",
    "status",
)  # Shown where they vary.
FOR_PROGRAMS = ("dim", "heads", "autocast", "layers", "parameters", "passes", "device", "device_name", "torch_version")


def models_table(records: Sequence[ModelRecord]) -> Table:
    """One row per model, with its prediction if it was measured and predicted."""
    changing = varying(records, SETTINGS)
    columns = [
        *(Column("query_len", "S") if column.key == "query_len" else column for column in CASE),
        *(named_columns([name], "all" if name in changing else "programs", 6)[0] for name in SETTINGS),
        *named_columns(FOR_PROGRAMS, "programs"),
        *FIGURES,
        Column("peak_by_predicted", "peak, measured / predicted", rank=3, read=peak_by_predicted),
        Column("note", "note", read=lambda record: failure_note(record) or None),
    ]
    title = f"{count_of(records)} of whole models: {common_case(records)}"
    return Table.of("models", title, columns, records, [LEGEND, *doubt_lines(records)])


def peak_by_predicted(record: ModelRecord) -> Cell:
    """ "same", or "1.02 x". None if the peak was not predicted, or only a bound of it."""
    predicted = SimpleNamespace(**{"peak_bytes": None, "bounds": (), **(record.predicted or {})})
    return None if "peak_bytes" in predicted.bounds else ratio_words(record, predicted, "peak_bytes")


HELD_FORMULAS = ("parameters", "parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes")


def parts_table(record: ModelRecord) -> Table:
    """Bytes kept for backward and held by each part of one case: by formula, predicted and measured."""
    sides = [vars(record), {}] if record.source == "predicted" else [record.predicted or {}, vars(record)]
    kept = [side.get("activations") for side in sides]
    parts = [components_of(found) if found else {} for found in kept]
    names = [name for name in dict.fromkeys([*record.formulas, *parts[0], *parts[1]]) if name not in HELD_FORMULAS]
    names.sort(key=lambda name: not name.startswith("layer."))

    def row(name: str, figures: Sequence[Mapping[str, Any]]) -> list[Cell]:
        formula = record.formulas.get(name, {})
        found = (side.get(name) for side in figures)
        return [name, formula.get("formula", "of the backend"), formula.get("value"), *found]

    rows = [row(name, parts) for name in names]
    rows.append([f"all, of {record.layers} layers", "", None, *(total(found) if found else None for found in kept)])
    rows += [row(name, sides) for name in HELD_FORMULAS if name in record.formulas]
    columns = [
        Column("part", "kept for backward by"),
        Column("formula", "formula", rank=1),
        Column("formula_bytes", "bytes", format=",", rank=1),
        Column("predicted_bytes", "predicted", format=","),
        Column("measured_bytes", "measured", format=","),
    ]
    case = f"{record.size}, {attention(record)}, S {record.query_len}, {record.mode}, {precision(record)}"
    return Table("parts", f"{case}: {record.parameters:,} parameters", columns, rows)

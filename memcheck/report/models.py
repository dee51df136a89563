"""Records of whole models: measured and predicted rows, a table of parts by formula, and the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from memcheck.core.model_record import ModelRecord, components_of, total
from memcheck.core.units import format_bytes
from memcheck.report.cases import (
    FIELD_WORDS,
    NEEDS,
    PHASE_WORDS,
    common_case,
    count_of,
    failure_note,
    is_predicted,
    need,
    phases_of,
    ratio_words,
    varying,
)
from memcheck.report.rows import (
    BELOW,
    SHORT_DTYPES,
    attribute,
    live_layout,
    mib_column,
    predicted_cells,
    row_and_note,
)
from memcheck.report.summary import (
    against,
    doubt_lines,
    exact_size,
    listed,
    times_as_much,
    what_was_measured,
    what_was_predicted,
)
from memcheck.report.tables import SPREAD, TIME, Cell, Column, Screen, Table

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
HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
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
        value = column.read(record)
        return f">={value:.2f}" if field in record.bounds and isinstance(value, float) else value

    return dataclasses.replace(column, read=read)


COLUMNS = [
    Column("size", "size", read=lambda record: record.size, width=6, rank=4),
    Column("operator", "attention", read=lambda record: attention(record), width=15),
    Column("query_len", "S", read=lambda record: str(record.query_len), width=5),
    Column("mode", "mode", read=lambda record: record.mode, width=8, rank=7),
    Column("dtype", "dtype", read=lambda record: precision(record), width=9, rank=7),
    *(model_mib(field, rank=5) for field in HELD),
    *(model_mib(field, rank=0) for field in (*NEEDS, "optimizer_peak_bytes")),
    Column("median_ms", "time", format=TIME, read=lambda record: total_time(record, "median_ms"), width=7),
    Column("deviation", "time", format=SPREAD, read=deviation, width=4, rank=6),
]

CASE = 5  # Columns of the case; the others are figures.


class ModelRows:
    """The rows of models that run one after another. timed: there will be times."""

    def __init__(self, screen: Screen | None = None, *, timed: bool = True) -> None:
        self.screen = screen or Screen()
        self.columns = [column for column in COLUMNS if timed or column.title != "time"]
        self.layout = live_layout(self.columns, (), self.screen)

    def header(self) -> str:
        return self.layout.header()

    def row(self, record: ModelRecord) -> str:
        """The record, and below it its prediction if it has one."""
        row = row_and_note(self.layout, [column.read(record) for column in self.columns], failure_note(record))
        if record.predicted is None:
            return row
        predicted = SimpleNamespace(**record.predicted)
        note = "" if predicted.status == record.status else predicted.status
        cells = predicted_cells(self.columns, record, predicted)
        return f"{row}\n{row_and_note(self.layout, ['', BELOW, *cells[2:]], note)}"

    def legend(self) -> str:
        return "\n".join(self.screen.fill(note) for note in [LEGEND, *self.layout.notes()])


def attention(record: ModelRecord) -> str:
    """The attention's name; whole models use the causal form of linear attention."""
    return "linear (causal)" if record.operator == "linear" else str(record.operator)


def precision(record: ModelRecord) -> str:
    name = SHORT_DTYPES.get(record.dtype or "", str(record.dtype))
    return f"{name}/{SHORT_DTYPES[record.autocast]}" if record.autocast else name


def model_title(records: Sequence[ModelRecord]) -> str:
    """The settings that all records share."""
    first = records[0]
    words = [str(first.device_name if first.source == "predicted" and first.device_name else first.device)]
    words += [f"batch {first.bsz}", f"feed-forward {first.feed_forward}"]
    words += ["activation checkpoints"] if first.checkpointing else []
    words += ["compiled"] if first.compiled else []
    words += [f"predicted, {first.basis or 'unknown'}"] if first.source == "predicted" else []
    return ", ".join(words)


SETTINGS = ("bsz", "factor", "feed_forward", "checkpointing", "compiled", "source", "status")  # Shown where they vary.
FOR_PROGRAMS = ("dim", "heads", "autocast", "layers", "parameters", "passes", "device", "device_name", "torch_version")


def models_table(records: Sequence[ModelRecord]) -> Table:
    """One row per model, with its prediction if it was measured and predicted."""
    changing = varying(records, SETTINGS)
    settings = [
        attribute(name, name.replace("_", " "), "all" if name in changing else "programs", rank=6) for name in SETTINGS
    ]
    case = [attribute("query_len", "S") if column.key == "query_len" else column for column in COLUMNS[:CASE]]
    columns = [
        *case,
        *settings,
        *(attribute(name, name.replace("_", " "), "programs") for name in FOR_PROGRAMS),
        *COLUMNS[CASE:],
        Column("peak_by_predicted", "peak, measured / predicted", rank=3, read=peak_by_predicted),
        Column("note", "note", read=lambda record: failure_note(record) or None),
    ]
    table = Table.of("models", f"{count_of(records)} of whole models: {common_case(records)}", columns, records)
    table.notes = [LEGEND, *doubt_lines(records)]
    return table


def peak_by_predicted(record: ModelRecord) -> Cell:
    """ "same", or "1.02 x". None if the peak was not predicted, or only a bound of it."""
    predicted = SimpleNamespace(**{"peak_bytes": None, "bounds": (), **(record.predicted or {})})
    return None if "peak_bytes" in predicted.bounds else ratio_words(record, predicted, "peak_bytes")


def model_summary(records: Sequence[ModelRecord]) -> list[str]:
    """Paragraphs: which models were measured or predicted, what the largest needs, and what is doubtful."""
    measured = [record for record in records if not is_predicted(record)]
    predicted = [record for record in records if is_predicted(record)]
    lines = [f"Whole models: {what_was_measured(measured)}"] if measured else []
    lines += [f"Whole models: {what_was_predicted(predicted)}"] if predicted else []
    return [*lines, *model_answer(measured or predicted), *doubt_lines(records)]


HELD_FORMULAS = ("parameters", "parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes")


def parts_table(record: ModelRecord) -> Table:
    """Bytes kept for backward and held by each part of one case: by formula, predicted and measured."""
    measured, predicted = record.activations, (record.predicted or {}).get("activations")
    if record.source == "predicted":
        measured, predicted = None, record.activations
    parts = [components_of(found) if found else {} for found in (predicted, measured)]
    known = [name for name in record.formulas if name not in HELD_FORMULAS]
    names = list(dict.fromkeys([*known, *parts[0], *parts[1]]))
    names.sort(key=lambda name: not name.startswith("layer."))

    def row(name: str, figures: Sequence[int | None]) -> list[Cell]:
        formula = record.formulas.get(name, {})
        return [name, formula.get("formula", "of the backend"), formula.get("value"), *figures]

    rows = [row(name, [part.get(name) for part in parts]) for name in names]
    sums = [total(found) if found else None for found in (predicted, measured)]
    rows.append([f"all, of {record.layers} layers", "", None, *sums])
    for name in HELD_FORMULAS:
        if name in record.formulas:
            figures = [(record.predicted or {}).get(name), getattr(record, name)]
            rows.append(row(name, figures[::-1] if record.source == "predicted" else figures))
    columns = [
        Column("part", "kept for backward by"),
        Column("formula", "formula", rank=1),
        Column("formula_bytes", "bytes", format=",", rank=1),
        Column("predicted_bytes", "predicted", format=","),
        Column("measured_bytes", "measured", format=","),
    ]
    case = f"{record.size}, {attention(record)}, S {record.query_len}, {record.mode}, {precision(record)}"
    return Table("parts", f"{case}: {record.parameters:,} parameters", columns, rows)


def model_answer(records: Sequence[ModelRecord]) -> Iterator[str]:
    """The highest peak and what it consists of, how the attentions compare, and who ran out of memory."""
    known = [record for record in records if record.status == "ok" and need(record) is not None]
    if known:
        yield peak_words(max(known, key=lambda record: need(record) or 0))
        yield from dict.fromkeys(f"Backward from {record.backward_from}." for record in known if record.backward_from)
        largest = known[-1]
        alike = [record for record in known if (record.size, record.query_len) == (largest.size, largest.query_len)]
        ranked = sorted(alike, key=lambda record: record.saved_bytes or 0)
        least, most = ranked[0].saved_bytes or 0, ranked[-1].saved_bytes or 0
        if len(ranked) > 1 and most > 1.05 * least > 0:
            words = f"For backward, {attention(ranked[-1])} keeps {times_as_much(most, least)} {attention(ranked[0])}"
            yield f"{words}: {against(most, least)}."
        elif len(ranked) > 1:
            yield f"{listed(list(map(attention, ranked)))} keep about the same for backward."
    for record in records:
        if record.status == "oom":
            name, held = attention(record), sum(record.formulas.get(field, {}).get("value") or 0 for field in HELD)
            yield f"{record.size} with {name}, S {record.query_len}, does not fit: {failure_note(record)}."
            if held:
                yield f"Its parameters, gradients and AdamW's state alone take {format_bytes(held)}."


def peak_words(record: ModelRecord) -> str:
    """ "small with softmax at S 128 needs 1.97 GiB at its peak, in the optimizer's step: 97 % of it is ..." """
    size = need(record) or 0
    (phase,) = [name for name in phases_of(record) if getattr(record, f"{name}_peak_bytes") == size][:1]
    held = sum(getattr(record, field) or 0 for field in HELD)
    words = f"{record.size} with {attention(record)} at S {record.query_len} needs {format_bytes(size)} at its peak, "
    share = f"{min(held / size, 1):.0%}" if size else "0%"
    words += f"in {PHASE_WORDS[phase]}. Parameters, gradients and AdamW's state are {format_bytes(held)}"
    return f"{words}, {share} of that."


def next_model_step(records: Sequence[ModelRecord], limit_bytes: int | None = None) -> str:
    """A command that predicts one change: activation checkpoints, or half the context. limit_bytes: of the run."""
    failed = [record for record in records if record.status == "oom"]
    record = failed[0] if failed else max(records, key=lambda record: need(record) or 0)
    change, words = (
        ("--checkpointing", "activation checkpoints") if not record.checkpointing else ("", "half the context")
    )
    context = record.query_len if change else max((record.query_len or 2) // 2, 1)
    flags = f"--size {record.size} --attention-type {record.operator} --context {context} --bsz {record.bsz}"
    flags += f" --mode {record.mode}" if record.mode != "train" else ""
    flags += f" --dtype {SHORT_DTYPES.get(record.dtype or '', record.dtype)}" if record.dtype != "float32" else ""
    flags += f" --autocast {SHORT_DTYPES[record.autocast]}" if record.autocast else ""
    flags += f" --feed-forward {record.feed_forward}" if record.feed_forward != "swiglu" else ""
    flags += f" --factor {record.factor}" if record.factor else ""
    flags += " --checkpointing"
    predicted_gpu = record.source == "predicted" and record.device == "cuda"
    flags += f" --device {record.device_name}" if predicted_gpu else " --device cpu" if record.device == "cpu" else ""
    flags += f" --memory-limit {exact_size(limit_bytes)}" if limit_bytes else ""
    return f"Next: memcheck profile-model {flags} --predict\n  predicts the same with {words}."

"""Tables of records: all rows, pivots by length and dimension, the layout of the cs336 table, and decoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from memcheck.core import errors, options
from memcheck.core.record import Record
from memcheck.report import accounting, cases, predictions
from memcheck.report import rows as shown
from memcheck.report.models import models_table
from memcheck.report.rows import decoding_columns, missing_words, quotient, value_or_verdict
from memcheck.report.tables import THREE_DIGITS, TIME, Cell, Column, Table, data_rows, write_files

BYTE_FIELDS = [
    field.name for field in dataclasses.fields(Record) if "_bytes" in field.name and "device" not in field.name
]
PIVOT_FIELDS = [field for field in BYTE_FIELDS if not field.startswith("oom")] + ["forward_ms", "backward_ms"]
# Fields shown by default in pivots; others can be requested.
STANDARD_PIVOTS = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "forward_ms", "backward_ms")
CASE_COLUMNS = [
    Column("operator", "operator"),
    shown.BACKEND,
    shown.MASK,
    *shown.named_columns(("dtype", "mode", "compiled")),
    Column("device", "device", read=cases.place_of),
    Column("source", "source"),
    Column("bsz", "B"),
    Column("query_len", "S", audience="programs"),
    Column("kv_len", "T", audience="programs"),
    *shown.named_columns(("dim", "heads", "core_dim", "factor", "window")),
]
ALWAYS_SHOWN = ("operator", "backend")
SIZES = ("bsz", "dim", "query_len", "kv_len")
OPERATORS_OWN = ("operator", *cases.OWN_SIZES, "compiled")  # Cases that differ in nothing else are comparable.


class Footnotes:
    """Numbers footnotes; equal sentences share a number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def marks(self, sentences: Sequence[str]) -> str | None:
        marks = [self.numbers.setdefault(sentence, len(self.numbers) + 1) for sentence in sentences if sentence]
        return ", ".join(f"[{mark}]" for mark in marks) or None

    def below(self, table: Table, more: Sequence[str] = ()) -> Table:
        """The table with the footnotes of its rows, and then more notes."""
        table.notes += [*(f"[{number}] {sentence}" for sentence, number in self.numbers.items()), *more]
        return table


def note_columns(footnotes: Footnotes) -> list[Column]:
    """Why a row failed or ran on another backend: a footnote for people, sentences for programs."""

    def marks(record: Record) -> Cell:
        backend = f"{record.backend}: {record.backend_reason}" if record.backend_reason else ""
        return footnotes.marks([cases.failure_note(record), backend])

    return [
        Column("note", "note", audience="people", read=marks),
        Column("reason", "reason", audience="programs", read=lambda record: cases.failure_note(record) or None),
        Column("doubts", "doubts", audience="programs", read=lambda record: " ".join(record.doubts) or None),
    ]


def case_columns(records: Sequence[Record]) -> list[Column]:
    """Columns of the case. In text, common settings move to the title; data formats keep every column."""
    changing = {*ALWAYS_SHOWN, *cases.varying(records, (*cases.CASE_FIELDS, "source"))}
    changing |= {"device"} if len({*map(cases.place_of, records)}) > 1 else set()
    if all(record.core_dim in (None, record.dim) for record in records):
        changing.discard("core_dim")
    columns = [
        column if column.key in changing else dataclasses.replace(column, audience="programs")
        for column in CASE_COLUMNS
    ]
    return [*columns, shown.lengths_column(records)]


def by_need(records: Sequence[Record]) -> list[tuple[Record, float | None]]:
    """The records by size, and those of equal sizes by their highest peak, each with its multiple of the least one."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault(cases.settings_of(record, OPERATORS_OWN), []).append(record)
    rows: list[tuple[Record, float | None]] = []
    for group in sorted(groups.values(), key=lambda group: [getattr(group[0], size) or 0 for size in SIZES]):
        group.sort(key=lambda record: math.inf if (size := cases.need(record)) is None else size)
        several = len(group) > 1 and cases.need(group[1]) is not None
        rows += [(record, quotient(cases.need(record), cases.need(group[0])) if several else None) for record in group]
    return rows


def rows_table(
    name: str, words: str, records: Sequence[Record], figures: Sequence[Column], notes: Sequence[str]
) -> Table:
    """One row per record: its case, its status if a case did not end well, the figures, and why some are missing."""
    footnotes, ordered = Footnotes(), by_need(records)
    records = [record for record, _ in ordered]
    least = {id(record): times for record, times in ordered}
    all_ok = all(record.status == "ok" for record in records)
    times = next((place for place, column in enumerate(figures) if column.format == TIME), len(figures))
    columns = [
        *case_columns(records),
        Column("status", "status", audience="programs" if all_ok else "all", rank=5),
        *figures[:times],
        Column("times_least", "x least", format=THREE_DIGITS, read=lambda record: least[id(record)], rank=2),
        *figures[times:],
        *note_columns(footnotes),
    ]
    title = f"{cases.count_of(records)}{words}: {cases.common_case(records)}"
    more = [shown.LEAST] if any(least.values()) else []
    return footnotes.below(Table.of(name, title, columns, records, [*notes, *more]), accounting.doubt_lines(records))


def records_table(records: Sequence[Record], units: bool = False) -> Table:
    """One row per record. units: U and bytes per query and key besides MiB."""
    parts = ("gradient_bytes", "workspace_bytes", "library_workspace_bytes", "reserved_bytes")
    more = (*parts, "forward_max_allocated_bytes", "backward_max_allocated_bytes")
    figures = [
        *(shown.mib_column(field, audience="programs") for field in ("input_bytes", "output_bytes", "parameter_bytes")),
        *shown.figure_columns(units, any(record.optimizer_peak_bytes is not None for record in records)),
        *(shown.mib_column(field, audience="programs") for field in more),
        *shown.named_columns(("passes", "device_name", "torch_version", "threads"), "programs"),
    ]
    timed = any(record.forward_ms is not None for record in records)
    notes = [shown.PEAKS, *([shown.TIMES] if timed else []), *([shown.UNITS] if units else [])]
    return rows_table("records", "", records, figures, notes)


def decode_table(records: Sequence[Record]) -> Table:
    """The size of the decoding state, and the memory and time of one step."""
    records = [record for record in records if record.mode == "decode"]
    words = " of decoding, one token after T of them"
    return rows_table("decode", words, records, decoding_columns(), [shown.DECODING])


HELD = ("input_bytes", "parameter_bytes", "output_bytes")
# The columns of the published cs336 table, in its order, each with its field, or the fields that it is the sum of.
CS336_COLUMNS = {
    "d_model": ("dim",),
    "seq_len": ("query_len",),
    "forward_ms": ("forward_ms",),
    "backward_ms": ("backward_ms",),
    "mem_after_inputs_mib": HELD,
    "mem_before_backward_mib": (*HELD, "saved_bytes"),
    "saved_activations_mib": ("saved_bytes",),
    "forward_peak_mib": ("output_bytes", "forward_peak_bytes"),
    "backward_peak_mib": ("backward_peak_bytes",),
    "status": ("status",),
    "compiled": ("compiled",),
}
CS336_NOTE = (
    "Columns, units and order are those of the published table. As there, mem_after_inputs and forward_peak include "
    "the output of the pass before. Unlike there, no figure includes cuBLAS workspaces, 16.25 MiB there. The "
    "published backward peak of eager rows is 8 score matrices; these lines need 6."
)


def sum_or_verdict(record: Record, fields: Sequence[str]) -> Cell:
    """The value of the field, or the sum of the fields in MiB, or the text in its place."""
    sizes = [getattr(record, field) for field in fields]
    if None in sizes or len(fields) == 1:
        return value_or_verdict(record, fields[-1]) if len(fields) == 1 else missing_words(record, fields[-1])
    return sum(sizes) / shown.MIB


def cs336_tables(records: Sequence[Record]) -> list[Table]:
    """One table per operator and further setting, with rows in the published order."""
    besides = ("query_len", "kv_len", "dim", "compiled")
    columns = [
        Column(name, name, format=".6g", read=partial(sum_or_verdict, fields=fields))
        for name, fields in CS336_COLUMNS.items()
    ]
    tables = []
    for rows in cases.groups_besides(records, besides):
        words = cases.describe(rows[0], [field for field in cases.CASE_FIELDS if field not in besides])
        rows.sort(key=lambda record: (record.dim or 0, record.query_len or 0, bool(record.compiled)))
        title = f"In the columns of cs336's published table: {words}"
        tables.append(Table.of(f"cs336 {words}", title, columns, rows, [CS336_NOTE]))
    return tables


def check_pivot(field: str) -> str:
    if field not in PIVOT_FIELDS:
        raise errors.unknown_name(options.named("pivot"), field, PIVOT_FIELDS)
    return field


def pivot_tables(records: Sequence[Record], field: str) -> list[Table]:
    """Length by dimension, one table per operator, dtype and further setting; with a single dimension, by operator."""
    across: str = "dim"
    besides: tuple[str, ...] = ("query_len", "kv_len", "dim")
    # Each operator has one row for each length and shared setting.
    one_each = len({cases.settings_of(record, cases.OWN_SIZES) for record in records}) == len(records)
    if "dim" not in cases.varying(records) and one_each:
        across, besides = "operator", ("query_len", "kv_len", "operator", *cases.OWN_SIZES)
    return [pivot_table(rows, field, across, besides) for rows in cases.groups_besides(records, besides)]


def pivot_table(records: Sequence[Record], field: str, across: str, besides: Sequence[str]) -> Table:
    heads = (
        sorted(cases.values_of(records, across)) if across == "dim" else list(cases.values_in_order(records, across))
    )
    rows = sorted({(record.query_len or 0, record.kv_len or 0, cases.lengths(record)) for record in records})
    cells = {(cases.lengths(record), getattr(record, across)): value_or_verdict(record, field) for record in records}
    titles = [f"dim {head}" if across == "dim" else str(head) for head in heads]
    form = TIME if field.endswith("_ms") else ".2f"
    words = cases.describe(records[0], [name for name in cases.CASE_FIELDS if name not in besides])
    return Table(
        f"{field} {words}",
        f"{pivot_title(field)}: {words}",
        [Column("length", "N"), *(Column(title, title, format=form) for title in titles)],
        [[label, *(cells.get((label, head)) for head in heads)] for _, _, label in rows],
    )


def stacked_pivot(records: Sequence[Record], field: str) -> Table:
    """All pivots of a field in a single table whose rows name their case, for files and the HTML page."""
    pivots = pivot_tables(records, field)
    columns = {column.key: column for pivot in pivots for column in pivot.columns[1:]}
    rows = [
        {**dict.fromkeys(columns), "case": pivot.title.partition(": ")[2], **row}
        for pivot in pivots
        for row in data_rows(pivot)
    ]
    heads = [Column("case", "case"), Column("length", "N"), *columns.values()]
    title = f"{pivot_title(field)}, by length and {'dimension' if 'dim' in cases.varying(records) else 'operator'}"
    return Table.of(f"pivot {field}", title, heads, rows)


def pivot_title(field: str) -> str:
    """A field's name and its unit: "peak forward, MiB". Times carry their units themselves."""
    if field.endswith("_ms"):
        return f"{field.removesuffix('_ms')} time"
    words = cases.FIELD_WORDS.get(field, field.replace("_bytes", "").replace("_", " "))
    return f"{words}, {'B' if 'per_token' in field else 'MiB'}"


def main_tables(records: Sequence[Record], units: bool = False) -> list[Table]:
    """All rows, and the tables of decoding, predictions, cs336 cases and whole models, as far as there are any."""
    operators = cases.operators_among(records)
    runs = [record for record in operators if record.mode != "decode"]
    tables = [records_table(runs, units)] if runs else []
    tables += [decode_table(operators)] if len(runs) < len(operators) else []
    if models := cases.models_among(records):
        beside_measured = {id(predicted) for _, predicted in cases.pair(models)}
        tables.append(models_table([model for model in models if id(model) not in beside_measured]))
    tables += [beside] if (beside := predictions.prediction_table(records)).rows else []
    return tables + cs336_tables([record for record in runs if (record.operator or "").startswith("cs336/")])


def growth_tables(records: Sequence[Record]) -> list[Table]:
    """Scaling, and the standard pivots that have a value, of the cases that have sizes."""
    runs = [record for record in cases.operators_among(records) if record.mode != "decode" and cases.has_sizes(record)]
    known = [field for field in STANDARD_PIVOTS if any(getattr(record, field) is not None for record in runs)]
    scaling = accounting.scaling_table(runs)
    return ([scaling] if scaling.rows else []) + [stacked_pivot(runs, field) for field in known]


def standard_tables(records: Sequence[Record]) -> list[Table]:
    """Every table that these records allow."""
    return [*main_tables(records), *growth_tables(records)]


def write_tables(records: Sequence[Record], folder: Path | str) -> list[Path]:
    """Writes tables.md and tables.json into the folder, and each table as tables/NAME.csv and .tex."""
    return write_files(standard_tables(records), Path(folder))

"""The columns of a record, and its row, so that a row can be printed as soon as its case is done."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from memcheck.core.doubts import reason_in_short
from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.report.cases import (
    FIELD_WORDS,
    NEEDS,
    failure_note,
    lengths,
    need,
    ratio_words,
    sequence_words,
    tokens_that_count,
)
from memcheck.report.tables import SPREAD, THREE_DIGITS, TIME, Cell, Column, Layout, Screen, Verdict, text_of

MIB = 2**20
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SHORT_DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
BACKWARD_FIELDS = ("backward_peak_bytes", "gradient_bytes", "backward_max_allocated_bytes", "backward_ms")
PEAKS = "Peaks count everything that is alive in the phase, inputs and output included. -: not known."
TIMES = "Times are medians of separate passes without tracking, ± half the distance between their quartiles."
UNITS = (
    "U: the bytes of one main tensor, (B,H,S,D), (B,S,R) or (B,S,E). B/ST: bytes per query and key, flat where memory "
    "grows with S*T, halved per doubling where it is linear. memcheck's operators have a fixed scratch for each "
    "thread, which shows where the rest is small."
)
PREDICTED = (
    "predicted: from the shapes alone, nothing was run for it. same: equal to the byte; otherwise measured / predicted."
)
BATCHES = (
    "batch: padded, a row for each sequence; packed, one row with a sequence behind the other. per token: the highest "
    "peak of all phases, for each token that is no padding."
)
BELOW = "  predicted"  # In the first column of a row of predictions.
DECODING = (
    "state: what T tokens leave for the next one. peak of a step: of the step from T tokens to T + 1, with the state "
    "before it and the state after it. -: not known."
)


def unit_bytes(record: Record) -> int | None:
    """U, the bytes of one main tensor: (B,S,R), (B,H,S,D) or (B,S,E), in the input dtype."""
    width = record.core_dim or record.dim
    if not (record.bsz and record.query_len and width and record.dtype in ITEM_BYTES):
        return None
    return record.bsz * record.query_len * width * ITEM_BYTES[record.dtype]


def verdict(record: Record, field: str) -> Verdict | None:
    """The text in place of a missing value. None if the case reached that phase or the field does not apply."""
    if record.status == "ok" or (field in BACKWARD_FIELDS and record.mode in ("inference", "decode")):
        return None
    return Verdict("OOM" if record.status == "oom" else record.status)


def value_or_verdict(record: Record, field: str) -> Cell:
    """The value, in MiB for byte fields, or its verdict."""
    value = getattr(record, field)
    if value is None:
        return verdict(record, field)
    return value / MIB if "_bytes" in field and "per_token" not in field else value


def quotient(size: int | None, divisor: int | None) -> float | None:
    return size / divisor if size is not None and divisor else None


def mask(record: Record) -> str:
    """The mask that was really applied: some operators are always, or never, causal."""
    return {True: "causal", False: "none", None: "-"}[record.causal]


def mib_column(field: str, title: str = "", audience: str = "all", form: str = ".2f", rank: int = 0) -> Column:
    def read(record: Record) -> Cell:
        return value_or_verdict(record, field)

    key = field.replace("_bytes", "_mib")
    return Column(key, title or FIELD_WORDS[field], "MiB", form, audience, read, rank, width=8)


def need_columns(field: str, units: bool) -> list[Column]:
    """MiB, U and bytes per query and key. units: whether people see all of them."""
    stem, title, audience = field.removesuffix("_bytes"), FIELD_WORDS[field], "all" if units else "programs"

    def in_units(record: Record) -> Cell:
        return quotient(getattr(record, field), unit_bytes(record))

    def per_pair(record: Record) -> Cell:
        return quotient(getattr(record, field), (record.query_len or 0) * (record.kv_len or 0))

    return [
        mib_column(field),
        Column(f"{stem}_u", title, "U", ".2f", audience, in_units, width=6),
        Column(f"{stem}_bytes_per_pair", title, "B/ST", ".1f", audience, per_pair, rank=1, width=5),
    ]


def spread(record: Record, field: str) -> float | None:
    """Half the distance between the quartiles, as a share of the median. None for a single pass."""
    quartiles, median = getattr(record, f"{field}_quartiles"), getattr(record, field)
    if quartiles is None or not median or record.passes == 1:
        return None
    return float(quartiles[1] - quartiles[0]) / 2 / median


def time_columns(field: str, title: str, rank: int = 0) -> list[Column]:
    """The median and its spread. Programs get the quartiles instead of the spread."""

    def quartile(which: int, name: str) -> Column:
        def read(record: Record) -> Cell:
            quartiles = getattr(record, f"{field}_quartiles")
            return None if quartiles is None else quartiles[which]

        return Column(f"{field}_{name}_quartile", f"{title}, {name} quartile", "ms", "", "programs", read)

    return [
        Column(field, title, "", TIME, "all", lambda record: value_or_verdict(record, field), rank, width=7),
        Column(
            f"{field}_spread", title, "", SPREAD, "people", lambda record: spread(record, field), max(rank, 4), width=4
        ),
        quartile(0, "lower"),
        quartile(1, "upper"),
    ]


def attribute(name: str, title: str, audience: str = "all", rank: int = 0) -> Column:
    """A column that holds an attribute as it is."""
    return Column(name, title, audience=audience, read=lambda record: getattr(record, name), rank=rank)


def lengths_column(records: Sequence[Any]) -> Column:
    """S and T for people: one number where they are equal."""

    def read(record: Record) -> Cell:
        if record.query_len is None:
            return None
        words = str(record.kv_len) if record.mode == "decode" and record.kv_len else lengths(record)
        return int(words) if words.isdecimal() else words

    if all(record.kv_len is None for record in records):
        title = "S"
    elif all(record.mode == "decode" for record in records):
        title = "tokens T"
    else:
        title = "S = T" if all(record.kv_len in (record.query_len, None) for record in records) else "S x T"
    return Column("lengths", title, format="d", audience="people", read=read)


def batch_columns(records: Sequence[Any]) -> list[Column]:
    """The columns of packed and padded batches, if there are any."""
    if all(record.lengths is None for record in records):
        return []

    def padding(record: Any) -> Cell:
        tokens = tokens_that_count(record)
        return None if tokens is None else 100 - 100 * tokens / (record.bsz * record.query_len)

    def words(record: Any) -> Cell:
        return None if record.lengths is None else sequence_words(record.lengths)

    return [
        attribute("layout", "batch"),
        Column("sequences", "sequences", audience="programs", read=words),
        Column("tokens", "tokens that count", format="d", read=tokens_that_count),
        Column("padding_percent", "padding", "%", ".0f", read=padding, rank=4),
    ]


PER_TOKEN = Column(
    "peak_bytes_per_token",
    "per token",
    "B",
    ".0f",
    read=lambda record: quotient(need(record), tokens_that_count(record)),
    width=6,
)
BACKEND = dataclasses.replace(attribute("backend", "backend", rank=5), width=12)
MASK = Column("causal", "mask", read=mask, rank=6, width=6)


def figure_columns(units: bool = False) -> list[Column]:
    """The bytes and times of a forward and backward. With units, times give way first where width is limited."""
    rank = 3 if units else 0
    return [
        *(column for field in NEEDS for column in need_columns(field, units)),
        *time_columns("forward_ms", "forward", rank),
        *time_columns("backward_ms", "backward", rank),
    ]


def decoding_columns() -> list[Column]:
    def per_token(record: Record) -> Cell:
        return value_or_verdict(record, "state_bytes_per_token")

    return [
        mib_column("state_bytes", form=THREE_DIGITS),
        mib_column("state_bytes_per_sequence", "state per sequence", form=THREE_DIGITS, rank=3),
        Column("state_bytes_per_token", "state per token", "B", ".1f", "all", per_token, width=7),
        mib_column("forward_peak_bytes", "peak of a step", form=THREE_DIGITS),
        *time_columns("forward_ms", "step"),
    ]


class LiveRows:
    """The rows of a table whose cases run one after another.

    cases: what will run; their names and sizes set the widths. units: U and bytes per query and key besides MiB.
    predicted: there will be rows of predictions. timed: there will be times.
    """

    def __init__(
        self,
        cases: Sequence[Any],
        *,
        units: bool = False,
        predicted: bool = False,
        timed: bool = True,
        screen: Screen | None = None,
    ) -> None:
        decoding = cases[0].mode == "decode"
        figures = decoding_columns() if decoding else figure_columns(units)
        masks = [] if decoding else [MASK]
        width = max(len(str(case.operator)) for case in cases)
        operator = dataclasses.replace(
            attribute("operator", "operator"), width=max(width, len(BELOW) if predicted else 0)
        )
        batch = batch_columns(cases)
        names = [operator, BACKEND, *masks, lengths_column(cases), *batch]
        figures = [*figures, PER_TOKEN] if batch else figures
        self.columns = [
            column
            for column in (*names, *figures)
            if column.audience != "programs" and (timed or column.format not in (TIME, SPREAD))
        ]
        self.screen = screen or Screen()
        self.layout = live_layout(self.columns, cases, self.screen)
        self.notes = [DECODING if decoding else PEAKS, *([TIMES] if timed else [])]
        self.notes += [BATCHES] if batch else []
        self.notes += [UNITS] if units and not decoding else []

    def header(self) -> str:
        return self.layout.header()

    def row(self, record: Record) -> str:
        """The figures, or the reason why there are none; below them the reason why some are missing."""
        return row_and_note(self.layout, [column.read(record) for column in self.columns], failure_note(record))

    def predicted_row(self, measured: Record, predicted: Record) -> str:
        """The row below a measured one: for each figure "same", or measured / predicted."""
        cells = predicted_cells(self.columns, measured, predicted)
        how = "bound" if predicted.doubts else predicted.basis
        cells = [how if column is BACKEND else cell for cell, column in zip(cells, self.columns, strict=True)]
        return row_and_note(self.layout, cells, failure_note(predicted))

    def legend(self) -> str:
        return "\n".join(self.screen.fill(note) for note in [*self.notes, *self.layout.notes()])


def live_layout(columns: Sequence[Column], cases: Sequence[Any], screen: Screen) -> Layout:
    """Widths for rows that are not known yet: a column's own width, else that of the cases' cells."""
    widths = [column.width or max(len(text_of(column.read(case), column)) for case in cases) for column in columns]
    return Layout(columns, widths, [bool(column.format or column.unit) for column in columns], screen)


def row_and_note(layout: Layout, cells: Sequence[Cell], note: str) -> str:
    """The row. A note stands in place of figures where none is known, else in a line of its own."""
    figures = [bool(column.width and column.format) for column in layout.columns]
    if note and all(
        cell in (None, "") or isinstance(cell, Verdict) for cell, figure in zip(cells, figures, strict=True) if figure
    ):
        cells = ["" if figure else cell for cell, figure in zip(cells, figures, strict=True)]
        line, width = f"{layout.row(cells)}  {note}", layout.screen.width
        if width is None or len(line) <= width:
            return line
    lines = textwrap.wrap(note, layout.screen.width or 10**6, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([layout.row(cells), *lines])


def predicted_cells(columns: Sequence[Column], measured: Any, predicted: Any) -> list[Cell]:
    """The cells of a prediction: a comparison where the measured figure is known, else the predicted one."""
    return [
        BELOW if place == 0 else predicted_cell(column, measured, predicted) for place, column in enumerate(columns)
    ]


def predicted_cell(column: Column, measured: Any, predicted: Any) -> Cell:
    field = column.key.replace("_mib", "_bytes")
    if "_mib" not in column.key:
        return ""
    words, size = ratio_words(measured, predicted, field), getattr(predicted, field)
    if size is not None and words != "same" and field in predicted.bounds:
        return f">={size / MIB:.2f}"
    return words if words is not None else quotient(size, MIB)


def explanation(record: Record, top: int) -> str:
    """Lists the tensors alive at the peaks and those kept for the backward, largest first."""
    size = record.query_len if record.kv_len is None else f"{record.query_len} x {record.kv_len}"
    lines = [f"{record.operator}, {size}"]
    alive = record.alive_at_peak or []
    for phase in dict.fromkeys(row.get("phase") for row in alive):
        peak = getattr(record, f"{phase}_peak_bytes", None)
        lines.append(f"  alive at the peak of the {phase}" + (f", {format_bytes(peak)}:" if peak is not None else ":"))
        lines += largest_first(((row["bytes"], row["name"]) for row in alive if row.get("phase") == phase), top)
    if record.saved_tensors:
        kept = "" if record.saved_bytes is None else f", {format_bytes(record.saved_bytes)}"
        lines.append(f"  kept for backward{kept}:")
        lines += largest_first(((row["bytes"], saved_name(row)) for row in record.saved_tensors), top)
    lines += [f"  note: {doubt}" for doubt in record.doubts if not reason_in_short(doubt)]
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]}\n  nothing is known beyond its row"


def saved_name(row: dict[str, Any]) -> str:
    shape = ",".join(map(str, row["shape"]))
    dtype = str(row["dtype"]).removeprefix("torch.")
    return f"{dtype} ({shape})" + (f", of {row['name']}" if row.get("name") else "")


def largest_first(rows: Iterable[tuple[int, Any]], top: int) -> list[str]:
    """Lines of a size and a name; the smallest entries are summed in the last line."""
    ordered = sorted(rows, key=lambda row: -row[0])
    largest, rest = (ordered, []) if len(ordered) <= top else (ordered[:top], ordered[top:])
    lines = [f"    {format_bytes(size):>10}  {name}" for size, name in largest]
    if rest:
        lines.append(f"    {format_bytes(sum(size for size, _ in rest)):>10}  {len(rest)} more")
    return lines

"""Tables of records: all rows, pivots by length and dimension, the layout of the cs336 table, and decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.report.cases import (
    CASE_FIELDS,
    describe,
    groups_besides,
    lengths,
    place_of,
    settings_of,
    values_in_order,
    values_of,
    varying,
)
from memcheck.report.rows import common_case, count_of, failure_note, mask, unit_bytes
from memcheck.report.tables import THREE_DIGITS, Cell, Column, Table, Verdict, write_files

MIB = 2**20
VERDICTS = {"oom": "OOM"}
BYTE_FIELDS = [
    field.name for field in dataclasses.fields(Record) if "_bytes" in field.name and "device" not in field.name
]
PIVOT_FIELDS = [field for field in BYTE_FIELDS if not field.startswith("oom")] + ["forward_ms", "backward_ms"]
# Fields shown by default in pivots; others can be requested.
STANDARD_PIVOTS = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "forward_ms", "backward_ms")
BACKWARD_FIELDS = ("backward_peak_bytes", "gradient_bytes", "backward_max_allocated_bytes", "backward_ms")


def verdict(record: Record, field: str) -> Verdict | None:
    """The text in place of a missing value. None if the case reached that phase or the field does not apply."""
    if record.status == "ok" or (field in BACKWARD_FIELDS and record.mode in ("inference", "decode")):
        return None
    return Verdict(VERDICTS.get(record.status, record.status))


def value_or_verdict(record: Record, field: str) -> Cell:
    """The value, in MiB for byte fields, or its verdict."""
    value = getattr(record, field)
    if value is None:
        return verdict(record, field)
    return value / MIB if field in BYTE_FIELDS and "per_token" not in field else value


def in_units(record: Record, field: str) -> float | None:
    value, unit = getattr(record, field), unit_bytes(record)
    return None if value is None or not unit else value / unit


def per_pair(record: Record, field: str) -> float | None:
    value, pairs = getattr(record, field), (record.query_len or 0) * (record.kv_len or 0)
    return None if value is None or not pairs else value / pairs


def quartile(record: Record, field: str, which: int) -> float | None:
    quartiles = getattr(record, field)
    return None if quartiles is None else quartiles[which]


Reader = Callable[[Record], Cell]


def mib_column(field: str, title: str, audience: str = "all", form: str = ".2f") -> tuple[Column, Reader]:
    key = field.replace("_bytes", "_mib")
    return Column(key, title, "MiB", form, audience), lambda record: value_or_verdict(record, field)


def need_columns(field: str, title: str) -> list[tuple[Column, Reader]]:
    """Columns for MiB, U and bytes per query and key."""
    stem = field.removesuffix("_bytes")
    return [
        mib_column(field, title),
        (Column(f"{stem}_u", title, "U", ".2f"), lambda record: in_units(record, field)),
        (Column(f"{stem}_bytes_per_pair", title, "B/ST", ".1f"), lambda record: per_pair(record, field)),
    ]


def time_columns(phase: str) -> list[tuple[Column, Reader]]:
    def quartile_column(which: int, name: str) -> tuple[Column, Reader]:
        column = Column(f"{phase}_ms_{name}_quartile", f"{phase}, {name} quartile", "ms", ".1f", "programs")
        return column, lambda record: quartile(record, f"{phase}_ms_quartiles", which)

    column = Column(f"{phase}_ms", phase, "ms", THREE_DIGITS)
    return [
        (column, lambda record: value_or_verdict(record, f"{phase}_ms")),
        quartile_column(0, "lower"),
        quartile_column(1, "upper"),
    ]


CASE_COLUMNS: list[tuple[Column, Reader]] = [
    (Column("operator", "operator"), lambda record: record.operator),
    (Column("backend", "backend"), lambda record: record.backend),
    (Column("causal", "mask"), mask),
    (Column("dtype", "dtype"), lambda record: record.dtype),
    (Column("mode", "mode"), lambda record: record.mode),
    (Column("compiled", "compiled"), lambda record: record.compiled),
    (Column("device", "device"), place_of),
    (Column("source", "source"), lambda record: record.source),
    (Column("bsz", "B"), lambda record: record.bsz),
    (Column("query_len", "S"), lambda record: record.query_len),
    (Column("kv_len", "T"), lambda record: record.kv_len),
    (Column("dim", "dim"), lambda record: record.dim),
    (Column("heads", "heads"), lambda record: record.heads),
    (Column("core_dim", "core dim"), lambda record: record.core_dim),
    (Column("factor", "factor"), lambda record: record.factor),
]
ALWAYS_SHOWN = ("operator", "backend", "query_len", "kv_len")
FIGURE_COLUMNS: list[tuple[Column, Reader]] = [
    (Column("status", "status"), lambda record: record.status),
    mib_column("input_bytes", "inputs", "programs"),
    mib_column("output_bytes", "output", "programs"),
    mib_column("parameter_bytes", "parameters", "programs"),
    *need_columns("forward_peak_bytes", "forward peak"),
    *need_columns("saved_bytes", "kept"),
    *need_columns("backward_peak_bytes", "backward peak"),
    mib_column("gradient_bytes", "gradients", "programs"),
    mib_column("workspace_bytes", "workspace", "programs"),
    mib_column("library_workspace_bytes", "library workspace", "programs"),
    mib_column("forward_max_allocated_bytes", "max allocated, forward", "programs"),
    mib_column("backward_max_allocated_bytes", "max allocated, backward", "programs"),
    mib_column("reserved_bytes", "reserved", "programs"),
    *time_columns("forward"),
    *time_columns("backward"),
    (Column("passes", "passes", audience="programs"), lambda record: record.passes),
    (Column("device_name", "device name", audience="programs"), lambda record: record.device_name),
    (Column("torch_version", "torch", audience="programs"), lambda record: record.torch_version),
    (Column("threads", "threads", audience="programs"), lambda record: record.threads),
]
NEEDS = (
    "U: the bytes of one main tensor, (B,H,S,D), (B,S,R) or (B,S,E). B/ST: bytes per query and key. kept: for the "
    "backward. Peaks count everything alive, inputs and output included; times are medians of a pass of their own. -: "
    "not known."
)


class Footnotes:
    """Numbers footnotes; equal sentences share a number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def marks(self, sentences: Sequence[str]) -> str | None:
        marks = [self.numbers.setdefault(sentence, len(self.numbers) + 1) for sentence in sentences if sentence]
        return ", ".join(f"[{mark}]" for mark in marks) or None

    def lines(self) -> list[str]:
        return [f"[{number}] {sentence}" for sentence, number in self.numbers.items()]


def remarks(record: Record) -> list[str]:
    """Why a row failed, why its backend differs from the requested one, and which figures are doubtful."""
    backend = [f"{record.backend}: {record.backend_reason}"] if record.backend_reason else []
    return [failure_note(record), *backend, *(f"doubtful: {doubt}" for doubt in record.doubts)]


def remark_columns(footnotes: Footnotes) -> list[tuple[Column, Reader]]:
    return [
        (Column("note", "note", audience="people"), lambda record: footnotes.marks(remarks(record))),
        (Column("reason", "reason", audience="programs"), lambda record: failure_note(record) or None),
        (Column("doubts", "doubts", audience="programs"), lambda record: " ".join(record.doubts) or None),
    ]


def table_of(name: str, title: str, readers: Sequence[tuple[Column, Reader]], records: Sequence[Record]) -> Table:
    rows = [[read(record) for _, read in readers] for record in records]
    return Table(name, title, [column for column, _ in readers], rows)


def case_columns(records: Sequence[Record]) -> list[tuple[Column, Reader]]:
    """Columns of the case. In text, common settings move to the title; data formats keep every column."""
    changing = {*ALWAYS_SHOWN, *varying(records)} | ({"device"} if len({*map(place_of, records)}) > 1 else set())
    changing |= {"source"} if len({record.source for record in records}) > 1 else set()
    if all(record.core_dim in (None, record.dim) for record in records):
        changing.discard("core_dim")
    return [
        (column if column.key in changing else dataclasses.replace(column, audience="programs"), read)
        for column, read in CASE_COLUMNS
    ]


SIZES = ("bsz", "dim", "query_len", "kv_len")


def records_table(records: Sequence[Record]) -> Table:
    """One row per record. Records of a sweep keep the order in which they ran; others are sorted by size."""
    records = sorted(records, key=lambda record: [getattr(record, size) or 0 for size in SIZES])
    footnotes = Footnotes()
    readers = [*case_columns(records), *FIGURE_COLUMNS, *remark_columns(footnotes)]
    table = table_of("records", f"{count_of(records)}: {common_case(records)}", readers, records)
    table.notes = [NEEDS, *footnotes.lines()]
    return table


def decode_table(records: Sequence[Record]) -> Table:
    """The size of the decoding state, and the memory and time of one step."""
    records = [record for record in records if record.mode == "decode"]
    footnotes = Footnotes()
    readers = [
        *(pair for pair in case_columns(records) if pair[0].key not in ("query_len", "kv_len")),
        (Column("kv_len", "tokens T"), lambda record: record.kv_len),
        (Column("status", "status"), lambda record: record.status),
        mib_column("state_bytes", "state", form=THREE_DIGITS),
        mib_column("state_bytes_per_sequence", "state per sequence", form=THREE_DIGITS),
        (
            Column("state_bytes_per_token", "state per token", "B", ".1f"),
            lambda record: value_or_verdict(record, "state_bytes_per_token"),
        ),
        mib_column("forward_peak_bytes", "peak of a step", form=THREE_DIGITS),
        (Column("step_ms", "step", "ms", THREE_DIGITS), lambda record: value_or_verdict(record, "forward_ms")),
        *remark_columns(footnotes),
    ]
    table = table_of(
        "decode",
        f"{count_of(records)} of decoding, one token after T of them: {common_case(records)}",
        readers,
        records,
    )
    table.notes = ["The peak of a step holds the state before it and the one after it.", *footnotes.lines()]
    return table


# The columns of the published cs336 table, in its order: its name -> our field.
CS336_COLUMNS: dict[str, Reader] = {
    "d_model": lambda record: record.dim,
    "seq_len": lambda record: record.query_len,
    "forward_ms": lambda record: value_or_verdict(record, "forward_ms"),
    "backward_ms": lambda record: value_or_verdict(record, "backward_ms"),
    "mem_after_inputs_mib": lambda record: sum_mib(record, ("input_bytes", "parameter_bytes", "output_bytes")),
    "mem_before_backward_mib": lambda record: sum_mib(
        record, ("input_bytes", "parameter_bytes", "output_bytes", "saved_bytes")
    ),
    "saved_activations_mib": lambda record: value_or_verdict(record, "saved_bytes"),
    "forward_peak_mib": lambda record: sum_mib(record, ("output_bytes", "forward_peak_bytes")),
    "backward_peak_mib": lambda record: value_or_verdict(record, "backward_peak_bytes"),
    "status": lambda record: record.status,
    "compiled": lambda record: record.compiled,
}
CS336_NOTE = (
    "Columns, units and order of the published table. mem_after_inputs and forward_peak hold one more output, that of "
    "the pass before, as there; cuBLAS workspaces, 16.25 MiB there, are in none. The published backward peak of eager "
    "rows is 8 score matrices where these lines take 6."
)


def sum_mib(record: Record, fields: Sequence[str]) -> Cell:
    sizes = [getattr(record, field) for field in fields]
    return verdict(record, fields[-1]) if None in sizes else sum(sizes) / MIB


def is_cs336(record: Record) -> bool:
    return (record.operator or "").startswith("cs336/")


def cs336_tables(records: Sequence[Record]) -> list[Table]:
    """One table per operator and further setting, with rows in the published order."""
    besides = ("query_len", "kv_len", "dim", "compiled")
    readers = [(Column(name, name, format=".6g"), read) for name, read in CS336_COLUMNS.items()]
    tables = []
    for rows in groups_besides(records, besides):
        words = describe(rows[0], [field for field in CASE_FIELDS if field not in besides])
        rows.sort(key=lambda record: (record.dim or 0, record.query_len or 0, bool(record.compiled)))
        table = table_of(f"cs336 {words}", f"As cs336 published theirs: {words}", readers, rows)
        table.notes = [CS336_NOTE]
        tables.append(table)
    return tables


def check_pivot(field: str) -> str:
    if field not in PIVOT_FIELDS:
        raise UsageError(f"--pivot {field} is unknown; known: {', '.join(PIVOT_FIELDS)}")
    return field


def pivot_tables(records: Sequence[Record], field: str) -> list[Table]:
    """Length by dimension, one table per operator, dtype and further setting; with a single dimension, by operator."""
    across: str = "dim"
    besides: tuple[str, ...] = ("query_len", "kv_len", "dim")
    if "dim" not in varying(records) and one_each(records):
        across, besides = "operator", ("query_len", "kv_len", "operator", *OPERATORS_OWN)
    return [pivot_table(rows, field, across, besides) for rows in groups_besides(records, besides)]


# Sizes that only some operators have. If every operator has one value, they do not distinguish operators.
OPERATORS_OWN = ("heads", "core_dim", "factor", "causal")


def one_each(records: Sequence[Record]) -> bool:
    """True if each operator has one row for each length and shared setting."""
    besides = [field for field in CASE_FIELDS if field in OPERATORS_OWN]
    return len({settings_of(record, besides) for record in records}) == len(records)


def pivot_table(records: Sequence[Record], field: str, across: str, besides: Sequence[str]) -> Table:
    heads = sorted(values_of(records, across)) if across == "dim" else list(values_in_order(records, across))
    rows = sorted({(record.query_len or 0, record.kv_len or 0, lengths(record)) for record in records})
    cells = {(lengths(record), getattr(record, across)): value_or_verdict(record, field) for record in records}
    titles = [f"dim {head}" if across == "dim" else str(head) for head in heads]
    what, unit = quantity(field)
    form = THREE_DIGITS if unit == "ms" else ".2f"
    words = describe(records[0], [name for name in CASE_FIELDS if name not in besides])
    return Table(
        f"{field} {words}",
        f"{what}, {unit}: {words}",
        [Column("length", "N"), *(Column(title, title, format=form) for title in titles)],
        [[label, *(cells.get((label, head)) for head in heads)] for _, _, label in rows],
    )


def stacked_pivot(records: Sequence[Record], field: str) -> Table:
    """All pivots of a field in a single table whose rows name their case, for files and the HTML page."""
    pivots = pivot_tables(records, field)
    columns = {column.key: column for pivot in pivots for column in pivot.columns[1:]}
    rows = []
    for pivot in pivots:
        what = pivot.title.partition(": ")[2]
        keys = [column.key for column in pivot.columns]
        for row in pivot.rows:
            cells = dict(zip(keys, row, strict=True))
            rows.append([what, cells["length"], *(cells.get(key) for key in columns)])
    heads = [Column("case", "case"), Column("length", "N"), *columns.values()]
    title = f"{', '.join(quantity(field))}, by length and {'dimension' if 'dim' in varying(records) else 'operator'}"
    return Table(f"pivot {field}", title, heads, rows)


def quantity(field: str) -> tuple[str, str]:
    """A field's name and its unit: "forward peak", "MiB"."""
    unit = "ms" if field.endswith("_ms") else "B" if "per_token" in field else "MiB"
    return field.removesuffix("_ms").replace("_bytes", "").replace("_", " "), unit


def standard_tables(records: Sequence[Record]) -> list[Table]:
    """Every table that these records allow."""
    from memcheck.report.predictions import prediction_table
    from memcheck.report.scaling import scaling_table

    runs = [record for record in records if record.mode != "decode"]
    tables = [records_table(runs)] if runs else []
    tables += [decode_table(records)] if len(runs) < len(records) else []
    tables += [beside] if (beside := prediction_table(records)).rows else []
    tables += cs336_tables([record for record in runs if is_cs336(record)])
    if (scaling := scaling_table(runs)).rows:
        tables.append(scaling)
    for field in STANDARD_PIVOTS:
        if any(getattr(record, field) is not None for record in runs):
            tables.append(stacked_pivot(runs, field))
    return tables


def write_tables(records: Sequence[Record], folder: Path | str) -> list[Path]:
    """Writes tables.md and tables.json into the folder, and each table as tables/NAME.csv and .tex."""
    return write_files(standard_tables(records), Path(folder))

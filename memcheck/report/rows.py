"""Records as text, one row each, so that a row can be printed as soon as its case is done."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import format_bytes

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
BYTE_COLUMNS = {
    "forward_peak_bytes": "forward peak",
    "saved_bytes": "kept for backward",
    "backward_peak_bytes": "backward peak",
}
NAMES = "{:<21} {:<12} {:<6} {:>11}  {:<11}"
BYTES = "|{:>9} {:>6} {:>5} "
TIMES = "|{:>8} {:>8}"
DECODING = "|{:>13} {:>12} {:>9} |{:>13} |{:>9}"
LEGEND_OF_UNITS = {
    "attention": "U: the bytes of one main tensor, (B,H,S,D) or (B,S,R); inputs and output alone are 4 U when S = T. "
    "B/ST: bytes per query and key,\nflat where memory grows with S*T, halving per doubling where it is linear. "
    "ms: medians of a\npass without measuring. -: not known. "
    "memcheck's operators have a fixed scratch for each thread, which shows where the rest is small.",
    "tokens": "U: the bytes of x, (B,S,E); input and output are 2 U, beside the weight. B/ST: there are no keys. "
    "ms: medians of a pass\nwithout measuring. -: not known. "
    "A chunk of rows takes up to 4 MiB, which shows where x is small.",
}


def unit_bytes(record: Record) -> int | None:
    """U, the bytes of one main tensor: (B,S,R), (B,H,S,D) or (B,S,E), in the input dtype."""
    width = record.core_dim or record.dim
    if not (record.bsz and record.query_len and width and record.dtype in ITEM_BYTES):
        return None
    return record.bsz * record.query_len * width * ITEM_BYTES[record.dtype]


def legend(records: Sequence[Record]) -> str:
    """Explains the columns, for records of attention or of operators without keys."""
    return LEGEND_OF_UNITS["tokens" if all(record.kv_len is None for record in records) else "attention"]


def table_header() -> str:
    groups = NAMES.format("", "", "", "", "") + "".join(f"|{title:^23}" for title in BYTE_COLUMNS.values())
    columns = NAMES.format("operator", "backend", "mask", "S x T", "status") + BYTES.format("MiB", "U", "B/ST") * 3
    groups += f"|{'time, ms':^17}"
    columns += TIMES.format("forward", "backward")
    return f"{groups.rstrip()}\n{columns}\n{'-' * len(columns)}"


def table_row(record: Record) -> str:
    """One line, plus a line for a failure after the first figures, and a line for doubts."""
    lengths = f"{record.query_len}" if record.kv_len is None else f"{record.query_len} x {record.kv_len}"
    names = NAMES.format(record.operator or "-", record.backend or "-", mask(record), lengths, record.status)
    notes = [doubts_note(record)] if record.doubts else []
    note = failure_note(record)
    if all(getattr(record, field) is None for field in BYTE_COLUMNS):
        row = f"{names}| {note}"
    else:
        row = names + cells(record)
        notes = [note, *notes] if note else notes
    return "\n".join([row, *(f"{' ' * len(names)}| {note}" for note in notes)])


def doubts_note(record: Record) -> str:
    """The doubts without their numbers; the record has the full sentences."""
    return "doubtful: " + "; ".join(doubt.partition(":")[0] for doubt in record.doubts)


def cells(record: Record) -> str:
    times = TIMES.format(number(record.forward_ms, 1), number(record.backward_ms, 1))
    return "".join(byte_cells(record, field) for field in BYTE_COLUMNS) + times


def mask(record: Record) -> str:
    """The mask that was really applied: some operators are always, or never, causal."""
    return {True: "causal", False: "none", None: "-"}[record.causal]


def byte_cells(record: Record, field: str) -> str:
    size, unit = getattr(record, field), unit_bytes(record)
    if size is None:
        return BYTES.format("-", "-", "-")
    pairs = (record.query_len or 0) * (record.kv_len or 0)
    return BYTES.format(
        number(size / 2**20, 2), number(size / unit if unit else None, 2), number(size / pairs if pairs else None, 1)
    )


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def failure_note(record: Record) -> str:
    if record.status == "ok":
        return ""
    reason = textwrap.shorten(record.reason or "", 180, placeholder=" ...")
    if record.status != "oom":
        return reason or record.status
    if record.oom_phase is None:
        return f"OOM: {reason}"
    note = f"OOM in {record.oom_phase}"
    if record.oom_requested_bytes is not None and record.oom_in_use_bytes is not None:
        note += f": {format_bytes(record.oom_requested_bytes)} requested, "
        note += f"{format_bytes(record.oom_in_use_bytes)} in use"
    return note


def count_of(records: Sequence[Any]) -> str:
    return "1 case" if len(records) == 1 else f"{len(records)} cases"


def common_case(records: Sequence[Any]) -> str:
    """The settings that all records share: "cpu, float32, batch 1, dim 256, 4 heads, causal, train"."""
    words = {
        "device": "{}",
        "device_name": "{}",
        "dtype": "{}",
        "bsz": "batch {}",
        "dim": "dim {}",
        "heads": "{} heads",
        "core_dim": "core dim {}",
        "factor": "factor {}",
        "mode": "{}",
    }
    parts = []
    for field, text in words.items():
        values = {getattr(record, field, None) for record in records} - {None}
        if len(values) == 1 and (field != "core_dim" or values != {record.dim for record in records}):
            parts.append(text.format(values.pop()))
    causal = {record.causal for record in records} - {None}
    if len(causal) == 1:
        parts.insert(-1, "causal" if causal.pop() else "not causal")
    if {getattr(record, "source", None) for record in records} == {"predicted"}:
        parts.append("predicted")
    return ", ".join(parts)

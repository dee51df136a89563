"""Details of a single case: its largest tensors, and the row of a decoding step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.report import DECODING, NAMES, failure_note, number

DECODING_COLUMNS = ("state, MiB", "KiB/sequence", "B/token", "peak, MiB", "ms")
DECODING_LEGEND = (
    "state: what T tokens leave behind for the next one, a sequence and a token of it; peak: of one step from T tokens "
    "to T + 1,\nthe state before it and the one after it included. -: not known."
)


def decoding_header() -> str:
    columns = NAMES.format("operator", "backend", "dtype", "tokens T", "status") + DECODING.format(*DECODING_COLUMNS)
    return f"{columns}\n{'-' * len(columns)}"


def decoding_row(record: Record) -> str:
    names = NAMES.format(
        record.operator or "-", record.backend or "-", short_dtype(record), record.kv_len or "-", record.status
    )
    if record.state_bytes is None:
        return f"{names}| {failure_note(record)}"
    row = names + DECODING.format(
        number(record.state_bytes / 2**20, 3),
        number(scaled(record.state_bytes_per_sequence, 2**10), 1),
        number(record.state_bytes_per_token, 1),
        number(scaled(record.forward_peak_bytes, 2**20), 3),
        number(record.forward_ms, 3),
    )
    note = failure_note(record)
    return f"{row}\n{' ' * len(names)}| {note}" if note else row


def short_dtype(record: Record) -> str:
    return (record.dtype or "-").replace("bfloat", "bf").replace("float", "fp")


def scaled(size: float | None, unit: int) -> float | None:
    return None if size is None else size / unit


def explanation(record: Record, top: int) -> str:
    """Lists the tensors alive at the peaks and those kept for the backward, largest first."""
    lengths = record.query_len if record.kv_len is None else f"{record.query_len} x {record.kv_len}"
    lines = [f"{record.operator}, {lengths}"]
    alive = record.alive_at_peak or []
    for phase in dict.fromkeys(row.get("phase") for row in alive):
        peak = getattr(record, f"{phase}_peak_bytes", None)
        lines.append(f"  alive at the peak of the {phase}" + (f", {format_bytes(peak)}:" if peak is not None else ":"))
        lines += listing(((row["bytes"], row["name"]) for row in alive if row.get("phase") == phase), top)
    if record.saved_tensors:
        kept = "" if record.saved_bytes is None else f", {format_bytes(record.saved_bytes)}"
        lines.append(f"  kept for backward{kept}:")
        lines += listing(((row["bytes"], saved_name(row)) for row in record.saved_tensors), top)
    lines += [f"  note: {doubt}" for doubt in record.doubts]
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]}\n  nothing is known beyond its row"


def saved_name(row: dict[str, Any]) -> str:
    shape = ",".join(map(str, row["shape"]))
    dtype = str(row["dtype"]).removeprefix("torch.")
    return f"{dtype} ({shape})" + (f", of {row['name']}" if row.get("name") else "")


def listing(rows: Iterable[tuple[int, Any]], top: int) -> list[str]:
    """Lines of a size and a name; the smallest entries are summed in the last line."""
    ordered = sorted(rows, key=lambda row: -row[0])
    shown, rest = (ordered, []) if len(ordered) <= top else (ordered[:top], ordered[top:])
    lines = [f"    {format_bytes(size):>10}  {name}" for size, name in shown]
    if rest:
        lines.append(f"    {format_bytes(sum(size for size, _ in rest)):>10}  {len(rest)} more")
    return lines

"""The columns of a record's figures, and a list of what was alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import format_bytes, largest_first
from memcheck.report.cases import FIELD_WORDS, NEEDS, lengths
from memcheck.report.tables import SPREAD, THREE_DIGITS, TIME, Cell, Column, Verdict

MIB = 2**20
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SHORT_DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
BACKWARD_FIELDS = ("backward_peak_bytes", "gradient_bytes", "backward_max_allocated_bytes", "backward_ms")
PEAKS = "Peaks count everything that is alive in the phase, inputs and output included. -: not known."
TIMES = "Times are medians of separate passes without tracking, ± half the distance between their quartiles."
DECODING = (
    "state: what T tokens leave for the next one. peak of a step: of the step from T tokens to T + 1, with the state "
    "before it and the state after it. -: not known."
)
LEAST = "x least: the highest peak of all phases, as a multiple of the least one of the same sizes."
UNITS = (
    "U: the bytes of one main tensor, (B,H,S,D), (B,S,R) or (B,S,E). B/ST: bytes per query and key, flat where memory "
    "grows with S*T, halved per doubling where it is linear. memcheck's operators have a fixed scratch for each "
    "thread, which shows where the rest is small."
)
PREDICTED = (
    "predicted: from the shapes alone, nothing was run for it. same: equal to the byte; otherwise measured / predicted."
)


def short_dtype(dtype: str | None) -> str | None:
    """The short name of a dtype: "fp32"."""
    return dtype and SHORT_DTYPES.get(dtype, dtype)


def unit_bytes(record: Record) -> int | None:
    """U, the bytes of one main tensor: (B,S,R), (B,H,S,D) or (B,S,E), in the input dtype."""
    width = record.core_dim or record.dim
    if not (record.bsz and record.query_len and width and record.dtype in ITEM_BYTES):
        return None
    return record.bsz * record.query_len * width * ITEM_BYTES[record.dtype]


def missing_words(record: Record, field: str) -> Verdict | None:
    """The text in place of a missing value. None if the case reached that phase or the field does not apply."""
    if record.status == "ok" or (field in BACKWARD_FIELDS and record.mode in ("inference", "decode")):
        return None
    return Verdict("OOM" if record.status == "oom" else record.status)


def value_or_verdict(record: Record, field: str) -> Cell:
    """The value, in MiB for byte fields, or the text in its place."""
    value = getattr(record, field)
    if value is None:
        return missing_words(record, field)
    return value / MIB if "_bytes" in field and "per_token" not in field else value


def quotient(size: int | None, divisor: int | None) -> float | None:
    return size / divisor if size is not None and divisor else None


def mask(record: Record) -> str:
    """The mask that was really applied: some operators are always, or never, causal."""
    return {True: "causal", False: "none", None: "-"}[record.causal]


def named_columns(names: Iterable[str], audience: str = "all", rank: int = 0) -> list[Column]:
    """Columns of attributes whose titles are their names."""
    return [Column(name, name.replace("_", " "), audience=audience, rank=rank) for name in names]


def mib_column(field: str, title: str = "", audience: str = "all", form: str = ".2f", rank: int = 0) -> Column:
    key, read = field.replace("_bytes", "_mib"), partial(value_or_verdict, field=field)
    return Column(key, title or FIELD_WORDS[field], "MiB", form, audience, read, rank)


def need_columns(field: str, units: bool) -> list[Column]:
    """MiB, U and bytes per query and key. units: whether people see all of them."""
    stem, title, audience = field.removesuffix("_bytes"), FIELD_WORDS[field], "all" if units else "programs"

    def in_units(record: Record) -> Cell:
        return quotient(getattr(record, field), unit_bytes(record))

    def per_pair(record: Record) -> Cell:
        return quotient(getattr(record, field), (record.query_len or 0) * (record.kv_len or 0))

    return [
        mib_column(field),
        Column(f"{stem}_u", title, "U", ".2f", audience, in_units),
        Column(f"{stem}_bytes_per_pair", title, "B/ST", ".1f", audience, per_pair, rank=1),
    ]


def relative_spread(record: Record, field: str) -> float | None:
    """Half the distance between the quartiles, as a share of the median. None for a single pass."""
    low, high = quartile(record, field, 0), quartile(record, field, 1)
    median = getattr(record, field)
    return None if low is None or high is None or not median or record.passes == 1 else (high - low) / 2 / median


def quartile(record: Record, field: str, which: int) -> float | None:
    """The lower (0) or upper (1) quartile of a time."""
    quartiles = getattr(record, f"{field}_quartiles")
    return None if quartiles is None else float(quartiles[which])


def time_columns(field: str, title: str, rank: int = 0) -> list[Column]:
    """The median and its spread. Programs get the quartiles instead of the spread."""
    spread = partial(relative_spread, field=field)
    return [
        Column(field, title, "", TIME, "all", partial(value_or_verdict, field=field), rank),
        Column(f"{field}_spread", "±", "", SPREAD, "people", spread, max(rank, 4)),
        *(
            Column(
                f"{field}_{name}_quartile",
                f"{title}, {name} quartile",
                "ms",
                audience="programs",
                read=partial(quartile, field=field, which=which),
            )
            for which, name in enumerate(("lower", "upper"))
        ),
    ]


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


BACKEND = Column("backend", "backend", rank=5)
MASK = Column("causal", "mask", read=mask, rank=6)


def figure_columns(units: bool = False, steps: bool = False) -> list[Column]:
    """The bytes and times of a forward and backward. With units, times give way first where width is limited.

    steps: there are steps of an optimizer.
    """
    rank = 3 if units else 0
    return [
        *(column for field in NEEDS for column in need_columns(field, units)),
        *([mib_column("optimizer_peak_bytes")] if steps else []),
        *time_columns("forward_ms", "forward", rank),
        *time_columns("backward_ms", "backward", rank),
    ]


def decoding_columns() -> list[Column]:
    field = "state_bytes_per_token"
    return [
        mib_column("state_bytes", form=THREE_DIGITS),
        mib_column("state_bytes_per_sequence", "state per sequence", form=THREE_DIGITS, rank=3),
        Column(field, "state per token", "B", ".1f", read=partial(value_or_verdict, field=field)),
        mib_column("forward_peak_bytes", "peak of a step", form=THREE_DIGITS),
        *time_columns("forward_ms", "step"),
    ]


def explanation(record: Record, top: int) -> str:
    """Lists the tensors alive at the peaks and those kept for the backward, largest first."""
    size = record.query_len if record.kv_len is None else f"{record.query_len} x {record.kv_len}"
    lines = [f"{record.operator}, {size}"]
    alive = record.alive_at_peak or []
    for phase in dict.fromkeys(row.get("phase") for row in alive):
        peak = getattr(record, f"{phase}_peak_bytes", None)
        lines.append(f"  alive at the peak of the {phase}" + (f", {format_bytes(peak)}:" if peak is not None else ":"))
        lines += size_lines(((row["bytes"], row["name"]) for row in alive if row.get("phase") == phase), top)
    if record.saved_tensors:
        kept = "" if record.saved_bytes is None else f", {format_bytes(record.saved_bytes)}"
        lines.append(f"  kept for backward{kept}:")
        lines += size_lines(((row["bytes"], saved_name(row)) for row in record.saved_tensors), top)
    lines += [f"  note: {doubt}" for doubt in record.doubts if not doubt.about_times]
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]}\n  nothing is known beyond its row"


def size_lines(sizes: Iterable[tuple[int, str]], top: int) -> list[str]:
    return [f"    {format_bytes(size):>10}  {name}" for size, name in largest_first(sizes, top)]


def saved_name(row: dict[str, Any]) -> str:
    shape = ",".join(map(str, row["shape"]))
    dtype = str(row["dtype"]).removeprefix("torch.")
    return f"{dtype} ({shape})" + (f", of {row['name']}" if row.get("name") else "")

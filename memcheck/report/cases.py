"""Identifies cases: a record's settings as text, the settings that vary among records, and selection by settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memcheck.core.errors import UsageError
from memcheck.core.record import Record

CASE_FIELDS = (
    "operator",
    "bsz",
    "query_len",
    "kv_len",
    "dim",
    "heads",
    "core_dim",
    "factor",
    "dtype",
    "causal",
    "mode",
    "compiled",
)
WORDS = {
    "bsz": "batch {}",
    "query_len": "S {}",
    "kv_len": "T {}",
    "dim": "dim {}",
    "heads": "{} heads",
    "core_dim": "core dim {}",
    "factor": "factor {}",
}
YES_AND_NO = {"causal": ("causal", "not causal"), "compiled": ("compiled", "not compiled")}


def case_of(record: Record) -> tuple[Any, ...]:
    return tuple(getattr(record, field) for field in CASE_FIELDS)


def place_of(record: Record) -> str | None:
    """ "cpu", or "cuda:1"."""
    return record.device if record.device_index is None else f"{record.device}:{record.device_index}"


def values_of(records: Iterable[Record], field: str) -> set[Any]:
    return {getattr(record, field) for record in records} - {None}


def values_in_order(records: Iterable[Record], field: str) -> list[Any]:
    return [value for value in dict.fromkeys(getattr(record, field) for record in records) if value is not None]


def varying(records: Sequence[Record], fields: Sequence[str] = CASE_FIELDS) -> list[str]:
    """Fields with more than one value. A field that some operators lack does not count as varying for that reason."""
    return [field for field in fields if len(values_of(records, field)) > 1]


def describe(record: Record, fields: Sequence[str]) -> str:
    """Describes a case: "softplus, S 512, T 512, dim 64"; one length if S and T are equal."""
    words: list[str] = []
    for field in fields:
        value = getattr(record, field)
        if value is None or (field == "core_dim" and value == record.dim) or (field == "compiled" and not value):
            continue
        if field == "kv_len" and value == record.query_len and "query_len" in fields:
            words[-1] = f"S = T = {value}"
        elif field in YES_AND_NO:
            words.append(YES_AND_NO[field][0 if value else 1])
        else:
            words.append(WORDS.get(field, "{}").format(value))
    if record.source == "predicted":
        words.append("predicted")
    return ", ".join(words)


def settings_of(record: Record, besides: Sequence[str]) -> tuple[Any, ...]:
    """The case's settings and device without some fields. A core dimension equal to dim is not a setting of its own."""
    fields = [field for field in CASE_FIELDS if field not in besides]
    follows = "dim" in besides and record.core_dim == record.dim
    values = (None if field == "core_dim" and follows else getattr(record, field) for field in fields)
    return (*values, place_of(record), record.device_name, record.source)


def groups_besides(records: Sequence[Record], besides: Sequence[str]) -> list[list[Record]]:
    """Groups of records that differ only in the given fields."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(settings_of(record, besides), []).append(record)
    return list(groups.values())


def lengths(record: Record) -> str:
    """ "512", or "256 x 512" if queries and keys differ in number."""
    if record.kv_len in (record.query_len, None):
        return f"{record.query_len}"
    return f"{record.query_len} x {record.kv_len}"


def select(records: Sequence[Record], wanted: Mapping[str, str]) -> list[Record]:
    """The records whose fields have the wanted values; seq_len matches both lengths."""
    return [record for record in records if all(reads_as(record, *pair) for pair in wanted.items())]


def reads_as(record: Record, field: str, text: str) -> bool:
    fields = ("query_len", "kv_len") if field == "seq_len" else (field,)
    # The combinator has no keys; its query length is its sequence length.
    values = [getattr(record, name) for name in fields]
    return any(value is not None for value in values) and all(
        value is None or str(value).lower() == text.lower() for value in values
    )


def parse_wanted(text: str) -> dict[str, str]:
    """Parses "operator=softplus,seq-len=512" into fields and the wanted values."""
    known = (*CASE_FIELDS, "seq_len", "device", "status", "backend", "source")
    wanted = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        field = name.strip().replace("-", "_")
        if not equals or field not in known:
            names = ", ".join(known).replace("_", "-")
            raise UsageError(f"--case must look like operator=softplus,seq-len=512 with any of {names}, got {word!r}")
        wanted[field] = value.strip()
    return wanted

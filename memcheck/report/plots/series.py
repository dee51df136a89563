"""Prepares records for pictures: which may share one, what varies along an axis, and which records form a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import Style, format_bytes, format_time
from memcheck.report.cases import WORDS, YES_AND_NO, has_sizes, is_model, on_measured_devices, split_by_source
from memcheck.report.plots.style import distinct_styles

# Records that differ in one of these fields never share a picture. Whole models may differ in dtype and mode.
SETTING = {"device": "device", "device_name": "device", "kind": "kind", "dtype": "dtype", "mode": "mode"}
# Other fields that may distinguish records of one operator and size; each combination becomes a line.
VARIANT = (
    *("size", "dtype", "mode", "bsz", "heads", "core_dim", "factor", "window", "causal", "feed_forward"),
    *("autocast", "checkpointing", "backend", "threads", "device_index", "device_uuid", "torch_version"),
    *("memcheck_version", "allocator"),
)
VARIANT_WORDS = {
    **WORDS,
    "threads": "{} threads",
    "device_index": "device {}",
    "torch_version": "torch {}",
    "memcheck_version": "memcheck {}",
}
AXES = {
    "length": "sequence length",
    "kv_len": "key length",
    "query_len": "query length",
    "dim": "token dimension",
    "bsz": "batch size",
    "heads": "heads",
    "core_dim": "core dimension",
    "factor": "compression factor",
    "window": "window",
}
# The axes that are drawn without being asked for, in order of preference.
NATURAL = ("length", "kv_len", "query_len", "dim", "bsz")
# Statuses without a value that are marked where the value would be.
MARKED = ("oom", "skipped", "timeout", "killed")
Points = tuple[tuple[int, Record], ...]
Values = list[tuple[int, float]]


@dataclass(frozen=True)
class Quantity:
    """The value that a panel shows: the maximum of some fields of a record."""

    title: str
    fields: tuple[str, ...]

    @property
    def unit(self) -> str:
        return "ms" if self.fields[0].endswith("_ms") else "bytes"

    def text(self, value: float) -> str:
        return format_time(value) if self.unit == "ms" else format_bytes(value)

    def value(self, record: Record) -> float | None:
        sizes = [getattr(record, name) for name in self.fields]
        return None if any(size is None for size in sizes) else max(sizes)

    def along(self, points: Points) -> Values:
        """Position and value of the points that have a value."""
        return [(x, value) for x, record in points if (value := self.value(record)) is not None]

    def from_terms(self, record: Record) -> int | None:
        """The value as predicted from the shapes alone, by the record's terms."""
        terms = [(record.terms or {}).get(name) for name in self.fields]
        return None if None in terms else max(sum((named or {}).values()) for named in terms)

    def missing(self, record: Record) -> str | None:
        """The record's status, if that is the reason why it has no value."""
        if record.status == "oom":
            needs_backward = any(name.startswith(("backward", "gradient")) for name in self.fields)
            return "oom" if needs_backward or record.oom_phase != "backward" else None
        return record.status if record.status in MARKED and self.value(record) is None else None


@dataclass(frozen=True)
class Line:
    """One operator's records along x, measured and predicted, one of each for each x."""

    name: str
    style: Style
    measured: Points
    predicted: Points

    @property
    def points(self) -> Points:
        """The record of each x: the measured one, or else the predicted one."""
        return tuple(sorted({**dict(self.predicted), **dict(self.measured)}.items()))

    def expected(self, quantity: Quantity) -> Values:
        """Predicted values: of predictions, and where there is none, from the shapes alone."""
        terms = {x: float(size) for x, record in self.measured if (size := quantity.from_terms(record))}
        return sorted({**terms, **dict(quantity.along(self.predicted))}.items())

    def expected_at(self, x: int, quantity: Quantity) -> float:
        return dict(self.expected(quantity)).get(x, 0.0)


@dataclass(frozen=True)
class View:
    """Records of one panel: they differ only in x and in the operator. fixed: their sizes on the other axes."""

    x: str
    fixed: Mapping[str, int]
    records: list[Record]

    @property
    def positions(self) -> set[int]:
        return {position(record, self.x) for record in self.records}

    def words(self) -> str:
        """ "sequence length 512, compiled" """
        return ", ".join(
            ("compiled" if size else "eager") if axis == "compiled" else f"{AXES[axis]} {size}"
            for axis, size in self.fixed.items()
        )

    def lines(self, styles: Mapping[str, Style]) -> list[Line]:
        measured, predicted = map(self.points_by_name, split_by_source(self.records))
        names = dict.fromkeys([*measured, *predicted])
        drawn = distinct_styles(names, styles)
        return [Line(name, drawn[name], measured.get(name, ()), predicted.get(name, ())) for name in names]

    def points_by_name(self, records: Sequence[Record]) -> dict[str, Points]:
        groups: dict[str, dict[int, Record]] = {}
        for name, record in zip(line_names(records, self.x), records, strict=True):
            # If several records have the same settings, the newest is drawn.
            groups.setdefault(name, {})[position(record, self.x)] = record
        return {name: tuple(sorted(points.items())) for name, points in groups.items()}


def position(record: Record, axis: str) -> int:
    """The record's position on an axis; 0 if it lacks that size."""
    if axis == "length":
        return int(record.kv_len or record.query_len or 0)
    return int(getattr(record, axis) or 0)


def kind_of(record: Record) -> str:
    if is_model(record):
        return "models"
    if not has_sizes(record):
        return "callables"
    return "token operators" if record.kv_len is None else "attention"


def shared(records: Sequence[Record], name: str) -> list[Any]:
    """The values of a setting. A record without the value (a killed process) takes the one that all others share."""
    if name == "kind":
        return [kind_of(record) for record in records]
    values = [position(record, "bsz") or None if name == "bsz" else getattr(record, name) for record in records]
    if name not in ("device", "device_name"):  # Whole models may differ in the others.
        values = [None if is_model(record) else value for record, value in zip(records, values, strict=True)]
    known = set(values) - {None}
    stand_in = next(iter(known)) if len(known) == 1 else None
    return [stand_in if value is None else value for value in values]


def split(records: Sequence[Record], names: Sequence[str]) -> list[tuple[dict[str, Any], list[Record]]]:
    """Groups of records that agree in these settings, with their values."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record, *key in zip(records, *(shared(records, name) for name in names), strict=True):
        groups.setdefault(tuple(key), []).append(record)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups.items()]


def groups_of(records: Sequence[Record], x: str | None = None) -> list[tuple[str, list[Record]]]:
    """The groups of records that may share a picture along x, each with the words that tell it from the others."""
    found: list[tuple[dict[str, Any], list[Record]]] = []
    for setting, group in split(on_measured_devices(records), list(SETTING)):
        batches = split(group, [] if axis_among(group, x) == "bsz" else ["bsz"])
        found += [({**setting, **batch}, rows) for batch, rows in batches]
    telling = [name for name in (*SETTING, "bsz") if len({setting.get(name) for setting, _ in found} - {None}) > 1]
    groups = []
    for setting, rows in found:
        values = {name: setting[name] for name in telling if setting.get(name) is not None}
        words = (f"batch {value}" if name == "bsz" else str(value) for name, value in values.items())
        groups.append((", ".join(words), rows))
    return groups


def axes_of(records: Sequence[Record]) -> tuple[str, ...]:
    """The axes of the sizes: one length if S and T change together, else both."""
    pairs = {(position(record, "query_len"), position(record, "kv_len")) for record in records}
    queries, keys = ({pair[side] for pair in pairs} for side in (0, 1))
    in_step = len(queries) == len(keys) == len(pairs) or keys == {0}
    return ("length", "dim", "bsz") if in_step else ("kv_len", "query_len", "dim", "bsz")


def varies(records: Sequence[Record], axis: str) -> bool:
    return len({position(record, axis) for record in records} - {0}) > 1


def axis_among(records: Sequence[Record], x: str | None) -> str:
    """The axis that was asked for, or the first one that varies; one length if S and T change together."""
    axes = axes_of(records)
    if x in ("length", "kv_len", "query_len") and x not in axes:
        return axes[0]
    return x or next((axis for axis in NATURAL if axis in axes and varies(records, axis)), axes[0])


def views_along(records: Sequence[Record], x: str) -> list[View]:
    """A view for each combination of the other sizes, from small to large, and for eager and compiled.

    Records without a position on x are left out.
    """
    records = [record for record in records if position(record, x)]
    names = [axis for axis in (*axes_of(records), "compiled") if axis != x]
    names = [axis for axis in names if len({position(record, axis) for record in records}) > 1]
    groups: dict[tuple[int, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(position(record, axis) for axis in names), []).append(record)
    return [View(x, dict(zip(names, key, strict=True)), groups[key]) for key in sorted(groups)]


def axis_words(records: Sequence[Record], x: str) -> str:
    """The label of the x axis, with the lengths that do not vary; of those alone if x does not vary either."""
    uneven = any(record.kv_len not in (record.query_len, None) for record in records)
    if not varies(records, x):
        fixed = lengths_in(records, ("query_len", "kv_len") if uneven else ("length",))
        return f"at {fixed}" if fixed else ""
    if x == "length" and uneven:
        return "key length, the query length in step"
    fixed = lengths_in(records, [axis for axis in axes_of(records) if axis != x])
    return ", at ".join(filter(None, [AXES[x], fixed]))


def lengths_in(records: Sequence[Record], axes: Sequence[str]) -> str:
    """The lengths that all records have: "query length 4, key length 8"."""
    sizes = {axis: {position(record, axis) for record in records} - {0} for axis in axes if "len" in axis}
    return ", ".join(f"{AXES[axis]} {some.pop()}" for axis, some in sizes.items() if len(some) == 1)


def line_names(records: Sequence[Record], x: str) -> list[str]:
    """Line names: the operator, plus the fields that distinguish its records at the same x."""

    def variant(record: Record, name: str) -> Any:
        if name == "bsz":
            return position(record, name) or None
        value = getattr(record, name, None)
        return "off" if name == "autocast" and value is None and is_model(record) else value

    stacks: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        stacks.setdefault((record.operator or "?", position(record, x)), []).append(record)
    telling: dict[str, dict[str, None]] = {}
    for (operator, _), stack in stacks.items():
        differing = [name for name in VARIANT if len({variant(record, name) for record in stack} - {None}) > 1]
        telling.setdefault(operator, {}).update({name: None for name in differing if name != x})
    names = []
    for record in records:
        words = [record.operator or "?"]
        for name in telling[words[0]]:
            if (value := variant(record, name)) is not None:
                yes_and_no = YES_AND_NO.get(name)
                words.append(yes_and_no[not value] if yes_and_no else VARIANT_WORDS.get(name, "{}").format(value))
        names.append(", ".join(words))
    return names


def undrawn_note(records: Sequence[Record], x: str) -> str:
    """Names the cases that the picture leaves out: unsupported, failed, or without this size."""
    rest = {f"{record.operator} ({record.status})" for record in records if record.status not in ("ok", *MARKED)}
    rest |= {f"{record.operator} (no {AXES[x]})" for record in records if has_sizes(record) and not position(record, x)}
    return f"not drawn: {', '.join(sorted(rest))}" if rest else ""

"""Prepares records for plotting: which may share a plot, which sizes vary, which records form a line, and the words of
titles, captions and file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.cases import counted_percent, has_sizes, is_predicted, on_measured_devices, split_by_source
from memcheck.report.plots.style import distinct_styles

# Records that differ in one of these fields never share a plot.
SETTING = {"device": "device", "device_name": "device", "dtype": "dtype", "mode": "mode", "bsz": "batch size"}
# Other fields that may distinguish records of one operator and shape; each combination becomes a line.
VARIANT = {
    "layout": "{}",
    "heads": "{} heads",
    "core_dim": "core dim {}",
    "factor": "factor {}",
    "window": "window {}",
    "causal": "{}",
    "compiled": "{}",
    "backend": "{}",
    "threads": "{} threads",
    "device_index": "device {}",
    "device_uuid": "{}",
    "torch_version": "torch {}",
    "memcheck_version": "memcheck {}",
    "allocator": "{}",
}
VALUE_WORDS = {
    ("causal", True): "causal",
    ("causal", False): "no mask",
    ("compiled", True): "compiled",
    ("compiled", False): "eager",
}
AXES = {
    "length": "sequence length",
    "query_len": "query length",
    "kv_len": "key length",
    "dim": "token dimension",
    "counted": "used tokens, %",
}
# Cases with these statuses have no value and are marked where the value would be.
MARKED = ("oom", "skipped", "timeout", "killed")


Points = tuple[tuple[int, Record], ...]


@dataclass(frozen=True)
class Quantity:
    """The value that a panel shows: the maximum of some fields of a record."""

    title: str
    fields: tuple[str, ...]
    unit: str = "bytes"  # or "ms"
    label: str = ""

    def value(self, record: Record) -> float | None:
        sizes = [getattr(record, name) for name in self.fields]
        return None if any(size is None for size in sizes) else max(sizes)

    def along(self, points: Points) -> list[tuple[int, float]]:
        """Position and value of the points that have a value."""
        return [(x, value) for x, record in points if (value := self.value(record)) is not None]

    def from_terms(self, record: Record) -> int | None:
        """The same value, computed from the record's terms."""
        terms = [(record.terms or {}).get(name) for name in self.fields]
        return None if None in terms else max(sum((named or {}).values()) for named in terms)

    def missing(self, record: Record) -> str | None:
        """The record's status, if that is the reason why it has no value."""
        if record.status == "oom":
            needs_backward = any(name.startswith(("backward", "gradient")) for name in self.fields)
            return "oom" if needs_backward or record.oom_phase != "backward" else None
        return record.status if record.status in MARKED and self.value(record) is None else None


FORWARD = Quantity("Forward", ("forward_peak_bytes",), label="peak memory")
BACKWARD = Quantity(
    "Forward + backward",
    ("forward_peak_bytes", "backward_peak_bytes"),
    label="peak memory",
)
WHOLE_STEP = Quantity(
    "With the optimizer's step",
    ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes"),
    label="peak memory",
)
FORWARD_TIME = Quantity("Forward", ("forward_ms",), "ms", "time")
BACKWARD_TIME = Quantity("Backward", ("backward_ms",), "ms", "time")
STATE = Quantity("State", ("state_bytes",), label="memory")
STEP = Quantity("Peak of one step", ("forward_peak_bytes",), label="memory")


Quantities = Sequence[Quantity] | Callable[[Sequence[Record]], Sequence[Quantity]]


def quantity_of(name: str) -> Quantity:
    """The quantity of a single record field."""
    unit = "ms" if name.endswith("_ms") else "bytes"
    words = name.removesuffix("_ms").removesuffix("_bytes").replace("_", " ")
    return Quantity(
        words, (name,), unit, f"{words} {'time' if unit == 'ms' else 'memory'}".replace("peak memory", "peak")
    )


@dataclass(frozen=True)
class Line:
    """One operator's records along x, one for each x.

    predictions: of the same operator, drawn beside its measurements. Without measurements, they are the points.
    """

    name: str
    style: Style
    points: Points
    predictions: Points = ()

    @property
    def predicted(self) -> bool:
        """True if no record of the line was measured."""
        return all(is_predicted(record) for _, record in self.points)


@dataclass(frozen=True)
class View:
    """Records that differ only in x and in the operator."""

    x: str
    fixed: Mapping[str, int]
    records: list[Record] = field(default_factory=list)

    @property
    def positions(self) -> list[int]:
        return sorted({position(record, self.x) for record in self.records})

    @property
    def label(self) -> str:
        """The label of the x axis."""
        if self.x == "length" and any(record.kv_len not in (record.query_len, None) for record in self.records):
            return "key length, the query length in step"
        lengths = [f"{AXES[axis]} {size}" for axis, size in self.fixed.items() if axis != "dim"]
        return ", at ".join([AXES[self.x], ", ".join(lengths)]) if lengths else AXES[self.x]

    def fixed_words(self, *fields: str) -> str:
        """ "sequence length 512, token dimension 64", of the given fields or of all fixed axes."""
        return ", ".join(f"{AXES[name]} {size}" for name, size in self.fixed.items() if not fields or name in fields)

    def lines(self, styles: Mapping[str, Style]) -> list[Line]:
        """The lines of the operators. UsageError: the records did not all run under the same conditions."""
        refuse_mixed(self.records)
        measured, predicted = map(self.points_by_name, split_by_source(self.records))
        names = dict.fromkeys([*measured, *predicted])
        drawn = distinct_styles(names, styles)
        return [
            Line(name, drawn[name], measured[name], predicted.get(name, ()))
            if name in measured
            else Line(name, drawn[name], predicted[name])
            for name in names
        ]

    def points_by_name(self, records: Sequence[Record]) -> dict[str, Points]:
        groups: dict[str, dict[int, Record]] = {}
        for name, record in zip(line_names(records, self.x), records, strict=True):
            # If several records have the same settings, the newest is drawn.
            groups.setdefault(name, {})[position(record, self.x)] = record
        return {name: tuple(sorted(points.items())) for name, points in groups.items()}


def position(record: Record, axis: str) -> int:
    """The record's position on an axis; 0 if it lacks that size."""
    if axis == "counted":
        return counted_percent(record)
    if axis in ("length", "kv_len"):
        return int(record.kv_len or record.query_len or 0)
    return int(getattr(record, axis) or 0)


def split_settings(records: Sequence[Record]) -> list[tuple[dict[str, Any], list[Record]]]:
    """Groups of records that may share a plot, each with the values in which it differs from the other groups."""
    records = on_measured_devices(records)
    names = [*SETTING, "kind"]
    kinds = [*(shared(records, name) for name in SETTING), map(kind_of, records)]
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for key, record in zip(zip(*kinds, strict=True), records, strict=True):
        groups.setdefault(key, []).append(record)
    differing = [number for number in range(len(names)) if len({key[number] for key in groups}) > 1]
    return [({names[number]: key[number] for number in differing}, rows) for key, rows in groups.items()]


def kind_of(record: Record) -> str:
    if not has_sizes(record):
        return "callables"
    if record.lengths is not None:
        return "packed and padded batches"
    return "token operators" if record.kv_len is None else "attention"


def shared(records: Sequence[Record], name: str) -> list[Any]:
    """The values of a field. A record without the value (a killed process) takes the one that all others share.

    The batch size of packed sequences is their number, as if they were padded.
    """
    values = [
        len(record.lengths) if name == "bsz" and record.lengths is not None else getattr(record, name)
        for record in records
    ]
    known = set(values) - {None}
    stand_in = next(iter(known)) if len(known) == 1 else None
    return [stand_in if value is None else value for value in values]


def refuse_mixed(records: Sequence[Record]) -> None:
    """Raises UsageError unless all records ran under the same conditions."""
    for name, words in SETTING.items():
        values = sorted({str(value) for value in shared(records, name)})
        if len(values) > 1:
            raise UsageError(f"one plot needs one {words}, got {', '.join(values)}")
    if len({record.kv_len is None for record in records}) > 1:
        raise UsageError("one plot needs operators of one kind, got attention and operators without keys")


def axes_of(records: Sequence[Record]) -> tuple[str, ...]:
    """The axes of the shapes: one length if S and T change together, else both.

    Packed and padded batches are compared by the share of tokens that count.
    """
    if any(record.lengths is not None for record in records):
        return ("counted", "dim")
    pairs = {(position(record, "query_len"), position(record, "kv_len")) for record in records}
    queries, keys = ({pair[side] for pair in pairs} for side in (0, 1))
    return ("length", "dim") if len(queries) == len(keys) == len(pairs) else ("query_len", "kv_len", "dim")


def views_along(records: Sequence[Record], x: str) -> list[View]:
    """One view for each value of the other axes, from small to large. Records without a position on x are left out."""
    axes, x = axes_of(records), axis_among(records, x)
    groups: dict[tuple[int, ...], View] = {}
    others = [axis for axis in axes if axis != x]
    for record in records:
        if not position(record, x):
            continue
        key = tuple(position(record, axis) for axis in others)
        view = groups.setdefault(key, View(x, dict(zip(others, key, strict=True))))
        view.records.append(record)
    return [groups[key] for key in sorted(groups)]


def axis_among(records: Sequence[Record], x: str) -> str:
    """The axis to use for x: the common length if there is one, else the key length."""
    axes = axes_of(records)
    if x in axes:
        return x
    return next(axis for axis in ("length", "counted", "kv_len") if axis in axes)


def natural_axis(records: Sequence[Record]) -> str:
    """The axis that varies; a length is preferred to the dimension."""
    order = {"length": 0, "counted": 0, "kv_len": 1, "query_len": 2, "dim": 3}
    axes = sorted(axes_of(records), key=lambda axis: order[axis])
    varying = [axis for axis in axes if len({position(record, axis) for record in records}) > 1]
    return (varying or axes)[0]


def line_names(records: Sequence[Record], x: str) -> list[str]:
    """Line names: the operator, plus the fields that distinguish its records at the same x."""
    stacks: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        stacks.setdefault((record.operator or "?", position(record, x)), []).append(record)
    telling: dict[str, dict[str, None]] = {}
    for (operator, _), stack in stacks.items():
        differing = [name for name in VARIANT if len({getattr(record, name) for record in stack} - {None}) > 1]
        telling.setdefault(operator, {}).update(dict.fromkeys(differing))
    return [variant_name(record, telling[record.operator or "?"]) for record in records]


def variant_name(record: Record, fields: Iterable[str]) -> str:
    values = {name: value for name in fields if (value := getattr(record, name)) is not None}
    words = (VARIANT[name].format(VALUE_WORDS.get((name, value), value)) for name, value in values.items())
    return ", ".join([record.operator or "?", *words])


def undrawn_note(records: Sequence[Record]) -> str:
    """Names the cases that the plot leaves out because they were unsupported or failed."""
    rest = {(record.operator, record.status) for record in records if record.status not in ("ok", *MARKED)}
    missing = sorted(f"{operator} ({status})" for operator, status in rest)
    return f"not drawn: {', '.join(missing)}" if missing else ""


def slug(text: str) -> str:
    """Converts text to a file name: "NVIDIA A100, float32" becomes "nvidia-a100-float32"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def setting_words(setting: Mapping[str, Any]) -> str:
    """The values that distinguish a group of records: "float16, batch 4"."""
    words = [f"batch {value}" if name == "bsz" else str(value) for name, value in setting.items() if value is not None]
    return ", ".join(words)


def fixed_slug(view: View) -> str:
    return slug("-".join(f"{name}-{size}" for name, size in view.fixed.items()))


def heading(topic: str, words: str) -> str:
    """ "Attention, float16: peak memory", or "Peak memory" without a topic."""
    return f"{topic}: {words}" if topic else words[:1].upper() + words[1:]

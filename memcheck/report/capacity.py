"""Tables of the largest size that fits, operators side by side: its bytes, and why no larger one fits."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import SimpleNamespace

from memcheck.core.devices import Device
from memcheck.core.prediction import SIZES as SIZES_IN_WORDS
from memcheck.core.prediction import Largest
from memcheck.core.units import format_bytes
from memcheck.report.cases import FIELD_WORDS, NEEDS, common_case
from memcheck.report.records import Footnotes
from memcheck.report.rows import MIB, quotient
from memcheck.report.tables import Cell, Column, Table

FOLLOWERS = {"dim": ("core_dim",)}
SIZES = {"bsz": "B", "query_len": "N", "dim": "dim"}
BYTES = (*NEEDS, "reserved_bytes")
RANKS = {"forward_peak_bytes": 3, "saved_bytes": 2, "backward_peak_bytes": 1}  # Of columns, see Column.rank.
DERIVED = "calculated from PyTorch's source, not measured on such a GPU"
NOTE = (
    "Everything is predicted, nothing was run. The largest size was predicted and fits; the next one was predicted and "
    "does not: the last columns are its failed request, and the bytes in use at that moment. -: not known."
)


def capacity_table(capacities: Sequence[Largest], axis: str, limit_bytes: int | None = None) -> Table:
    """One row per search for the largest size of a case. All searches vary the same axis on the same device."""
    device, footnotes = capacities[0].edge.device, Footnotes()
    largest = f"largest {SIZES_IN_WORDS[axis]}"
    columns = [
        *(
            Column(name, title, read=attrgetter(f"edge.case.{name}"))
            for name, title in varying_sizes(capacities, axis).items()
        ),
        Column("largest", largest, format=",", read=lambda found: None if found.unpredicted else found.size),
        *(mib_column(field, FIELD_WORDS[field], RANKS.get(field, 4), "at", field) for field in BYTES),
        Column("runs_out_in", "next runs out in", rank=4, read=phase_of),
        mib_column("requested", "next requests", 5, "beyond", "oom_requested_bytes"),
        mib_column("in_use", "next in use", 5, "beyond", "oom_in_use_bytes"),
        Column("next", "next", audience="programs", read=next_size),
        Column("note", "note", audience="people", read=lambda found: footnotes.marks(notes_of(found))),
    ]
    title = f"The {largest} that fits {device.name} ({room_words(device, limit_bytes)}): "
    notes = [NOTE, f"{device.name}: {device.source}."]
    table = Table.of("capacity", title + shared_words(capacities, axis), columns, capacities, notes)
    return footnotes.below(table)


def mib_column(key: str, title: str, rank: int, side: str, field: str) -> Column:
    """A field of the prediction at the edge, or beyond it, in MiB."""

    def read(capacity: Largest) -> Cell:
        prediction = getattr(capacity, side)
        return quotient(getattr(prediction.record, field), MIB) if prediction else None

    return Column(f"{key.removesuffix('_bytes')}_mib", title, "MiB", ",.2f", read=read, rank=rank)


def room_words(device: Device, limit_bytes: int | None) -> str:
    usable = device.usable_bytes
    parts = [] if usable is None else [f"{usable / MIB:,.0f} MiB usable"]
    return ", ".join(parts + ([f"limit {format_bytes(limit_bytes)}"] if limit_bytes else []))


def shared_words(capacities: Sequence[Largest], *axes: str) -> str:
    """The settings that the cases share, apart from some axes: "float32, batch 8, 8 heads, causal, train"."""
    hidden = {"device", *(name for axis in axes for name in (axis, *FOLLOWERS.get(axis, ())))}
    words = common_case([SimpleNamespace(**{**vars(found.edge.case), **dict.fromkeys(hidden)}) for found in capacities])
    lengths = {found.edge.case.kv_len or found.edge.case.query_len for found in capacities}
    return words if "seq_len" in axes or len(lengths) > 1 else f"{words}, sequence length {lengths.pop()}"


def varying_sizes(capacities: Sequence[Largest], axis: str) -> dict[str, str]:
    """The operator, and the given sizes that have several values, with their titles."""
    cases = [found.edge.case for found in capacities]
    names = [name for name in SIZES if name != ("query_len" if axis == "seq_len" else axis)]
    sizes = {name: SIZES[name] for name in names if len({getattr(case, name) for case in cases}) > 1}
    return {"operator": "operator", **sizes}


def next_size(found: Largest) -> int | None:
    return found.size + found.step if found.beyond else None


def phase_of(capacity: Largest) -> str | None:
    """Where the next size runs out of memory: a phase, the inputs, or its status."""
    if capacity.beyond is None or capacity.unpredicted:
        return None
    failure = capacity.beyond.record
    return failure.oom_phase or ("inputs" if failure.status == "oom" else failure.status)


def notes_of(capacity: Largest) -> list[str]:
    if reason := capacity.unpredicted:
        return [f"{capacity.edge.case.operator}: {reason}"]
    notes, beyond = [], f"{capacity.size + capacity.step:,}"
    if capacity.beyond is None:
        notes.append(f"the search ended at {capacity.size:,}: more may fit (--up-to)")
    elif capacity.at is None:
        notes.append(f"not even {beyond} fits")
    elif capacity.beyond.record.status != "oom":
        notes.append(f"{beyond}: {capacity.beyond.record.reason or capacity.beyond.record.status}")
    if capacity.gaps:
        gaps = ", ".join(f"{size:,}" for size in capacity.gaps[:5])
        notes.append(f"not everything below fits: {gaps}{' ...' if len(capacity.gaps) > 5 else ''}")
    known = capacity.edge
    if known.terms:
        notes += [f"not known: {words}" for words in known.unknown]
        notes += [DERIVED] if known.certainty == "derived" else []
    return notes

"""Tables of the largest size that fits, operators side by side: its bytes, and why no larger one fits."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING

from memcheck.core.record import sequence_words
from memcheck.core.units import format_bytes
from memcheck.core.verdict import size_words
from memcheck.report.cases import FIELD_WORDS, NEEDS, common_case
from memcheck.report.records import Footnotes
from memcheck.report.rows import MIB, quotient
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.core.prediction import Capacity

FOLLOWERS = {"dim": ("core_dim",)}
SIZES = {"bsz": "B", "query_len": "N", "dim": "dim"}
BYTES = (*NEEDS, "reserved_bytes")
RANKS = {"forward_peak_bytes": 3, "saved_bytes": 2, "backward_peak_bytes": 1}  # Of columns, see Column.rank.
DERIVED = "calculated from PyTorch's source, not measured on such a GPU"
NOTE = (
    "Everything is predicted, nothing was run. The largest size was predicted and fits; the next one was predicted and "
    "does not: the last columns are its failed request, and the bytes in use at that moment. -: not known."
)


HOW_SEQUENCES_GROW = {
    "seq_len": "The other sequences keep their proportion to the longest.",
    "bsz": "The sequences repeat the given lengths.",
}


def capacity_table(capacities: Sequence[Capacity], limit_bytes: int | None = None) -> Table:
    """One row per search. All searches vary the same size on the same device."""
    first = capacities[0]
    axis, device, footnotes = first.axis, first.device, Footnotes()
    of_sequences = first.case.lengths is not None
    largest = f"largest {size_words(axis, first.case)}"
    columns = [
        *(Column(name, title, read=attrgetter(f"case.{name}")) for name, title in varying_sizes(capacities).items()),
        *([Column("sequences", "sequences", read=sequences_of)] if of_sequences else []),
        Column("largest", largest, format=",", read=lambda found: None if found.unpredicted else found.largest),
        *(mib_column(field, FIELD_WORDS[field], RANKS.get(field, 4), "at", field) for field in BYTES),
        Column("runs_out_in", "next runs out in", rank=4, read=phase_of),
        mib_column("requested", "next requests", 5, "beyond", "oom_requested_bytes"),
        mib_column("in_use", "next in use", 5, "beyond", "oom_in_use_bytes"),
        Column("next", "next", audience="programs", read=lambda found: found.next_size if found.beyond else None),
        Column("note", "note", audience="people", read=lambda found: footnotes.marks(notes_of(found))),
    ]
    title = f"The {largest} that fits {device.name} ({room_words(first, limit_bytes)}): "
    notes = [HOW_SEQUENCES_GROW[axis]] if of_sequences and axis in HOW_SEQUENCES_GROW else []
    notes += [NOTE, f"{device.name}: {device.source}."]
    table = Table.of("capacity", title + shared_words(capacities, axis), columns, capacities, notes)
    return footnotes.below(table)


def mib_column(key: str, title: str, rank: int, side: str, field: str) -> Column:
    """A field of the prediction at the edge, or beyond it, in MiB."""

    def read(capacity: Capacity) -> Cell:
        prediction = getattr(capacity, side)
        return quotient(getattr(prediction.record, field), MIB) if prediction else None

    return Column(f"{key.removesuffix('_bytes')}_mib", title, "MiB", ",.2f", read=read, rank=rank)


def room_words(capacity: Capacity, limit_bytes: int | None) -> str:
    usable = capacity.device.usable_bytes
    parts = [] if usable is None else [f"{usable / MIB:,.0f} MiB usable"]
    return ", ".join(parts + ([f"limit {format_bytes(limit_bytes)}"] if limit_bytes else []))


def shared_words(capacities: Sequence[Capacity], *axes: str) -> str:
    """The settings that the cases share, apart from some axes: "float32, batch 8, 8 heads, causal, train"."""
    of_sequences = capacities[0].case.lengths is not None
    # The table has a column of the sequences, whose number is the batch size.
    hidden = {
        "device",
        *(("bsz", "lengths") if of_sequences else ()),
        *(name for axis in axes for name in (axis, *FOLLOWERS.get(axis, ()))),
    }
    words = common_case([SimpleNamespace(**{**vars(edge.case), **dict.fromkeys(hidden)}) for edge in capacities])
    lengths = {capacity.case.kv_len or capacity.case.query_len for capacity in capacities}
    return (
        words if "seq_len" in axes or len(lengths) > 1 or of_sequences else f"{words}, sequence length {lengths.pop()}"
    )


def varying_sizes(capacities: Sequence[Capacity]) -> dict[str, str]:
    """The operator, and the given sizes that have several values, with their titles."""
    cases, axis = [capacity.case for capacity in capacities], capacities[0].axis
    of_sequences = cases[0].lengths is not None
    names = [name for name in SIZES if name != ("query_len" if axis == "seq_len" else axis)]
    names = [name for name in names if not of_sequences or name == "dim"]
    sizes = {name: SIZES[name] for name in names if len({getattr(case, name) for case in cases}) > 1}
    return {"operator": "operator", **sizes, **({"layout": "batch"} if of_sequences else {})}


def sequences_of(capacity: Capacity) -> str:
    """The sequence lengths at the size that was found; with the axis "bsz", the lengths that repeat."""
    lengths = capacity.case.lengths or ()
    return sequence_words(lengths[: capacity.step] if capacity.axis == "bsz" else lengths)


def phase_of(capacity: Capacity) -> str | None:
    """Where the next size runs out of memory: a phase, the inputs, or its status."""
    if capacity.beyond is None or capacity.unpredicted:
        return None
    failure = capacity.beyond.record
    return failure.oom_phase or ("inputs" if failure.status == "oom" else failure.status)


def notes_of(capacity: Capacity) -> list[str]:
    if reason := capacity.unpredicted:
        return [f"{capacity.case.operator}: {reason}"]
    notes = []
    if capacity.beyond is None:
        notes.append(f"the search ended at {capacity.largest:,}: more may fit (--up-to)")
    elif capacity.at is None:
        notes.append(f"not even {capacity.next_size:,} fits")
    elif capacity.beyond.record.status != "oom":
        notes.append(f"{capacity.next_size:,}: {capacity.beyond.record.reason or capacity.beyond.record.status}")
    if capacity.gaps:
        gaps = ", ".join(f"{size:,}" for size in capacity.gaps[:5])
        notes.append(f"not everything below fits: {gaps}{' ...' if len(capacity.gaps) > 5 else ''}")
    known = capacity.at or capacity.beyond
    if known is not None and known.terms:
        notes += [f"not known: {words}" for words in known.unknown]
        notes += [DERIVED] if known.certainty == "derived" else []
    return notes

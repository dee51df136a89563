"""Tables of the largest size that fits, operators side by side: its bytes, and why no larger one fits."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from memcheck.core.record import Record, sequence_words
from memcheck.core.units import format_bytes
from memcheck.report.cases import FIELD_WORDS, NEEDS, common_case
from memcheck.report.records import Footnotes
from memcheck.report.rows import MIB, quotient
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.bench.capacity import Capacity
    from memcheck.bench.catalog import Case

FOUND = {"seq_len": "sequence length", "bsz": "batch size", "dim": "dimension"}
FOUND_OF_SEQUENCES = {"seq_len": "length of the longest sequence", "bsz": "number of sequences"}
FOLLOWERS = {"dim": ("core_dim",)}
SIZES = {"bsz": "B", "query_len": "N", "dim": "dim"}
BYTES = (*NEEDS, "reserved_bytes")
RANKS = {"forward_peak_bytes": 3, "saved_bytes": 2, "backward_peak_bytes": 1}  # Of columns, see Column.rank.
DERIVED = "derived: by rules read in sources, which were not compared with a measurement on such a device"
NOTE = (
    "Everything is predicted, nothing was run. The largest size was predicted and fits; the next one was predicted and "
    "does not: the last columns are its failed request, and the bytes in use at that moment. -: not known."
)


HOW_SEQUENCES_GROW = {
    "seq_len": "The other sequences keep their proportion to the longest.",
    "bsz": "The sequences repeat the given lengths.",
}


def size_words(axis: str, case: Case) -> str:
    """The name of a size: "batch size", of padded and packed batches "number of sequences"."""
    return FOUND[axis] if case.lengths is None else FOUND_OF_SEQUENCES.get(axis, FOUND[axis])


def capacity_table(capacities: Sequence[Capacity], limit_bytes: int | None = None) -> Table:
    """One row per search. All searches vary the same size on the same device."""
    axis, device = capacities[0].axis, capacities[0].device
    footnotes = Footnotes()
    sizes = varying_sizes(capacities)
    of_sequences = capacities[0].case.lengths is not None
    columns = [
        Column("operator", "operator"),
        *(Column(field, SIZES[field]) for field in sizes),
        *([Column("layout", "batch"), Column("sequences", "sequences")] if of_sequences else []),
        Column("largest", f"largest {size_words(axis, capacities[0].case)}", format=","),
        *(
            Column(field.replace("_bytes", "_mib"), FIELD_WORDS[field], "MiB", ",.2f", rank=RANKS.get(field, 4))
            for field in BYTES
        ),
        Column("runs_out_in", "next runs out in", rank=4),
        Column("requested_mib", "next requests", "MiB", ",.2f", rank=5),
        Column("in_use_mib", "next in use", "MiB", ",.2f", rank=5),
        Column("next", "next", audience="programs"),
        Column("note", "note", audience="people"),
    ]
    rows = [row_of(capacity, sizes, footnotes) for capacity in capacities]
    room = room_words(capacities[0], limit_bytes)
    title = f"The largest {size_words(axis, capacities[0].case)} that fits {device.name} ({room}): "
    notes = [HOW_SEQUENCES_GROW[axis]] if of_sequences and axis in HOW_SEQUENCES_GROW else []
    notes += [NOTE, f"{device.name}: {device.source}.", *footnotes.lines()]
    return Table("capacity", title + shared_words(capacities, axis), columns, rows, notes)


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


def varying_sizes(capacities: Sequence[Capacity]) -> list[str]:
    """The given sizes that have several values."""
    found = {"seq_len": "query_len"}.get(capacities[0].axis, capacities[0].axis)
    cases = [capacity.case for capacity in capacities]
    names = [name for name in SIZES if name != found and (cases[0].lengths is None or name == "dim")]
    return [name for name in names if len({getattr(case, name) for case in cases}) > 1]


def row_of(capacity: Capacity, sizes: Sequence[str], footnotes: Footnotes) -> list[Cell]:
    case, at, beyond = capacity.case, capacity.at, capacity.beyond
    largest = None if capacity.unpredicted else capacity.largest
    figures = [quotient(getattr(at.record, field), MIB) if at else None for field in BYTES]
    failure = beyond.record if beyond else None
    return [
        case.operator,
        *(getattr(case, name) for name in sizes),
        *([case.layout, sequences_of(capacity, case.lengths)] if case.lengths is not None else []),
        largest,
        *figures,
        phase_of(failure) if failure and not capacity.unpredicted else None,
        quotient(failure.oom_requested_bytes, MIB) if failure else None,
        quotient(failure.oom_in_use_bytes, MIB) if failure else None,
        capacity.next_size if beyond else None,
        footnotes.marks(notes_of(capacity)),
    ]


def sequences_of(capacity: Capacity, lengths: Sequence[int]) -> str:
    """The lengths at the size that was found, or those that are repeated."""
    return sequence_words(lengths[: capacity.step] if capacity.axis == "bsz" else lengths)


def phase_of(failure: Record) -> str:
    """Where the next size runs out of memory: a phase, the inputs, or its status."""
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
        notes += [DERIVED] if known.basis == "derived" else []
    return notes

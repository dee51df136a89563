"""Breaks down the memory of one case into its parts, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Iterator

from memcheck.core.record import Record
from memcheck.report.cases import CASE_FIELDS, FIELD_WORDS, describe, failure_note
from memcheck.report.rows import quotient, unit_bytes
from memcheck.report.summary import doubt_lines
from memcheck.report.tables import Cell, Column, Table

# Record field -> the phase whose peak it is, as alive_at_peak names it.
MOMENTS = {
    "forward_peak_bytes": "forward",
    "saved_bytes": None,
    "backward_peak_bytes": "backward",
    "state_bytes": "decoding",
}
PARTS = (
    *("input_bytes", "output_bytes", "parameter_bytes", "gradient_bytes"),
    *("workspace_bytes", "library_workspace_bytes"),
)
# Names that the terms use for tensors of each part.
INPUTS, PARAMETERS, OUTPUT = ("q", "k", "v", "x"), ("weight",), "y"


# Moment, name, predicted and measured bytes, and the measured tensor under its own name.
Component = tuple[str, str, int | None, int | None, str | None]


def components_of(record: Record) -> Iterator[Component]:
    """The tensors that the caller holds, then those alive at each peak."""
    predicted = predicted_parts(record)
    for field in PARTS:
        if (measured := getattr(record, field)) is not None or field in predicted:
            yield "in all", FIELD_WORDS[field], predicted.get(field), measured, None
    for field, phase in MOMENTS.items():
        yield from components_at(record, field, phase)


def predicted_parts(record: Record) -> dict[str, int]:
    """The parts of a record as sums of its terms. Empty for decoding, whose inputs are the state."""
    terms = record.terms or {}
    forward, backward = terms.get("forward_peak_bytes", {}), terms.get("backward_peak_bytes", {})
    inputs, parameters = (sum(forward.get(name, 0) for name in names) for names in (INPUTS, PARAMETERS))
    output = forward.get(OUTPUT, backward.get(OUTPUT))
    if not forward or output is None or record.mode == "decode":
        return {}
    parts = {"input_bytes": inputs, "output_bytes": output, "parameter_bytes": parameters}
    held = inputs + parameters + output + sum(terms.get("saved_bytes", {}).values())
    scratch = [sum(forward.values()) - held]
    if backward:
        # A gradient is as large as its tensor; incoming gradients are named after y.
        parts["gradient_bytes"] = inputs + parameters
        incoming = sum(size for name, size in backward.items() if name.replace("_", " ").startswith("grad y"))
        scratch.append(sum(backward.values()) - held - parts["gradient_bytes"] - incoming)
    return {**parts, "workspace_bytes": max(0, *scratch)}


def components_at(record: Record, field: str, phase: str | None) -> Iterator[Component]:
    """The predicted terms, each with a measured tensor of the same size; then the other tensors and the sums."""
    moment, terms, measured = FIELD_WORDS[field], (record.terms or {}).get(field), getattr(record, field)
    alive = alive_tensors(record, phase)
    left = list(alive)
    for name, size in (terms or {}).items():
        match = next((tensor for tensor in left if tensor[1] == size), None)
        if match is None:
            yield moment, name, size, None, None
            continue
        left.remove(match)
        # Size alone cannot distinguish tensors of equal size.
        yield moment, name, size, size, " or ".join(dict.fromkeys(other for other, bytes_ in alive if bytes_ == size))
    for name, size in left:
        yield moment, "not predicted" if terms else name, None, size, name if terms else None
    if terms is not None or measured is not None:
        yield moment, "sum", None if terms is None else sum(terms.values()), measured, None


def alive_tensors(record: Record, phase: str | None) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors alive at the phase's peak, or, without a phase, of those kept for the backward."""
    if phase is None:
        kept = [(f"{tuple(one['shape'])} {one['dtype']!s}", one) for one in record.saved_tensors or []]
        return [(name.replace("torch.", ""), int(tensor["bytes"])) for name, tensor in kept]
    alive = record.alive_at_peak or []
    return [(str(tensor["name"]), int(tensor["bytes"])) for tensor in alive if tensor.get("phase") == phase]


def accounting_table(record: Record) -> Table:
    """One row for each part of each moment."""
    unit = unit_bytes(record)
    rows: list[list[Cell]] = []
    for moment, name, predicted, measured, what in components_of(record):
        difference = None if predicted is None or measured is None else measured - predicted
        size = predicted if measured is None else measured
        sizes = quotient(size, 2**20), quotient(size, unit)
        rows.append([moment, name, predicted, measured, difference, *sizes, what])
    columns = [
        Column("moment", "moment"),
        Column("component", "what"),
        Column("predicted_bytes", "predicted", "B", ",", rank=3),
        Column("measured_bytes", "measured", "B", ","),
        Column("difference_bytes", "measured - predicted", "B", "+,"),
        Column("mib", "size", "MiB", ",.2f", rank=1),
        Column("u", "size", "U", ",.2f", rank=2),
        Column("measured_as", "measured as", rank=4),
    ]
    notes = [f"U = {unit:,} B, one main tensor."] if unit else []
    if record.terms is None:
        notes.append("No terms are known for this case: the column of predictions is empty.")
    if record.alive_at_peak is None and record.mode != "decode":
        notes.append("The tensors alive at the peaks were not recorded: single components are predicted only.")
    notes += [*filter(None, [failure_note(record)]), *doubt_lines([record])]
    words = describe(record, CASE_FIELDS)
    return Table(f"accounting {words}", f"Where the memory goes: {words}", columns, rows, notes)

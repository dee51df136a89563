"""Predictions: beside measurements of the same cases, one as the sums of its terms, and that of a model by module."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.core import options, units
from memcheck.core.prediction import largest_words, need_of
from memcheck.core.record import Record
from memcheck.core.script_record import Alive, Origin
from memcheck.core.trace import OUTSIDE
from memcheck.report import cases
from memcheck.report.alive import module_table, unit_of
from memcheck.report.rows import MIB, PREDICTED, quotient
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.core.prediction import Largest, Prediction
    from memcheck.core.trace import Allocation, Trace


COMPARED = (
    *cases.NEEDS,
    *("state_bytes", "forward_max_allocated_bytes", "backward_max_allocated_bytes", "reserved_bytes"),
)
# The figures of a single prediction, in the order in which they are shown.
FIGURES = {
    "input_bytes": "inputs",
    "parameter_bytes": "parameters",
    "state_bytes": "state, part of the inputs",
    **{field: cases.FIELD_WORDS[field] for field in cases.NEEDS},
    "forward_max_allocated_bytes": "max_memory_allocated after the forward",
    "backward_max_allocated_bytes": "max_memory_allocated after the backward",
    "oom_in_use_bytes": "in use when there was no room",
    "reserved_bytes": "reserved: segments of the caching allocator",
}


def prediction_table(records: Sequence[Record]) -> Table:
    """One row for each case that was both measured and predicted."""
    pairs = cases.pair(records)
    measured = [record for record, _ in pairs]
    fields = [
        name for name in cases.CASE_FIELDS if name in {"operator", "query_len", "kv_len", *cases.varying(measured)}
    ]
    columns = [Column("case", "case"), Column("status", "measured"), Column("predicted_status", "predicted")]
    for name in COMPARED:
        stem, title = name.removesuffix("_bytes"), cases.FIELD_WORDS[name]
        columns += [
            Column(f"{stem}_measured_mib", title, "MiB", ".2f", rank=2),
            Column(f"{stem}_predicted_mib", f"{title}, predicted", "MiB", ".2f", rank=3),
            Column(f"{stem}_words", f"{title}, measured / predicted", audience="people"),
            Column(f"{stem}_ratio", "measured / predicted", audience="programs"),
        ]
    columns += [Column("certainty", "predicted is", rank=4)]
    rows = [row_of(*both, fields) for both in pairs]
    title = f"Prediction beside measurement, {cases.count_of(pairs)}: {cases.common_case(measured)}"
    return Table("prediction", title, columns, rows, [PREDICTED, agreement(pairs)])


def row_of(measured: Record, predicted: Record, fields: Sequence[str]) -> list[Cell]:
    row: list[Cell] = [cases.describe(measured, fields), status_words(measured), status_words(predicted)]
    for name in COMPARED:
        row += [quotient(getattr(record, name), MIB) for record in (measured, predicted)]
        row += [cases.ratio_words(measured, predicted, name), cases.ratio(measured, predicted, name)]
    return [*row, predicted.certainty]


def status_words(record: Record) -> str:
    """ "ok", or "oom in backward"."""
    return f"{record.status} in {record.oom_phase}" if record.oom_phase else record.status


def agreement(pairs: Sequence[tuple[Record, Record]]) -> str:
    """How many figures and verdicts agree with the prediction, and which figure is furthest off."""
    known = [
        (share, name, measured)
        for measured, predicted in pairs
        for name in COMPARED
        if (share := cases.ratio(measured, predicted, name)) is not None
    ]
    same = sum(share == 1 for share, _, _ in known)
    judged = [both for both in pairs if {record.status for record in both} <= {"ok", "oom"}]
    right = sum(status_words(measured) == status_words(predicted) for measured, predicted in judged)
    counts = f"{same} of {len(known)} figures are as predicted, to the byte; {right} of {len(judged)} verdicts are."
    if same == len(known):
        return counts
    share, name, record = max(known, key=lambda one: abs(one[0] - 1))
    case = cases.describe(record, cases.CASE_FIELDS)
    return f"{counts} Furthest off: {cases.FIELD_WORDS[name]} of {case}, {share:.4g} x the predicted."


def unknown_words(predictions: Sequence[Record]) -> list[str]:
    """A line for each unknown, with the operators that have it."""
    operators: dict[str, dict[str, None]] = {}
    for record in predictions:
        for doubt in record.doubts:
            operators.setdefault(doubt, {})[record.operator or "?"] = None
    return [f"not known of {', '.join(names)}: {doubt}" for doubt, names in operators.items()]


def figures_table(prediction: Prediction, *, with_terms: bool) -> Table:
    """The figures of a prediction; with their terms, each as a sum."""
    record = prediction.record
    columns = [
        Column("figure", "figure, and what it is the sum of" if with_terms else "figure"),
        Column("mib", "MiB", format=",.2f"),
        Column("bytes", "bytes", format=","),
    ]
    rows: list[list[Cell]] = []
    for field, title in FIGURES.items():
        if terms := prediction.terms.get(field):
            bound = ", not known to the byte" if field in prediction.bounds else ""
            rows.append([f"{title}{bound}", sum(terms.values()) / MIB, sum(terms.values())])
            largest = sorted(terms.items(), key=lambda it: -it[1]) if with_terms else ()
            rows += [[f"  {name}", size / MIB, size] for name, size in largest]
    return Table("terms", case_words(record), columns, rows)


def case_words(record: Record) -> str:
    """ "softplus: cuda, RTX-4090, float32, batch 8, dim 256, causal, train, predicted, S 4096, T 4096"."""
    lengths = f"S {record.query_len}" + (f", T {record.kv_len}" if record.kv_len else "")
    backend = f", {record.backend}" if record.backend else ""
    return f"{record.operator}: {cases.common_case([record])}, {lengths}{backend}"


def alive_sentence(prediction: Prediction) -> str:
    """ "Alive at the peak: q 32 MiB, k 32 MiB, 7 more 1.5 MiB.", or "" without a peak."""
    alive = prediction.alive_at_peak()
    return f"Alive at the peak: {units.alive_words(alive)}." if alive else ""


MOST_ROWS = 16
NUMBER = r"(?<![^.])\d+(?![^.])"  # A whole word of a path.
# Kinds of memory that a table of modules tells apart.
KINDS = ("parameters", "gradients", "optimizer state", "kept for backward", "other")
NOTE = (
    "name.* (Nx): N modules with the same place in the blocks of a list. kept for backward: by the forward. other: "
    "everything else."
)


def tensors_of(prediction: Prediction) -> int | None:
    """The highest sum of tensors that is alive at once, whether it fits or not. None if it is not predicted."""
    return prediction.peak.bytes if prediction.peak is not None else None


def buffers_words(prediction: Prediction) -> str:
    """The buffers of collectives at the peak, in a sentence; "" if there are none."""
    parts = ", ".join(f"{name} {units.format_bytes(size)}" for name, size in prediction.buffers.items())
    return f"Collectives hold at the peak: {parts}." if parts else ""


def modules_table(prediction: Prediction) -> Table:
    """What is alive at the peak by module and kind. Equal modules of the blocks in a list are one row."""
    trace, peak = prediction.trace, prediction.peak
    assert trace is not None
    assert peak is not None
    kinds, unit = kinds_of(trace), unit_of(peak.bytes)
    names = block_names([*trace.modules, *(piece.module for piece in peak.alive)])
    alive = [
        Alive(Origin(piece.name, peak.phase, kinds.get(piece, "other"), names[piece.module]), piece.bytes, 1)
        for piece in peak.alive
    ]
    title = f"Alive at the peak, in the {peak.phase}, by module, {unit}"
    return module_table(alive, title, unit, MOST_ROWS, KINDS, NOTE)


def block_names(paths: Iterable[str]) -> dict[str, str]:
    """The names of modules in tables. The number of a block with modules in it is a star: "layers.*.mlp (12x)"."""
    paths = dict.fromkeys(paths)
    owners = {path.rpartition(".")[0] for path in paths}

    def starred(path: str) -> str:
        return re.sub(NUMBER, lambda number: "*" if path[: number.end()] in owners else number[0], path)

    names = {path: starred(path) or OUTSIDE for path in paths}
    counts = Counter(names.values())
    return {path: f"{name} ({counts[name]}x)" if counts[name] > 1 else name for path, name in names.items()}


def operators_table(prediction: Prediction) -> Table:
    """What is alive at the peak and kept for the backward, by the operator that made it. The sums are the record's."""
    trace, peak = prediction.trace, prediction.peak
    assert trace is not None
    assert peak is not None
    names = block_names([*trace.modules, *(piece.module for piece in [*peak.alive, *trace.saved])])
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    places: dict[str, Counter[str]] = defaultdict(Counter)
    for moment, allocations in {"peak": peak.alive, "kept": trace.saved}.items():
        for name, piece in trace.named_by_operator(allocations):
            sums[name][moment] += piece.bytes
            sums[name]["tensors"] += moment == "peak"
            places[name][names[piece.module]] += piece.bytes
    ordered = sorted(sums, key=lambda name: (-sums[name]["peak"], -sums[name]["kept"]))
    total = sum(sums.values(), Counter[str]())

    def row(name: str, where: str | None, found: Counter[str]) -> list[Cell]:
        sizes = [found["peak"] or None, found["kept"] or None]
        return [name, where, found["tensors"] or None, *(size and size / MIB for size in sizes), *sizes]

    def places_of(name: str) -> str:
        (first, _), *others = places[name].most_common()
        return f"{first} +{len(others)}" if others else first

    rows = [*(row(name, places_of(name), sums[name]) for name in ordered), row("all", None, total)]
    columns = [
        Column("operator", "operator, or what it is for"),
        Column("modules", "in", rank=2),
        Column("tensors", "tensors at the peak", rank=3),
        Column("peak_mib", "at the peak", "MiB", ",.2f"),
        Column("kept_mib", "kept for backward", "MiB", ",.2f"),
        Column("peak_bytes", "at the peak", "B", ",", rank=4),
        Column("saved_bytes", "kept for backward", "B", ",", rank=4),
    ]
    title = f"Alive at the peak, in the {peak.phase}, and kept for backward, by operator"
    note = "in: the modules with the most of it; +2: and two other places. Bytes add up to the record's."
    return Table("operators", title, columns, rows, [note])


def kinds_of(trace: Trace) -> dict[Allocation, str]:
    """What each allocation holds, as far as it is one of KINDS."""
    kinds = dict.fromkeys(trace.saved, "kept for backward")
    return kinds | {piece: role for piece, role in trace.roles.items() if role in KINDS}


def changes_table(base: Prediction, changes: Mapping[str, Prediction]) -> Table:
    """What each change would need, beside what is needed without any. changes: by the flags that make them."""
    columns = [
        Column("change", "one change"),
        Column("need", "needs"),
        Column("share", "% of current", format=".0f", rank=1),
        Column("fits", "fits"),
        Column("runs_out_in", "runs out in", rank=2),
    ]
    current = need_of(base)
    rows: list[list[Cell]] = []
    for flags, found in {"as it is": base, **changes}.items():
        need, limited = need_of(found), found.place.room_bytes is not None
        share = None if need is None or current is None else 100 * need.bytes / current.bytes
        words = str(need) if need is not None else None
        rows.append([flags, words, share, found.fits if limited else None, found.record.oom_phase])
    helping = base.fits is False
    title = "What would help, one change at a time" if helping else "What other settings would need"
    notes = ["Each line was predicted in the same way."]
    if helping and not any(found.fits for found in changes.values()):
        notes.append("None of these is enough.")
    return Table("changes", title, columns, rows, notes)


SIZE_WORDS = {"bsz": "batch", "seq_len": "length"}


def edge_verdict(edge: Largest, axis: str) -> str:
    """The largest size that fits, what it needs, and why the next size does not fit."""
    words = largest_words(SIZE_WORDS[axis], edge.size, edge.step, edge.at, edge.beyond)
    return words.replace("more may fit.", f"more may fit ({options.named('up_to')}).")


def edges_table(edges: Mapping[str, Largest], axis: str) -> Table:
    """The largest size in each setting, and both sides of the edge. The first row is the setting without a change."""
    word = SIZE_WORDS[axis]
    columns = [
        Column("change", "one change"),
        Column("largest", f"largest {word}", format=","),
        Column("need", "needs", rank=1),
        Column("next", f"next {word}", format=",", rank=2),
        Column("next_need", "needs", rank=2),
        Column("runs_out_in", "runs out in", rank=3),
    ]
    rows: list[list[Cell]] = []
    for flags, edge in edges.items():
        needs = [None if side is None else need_of(side) for side in (edge.at, edge.beyond)]
        sides = [None if need is None else str(need) for need in needs]
        phase = edge.beyond.record.oom_phase or edge.beyond.record.status if edge.beyond else None
        rows.append([flags, edge.size, sides[0], edge.size + edge.step if edge.beyond else None, sides[1], phase])
    several = len(rows) > 1
    title = f"What would allow another {word}" if several else f"The largest {word} that fits, and the next"
    return Table("edges", title, columns, rows, ["Each line was searched in the same way."] if several else [])

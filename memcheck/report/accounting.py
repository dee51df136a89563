"""What a sweep adds up to: the parts of a case's memory, laws of growth, and a count of what ended how."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memcheck.core.record import Record
from memcheck.report import cases, predictions
from memcheck.report.rows import quotient, unit_bytes
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
            yield "in all", cases.FIELD_WORDS[field], predicted.get(field), measured, None
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
    moment, terms, measured = cases.FIELD_WORDS[field], (record.terms or {}).get(field), getattr(record, field)
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
    notes += [*filter(None, [cases.failure_note(record)]), *doubt_lines([record])]
    words = cases.describe(record, cases.CASE_FIELDS)
    return Table(f"accounting {words}", f"Where the memory goes: {words}", columns, rows, notes)


# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
QUANTITIES = {
    **{field: cases.FIELD_WORDS[field] for field in cases.NEEDS},
    "forward_ms": "forward time",
    "backward_ms": "backward time",
}
# Inputs and output grow linearly with N for every operator and hide the operator's own growth.
LESS_HELD = ("forward_peak_bytes", "backward_peak_bytes")
HELD = ("input_bytes", "output_bytes", "parameter_bytes")
# The sizes that vary together under each name.
AXES = {"N": ("query_len", "kv_len"), "T": ("kv_len",), "S": ("query_len",), "dim": ("dim",)}

Point = tuple[float, float]


@dataclass(frozen=True)
class Exponent:
    """y ~ x^value by least squares on logarithms. low and high are None for two points, which fit exactly."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f} (two points)"
        return f"{self.value:.2f} ± {self.high - self.value:.2f}"


def fit_exponent(points: Sequence[Point]) -> Exponent | None:
    """Fits the exponent. None if there are fewer than two x values or no positive values."""
    points = [(x, y) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    import numpy as np

    xs, ys = np.log([x for x, _ in points]), np.log([y for _, y in points])
    freedom = len(points) - 2
    if freedom == 0:
        return Exponent(float(np.polyfit(xs, ys, 1)[0]), None, None)
    (slope, _), covariance = np.polyfit(xs, ys, 1, cov=True)
    # The two-sided 95 % quantile; with more degrees of freedom than the table has, that of the normal distribution.
    quantile = STUDENT_95[freedom - 1] if freedom <= len(STUDENT_95) else statistics.NormalDist().inv_cdf(0.975)
    margin = quantile * math.sqrt(covariance[0, 0])
    return Exponent(float(slope), float(slope - margin), float(slope + margin))


def factors_per_doubling(points: Sequence[Point]) -> list[float | None]:
    """The factor per doubling of x between neighbouring points; None where the earlier y is 0."""
    pairs = itertools.pairwise(points)
    return [(y2 / y1) ** (1 / math.log2(x2 / x1)) if y1 > 0 and y2 > 0 else None for (x1, y1), (x2, y2) in pairs]


def less_held(record: Record, field: str) -> float | None:
    value, held = getattr(record, field), [getattr(record, name) for name in HELD]
    return None if value is None or held[0] is None or held[1] is None else value - sum(size or 0 for size in held)


def points_of(records: Sequence[Record], axis: str, read: Callable[[Record], float | None]) -> list[Point]:
    """(x, y) of the records with status "ok"; a failed case's last figures do not show its needs."""
    values = {getattr(record, AXES[axis][0]): read(record) for record in records if record.status == "ok"}
    return sorted((x, y) for x, y in values.items() if x is not None and y is not None)


def axis_of(records: Sequence[Record]) -> str | None:
    """The axis that varies among records that differ only in lengths."""
    changing = cases.varying(records, ("query_len", "kv_len"))
    if changing == ["query_len", "kv_len"]:
        return "N" if all(record.query_len == record.kv_len for record in records) else None
    if changing == ["query_len"]:
        return "S" if records[0].kv_len is not None else "N"
    return "T" if changing else None


def series_of(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Each axis with records that differ only along it."""
    square = [record for record in records if record.kv_len in (record.query_len, None)]
    for group in cases.groups_besides(square, ("query_len", "kv_len")):
        if (axis := axis_of(group)) is not None:
            yield axis, group
    oblong = [record for record in records if record.kv_len not in (record.query_len, None)]
    for besides in ("query_len", "kv_len"):
        for group in cases.groups_besides(oblong, (besides,)):
            if cases.varying(group, (besides,)):
                yield ("S" if besides == "query_len" else "T"), group
    for group in cases.groups_besides(records, ("dim",)):
        if cases.varying(group, ("dim",)):
            yield "dim", group


def scaling_row(records: Sequence[Record], axis: str, field: str) -> list[Cell] | None:
    points = points_of(records, axis, lambda record: getattr(record, field))
    if not points:
        return None
    # Only positive values can be fitted and counted.
    points = [(x, y) for x, y in points if y > 0] or points
    span = f"{points[0][0]:g}" if len(points) == 1 else f"{points[0][0]:g} .. {points[-1][0]:g}"
    factors = " ".join("-" if factor is None else f"{factor:.2f}" for factor in factors_per_doubling(points))
    beyond = points_of(records, axis, lambda record: less_held(record, field)) if field in LESS_HELD else []
    fits = fit_exponent(points), fit_exponent(beyond)
    words = exponent_words(fits[0], points), exponent_words(fits[1], beyond) if field in LESS_HELD else None
    numbers: list[Cell] = []
    for fit in fits:
        numbers += [fit.value, fit.low, fit.high] if fit else [None] * 3
    return [QUANTITIES[field], span, len(points), factors or None, *words, *numbers]


def exponent_words(fit: Exponent | None, points: Sequence[Point]) -> str:
    if fit is not None:
        return str(fit)
    if not points:
        return "unknown"
    return "none taken" if all(y <= 0 for _, y in points) else "one length"


def scaling_table(records: Sequence[Record]) -> Table:
    """One row for each line of a log-log plot."""
    columns = [
        Column("case", "case"),
        Column("axis", "x"),
        Column("quantity", "y"),
        Column("span", "x from .. to", rank=2),
        Column("points", "points", rank=3),
        Column("factors_per_doubling", "y per doubling of x", rank=1),
        Column("exponent_words", "y ~ x^a", audience="people"),
        Column("exponent_beyond_held_words", "beyond what is held", audience="people"),
        *(
            Column(f"exponent{of}{name}", f"exponent{of}{name}", audience="programs")
            for of in ("", "_beyond_held")
            for name in ("", "_low", "_high")
        ),
    ]
    notes = [
        "y ~ x^a: least squares of the logarithms, ± half the 95 % confidence interval of a. beyond what is held: the "
        "same without inputs, output and parameters, which grow with N for every operator. "
        "Cases that failed or took nothing are not counted.",
    ]
    changing = {"operator", *cases.varying(records)}
    rows = []
    for axis, group in series_of(records):
        words = cases.describe(
            group[0], [field for field in cases.CASE_FIELDS if field in changing and field not in AXES[axis]]
        )
        found = [scaling_row(group, axis, field) for field in QUANTITIES]
        rows += [[words, axis, *row] for row in found if row is not None]
    return Table("scaling", f"Scaling: {cases.common_case(records)}", columns, rows, notes)


NUMBER = re.compile(r"\d[\d.,]*")


def summary(records: Sequence[Record]) -> list[str]:
    """How many cases were measured and predicted and how they ended, then the remarks."""
    kinds = ((cases.operators_among(records), ""), (cases.models_among(records), " of whole models"))
    groups = [(rows, kind) for some, kind in kinds for rows in cases.split_by_source(some) if rows]
    counts = [Counter(record.status for record in rows).most_common() for rows, _ in groups]
    ends = [", ".join(f"{number} {status}" for status, number in one) for one in counts]
    lines = [
        f"{cases.count_of(rows)}{kind} ({cases.common_case(rows)}): {words}."
        for (rows, kind), words in zip(groups, ends, strict=True)
    ]
    return [*lines, *remarks(records)]


def remarks(records: Sequence[Record]) -> list[str]:
    """How far measurements and predictions of the same cases agree, and what is doubtful."""
    pairs = cases.pair(records)
    return [*([predictions.agreement(pairs)] if pairs else []), *doubt_lines(records)]


def doubt_lines(records: Sequence[Record]) -> list[str]:
    """One line about times, one about bytes and one about predictions, for those that are doubtful."""
    lines = []
    measured, predicted = cases.split_by_source(records)
    noisy = [record for record in measured if any(doubt.about_times for doubt in record.doubts)]
    if noisy:
        reasons = Counter(reason for row in noisy for reason in {doubt.about_times for doubt in row.doubts} if reason)
        why = ", ".join(sorted(reasons, key=lambda reason: (-reasons[reason], reason)))
        timed = [record for record in measured if record in noisy or record.forward_ms is not None]
        lines.append(f"{of_rows('Times', noisy, timed)} are noisy: {why}; bytes are not affected.")
    for rows, what, verb in ((measured, "Figures", "uncertain"), (predicted, "Predictions", "bounds")):
        found = Counter(doubt for record in rows for doubt in record.doubts if not doubt.about_times)
        if found:
            doubtful = [record for record in rows if any(doubt in found for doubt in record.doubts)]
            # Doubts that differ only in their numbers are one reason.
            kinds = {NUMBER.sub("", doubt): doubt for doubt, _ in reversed(found.most_common())}
            more = f"; and {len(kinds) - 1} other reasons" if len(kinds) > 2 else "; and another" * (len(kinds) - 1)
            lines.append(f"{of_rows(what, doubtful, rows)} are {verb}: {found.most_common(1)[0][0]}{more}.")
    return lines


def of_rows(what: str, some: Sequence[Record], rows: Sequence[Record]) -> str:
    """ "Times of 2 of 5 rows", or "The times" of a single row."""
    return f"{what} of {len(some)} of {len(rows)} rows" if len(rows) > 1 else f"The {what.lower()}"


def doubt_details(records: Sequence[Record]) -> list[str]:
    """Every doubt, with its case."""
    fields = [
        field for field in cases.CASE_FIELDS if field in ("operator", "query_len", "kv_len", *cases.varying(records))
    ]
    return [f"{cases.describe(record, fields)}: {doubt}" for record in records for doubt in record.doubts]

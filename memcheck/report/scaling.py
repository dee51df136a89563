"""How memory and time grow: the factor per doubling, and the exponent a of memory ~ N^a with an interval."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memcheck.core.record import Record
from memcheck.report.cases import CASE_FIELDS, FIELD_WORDS, NEEDS, common_case, describe, groups_besides, varying
from memcheck.report.tables import Cell, Column, Table

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
QUANTITIES = {
    **{field: FIELD_WORDS[field] for field in NEEDS},
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
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    slope, intercept = statistics.linear_regression(xs, ys)
    freedom = len(points) - 2
    if freedom == 0:
        return Exponent(slope, None, None)
    residuals = sum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    # The two-sided 95 % quantile; with more degrees of freedom than the table has, that of the normal distribution.
    quantile = STUDENT_95[freedom - 1] if freedom <= len(STUDENT_95) else statistics.NormalDist().inv_cdf(0.975)
    margin = quantile * math.sqrt(residuals / freedom / spread)
    return Exponent(slope, slope - margin, slope + margin)


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
    changing = varying(records, ("query_len", "kv_len"))
    if changing == ["query_len", "kv_len"]:
        return "N" if all(record.query_len == record.kv_len for record in records) else None
    if changing == ["query_len"]:
        return "S" if records[0].kv_len is not None else "N"
    return "T" if changing else None


def series_of(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Each axis with records that differ only along it."""
    square = [record for record in records if record.kv_len in (record.query_len, None)]
    for group in groups_besides(square, ("query_len", "kv_len")):
        if (axis := axis_of(group)) is not None:
            yield axis, group
    oblong = [record for record in records if record.kv_len not in (record.query_len, None)]
    for besides in ("query_len", "kv_len"):
        for group in groups_besides(oblong, (besides,)):
            if varying(group, (besides,)):
                yield ("S" if besides == "query_len" else "T"), group
    for group in groups_besides(records, ("dim",)):
        if varying(group, ("dim",)):
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
    changing = {"operator", *varying(records)}
    rows = []
    for axis, group in series_of(records):
        words = describe(group[0], [field for field in CASE_FIELDS if field in changing and field not in AXES[axis]])
        found = [scaling_row(group, axis, field) for field in QUANTITIES]
        rows += [[words, axis, *row] for row in found if row is not None]
    return Table("scaling", f"Scaling: {common_case(records)}", columns, rows, notes)

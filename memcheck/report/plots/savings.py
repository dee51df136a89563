"""Bars that show how many times as much memory the standard operator needs as each other operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.plots.lines import MISSING_WORDS
from memcheck.report.plots.memory import memory_quantities
from memcheck.report.plots.scales import set_ticks, x_ticks
from memcheck.report.plots.series import Line, Quantity, View
from memcheck.report.plots.style import GREY, HATCHES, add_note, columns_of, in_house_style, new_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Names that count as "standard attention", in order of preference.
STANDARDS = ("naive", "memcheck-pyt/naive", "cs336/naive", "softmax/math", "memcheck-pyt/softmax", "softmax")
COLUMNS = 3
MOST_BARS = 9


def standard_among(names: Iterable[str]) -> str | None:
    """The standard operator among the names of lines. None if there is none, or nothing to compare it with."""
    names = list(names)
    found = [name for standard in STANDARDS for name in names if name.split(",")[0] == standard]
    return found[0] if found and len(names) > 1 else None


@in_house_style
def savings_bars(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str) -> Figure:
    """A panel per operator and a bar per x: the standard's peak memory divided by the operator's."""
    lines = view.lines(styles)
    standard = standard_among(line.name for line in lines)
    if standard is None:
        raise UsageError(f"the savings need a standard to compare with, got none of {', '.join(STANDARDS)}")
    quantity = memory_quantities(view.records)[-1]
    base = {x: record for line in lines if line.name == standard for x, record in line.points}
    others = [line for line in lines if line.name != standard and ratios(line, base, quantity)]
    figure, panels = new_panels(len(others), title, subtitle, panel=2.1, around=1.0, columns=COLUMNS, sharey=True)
    places = sorted(x_ticks(view.positions))[-MOST_BARS:]
    for number, ax in enumerate(panels):
        draw_ratios(ax, others[number], base, quantity, places, HATCHES[number % len(HATCHES)])
        columns = columns_of(ax)
        # Two lines where one might run into that of the next panel.
        ax.set_xlabel(view.label.replace(", ", ",\n") if number + columns >= len(others) else "")
    set_ratio_axis(figure.axes[0], others, base, quantity)
    figure.supylabel(f"{standard} / operator", fontsize=10)
    what = f"peak memory, {quantity.title.lower()}"
    hollow = any(predicted for line in others for _, predicted in ratios(line, base, quantity).values())
    not_run = f"hollow: {standard} predicted, not run" if hollow else ""
    add_note(figure, what, f"dotted: as much as {standard}", not_run)
    return figure


def ratios(line: Line, base: Mapping[int, Record], quantity: Quantity) -> dict[int, tuple[float, bool]]:
    """x -> the standard's bytes divided by this operator's, and whether the standard's bytes are predicted."""
    found = {}
    for x, record in line.points:
        if x in base and (size := quantity.value(record)):
            whole = quantity.value(base[x])
            predicted = quantity.from_terms(base[x]) if whole is None else None
            if whole or predicted:
                found[x] = (whole or predicted or 0) / size, whole is None
    return found


def draw_ratios(
    ax: Axes, line: Line, base: Mapping[int, Record], quantity: Quantity, places: Sequence[int], hatch: str
) -> None:
    known = ratios(line, base, quantity)
    rows = dict(line.points)
    for place, x in enumerate(places):
        ratio, predicted = known.get(x, (None, False))
        if ratio is not None:
            face, edge = ("white", line.style.colour) if predicted else (line.style.colour, "white")
            # On a logarithmic axis bars start at 1 and go up or down.
            ax.bar(place, ratio - 1, bottom=1, width=0.75, color=face, edgecolor=edge, hatch=hatch, label=line.name)
            factor = f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 1.95 else f"{ratio:.2f}x"
            label(ax, factor, place, ratio, above=ratio >= 1, fontsize=9)
        elif words := absence(rows.get(x), base.get(x), quantity):
            label(ax, words, place, 1, above=True, rotation=90, fontsize=8, color=GREY)
    ax.axhline(1, color="black", lw=0.8, ls=":", label="_one")
    ax.set_xticks(range(len(places)), [str(x) for x in places], fontsize=9 if len(places) < 7 else 8)
    ax.set_xlim(-0.6, len(places) - 0.4)
    ax.set_title(line.name)


def label(ax: Axes, text: str, place: int, y: float, *, above: bool, **look: Any) -> None:
    shift, edge = (2, "bottom") if above else (-2, "top")
    ax.annotate(text, (place, y), (0, shift), textcoords="offset points", ha="center", va=edge, **look)


def absence(record: Record | None, base: Record | None, quantity: Quantity) -> str:
    """The reason why a requested case has no factor."""
    if record is None or base is None:
        return ""
    if quantity.value(record) is None:
        return MISSING_WORDS.get(record.status, record.status)
    return f"standard: {MISSING_WORDS.get(base.status, base.status)}"


def set_ratio_axis(ax: Axes, others: Sequence[Line], base: Mapping[int, Record], quantity: Quantity) -> None:
    values = [ratio for line in others for ratio, _ in ratios(line, base, quantity).values()] or [1.0]
    low, high = math.floor(math.log2(min(*values, 1.0))), math.ceil(math.log2(max(*values, 1.5)))
    span = high - low
    ax.set_yscale("log", base=2)
    ax.set_ylim(2.0 ** (low - (0.04 if low == 0 else 0.14) * span), 2.0 ** (high + 0.12 * span))
    set_ticks(ax.yaxis, [2.0**power for power in range(low, high + 1, math.ceil(span / 5))], lambda y: f"{y:g}x")

"""Plots peak memory against a length or the token dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.pairing import on_measured_devices
from memcheck.report.plots.lines import MISSING_WORDS, beside_words, common_label, expected, line_figure
from memcheck.report.plots.scales import format_value, set_linear_ticks
from memcheck.report.plots.series import (
    AXES,
    BACKWARD,
    FORWARD,
    Line,
    Quantity,
    View,
    natural_axis,
    position,
    refuse_mixed,
    undrawn_note,
    views_along,
)
from memcheck.report.plots.style import GREY, HATCHES, in_house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center"}


def plot_memory(
    records: Sequence[Record], path: Path | str, *, styles: Mapping[str, Style], title: str, subtitle: str
) -> Figure:
    """Plots peak memory against the size that varies, or bars for a single shape, and writes the figure to `path`."""
    view = whole_view(records)
    if len(view.positions) > 1:
        figure = memory_lines(view, styles, title=title, subtitle=subtitle, log=True)
    else:
        figure = memory_bars(view, styles, title=title, subtitle=subtitle)
    save(figure, path)
    return figure


def whole_view(records: Sequence[Record]) -> View:
    """All records in one view. UsageError if more than one size varies."""
    records = on_measured_devices(records)
    refuse_mixed(records)
    views = views_along(records, natural_axis(records)) or [View("length", {})]
    if len(views) > 1:
        values = "; ".join(view.fixed_words() for view in views)
        raise UsageError(f"one plot against the {AXES[views[0].x]} needs the other sizes fixed, got {values}")
    return views[0]


def memory_quantities(records: Sequence[Record]) -> list[Quantity]:
    return [FORWARD, BACKWARD] if any(record.mode == "train" for record in records) else [FORWARD]


def memory_lines(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str, log: bool) -> Figure:
    return line_figure(view, memory_quantities(view.records), styles, title=title, subtitle=subtitle, log=log)


def memory_bars(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str) -> Figure:
    return bar_figure(view, memory_quantities(view.records), styles, title=title, subtitle=subtitle)


@in_house_style
def bar_figure(
    view: View, quantities: Sequence[Quantity], styles: Mapping[str, Style], *, title: str, subtitle: str
) -> Figure:
    """Bars for one shape: a bar per operator, a panel per quantity."""
    refuse_mixed(view.records)
    lines = view.lines(styles)
    bars = [line for line in lines if any(shown(row, quantity) for _, row in line.points for quantity in quantities)]
    figure = new_figure(9.6 if len(quantities) > 1 else 6.8, 1.6 + 0.36 * max(len(bars), 2), title, subtitle)
    panels = figure.subplots(1, len(quantities), sharey=True, sharex=True, squeeze=False)[0]
    for ax, quantity in zip(panels, quantities, strict=True):
        draw_bars(ax, bars, quantity)
        ax.set_title(quantity.title)
        ax.set_xlabel(f"{common_label(quantities)}\n{shape_words(view)}")
        ax.grid(axis="x")
    panels[0].set_yticks(range(len(bars)), [line.name for line in bars])
    panels[0].set_ylim(max(len(bars), 1) - 0.4, -0.6)  # The first operator stands at the top.
    highest = max([bar.get_width() for ax in panels for bar in ax.patches], default=0) or 2.0**20
    # Leaves room for the number at the end of the longest bar.
    panels[0].set_xlim(0, (1.45 if any(line.predictions for line in bars) else 1.3) * highest)
    set_linear_ticks(panels[0].xaxis, highest, quantities[0].unit)
    note = "; ".join(filter(None, [bar_note(bars, quantities), undrawn_note(view.records)]))
    if note:
        figure.supxlabel(note, fontsize=9, color=GREY)
    return figure


def bar_note(lines: Sequence[Line], quantities: Sequence[Quantity]) -> str:
    beside = any(expected(line, quantity) for line in lines for quantity in quantities)
    parts = ["dashed: predicted; in brackets measured / predicted, = to the byte"] if beside else []
    return "; ".join(parts + (["hollow: predicted, not run"] if any(line.predicted for line in lines) else []))


def draw_bars(ax: Axes, lines: Sequence[Line], quantity: Quantity) -> None:
    for place, line in enumerate(lines):
        ((_, record),) = line.points
        how, size = quantity.missing(record), quantity.value(record)
        width = 0 if how or size is None else size
        face, edge = ("white", line.style.colour) if line.predicted else (line.style.colour, "white")
        hatch = HATCHES[place % len(HATCHES)]
        ax.barh(place, width, height=0.65, color=face, edgecolor=edge, hatch=hatch, label=line.name)
        text = MISSING_WORDS[how] if how else "-" if size is None else format_value(size, quantity.unit)
        text += beside_words(line, quantity) if width else ""
        ax.annotate(text, (max(width, draw_expected(ax, place, line, quantity)), place), (4, 0), **BESIDE)


def draw_expected(ax: Axes, place: int, line: Line, quantity: Quantity) -> float:
    """Draws a dashed frame up to the predicted value, and returns its width."""
    width = max((size for _, size in expected(line, quantity)), default=0.0)
    if width:
        ax.barh(place, width, height=0.78, fill=False, edgecolor="black", ls=(0, (4, 3)), lw=1, label="_expected")
    return width


def shown(record: Record, quantity: Quantity) -> bool:
    return quantity.value(record) is not None or quantity.missing(record) is not None


def shape_words(view: View) -> str:
    """ "at sequence length 512", or "at query length 4, key length 8" """
    if not view.records:
        return ""
    queries, keys = (position(view.records[0], axis) for axis in ("query_len", "kv_len"))
    return f"at sequence length {keys}" if queries == keys else f"at query length {queries}, key length {keys}"

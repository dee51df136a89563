"""Plots peak memory against a length or the token dimension: lines, bars, small panels, and the same of decoding."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.cases import has_sizes, sequence_words
from memcheck.report.plots.lines import (
    HOLLOW_HELP,
    MISSING_WORDS,
    beside_notes,
    beside_words,
    common_label,
    draw_lines,
    drawn_values,
    line_figure,
    missing_points,
)
from memcheck.report.plots.scales import ROW, axes_points, format_value, set_linear_ticks, set_x, set_y
from memcheck.report.plots.series import (
    AXES,
    BACKWARD,
    FORWARD,
    STATE,
    STEP,
    WHOLE_STEP,
    Line,
    Quantities,
    Quantity,
    View,
    position,
    undrawn_note,
)
from memcheck.report.plots.style import (
    GREY,
    HATCHES,
    add_note,
    columns_of,
    distinct_styles,
    in_house_style,
    look_of,
    new_panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The overview: panels in a row, the height in points of a row of marks, and the size of markers.
COLUMNS = 3
SMALL_ROW = 9
MARKER = 4.5


def memory_quantities(records: Sequence[Record]) -> list[Quantity]:
    if all(record.mode != "train" for record in records):
        return [FORWARD]
    steps = any(record.optimizer_peak_bytes is not None for record in records)
    return [FORWARD, BACKWARD, *([WHOLE_STEP] if steps else [])]


@in_house_style
def bar_figure(view: View, styles: Mapping[str, Style], *, quantities: Quantities, title: str, subtitle: str) -> Figure:
    """Bars for one shape: a bar per operator, a panel per quantity. quantities: a list, or a function of records."""
    quantities = quantities(view.records) if callable(quantities) else quantities
    lines = view.lines(styles)
    known = {line.name for line in lines for quantity in quantities if quantity.along(line.points)}
    ended = {line.name for line in lines for quantity in quantities if any(missing_points(line, quantity, 0))}
    bars = [line for line in lines if line.name in known | ended]
    height = 0.6 + 0.36 * max(len(bars), 2)
    figure, panels = new_panels(len(quantities), title, subtitle, panel=height, around=1.0, sharey=True, sharex=True)
    for ax, quantity in zip(panels, quantities, strict=True):
        draw_bars(ax, bars, quantity)
        ax.set_title(quantity.title)
        ax.set_xlabel(f"{common_label(quantities)}\n{shape_words(view)}")
        ax.grid(axis="x")
    panels[0].set_yticks(range(len(bars)), [line.name for line in bars])
    panels[0].set_ylim(max(len(bars), 1) - 0.4, -0.6)  # The first operator stands at the top.
    highest = max(0.0, *(ax.dataLim.x1 for ax in panels)) or 2.0**20
    # Leaves room for the number at the end of the longest bar.
    panels[0].set_xlim(0, (1.45 if any(line.predictions for line in bars) else 1.3) * highest)
    set_linear_ticks(panels[0].xaxis, highest, quantities[0].unit)
    add_note(figure, *beside_notes(bars, quantities), undrawn_note(view.records))
    return figure


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
        # A dashed frame reaches to the predicted value.
        frame = max((size for _, size in quantity.along(line.predictions)), default=0.0)
        if frame:
            ax.barh(place, frame, height=0.78, fill=False, edgecolor="black", ls=(0, (4, 3)), lw=1, label="_expected")
        ax.annotate(text, (max(width, frame), place), (4, 0), textcoords="offset points", va="center")


def shape_words(view: View) -> str:
    """ "at sequence length 512", or "at query length 4, key length 8" """
    if not any(map(has_sizes, view.records)):
        return ""
    if (batch := view.records[0].lengths) is not None:
        return sequence_words(batch)
    queries, keys = (position(view.records[0], axis) for axis in ("query_len", "kv_len"))
    return f"at sequence length {keys}" if queries == keys else f"at query length {queries}, key length {keys}"


def decode_quantities(records: Sequence[Record]) -> list[Quantity]:
    return [quantity for quantity in (STATE, STEP) if any(quantity.value(record) is not None for record in records)]


memory_lines = functools.partial(line_figure, quantities=memory_quantities)
memory_bars = functools.partial(bar_figure, quantities=memory_quantities)
decode_lines = functools.partial(line_figure, quantities=decode_quantities)
decode_bars = functools.partial(bar_figure, quantities=decode_quantities)


@in_house_style
def memory_overview(views: Sequence[View], styles: Mapping[str, Style], *, title: str, subtitle: str) -> Figure:
    """Peak memory against the views' x axis, one panel per view."""
    records = [record for view in views for record in view.records]
    quantity = memory_quantities(records)[-1]
    # Styles are chosen once, so that an operator looks the same in every panel.
    names = dict.fromkeys(line.name for view in views for line in view.lines(styles))
    drawn = distinct_styles(names, styles)
    lines = [view.lines(drawn) for view in views]
    ended = [line.name for some in lines for line in some if any(missing_points(line, quantity, math.inf))]
    marks = {name: row for row, name in enumerate(dict.fromkeys(ended))}
    panel_height = 2.0 + SMALL_ROW * len(marks) / 72
    columns = 2 if len(views) in (2, 4) else COLUMNS
    shared: dict[str, Any] = {"columns": columns, "narrow_columns": 2, "sharex": True, "sharey": True}
    figure, panels = new_panels(len(views), title, subtitle, panel=panel_height, around=1.5, **shared)
    columns = columns_of(panels[0])
    for number, (ax, view) in enumerate(zip(panels, views, strict=True)):
        draw_panel(ax, view, lines[number], quantity, bottom=number + columns >= len(views))
    add_key(figure, drawn, f"{AXES[views[0].x]}; {quantity.label}")
    figure.draw_without_rendering()
    # The scale assumes rows of the height of a name; the rows here are lower.
    set_y(panels[0], drawn_values(panels), quantity.unit, log=True, rows=math.ceil(len(marks) * SMALL_ROW / ROW))
    percent = views[0].x == "counted"
    set_x(panels[0], {x for view in views for x in view.positions}, log=True, percent=percent)
    for ax, some in zip(panels, lines, strict=True):
        for line in some:
            mark_unfinished(ax, line, quantity, marks.get(line.name, 0))
    return figure


def draw_panel(ax: Axes, view: View, lines: Sequence[Line], quantity: Quantity, *, bottom: bool) -> None:
    draw_lines(ax, lines, quantity, math.inf, log=True)
    for drawn in ax.get_lines():
        drawn.set(markersize=MARKER, linewidth=0.8 if drawn.get_label() == "_bridge" else 1.2)
    ax.set_title(view.fixed_words(), fontsize=10)
    ax.grid()
    ax.xaxis.set_tick_params(labelbottom=bottom, labelsize=8)
    ax.yaxis.set_tick_params(labelsize=8)


def mark_unfinished(ax: Axes, line: Line, quantity: Quantity, row: int) -> None:
    """Marks unfinished cases at the top edge with the line's own marker, as panels have no names beside their lines."""
    place = ax.get_xaxis_transform()
    for x, how in missing_points(line, quantity, math.inf):
        y = 1 - SMALL_ROW * (row + 0.6) / axes_points(ax)
        face, cross = ("white", "black") if line.predicted or how == "skipped" else (line.style.colour, "white")
        ax.plot([x], [y], transform=place, label=f"_{how}", **look_of(line.style, mfc=face, ms=MARKER + 3))
        ax.plot([x], [y], transform=place, label="_cross", color=cross, marker="x", ms=MARKER - 0.5, mew=1)


def add_key(figure: Figure, styles: Mapping[str, Style], axes_words: str) -> None:
    from matplotlib.lines import Line2D

    handles = [
        *(Line2D([], [], label=name, **look_of(style, ls=style.dash, ms=MARKER + 1)) for name, style in styles.items()),
        Line2D([], [], marker="x", color="black", ls="none", label="crossed: out of memory, or not finished"),
        Line2D([], [], marker="o", mfc="white", color=GREY, ls="none", label=HOLLOW_HELP),
    ]
    columns = key_columns([str(handle.get_label()) for handle in handles], figure.get_figwidth() * 72)
    rows = math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * max(rows - 2, 0))  # There is room for two rows.
    how: dict[str, Any] = {"frameon": False, "fontsize": 9, "title_fontsize": 9, "handlelength": 4}
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, title=axes_words, **how)


def key_columns(labels: Sequence[str], points: float) -> int:
    """The largest number of columns, up to 4, whose labels fit into this width in points."""
    for columns in (4, 3, 2):
        rows, longer = divmod(len(labels), columns)
        ends = itertools.accumulate([rows + 1] * longer + [rows] * (columns - longer), initial=0)
        widths = [max(map(len, labels[first:last]), default=0) for first, last in itertools.pairwise(ends)]
        if sum(5 * width + 60 for width in widths) <= points:
            return columns
    return 1

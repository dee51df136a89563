"""Small log-log panels, one for each fixed value, with a shared legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.core.style import Style
from memcheck.report.plots.lines import draw_lines, drawn_values, missing_points
from memcheck.report.plots.memory import memory_quantities
from memcheck.report.plots.scales import ROW, axes_points, set_x, set_y
from memcheck.report.plots.series import AXES, Line, Quantity, View, refuse_mixed
from memcheck.report.plots.style import GREY, distinct_styles, in_house_style, look_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
SMALL_ROW = 9  # points
MARKER = 4.5


@in_house_style
def memory_overview(views: Sequence[View], styles: Mapping[str, Style], *, title: str, subtitle: str) -> Figure:
    """Peak memory against the views' x axis, one panel per view."""
    records = [record for view in views for record in view.records]
    refuse_mixed(records)
    quantity = memory_quantities(records)[-1]
    # Styles are chosen once, so that an operator looks the same in every panel.
    names = dict.fromkeys(line.name for view in views for line in view.lines(styles))
    drawn = distinct_styles(names, styles)
    columns = 2 if len(views) in (2, 4) else min(COLUMNS, len(views))
    rows = math.ceil(len(views) / columns)
    marks = {name: row for row, name in enumerate(unfinished(views, drawn, quantity))}
    panel_height = 2.0 + SMALL_ROW * len(marks) / 72
    figure = new_figure(9.6, 1.5 + panel_height * rows, title, subtitle)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for ax in panels[len(views) :]:
        ax.set_visible(False)
    panels = panels[: len(views)]
    for number, (ax, view) in enumerate(zip(panels, views, strict=True)):
        draw_panel(ax, view, view.lines(drawn), quantity, bottom=number + columns >= len(views))
    add_key(figure, drawn, f"{AXES[views[0].x]}; {quantity.label}")
    figure.draw_without_rendering()
    # The scale assumes rows of the height of a name; the rows here are lower.
    set_y(panels[0], drawn_values(panels), quantity.unit, log=True, rows=math.ceil(len(marks) * SMALL_ROW / ROW))
    set_x(panels[0], {x for view in views for x in view.positions}, log=True)
    for ax, view in zip(panels, views, strict=True):
        for line in view.lines(drawn):
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


def unfinished(views: Sequence[View], styles: Mapping[str, Style], quantity: Quantity) -> list[str]:
    lines = [line for view in views for line in view.lines(styles)]
    return list(dict.fromkeys(line.name for line in lines if any(missing_points(line, quantity, math.inf))))


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
        Line2D([], [], color=s.colour, marker=s.marker, ls=s.dash, ms=MARKER + 1, label=name)
        for name, s in styles.items()
    ]
    handles.append(Line2D([], [], marker="x", color="black", ls="none", label="crossed: OOM, or no end"))
    handles.append(Line2D([], [], marker="o", mfc="white", color=GREY, ls="none", label="hollow: predicted, not run"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        title=axes_words,
        title_fontsize=9,
        handlelength=4,
    )

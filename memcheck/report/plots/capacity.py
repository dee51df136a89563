"""Plots the largest size that fits against another size, one line per operator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcheck.core.style import Style
from memcheck.report.plots.lines import Name, name_lines
from memcheck.report.plots.scales import ROW, axes_points, set_ticks, set_x
from memcheck.report.plots.style import add_note, distinct_styles, in_house_style, look_of, new_figure, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS = {"seq_len": "sequence length", "bsz": "batch size", "dim": "token dimension"}
HEIGHT = 4.6


@dataclass(frozen=True)
class Limit:
    """The largest size that fits at x; 0 if none does. open: the search reached its limit without finding the end."""

    x: int
    largest: int
    open: bool = False


@in_house_style
def capacity_figure(
    curves: Mapping[str, Sequence[Limit]],
    styles: Mapping[str, Style],
    *,
    found: str,
    along: str,
    title: str,
    subtitle: str = "",
    note: str = "",
) -> Figure:
    """A line for each operator. found: the searched size; along: the size on the x axis.

    Both are "seq_len", "bsz", "dim" or words of their own.
    """
    figure = new_figure(7.6, HEIGHT, title, subtitle)
    ax = figure.subplots()
    drawn = distinct_styles(curves, styles)
    nothing = {name: [edge.x for edge in edges if not edge.largest] for name, edges in curves.items()}
    rows = [name for name, places in nothing.items() if places]
    known = {name: fitting for name, edges in curves.items() if (fitting := [edge for edge in edges if edge.largest])}
    for name, edges in known.items():
        draw_edges(ax, name, edges, drawn[name])
    ax.grid()
    ax.set_xlabel(WORDS.get(along, along))
    ax.set_ylabel(f"largest {WORDS.get(found, found)} that fits")
    every = [edge for edges in curves.values() for edge in edges]
    set_x(ax, {edge.x for edge in every}, log=True)
    unended = "hollow: the search ended there, more may fit" if any(edge.open for edge in every) else ""
    add_note(figure, unended, "\u2716 nothing fits" if rows else "", note)
    figure.draw_without_rendering()  # The layout must be settled before distances in points are computed.
    set_sizes(ax, [edge.largest for edge in every if edge.largest], len(rows))
    for number, name in enumerate(rows):
        mark_nothing(ax, nothing[name], number, drawn[name])
    name_lines(ax, [last_name(name, edges[-1], drawn[name]) for name, edges in known.items()], 0)
    return figure


plot_capacity = written(capacity_figure)


def draw_edges(ax: Axes, name: str, edges: Sequence[Limit], style: Style) -> None:
    ax.plot([edge.x for edge in edges], [edge.largest for edge in edges], label=name, **look_of(style, ls=style.dash))
    if unended := [edge for edge in edges if edge.open]:
        places = [edge.x for edge in unended], [edge.largest for edge in unended]
        ax.plot(*places, label="_open", **look_of(style, mfc="white", mew=1.3))


def set_sizes(ax: Axes, sizes: Sequence[int], rows: int) -> None:
    """Sets a logarithmic axis of sizes, with room below it for rows of marks."""
    low, high = math.log2(min(sizes, default=1)), math.log2(max(sizes, default=2))
    margin = 0.06 * max(high - low, 1)
    share = min(ROW * rows / axes_points(ax), 0.7)
    room = (high - low + 2 * margin) * share / (1 - share)
    ax.set_yscale("log", base=2)
    ax.set_ylim(2.0 ** (low - margin - room), 2.0 ** (high + margin))
    powers = range(math.ceil(low - margin), math.floor(high + margin) + 1)
    set_ticks(ax.yaxis, [2.0**power for power in powers[:: math.ceil(len(powers) / 9) or 1]], lambda y: f"{y:,.0f}")


def mark_nothing(ax: Axes, places: Sequence[int], row: int, style: Style) -> None:
    """Draws crosses at the lower edge, where not even the smallest size fits."""
    y = ROW * (row + 0.5) / axes_points(ax)
    look = look_of(style, marker="X", ms=8)
    ax.plot(places, [y] * len(places), transform=ax.get_xaxis_transform(), label="_nothing", **look)


def last_name(name: str, edge: Limit, style: Style) -> Name:
    return Name(f"{name} {edge.largest:,}{' or more' if edge.open else ''}", float(edge.largest), style, edge.open)

"""The largest size that fits against another size, a line per operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.style import Style
from memcheck.report.plots.style import (
    add_note,
    distinct_styles,
    in_house_style,
    new_figure,
    save,
    set_powers,
    set_ticks,
    spaced,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {"seq_len": "sequence length", "bsz": "batch size", "dim": "token dimension"}


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
    figure = new_figure(7.6, 4.6, title, subtitle)
    ax = figure.subplots()
    drawn = distinct_styles(curves, styles)
    every = [edge for edges in curves.values() for edge in edges]
    nothing = [name for name, edges in curves.items() if not all(edge.largest for edge in edges)]
    for name, edges in curves.items():
        look: dict[str, Any] = {"color": drawn[name].colour, "marker": drawn[name].marker}
        fitting = [(edge.x, edge.largest) for edge in edges if edge.largest]
        ax.plot(*(zip(*fitting, strict=True) if fitting else ([], [])), ls=drawn[name].dash, label=name, **look)
        if more := [(edge.x, edge.largest) for edge in edges if edge.largest and edge.open]:
            ax.plot(*zip(*more, strict=True), ls="none", mfc="white", mew=1.3, label="_open", **look)
        if name in nothing:  # In rows along the lower edge.
            places = [edge.x for edge in edges if not edge.largest]
            heights = [0.03 + 0.05 * nothing.index(name)] * len(places)
            look |= {"marker": "x", "ls": "none", "ms": 9, "mew": 2.2}
            ax.plot(places, heights, transform=ax.get_xaxis_transform(), label="_nothing", **look)
    ax.grid()
    ax.set_xlabel(WORDS.get(along, along))
    ax.set_ylabel(f"largest {WORDS.get(found, found)} that fits")
    ax.set_xscale("log", base=2)
    set_ticks(ax.xaxis, spaced({edge.x for edge in every}), str)
    set_powers(ax, [edge.largest for edge in every], lambda y: f"{y:,.0f}")
    if nothing:
        low, high = ax.get_ylim()
        share = min(0.05 * (len(nothing) + 1), 0.6)
        ax.set_ylim(low / (high / low) ** (share / (1 - share)), high)
    figure.legend(loc="outside right center", handlelength=3)
    unended = "hollow: the search ended there, more may fit" if any(edge.open for edge in every) else ""
    add_note(figure, unended, "x: nothing fits" if nothing else "", note)
    return figure


def plot_capacity(curves: Mapping[str, Sequence[Limit]], path: Path | str, **how: Any) -> Figure:
    """Draws the capacities and writes them to `path`. how: as of capacity_figure."""
    figure = capacity_figure(curves, **how)
    save(figure, path)
    return figure

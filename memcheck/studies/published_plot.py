"""Plots the memory of the published operators divided by ours, one dot per shape."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memcheck.core.style import Style
from memcheck.report.plots.pictures import Picture
from memcheck.report.plots.scales import set_ticks
from memcheck.report.plots.style import add_note, distinct_styles, in_house_style, look_of, new_panels, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
PHASES = {"forward": "Forward", "backward": "Forward + backward"}
NOTE = (
    "a mark for each shape, longer sequences higher; right of the dotted line ours needs less\n"
    "hollow, at the right edge: the published operator ran out of memory, and ours needs no more than what fitted there"
)


@in_house_style
def published_figure(
    rows: Sequence[Row],
    styles: Mapping[str, Style],
    *,
    title: str = "Memory of the published operator / ours",
    subtitle: str = "",
) -> Figure:
    """One strip per operator of ours, with a dot for each shape that has both figures."""
    names = list(dict.fromkeys(row["ours"] for row in rows))[::-1]
    drawn = distinct_styles(names, styles)
    shared: dict[str, Any] = {"around": 1.3, "sharey": True, "sharex": True}
    figure, panels = new_panels(len(PHASES), title, subtitle, panel=0.6 + 0.8 * max(len(names), 1), **shared)
    edge = set_ratio_axis(panels[0], [ratio for row in rows for phase in PHASES if (ratio := ratio_of(row, phase))])
    for ax, phase in zip(panels, PHASES, strict=True):
        for place, name in enumerate(names):
            strip = [row for row in rows if row["ours"] == name]
            draw_strip(ax, strip, phase, place, drawn[name], edge, known_capacity(rows))
        ax.set_title(PHASES[phase])
        ax.set_xlabel("published / ours, without workspaces")
        ax.axvline(1, color="black", lw=0.8, ls=":", label="_one")
        ax.grid(axis="x")
    panels[0].set_yticks(range(len(names)), [strip_name(rows, name) for name in names])
    panels[0].set_ylim(-0.6, max(len(names), 1) - 0.4)
    add_note(figure, NOTE)
    return figure


plot_published = written(published_figure)


def ratio_of(row: Row, phase: str) -> float | None:
    """The ratio, without library workspaces where they are known, because only the published figures include them."""
    fair = row.get(f"{phase}_ratio_less_workspaces")
    return row.get(f"{phase}_ratio") if fair is None else fair


def strip_name(rows: Sequence[Row], name: str) -> str:
    published = next(row["operator"] for row in rows if row["ours"] == name)
    return name if published == name.split("/")[-1] else f"{name}\n(published: {published})"


def draw_strip(
    ax: Axes, rows: Sequence[Row], phase: str, place: int, style: Style, edge: float, capacity: float
) -> None:
    """Draws one strip; longer sequences are drawn higher."""
    lengths = [row["query_len"] for row in rows]
    known = [(row, ratio) for row in rows if (ratio := ratio_of(row, phase))]
    heights = [place + rise(row["query_len"], lengths) for row, _ in known]
    ratios = [ratio for _, ratio in known]
    look = look_of(style, ms=5)
    if known:
        ax.plot(ratios, heights, alpha=0.75, mec="white", mew=0.4, label=rows[0]["ours"], **look)
        middle = statistics.median(ratios)
        ax.plot([middle, middle], [place - 0.38, place + 0.38], color="black", lw=1.4, label="_median")
        ax.text(middle, place + 0.39, f"median {middle:.2f}x", ha="center", va="bottom", fontsize=9)
    if saved := [place + rise(row["query_len"], lengths) for row in rows if is_rescued(row, phase, capacity)]:
        ax.plot([edge] * len(saved), saved, mfc="none", mew=1.2, label="_oom", **look)


def rise(length: int, lengths: Sequence[int]) -> float:
    """A height from -0.3 for the shortest sequence to 0.3 for the longest."""
    span = math.log2(max(lengths) / min(lengths))
    return 0.6 * math.log2(length / min(lengths)) / span - 0.3 if span else 0.0


def is_rescued(row: Row, phase: str, capacity: float) -> bool:
    """True if the published operator ran out of memory and ours needs no more than is known to have fitted."""
    ours = row.get(f"ours_{phase}_bytes")
    failed = row[f"published_{phase}_bytes"] is None and str(row["published_status"]).startswith("oom")
    return failed and ours is not None and ours <= capacity


def known_capacity(rows: Sequence[Row]) -> float:
    """The highest published figure that fitted."""
    return max((row[f"published_{phase}_bytes"] or 0 for row in rows for phase in PHASES), default=0)


def set_ratio_axis(ax: Axes, ratios: Sequence[float]) -> float:
    """Sets the axis, and returns the position of the out-of-memory marks at the right edge."""
    low, high = math.log2(min([*ratios, 1.0])), math.log2(max([*ratios, 2.0]))
    edge = high + 0.12 * (high - low)
    ax.set_xscale("log", base=2)
    ax.set_xlim(2.0 ** (low - 0.06 * (high - low)), 2.0 ** (edge + 0.05 * (high - low)))
    set_ticks(ax.xaxis, ratio_ticks(2.0**low, 2.0**high), lambda x: f"{x:.3g}x")
    return float(2.0**edge)


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round ratios within the range; powers of two only if there would be too many."""
    powers = [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    rounder = sorted({power * part for power in powers for part in (1, 1.25, 1.5)})
    ticks = [tick for tick in (rounder if len(powers) < 4 else powers) if low <= tick <= high]
    return ticks[:: math.ceil(len(ticks) / 8)]


def published_picture(rows: Sequence[Row], styles: Mapping[str, Style]) -> Picture:
    """The figure of these rows as a picture for write_plots and svg_plots."""
    title = "Memory of the published operators, by ours"
    subtitle = f"{len(rows)} rows of memcheck_pyt's table, A100 40 GB; ours {sources(rows)}"
    caption = f"{title}; {subtitle}."
    return Picture("published", caption, lambda: published_figure(rows, styles, title=title, subtitle=subtitle))


def sources(rows: Sequence[Row]) -> str:
    """Describes where our figures come from: "measured on cpu, by formula"."""
    return ", ".join(dict.fromkeys(str(row["ours_source"]) for row in rows if row.get("ours_source")))

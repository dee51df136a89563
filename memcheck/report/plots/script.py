"""Plots the memory of a script over its events, stacked by what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.script_record import LAYERS, ScriptRecord
from memcheck.core.units import format_bytes
from memcheck.report.plots.scales import set_linear_ticks
from memcheck.report.plots.style import in_house_style, new_figure, save
from memcheck.report.plots.timeline import Layers, draw_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the bottom: what lives longest first.
ORDER = ("parameters", "buffers", "optimizer state", "gradients")


def plot_script(record: ScriptRecord, path: Path | str, *, title: str, subtitle: str = "") -> Figure:
    """Plots the record and writes the figure to `path`, in the format of its suffix."""
    figure = script_figure(record, title=title, subtitle=subtitle)
    save(figure, path)
    return figure


@in_house_style
def script_figure(record: ScriptRecord, *, title: str, subtitle: str = "") -> Figure:
    figure = new_figure(9.6, 4.8, title, subtitle)
    ax = figure.subplots()
    stack = layers_over_time(record)
    # Edges would hide layers that are narrower.
    draw_layers(ax, stack, edge=0)
    figure.draw_without_rendering()
    limit = shown_limit(record)
    top = max(record.peak.bytes, limit) or 1
    lowest = min((size for sizes in stack.layers.values() for size in sizes), default=0)
    ax.set_ylim(1.1 * min(lowest, 0), 1.2 * top)
    ax.set_xlim(0, record.events + 1)
    set_linear_ticks(ax.yaxis, top, "bytes")
    ax.set_xlabel("allocations and frees, in order")
    ax.set_ylabel("alive")
    show_seconds(ax, record)
    if limit:
        ax.axhline(limit, color="black", lw=0.8, ls="--", label="_limit")
        place: dict[str, Any] = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        ax.annotate(f"limit {format_bytes(limit)}", (record.events, limit), **place)
    mark_peak(ax, record)
    return figure


def shown_limit(record: ScriptRecord) -> int:
    """The limit, or 0 if it is so far above the peak that it would flatten the picture."""
    limit = record.limit_bytes or 0
    return limit if limit < 3 * record.peak.bytes else 0


def layers_over_time(record: ScriptRecord) -> Layers:
    used = [place for place in range(len(LAYERS)) if any(level.layers[place] for level in record.levels)]
    used.sort(key=lambda place: ORDER.index(LAYERS[place]) if LAYERS[place] in ORDER else len(ORDER) + place)
    layers = {LAYERS[place]: [0, *(level.layers[place] for level in record.levels)] for place in used}
    return Layers([0, *(level.event for level in record.levels)], layers)


def show_seconds(ax: Axes, record: ScriptRecord) -> None:
    """Says along the upper edge when some of the events were."""
    levels = record.levels
    chosen = levels[len(levels) // 12 :: max(1, len(levels) // 6)]
    upper = ax.secondary_xaxis("top")
    upper.set_xticks([level.event for level in chosen], [f"{level.seconds:.3g} s" for level in chosen], fontsize=9)
    upper.tick_params(length=3)


def mark_peak(ax: Axes, record: ScriptRecord) -> None:
    peak = record.peak
    ax.plot([peak.event], [peak.bytes], marker="v", color="black", ms=7, clip_on=False, label="_peak")
    side, shift = ("left", -4) if peak.event < 0.7 * record.events else ("right", 4)
    style: dict[str, Any] = {"xytext": (shift, 7), "textcoords": "offset points", "ha": side, "va": "bottom"}
    ax.annotate(f"peak {format_bytes(peak.bytes)}, {peak.place.phase}", (peak.event, peak.bytes), **style)

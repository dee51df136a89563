"""Plots the memory of a snapshot over its events: what was alive by line of Python, below what was reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcheck.core.snapshot_record import SnapshotRecord
from memcheck.core.units import format_bytes
from memcheck.report.plots.style import in_house_style, written
from memcheck.report.plots.timeline import Layers, Peak, mark_peaks, stack_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@in_house_style
def snapshot_figure(record: SnapshotRecord, *, title: str, subtitle: str = "") -> Figure:
    levels = record.levels
    stack = Layers([event + 1 for event in levels.events], short_names(levels.layers))
    figure, ax = stack_figure(stack, title, subtitle, top=record.peak_reserved_bytes)
    ax.set_xlabel("events")
    end = max(record.events, 1) + 1
    ax.set_xlim(0, end)
    ax.step([*stack.steps, end], [*levels.reserved, *levels.reserved[-1:]], where="post", color="black", lw=1)
    place: dict[str, Any] = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    ax.annotate("reserved", (end, levels.reserved[-1]), **place)
    peak = record.peak
    peaks = [Peak(peak.event + 1, peak.allocated_bytes, f"peak {format_bytes(peak.allocated_bytes)}", 0, end)]
    if record.oom is not None:
        moment = record.oom.moment
        text = f"out of memory: {format_bytes(record.oom.requested_bytes)} requested"
        peaks.append(Peak(moment.event + 1, moment.reserved_bytes, text, 0, end))
    mark_peaks(ax, peaks)
    return figure


plot_snapshot = written(snapshot_figure)


def short_names(layers: dict[str, list[int]]) -> dict[str, list[int]]:
    """The layers by file and line without folders, where that is unique."""
    names = [name.rpartition("/")[2] for name in layers]
    return {
        short if names.count(short) == 1 else name: sizes
        for short, (name, sizes) in zip(names, layers.items(), strict=True)
    }

"""Plots the memory of a script over its events, stacked by what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcheck.core.script_record import LAYERS, ScriptRecord
from memcheck.core.units import format_bytes
from memcheck.report.plots.style import in_house_style, inline_svg, written
from memcheck.report.plots.timeline import Layers, Peak, mark_peaks, stack_figure
from memcheck.report.script_tables import script_page, script_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the bottom: what lives longest first.
ORDER = ("parameters", "buffers", "optimizer state", "gradients")


@in_house_style
def script_figure(record: ScriptRecord, *, title: str, subtitle: str = "") -> Figure:
    # The limit is shown unless it is so far above the peak that it would flatten the picture.
    limit = record.limit_bytes or 0
    limit = limit if limit < 3 * record.peak.bytes else 0
    if record.growing:
        subtitle += f"; grows {format_bytes(record.growth_per_step)} a {record.step_name}"
    if record.process.growth_per_step:
        subtitle += f"; the process grows {format_bytes(record.process.growth_per_step)} more"
    figure, ax = stack_figure(layers_over_time(record), title, subtitle, top=max(record.peak.bytes, limit))
    ax.set_xlim(0, record.events + 1)
    show_seconds(ax, record)
    if limit:
        ax.axhline(limit, color="black", lw=0.8, ls="--", label="_limit")
        place: dict[str, Any] = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        ax.annotate(f"limit {format_bytes(limit)}", (record.events, limit), **place)
    peak = record.peak
    text = f"peak {format_bytes(peak.bytes)}, {peak.place.phase}"
    mark_peaks(ax, [Peak(peak.event, peak.bytes, text, *ax.get_xlim())])
    return figure


plot_script = written(script_figure)


def page_of(record: ScriptRecord) -> str:
    """The report as an HTML page with the picture."""
    title = script_title(record)
    return script_page(
        record, inline_svg(lambda: script_figure(record, title=title, subtitle=f"on {record.device}"), "run", title)
    )


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

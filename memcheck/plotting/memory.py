"""Peak memory against a length or the token dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.errors import UsageError
from memcheck.plotting.lines import MISSING_WORDS, common_label, line_figure
from memcheck.plotting.scales import format_value, set_y
from memcheck.plotting.series import (
    AXES,
    BACKWARD,
    FORWARD,
    Quantity,
    View,
    natural_axis,
    position,
    refuse_mixed,
    undrawn_note,
    views_along,
)
from memcheck.plotting.style import GREY, HATCHES, Style, in_house_style, new_figure, save
from memcheck.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_memory(
    records: Sequence[Record], path: Path, *, styles: Mapping[str, Style], title: str, subtitle: str
) -> Figure:
    """Peak memory against what varies, or bars for a single shape, written to `path`."""
    view = whole_view(records)
    if len(view.positions) > 1:
        figure = memory_lines(view, styles, title=title, subtitle=subtitle, log=True)
    else:
        figure = memory_bars(view, styles, title=title, subtitle=subtitle)
    save(figure, path)
    return figure


def whole_view(records: Sequence[Record]) -> View:
    """All records in one view; a UsageError where more than one axis varies."""
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
    """One shape: a bar for each operator, a panel for each quantity."""
    refuse_mixed(view.records)
    figure = new_figure(9.6 if len(quantities) > 1 else 6.8, 4.6, title, subtitle)
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for ax, quantity in zip(panels, quantities, strict=True):
        draw_bars(ax, view, quantity, styles)
    panels[0].set_ylabel(common_label(quantities))
    if note := undrawn_note(view.records):
        figure.supxlabel(note, fontsize=9, color=GREY)
    figure.draw_without_rendering()
    heights = [bar.get_height() for ax in panels for bar in ax.patches]
    set_y(panels[0], heights, "bytes", log=False, rows=1)
    return figure


def draw_bars(ax: Axes, view: View, quantity: Quantity, styles: Mapping[str, Style]) -> None:
    lines = [line for line in view.lines(styles) for _, record in line.points if shown(record, quantity)]
    for place, line in enumerate(lines):
        ((_, record),) = line.points
        how = quantity.missing(record)
        size = 0 if how else quantity.value(record) or 0
        hatch = HATCHES[place % len(HATCHES)]
        ax.bar(place, size, width=0.6, color=line.style.colour, edgecolor="white", hatch=hatch, label=line.name)
        text = MISSING_WORDS[how] if how else format_value(size, quantity.unit)
        ax.annotate(text, (place, size), (0, 3), textcoords="offset points", ha="center")
    slant: dict[str, Any] = {} if len(lines) < 5 else {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(range(len(lines)), [line.name for line in lines], **slant)
    ax.set_xlim(-0.7, max(len(lines), 1) - 0.3)
    ax.set_title(quantity.title)
    ax.set_xlabel(shape_words(view))
    ax.grid(axis="y")


def shown(record: Record, quantity: Quantity) -> bool:
    return quantity.value(record) is not None or quantity.missing(record) is not None


def shape_words(view: View) -> str:
    """ "at sequence length 512", or "at query length 4, key length 8" """
    if not view.records:
        return ""
    queries, keys = (position(view.records[0], axis) for axis in ("query_len", "kv_len"))
    return f"at sequence length {keys}" if queries == keys else f"at query length {queries}, key length {keys}"

"""A figure of records along an axis: measured values are marks, predicted ones lines. Where nothing varies, bars."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.core.units import Style
from memcheck.report.cases import common_case, has_sizes
from memcheck.report.plots import series, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD = series.Quantity("Forward", ("forward_peak_bytes",))
BACKWARD = series.Quantity("Forward + backward", ("forward_peak_bytes", "backward_peak_bytes"))
WHOLE_STEP = series.Quantity(
    "With the optimizer", ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes")
)
# The quantities of each kind of figure, a panel each.
FIGURES = {
    "memory": [FORWARD, BACKWARD, WHOLE_STEP],
    "kept": [series.Quantity("Kept for the backward", ("saved_bytes",))],
    "time": [series.Quantity(phase.capitalize(), (f"{phase}_ms",)) for phase in ("forward", "backward", "optimizer")],
    "decode": [
        series.Quantity("State", ("state_bytes",)),
        series.Quantity("Peak of one step", ("forward_peak_bytes",)),
    ],
}
TITLES = {
    "memory": "peak memory",
    "kept": "memory kept for the backward",
    "time": "time, median and quartiles",
    "decode": "state of decoding, and peak of a step",
}
# Of more panels than this, only those of the last quantity are drawn, in so many columns.
MOST_PANELS = 6
COLUMNS = 3
ROW = 0.055  # Height of a row of marks at the upper edge, as a share of the panel.
# How cases without a value are marked and named. Those that were not run have a hollow mark of their line.
MARKS = {"oom": "x", "timeout": r"$\mathbf{T}$", "killed": r"$\mathbf{K}$", "skipped": ""}
ENDINGS = {"oom": "OOM", "timeout": "timeout", "killed": "killed", "skipped": "not run"}


def quantities_of(kind: str, records: Sequence[Record]) -> list[series.Quantity]:
    """The quantities of a kind, or of a field such as "saved_bytes", that these records have."""
    decoding = records[0].mode == "decode"
    if kind == "memory":  # Its panels show where memory ran out, even if no case has a peak.
        training = any(record.mode in ("train", "backward") for record in records)
        stepping = any(record.optimizer_peak_bytes is not None for record in records)
        panels = {FORWARD: not decoding, BACKWARD: training, WHOLE_STEP: stepping}
        return [quantity for quantity, wanted in panels.items() if wanted]
    if kind == ("kept" if decoding else "decode"):
        return []
    words = kind.removesuffix("_ms").removesuffix("_bytes").replace("_", " ").capitalize()
    quantities = FIGURES.get(kind) or [series.Quantity(words, (kind,))]
    return [quantity for quantity in quantities if any(quantity.value(record) is not None for record in records)]


def drawn_views(records: Sequence[Record], x: str | None) -> list[series.View]:
    """The views with points enough for a line, or if nothing varies and no axis was asked for, those of bars."""
    if not any(map(has_sizes, records)):
        return [series.View("length", {}, list(records))]
    views = series.views_along(records, series.axis_among(records, x))
    lines = [view for view in views if len(view.positions) > 1]
    return lines if lines or x else views


@dataclass(frozen=True)
class Panel:
    """What a panel of a figure shows."""

    title: str
    quantity: series.Quantity
    lines: list[series.Line]

    def missing(self) -> Iterator[tuple[series.Line, int, str]]:
        """The cases without a value: line, x and status."""
        for line in self.lines:
            for x, record in line.points:
                if how := self.quantity.missing(record):
                    yield line, x, how


@style.in_house_style
def figure(
    records: Sequence[Record],
    kind: str = "memory",
    *,
    x: str | None = None,
    styles: Mapping[str, Style] | None = None,
    title: str = "",
    subtitle: str | None = None,
    log: bool = True,
) -> Figure:
    """The figure of records that may share one; report.plots.pictures has figures of any records.

    kind: of FIGURES, or a field in bytes or ms. x: an axis of series.AXES; default: what varies.

    Raises:
        UsageError: the records differ in more than one figure can show.
        MemcheckError: there is nothing to draw.
    """
    groups = series.groups_of(records, x)
    if len(groups) > 1:
        raise UsageError(f"a figure shows one setting, got {' and '.join(words for words, _ in groups)}")
    records = groups[0][1] if groups else []
    quantities, views = (quantities_of(kind, records), drawn_views(records, x)) if records else ([], [])
    if not quantities or not views:
        raise MemcheckError(f"there is nothing to draw of {kind} in these {len(records)} records")
    if len(views) * len(quantities) > MOST_PANELS:
        quantities = quantities[-1:]
    names = dict.fromkeys(line.name for view in views for line in view.lines({}))
    drawn = style.distinct_styles(names, styles or {})
    several = len(quantities) > 1 or (kind == "memory" and len(views) == 1)
    panels = [
        Panel(", ".join(filter(None, [quantity.title * several, view.words()])), quantity, view.lines(drawn))
        for view in views
        for quantity in quantities
    ]
    columns = len(quantities) if len(quantities) > 1 else 2 if len(views) in (2, 4) else COLUMNS
    words = title or title_of(kind), common_case(records) if subtitle is None else subtitle
    label = series.axis_words(records, views[0].x)
    if all(len(view.positions) < 2 for view in views):
        result, drawn_as = bar_figure(panels, columns, words, label), "black: predicted"
    else:
        result = line_figure(panels, columns, words, label, log=log)
        drawn_as = "marks: measured; lines: predicted, else from mark to mark"
    style.add_note(result, *notes_of(panels, drawn_as), series.undrawn_note(records, views[0].x))
    return result


def plot_figure(records: Sequence[Record], path: Path | str, kind: str = "memory", **how: Any) -> Figure:
    """Draws a figure and writes it to `path`. how: as of figure()."""
    drawn = figure(records, kind, **how)
    style.save(drawn, path)
    return drawn


def title_of(kind: str) -> str:
    words = TITLES.get(kind) or kind.removesuffix("_ms").removesuffix("_bytes").replace("_", " ")
    return words[:1].upper() + words[1:]


def line_figure(panels: Sequence[Panel], columns: int, words: tuple[str, str], label: str, *, log: bool) -> Figure:
    rows, names = math.ceil(len(panels) / columns), {line.name for panel in panels for line in panel.lines}
    height = max(3.4 if rows == 1 else 2.4, 0.19 * (len(names) + 4) / rows)
    figure, axes = style.new_panels(
        len(panels), *words, panel=height, around=1.0, columns=columns, sharey=True, sharex=True
    )
    sizes = [y for panel in panels for line in panel.lines for _, y in panel.quantity.along(line.points)]
    # On a linear axis, one large prediction would flatten all measurements.
    limit = math.inf if log or not sizes else 1.25 * max(sizes)
    ends = [
        [(line, x, how) for line, x, how in panel.missing() if not 0 < line.expected_at(x, panel.quantity) <= limit]
        for panel in panels
    ]
    order = list(dict.fromkeys(line.name for some in ends for line, *_ in some))
    for ax, panel, some in zip(axes, panels, ends, strict=True):
        ax.set_title(panel.title)
        ax.grid()
        for line in panel.lines:
            draw_line(ax, line, panel.quantity, limit, log=log)
        for line, x, how in some:  # In rows at the upper edge, as their value is not known.
            y = 1 - ROW * (order.index(line.name) + 0.6)
            ax.plot([x], [y], transform=ax.get_xaxis_transform(), clip_on=False, label=f"_{how}", **look_of(line, how))
    set_x(axes[0], {x for panel in panels for line in panel.lines for x, _ in line.points}, log=log)
    set_y(axes, panels[0].quantity, log=log, room=min(ROW * len(order), 0.7))
    for ax in axes[max(len(axes) - columns, 0) :]:
        ax.set_xlabel(label)
        ax.xaxis.set_tick_params(labelbottom=True)
    for ax in axes[::columns]:
        ax.set_ylabel("time" if panels[0].quantity.unit == "ms" else "memory")
    figure.legend(handles=legend_of(panels), loc="outside right center", handlelength=3)
    return figure


def look_of(line: series.Line, how: str = "") -> dict[str, Any]:
    """Keywords of a mark of the line, or of its cases that have no value. It is hollow where nothing ran."""
    colour, mark = line.style.colour, MARKS.get(how, "")
    face = colour if line.measured and how != "skipped" else "white"
    shape = {"marker": mark, "ms": 9, "mew": 2.2} if mark else {"marker": line.style.marker, "ms": 6.5, "mew": 1.3}
    return {"color": colour, "ls": "none", "mfc": face, **shape}


def draw_line(ax: Axes, line: series.Line, quantity: series.Quantity, limit: float, *, log: bool) -> None:
    """Marks of the measured values, hollow ones where only the prediction is known, and the line of the predictions.

    Where nothing is predicted, the line goes from mark to mark.
    """
    found = {x: y for x, y in quantity.along(line.measured) if y > 0 or not log}
    expected = {x: y for x, y in line.expected(quantity) if 0 < y <= limit}
    ends = {x: quantity.missing(record) for x, record in line.points}
    marks = {"": found} if line.measured else {}
    for x in sorted(expected.keys() - found):
        marks.setdefault("oom" if ends[x] == "oom" else "skipped", {})[x] = expected[x]
    if path := sorted({**found, **expected}.items()):
        ax.plot(*zip(*path, strict=True), color=line.style.colour, ls=line.style.dash, lw=1.2, label="_line")
    for how, points in marks.items():
        if points:
            name = f"_{how}" if how else line.name
            ax.plot(*zip(*points.items(), strict=True), label=name, **look_of(line, how))
    spans = [(x, getattr(record, f"{quantity.fields[0]}_quartiles", None)) for x, record in line.measured]
    if known := [(x, *span) for x, span in spans if span is not None and span[0] > 0]:
        ax.vlines(*zip(*known, strict=True), color=line.style.colour, lw=3, alpha=0.45, label="_quartiles")


def set_x(ax: Axes, positions: Collection[int], *, log: bool) -> None:
    if log:
        ax.set_xscale("log", base=2)
        # Set explicitly: if no case finished, there are no points from which matplotlib could derive it.
        margin = (max(positions) / min(positions)) ** 0.06
        ax.set_xlim(min(positions) / margin, max(positions) * margin)
        style.set_ticks(ax.xaxis, style.spaced(positions), str)
    else:
        ax.set_xlim(0, 1.05 * max(positions))


def set_y(axes: Sequence[Axes], quantity: series.Quantity, *, log: bool, room: float) -> None:
    """The axis that all panels share, around what is drawn. room: the share of it for rows of marks above."""
    values = [y for ax in axes for y in (ax.dataLim.y0, ax.dataLim.y1) if math.isfinite(y)]
    if log:
        style.set_powers(axes[0], values, quantity.text, room=room)
        return
    highest = max(values, default=0) or 2.0**20
    axes[0].set_ylim(0, 1.06 * highest / (1 - room))
    style.set_linear(axes[0].yaxis, highest, quantity.text)


def legend_of(panels: Sequence[Panel]) -> list[Any]:
    """The lines, from the highest at its right end down, and the marks of cases without a value."""
    from matplotlib.lines import Line2D

    ends = [(line.name, how) for panel in panels for line, _, how in panel.missing()]
    heights, lines = dict.fromkeys((name for name, _ in ends), math.inf), {}
    for line, quantity in ((line, panel.quantity) for panel in panels for line in panel.lines):
        lines[line.name] = line
        if points := [*line.expected(quantity), *quantity.along(line.points)]:
            heights[line.name] = max(points)[1]
    handles = [
        Line2D([], [], label=name, **{**look_of(lines[name]), "ls": lines[name].style.dash})
        for name in sorted(heights, key=lambda name: -heights[name])
    ]
    for how in [how for how in MARKS if how in {how for _, how in ends}]:
        look: dict[str, Any] = {"marker": MARKS[how] or "o", "mfc": "white", "mew": 2.2 if how == "oom" else 1.3}
        handles.append(Line2D([], [], ls="none", color=style.GREY, label=ENDINGS[how], **look))
    return handles


def notes_of(panels: Sequence[Panel], drawn_as: str) -> list[str]:
    """What needs an explanation. drawn_as: how predictions are drawn beside measurements."""
    cells = [(line, panel.quantity) for panel in panels for line in panel.lines]
    expected = [(line, quantity) for line, quantity in cells if line.expected(quantity)]
    hollow = any(dict(line.expected(quantity)).keys() - dict(line.measured) for line, quantity in expected)
    zeros = [line.name for line, quantity in cells if {y for _, y in quantity.along(line.points)} == {0}]
    return [
        drawn_as * any(line.measured for line, _ in expected),
        "hollow: predicted, not run" * hollow,
        f"0 throughout: {', '.join(dict.fromkeys(zeros))}" * bool(zeros),
    ]


def bar_figure(panels: Sequence[Panel], columns: int, words: tuple[str, str], label: str) -> Figure:
    """A bar per line with its value, and a black line where the prediction of what was measured is."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    height = 0.6 + 0.36 * max(len(names), 2)
    shape: dict[str, Any] = {"panel": height, "around": 1.0, "columns": columns, "sharex": True, "sharey": True}
    figure, axes = style.new_panels(len(panels), *words, **shape)
    for ax, panel in zip(axes, panels, strict=True):
        for line in panel.lines:
            ((x, record),) = line.points
            place, value = names.index(line.name), panel.quantity.value(record)
            how, expected = panel.quantity.missing(record), line.expected_at(x, panel.quantity)
            width = 0.0 if how or value is None else value
            face, edge = (line.style.colour, "white") if line.measured else ("white", line.style.colour)
            hatch = style.HATCHES[place % len(style.HATCHES)]
            ax.barh(place, width, height=0.65, color=face, edgecolor=edge, hatch=hatch, label=line.name)
            if expected and line.measured:
                ax.plot([expected], [place], marker="|", color="black", ms=20, mew=1.5, label="_predicted")
            text = ENDINGS[how] if how else "-" if value is None else panel.quantity.text(value)
            ax.annotate(text, (max(width, expected), place), (4, 0), textcoords="offset points", va="center")
        ax.set_title(panel.title)
        ax.set_xlabel(label)
        ax.grid(axis="x")
        ax.xaxis.set_tick_params(labelbottom=True)
    highest = max(ax.dataLim.x1 for ax in axes)
    highest = highest if math.isfinite(highest) and highest else 2.0**20
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.4 * highest))  # The first operator stands at the top.
    style.set_linear(axes[0].xaxis, highest, panels[0].quantity.text, 2.5)
    return figure

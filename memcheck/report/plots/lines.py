"""Line plots: one line per operator, with its name at the end and marks for cases that did not finish. Times, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.plots.scales import ROW, axes_points, format_value, set_x, set_y
from memcheck.report.plots.series import (
    BACKWARD_TIME,
    FORWARD_TIME,
    Line,
    Quantities,
    Quantity,
    View,
    undrawn_note,
)
from memcheck.report.plots.style import add_note, columns_of, in_house_style, look_of, new_panels, shade_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Points between two names, from the axes to the mark of a name, and from the axes to the name itself.
NAME_GAP = 13
KEY_POINTS = 14
NAME_POINTS = 22
# A filled mark: the case ran. A hollow mark: it was not run.
MISSING_MARKS = {"oom": "X", "skipped": "X", "timeout": r"$\mathbf{T}$", "killed": r"$\mathbf{K}$"}
MISSING_WORDS = {"oom": "OOM", "skipped": "not run", "timeout": "timeout", "killed": "killed"}
MISSING_HELP = {
    "skipped": "hollow: not run, at the predicted height or in a row of its own",
    "timeout": "T time-out",
    "killed": "K killed",
}
BESIDE_HELP = "dashed: predicted; in brackets measured / predicted, = to the byte"
HOLLOW_HELP = "hollow: predicted, not run"
HOLLOW: dict[str, Any] = {"mfc": "white", "mew": 1.3}


@dataclass(frozen=True)
class Name:
    """An operator's name in the margin, placed at the height of a value."""

    text: str
    value: float
    style: Style
    hollow: bool = False


@in_house_style
def line_figure(
    view: View, styles: Mapping[str, Style], *, quantities: Quantities, title: str, subtitle: str, log: bool = True
) -> Figure:
    """One panel for each quantity, all on the same scale. quantities: a list, or a function of records."""
    quantities = quantities(view.records) if callable(quantities) else quantities
    lines = view.lines(styles)
    # The lines that have unfinished cases; each gets a row of marks of its own at the top edge.
    rows = [
        line.name for line in lines if any(quantity.missing(row) for _, row in line.points for quantity in quantities)
    ]
    # On linear axes, one huge prediction would flatten all measurements.
    sizes = [value for line in lines for quantity in quantities for _, value in quantity.along(line.points)]
    limit = math.inf if log or not sizes else 1.25 * max(sizes)
    # Each row of marks needs extra height, and each name needs room beside the panel.
    height = 3.4 + ROW * len(rows) / 72 + max(0, len(lines) - 12) * NAME_GAP / 72
    figure, panels = new_panels(len(quantities), title, subtitle, panel=height, around=1.0, sharey=True)
    for ax, quantity in zip(panels, quantities, strict=True):
        draw_lines(ax, lines, quantity, limit, log=log)
        dress(ax, view, quantity.title, log=log)
    for ax in panels[:: columns_of(panels[0])]:
        ax.set_ylabel(common_label(quantities))
    add_note(figure, *notes(lines, quantities), undrawn_note(view.records))
    figure.draw_without_rendering()  # The layout must be settled before distances in points are computed.
    set_y(panels[0], drawn_values(panels), quantities[0].unit, log=log, rows=len(rows))
    for ax, quantity in zip(panels, quantities, strict=True):
        mark_missing(ax, lines, quantity, rows, limit)
        name_lines(ax, end_names(lines, quantity, limit), len(rows))
    return figure


def common_label(quantities: Sequence[Quantity]) -> str:
    labels = {quantity.label for quantity in quantities}
    return labels.pop() if len(labels) == 1 else "peak memory"


def dress(ax: Axes, view: View, title: str, *, log: bool) -> None:
    ax.set_title(title)
    ax.set_xlabel(view.label)
    ax.grid()
    set_x(ax, view.positions, log=log, percent=view.x == "counted")


def predicted(line: Line, quantity: Quantity, limit: float) -> list[tuple[int, float]]:
    """Cases that were not run, with the value of their terms, up to a limit."""
    skipped = [(x, quantity.from_terms(record)) for x, record in line.points if quantity.missing(record) == "skipped"]
    return [(x, float(size)) for x, size in skipped if size and size <= limit]


def draw_lines(ax: Axes, lines: Sequence[Line], quantity: Quantity, limit: float, *, log: bool) -> None:
    for line in lines:
        points = [(x, value) for x, value in quantity.along(line.points) if value > 0 or not log]
        if points:
            draw_quartiles(ax, line, quantity)
            dash = "-" if quantity.along(line.predictions) else line.style.dash
            hollow = HOLLOW if line.predicted else {}
            ax.plot(*zip(*points, strict=True), label=line.name, **look_of(line.style, ls=dash, **hollow))
        if beside := [(x, value) for x, value in quantity.along(line.predictions) if 0 < value <= limit]:
            # Drawn over the solid line, so that both are visible where they coincide.
            colour = shade_of(line.style.colour)
            ax.plot(*zip(*beside, strict=True), color=colour, lw=1.1, ls=(0, (4, 3)), label="_expected")
        if guesses := predicted(line, quantity, limit):
            bridge = [*points[-1:], *guesses] if points and points[-1][0] < guesses[0][0] else guesses
            ax.plot(*zip(*bridge, strict=True), color=line.style.colour, lw=0.8, ls=(0, (1, 3)), label="_bridge")
            ax.plot(*zip(*guesses, strict=True), label="_predicted", **look_of(line.style, **HOLLOW))


def draw_quartiles(ax: Axes, line: Line, quantity: Quantity) -> None:
    spans = [(x, getattr(record, f"{quantity.fields[0]}_quartiles", None)) for x, record in line.points]
    known = [(x, *span) for x, span in spans if span is not None and span[0] > 0]
    if known:
        ax.vlines(*zip(*known, strict=True), color=line.style.colour, lw=3, alpha=0.45, label="_quartiles")


def missing_points(line: Line, quantity: Quantity, limit: float) -> Iterator[tuple[int, str]]:
    """Position and ending of the cases whose value is neither known nor predicted within the axes."""
    drawn = {x for x, _ in predicted(line, quantity, limit)}
    for x, record in line.points:
        if x not in drawn and (how := quantity.missing(record)):
            yield x, how


def mark_missing(ax: Axes, lines: Sequence[Line], quantity: Quantity, rows: Sequence[str], limit: float) -> None:
    """Marks unfinished cases in a row of their own, as their value is not known."""
    for line in lines:
        places: dict[str, list[int]] = {}
        for x, how in missing_points(line, quantity, limit):
            places.setdefault(how, []).append(x)
        if not places:
            continue
        height = 1 - ROW * (rows.index(line.name) + 0.5) / axes_points(ax)  # As a fraction of the axes' height.
        ax.plot(
            [0, 1],
            [height] * 2,
            transform=ax.transAxes,
            color=line.style.colour,
            lw=0.6,
            alpha=0.4,
            ls=":",
            label="_row",
        )
        looks = []
        for how, xs in places.items():
            face = "white" if line.predicted or how == "skipped" else line.style.colour
            looks.append(look_of(line.style, marker=MISSING_MARKS[how], mfc=face, ms=8))
            top = ax.get_xaxis_transform()
            ax.plot(xs, [height] * len(xs), transform=top, clip_on=False, label=f"_{how}", **looks[-1])
        name_in_margin(ax, height, f"{line.name} {', '.join(MISSING_WORDS[how] for how in places)}", looks[0])


def end_names(lines: Sequence[Line], quantity: Quantity, limit: float) -> list[Name]:
    """The last known value of each line, as text."""
    names = []
    for line in lines:
        points, guesses = quantity.along(line.points), predicted(line, quantity, limit)
        hollow = bool(guesses) and (not points or guesses[-1][0] > points[-1][0])
        if last := (guesses if hollow else points)[-1:]:
            value = format_value(last[0][1], quantity.unit) + (" predicted" if hollow else beside_words(line, quantity))
            names.append(Name(f"{line.name} {value}", last[0][1], line.style, hollow or line.predicted))
    return names


def beside_words(line: Line, quantity: Quantity) -> str:
    """Compares the last known value with its prediction: " (=)" if equal to the byte, or " (1.02x)"."""
    value, prediction = quantity.along(line.points)[-1], dict(quantity.along(line.predictions))
    if not prediction.get(value[0]):
        return ""
    share = value[1] / prediction[value[0]]
    return " (=)" if share == 1 else f" ({share:.4g}x)"


def name_lines(ax: Axes, names: Sequence[Name], rows: int) -> None:
    """Writes the lines' names into the margin, each as close to its last point as space allows, in order of height."""
    names = sorted(names, key=lambda name: name.value)
    height = axes_points(ax)
    shares = [float(ax.transAxes.inverted().transform(ax.transData.transform((1, name.value)))[1]) for name in names]
    wanted = [max(share, 0.0) * height for share in shares]
    for name, share, at in zip(names, wanted, spread_apart(wanted, NAME_GAP, height - ROW * rows - 4), strict=True):
        # A thin line leads from the edge of the axes to the name.
        thin = {"arrowstyle": "-", "color": name.style.colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate("", (1, share / height), (KEY_POINTS - 5, at - share), arrowprops=thin, **place)
        face = "white" if name.hollow else name.style.colour
        name_in_margin(ax, at / height, name.text, look_of(name.style, mfc=face))
    # Long names must leave room for the panel.
    figure = ax.get_figure(root=True)
    assert figure is not None
    room = 60 * figure.get_figwidth() / columns_of(ax)
    longest = max((len(text.get_text()) for text in ax.texts), default=1)
    for text in ax.texts:
        text.set_fontsize(min(10, room / max(longest, 1)))


def name_in_margin(ax: Axes, share: float, text: str, look: dict[str, Any]) -> None:
    """Draws a mark and a name at a given height of the axes."""
    from matplotlib.transforms import offset_copy

    mark, name = (
        offset_copy(ax.transAxes, ax.get_figure(root=True), x=points, units="points")
        for points in (KEY_POINTS, NAME_POINTS)
    )
    ax.plot([1], [share], transform=mark, clip_on=False, label="_key", **look)
    ax.text(1, share, text, transform=name, va="center")


def spread_apart(wanted: Sequence[float], gap: float, highest: float) -> list[float]:
    """Moves heights apart so that neighbours keep at least `gap`, as close to the wanted heights as possible."""
    # After the gaps are subtracted, heights need only be non-decreasing; neighbours that violate this are averaged.
    pools: list[tuple[float, int]] = []
    for number, want in enumerate(wanted):
        pools.append((want - number * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, many) = pools[-2:]
            pools[-2:] = [((low * few + high * many) / (few + many), few + many)]
    flat = [height for height, count in pools for _ in range(count)]
    top = highest - (len(flat) - 1) * gap
    return [max(min(height, top), 0.0) + number * gap for number, height in enumerate(flat)]


def drawn_values(panels: Collection[Axes]) -> list[float]:
    """The lowest and highest y of each panel's lines and error bars."""
    return [y for ax in panels for y in (ax.dataLim.y0, ax.dataLim.y1) if math.isfinite(y)]


def notes(lines: Sequence[Line], quantities: Sequence[Quantity]) -> list[str]:
    """Explains the marks that the figure uses."""
    endings = {quantity.missing(row) for line in lines for quantity in quantities for _, row in line.points}
    first = {line.name: [value for _, value in quantities[0].along(line.points)] for line in lines}
    nothing = [name for name, values in first.items() if values and not any(values)]
    return [
        *(words for how, words in MISSING_HELP.items() if how in endings),
        *beside_notes(lines, quantities),
        f"0 throughout: {', '.join(nothing)}" if nothing else "",
    ]


def beside_notes(lines: Sequence[Line], quantities: Sequence[Quantity]) -> list[str]:
    """Explains how predictions are drawn, if there are any."""
    beside = any(quantity.along(line.predictions) for line in lines for quantity in quantities)
    return [BESIDE_HELP if beside else "", HOLLOW_HELP if any(line.predicted for line in lines) else ""]


def named_lines(ax: Axes) -> list[Line2D]:
    return [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]


def time_quantities(records: Sequence[Record]) -> list[Quantity]:
    """The phases that were timed."""
    return [quantity for quantity in (FORWARD_TIME, BACKWARD_TIME) if any(map(quantity.value, records))]


time_lines = functools.partial(line_figure, quantities=time_quantities)  # Medians as lines, quartiles as bars.

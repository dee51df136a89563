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
    refuse_mixed,
    undrawn_note,
)
from memcheck.report.plots.style import GREY, in_house_style, look_of, new_figure, shade_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Transform

# Points between two names, from the axes to the mark of a name, and from the axes to the name itself.
NAME_GAP = 13
KEY_POINTS = 14
NAME_POINTS = 22
# A filled mark: the case ran. A hollow mark: it was not run.
MISSING_MARKS = {"oom": "X", "skipped": "X", "timeout": r"$\mathbf{T}$", "killed": r"$\mathbf{K}$"}
MISSING_WORDS = {"oom": "OOM", "skipped": "not run", "timeout": "timeout", "killed": "killed"}
MISSING_HELP = {
    "oom": "\u2716 out of memory",
    "skipped": "hollow: not run, at the predicted height or in a row of its own",
    "timeout": "T time-out",
    "killed": "K killed",
}


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
    """One panel for each quantity, all on the same scale. quantities: themselves, or how to choose them by records."""
    refuse_mixed(view.records)
    quantities = quantities(view.records) if callable(quantities) else quantities
    lines = view.lines(styles)
    rows = missing_rows(lines, quantities)
    # Each row of marks needs extra height, and each name needs room beside the panel.
    height = 4.4 + ROW * len(rows) / 72 + max(0, len(lines) - 12) * NAME_GAP / 72
    figure = new_figure(9.6 if len(quantities) > 1 else 6.8, height, title, subtitle)
    panels = figure.subplots(1, len(quantities), sharey=True, squeeze=False)[0]
    for ax, quantity in zip(panels, quantities, strict=True):
        draw_lines(ax, lines, quantity, predicted_limit(lines, quantities, log=log), log=log)
        dress(ax, view, quantity, log=log)
    panels[0].set_ylabel(common_label(quantities))
    if note := notes(view.records, lines, quantities):
        figure.supxlabel(note, fontsize=9, color=GREY)
    figure.draw_without_rendering()  # The layout must be settled before distances in points are computed.
    set_y(panels[0], drawn_values(panels), quantities[0].unit, log=log, rows=len(rows))
    for ax, quantity in zip(panels, quantities, strict=True):
        mark_missing(ax, lines, quantity, rows, predicted_limit(lines, quantities, log=log))
        name_lines(ax, end_names(lines, quantity, predicted_limit(lines, quantities, log=log)), len(rows))
    return figure


def common_label(quantities: Sequence[Quantity]) -> str:
    labels = {quantity.label for quantity in quantities}
    return labels.pop() if len(labels) == 1 else "memory, inputs and output included"


def dress(ax: Axes, view: View, quantity: Quantity, *, log: bool) -> None:
    ax.set_title(quantity.title)
    ax.set_xlabel(view.label)
    ax.grid()
    set_x(ax, view.positions, log=log)


def measured(line: Line, quantity: Quantity) -> list[tuple[int, float]]:
    return [(x, value) for x, record in line.points if (value := quantity.value(record)) is not None]


def expected(line: Line, quantity: Quantity) -> list[tuple[int, float]]:
    """The line's predictions, if it has measurements to compare them with."""
    return [(x, value) for x, record in line.predictions if (value := quantity.value(record)) is not None]


def predicted(line: Line, quantity: Quantity, limit: float) -> list[tuple[int, float]]:
    """Cases that were not run, with the value of their terms, up to a limit."""
    skipped = [(x, quantity.from_terms(record)) for x, record in line.points if quantity.missing(record) == "skipped"]
    return [(x, float(size)) for x, size in skipped if size and size <= limit]


def predicted_limit(lines: Sequence[Line], quantities: Sequence[Quantity], *, log: bool) -> float:
    """The limit for predicted values: on linear axes, one huge prediction would flatten all measurements."""
    sizes = [value for line in lines for quantity in quantities for _, value in measured(line, quantity)]
    return float("inf") if log or not sizes else 1.25 * max(sizes)


def draw_lines(ax: Axes, lines: Sequence[Line], quantity: Quantity, limit: float, *, log: bool) -> None:
    for line in lines:
        points = [(x, value) for x, value in measured(line, quantity) if value > 0 or not log]
        if points:
            draw_quartiles(ax, line, quantity)
            ax.plot(*zip(*points, strict=True), label=line.name, **line_look(line, quantity))
        if beside := [(x, value) for x, value in expected(line, quantity) if 0 < value <= limit]:
            # Drawn over the solid line, so that both are visible where they coincide.
            colour = shade_of(line.style.colour)
            ax.plot(*zip(*beside, strict=True), color=colour, lw=1.1, ls=(0, (4, 3)), label="_expected")
        if guesses := predicted(line, quantity, limit):
            bridge = [*points[-1:], *guesses] if points and points[-1][0] < guesses[0][0] else guesses
            ax.plot(*zip(*bridge, strict=True), color=line.style.colour, lw=0.8, ls=(0, (1, 3)), label="_bridge")
            ax.plot(*zip(*guesses, strict=True), label="_predicted", **look_of(line.style, mfc="white", mew=1.3))


def line_look(line: Line, quantity: Quantity) -> dict[str, Any]:
    """Line properties: solid if measured with a prediction beside it, hollow if only predicted."""
    look = look_of(line.style, ls="-" if expected(line, quantity) else line.style.dash)
    return {**look, "mfc": "white", "mew": 1.3} if line.predicted else look


def draw_quartiles(ax: Axes, line: Line, quantity: Quantity) -> None:
    spans = [(x, getattr(record, f"{quantity.fields[0]}_quartiles", None)) for x, record in line.points]
    known = [(x, *span) for x, span in spans if span is not None and span[0] > 0]
    if known:
        ax.vlines(*zip(*known, strict=True), color=line.style.colour, lw=3, alpha=0.45, label="_quartiles")


def missing_rows(lines: Sequence[Line], quantities: Sequence[Quantity]) -> list[str]:
    """The lines that have unfinished cases; each gets its own row at the top edge."""
    return [
        line.name for line in lines if any(quantity.missing(row) for _, row in line.points for quantity in quantities)
    ]


def missing_points(line: Line, quantity: Quantity, limit: float) -> Iterator[tuple[int, str]]:
    """Position and ending of the cases whose value is neither known nor predicted within the axes."""
    drawn = {x for x, _ in predicted(line, quantity, limit)}
    for x, record in line.points:
        if x not in drawn and (how := quantity.missing(record)):
            yield x, how


def mark_missing(ax: Axes, lines: Sequence[Line], quantity: Quantity, rows: Sequence[str], limit: float) -> None:
    """Marks unfinished cases in a row of their own, as their value is not known."""
    for line in lines:
        endings = dict(missing_points(line, quantity, limit))
        if not endings:
            continue
        y = row_height(ax, rows.index(line.name))
        ax.axhline(y_of(ax, y), color=line.style.colour, lw=0.6, alpha=0.4, ls=":", label="_row")
        for how in dict.fromkeys(endings.values()):
            places = [x for x, ending in endings.items() if ending == how]
            draw_marks(ax, places, y, how, line.style, hollow=line.predicted)
        words = ", ".join(MISSING_WORDS[how] for how in dict.fromkeys(endings.values()))
        look = mark_look(next(iter(endings.values())), line.style, hollow=line.predicted)
        name_in_margin(ax, y, f"{line.name} {words}", look)


def draw_marks(ax: Axes, places: Sequence[int], y: float, how: str, style: Style, *, hollow: bool) -> None:
    top, look = ax.get_xaxis_transform(), mark_look(how, style, hollow=hollow)
    ax.plot(places, [y] * len(places), transform=top, clip_on=False, label=f"_{how}", **look)


def mark_look(how: str, style: Style, *, hollow: bool = False) -> dict[str, Any]:
    face = "white" if hollow or how == "skipped" else style.colour
    return look_of(style, marker=MISSING_MARKS[how], mfc=face, ms=8)


def row_height(ax: Axes, row: int) -> float:
    """The middle of a row, counted from the top edge, as a fraction of the axes' height."""
    return 1 - ROW * (row + 0.5) / axes_points(ax)


def y_of(ax: Axes, share: float) -> float:
    return float(ax.transData.inverted().transform(ax.transAxes.transform((0, share)))[1])


def end_names(lines: Sequence[Line], quantity: Quantity, limit: float) -> list[Name]:
    """The last known value of each line, as text."""
    names = []
    for line in lines:
        points, guesses = measured(line, quantity), predicted(line, quantity, limit)
        hollow = bool(guesses) and (not points or guesses[-1][0] > points[-1][0])
        if last := (guesses if hollow else points)[-1:]:
            value = format_value(last[0][1], quantity.unit) + (" predicted" if hollow else beside_words(line, quantity))
            names.append(Name(f"{line.name} {value}", last[0][1], line.style, hollow or line.predicted))
    return names


def beside_words(line: Line, quantity: Quantity) -> str:
    """Compares the last known value with its prediction: " (=)" if equal to the byte, or " (1.02x)"."""
    value, prediction = measured(line, quantity)[-1], dict(expected(line, quantity))
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
    for name, share, at in zip(names, wanted, spread(wanted, NAME_GAP, height - ROW * rows - 4), strict=True):
        lead(ax, share / height, at / height, name.style)
        face = "white" if name.hollow else name.style.colour
        name_in_margin(ax, at / height, name.text, look_of(name.style, mfc=face))


def lead(ax: Axes, share: float, at: float, style: Style) -> None:
    """Draws a thin line from the edge of the axes to the name."""
    shift = (KEY_POINTS - 5, (at - share) * axes_points(ax))
    thin = {"arrowstyle": "-", "color": style.colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (1, share), shift, xycoords="axes fraction", textcoords="offset points", arrowprops=thin)


def name_in_margin(ax: Axes, share: float, text: str, look: dict[str, Any]) -> None:
    """Draws a mark and a name at a given height of the axes."""
    ax.plot([1], [share], transform=margin(ax, KEY_POINTS), clip_on=False, label="_key", **look)
    ax.text(1, share, text, transform=margin(ax, NAME_POINTS), va="center")


def margin(ax: Axes, points: float) -> Transform:
    """Converts an offset in points to the right of the axes into axes coordinates."""
    from matplotlib.transforms import ScaledTranslation

    figure = ax.get_figure(root=True)
    assert figure is not None
    return ax.transAxes + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)


def spread(wanted: Sequence[float], gap: float, highest: float) -> list[float]:
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


def notes(records: Sequence[Record], lines: Sequence[Line], quantities: Sequence[Quantity]) -> str:
    """Explains the marks that the figure uses, and names the cases that it leaves out."""
    endings = {
        how for line in lines for quantity in quantities for _, row in line.points if (how := quantity.missing(row))
    }
    parts = [MISSING_HELP[how] for how in MISSING_HELP if how in endings and how != "oom"]
    beside = any(expected(line, quantity) for line in lines for quantity in quantities)
    parts += ["dashed: predicted; in brackets measured / predicted, = to the byte"] if beside else []
    parts += ["hollow: predicted, not run"] if any(line.predicted for line in lines) else []
    nothing = [
        line.name
        for line in lines
        if all(value == 0 for _, value in measured(line, quantities[0])) and measured(line, quantities[0])
    ]
    if nothing:
        parts.append(f"0 throughout: {', '.join(nothing)}")
    return "; ".join([*parts, *filter(None, [undrawn_note(records)])])


def named_lines(ax: Axes) -> list[Line2D]:
    return [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]


def time_quantities(records: Sequence[Record]) -> list[Quantity]:
    """The phases that were timed."""
    return [quantity for quantity in (FORWARD_TIME, BACKWARD_TIME) if any(map(quantity.value, records))]


time_lines = functools.partial(line_figure, quantities=time_quantities)  # Medians as lines, quartiles as bars.

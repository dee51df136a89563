"""Plots expected bytes (from terms or predictions) as lines, and measured bytes as marks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.cases import is_predicted, pair
from memcheck.report.plots.lines import HOLLOW, Name, dress, name_lines
from memcheck.report.plots.memory import memory_quantities
from memcheck.report.plots.scales import format_value, set_y
from memcheck.report.plots.series import Line, Quantity, View
from memcheck.report.plots.style import add_note, in_house_style, look_of, new_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = list[tuple[int, float]]


def from_terms(line: Line, quantity: Quantity) -> Values:
    if line.predicted:
        return []
    return [(x, float(size)) for x, record in line.points if (size := quantity.from_terms(record))]


def from_predictions(line: Line, quantity: Quantity) -> Values:
    return quantity.along(line.predictions)


@dataclass(frozen=True)
class Expectation:
    """A source of expected values, and its wording in the plot."""

    of: Callable[[Line, Quantity], Values]
    lines: str
    difference: str
    ratio: bool  # Otherwise differences are shown as a percentage.


TERMS = Expectation(from_terms, "predicted, from the shapes alone", "measured less predicted", ratio=False)
PREDICTION = Expectation(from_predictions, "predicted", "measured / predicted", ratio=True)


def has_terms(records: Sequence[Record]) -> bool:
    quantity = memory_quantities(records)[-1]
    measured = [record for record in records if not is_predicted(record)]
    return any(quantity.from_terms(record) is not None and quantity.value(record) is not None for record in measured)


def has_prediction(records: Sequence[Record]) -> bool:
    quantity = memory_quantities(records)[-1]
    return any(None not in map(quantity.value, both) for both in pair(records))


@in_house_style
def expectation_figure(
    view: View, styles: Mapping[str, Style], *, expectation: Expectation, title: str, subtitle: str, log: bool = True
) -> Figure:
    """Left: expected and measured on one scale. Right: the relative difference."""
    quantity = memory_quantities(view.records)[-1]
    lines = [(line, wanted) for line in view.lines(styles) if (wanted := expectation.of(line, quantity))]
    figure, (both, difference) = new_panels(2, title, subtitle, panel=3.5, around=1.0)
    off: list[tuple[Line, Values]] = []  # x -> measured / expected - 1
    for line, wanted in lines:
        found = quantity.along(line.points)
        draw_both(both, line, wanted, [(x, value) for x, value in found if value > 0])
        if shares := [(x, value / dict(wanted)[x] - 1) for x, value in found if dict(wanted).get(x)]:
            difference.plot(*zip(*shares, strict=True), label=line.name, **look_of(line.style, ls=line.style.dash))
            off.append((line, shares))
    dress(both, view, f"{quantity.title}: bytes", log=log)
    both.set_ylabel("peak memory")
    dress(difference, view, expectation.difference, log=log)
    set_difference_axis(difference, [share for _, shares in off for _, share in shares], expectation)
    not_run = any(x not in dict(quantity.along(line.points)) for line, wanted in lines for x, _ in wanted)
    add_note(figure, f"lines: {expectation.lines}", "marks: measured", "hollow: not run" if not_run else "")
    figure.draw_without_rendering()
    set_y(both, [value for _, wanted in lines for _, value in wanted], quantity.unit, log=log)
    ends = [(line, wanted[-1][1]) for line, wanted in lines]
    name_lines(
        both, [Name(f"{line.name} {format_value(end, quantity.unit)}", end, line.style) for line, end in ends], 0
    )
    names = [
        Name(f"{line.name} {furthest_words([share for _, share in shares], expectation)}", shares[-1][1], line.style)
        for line, shares in off
    ]
    name_lines(difference, names, 0)
    return figure


terms_lines = functools.partial(expectation_figure, expectation=TERMS)
prediction_lines = functools.partial(expectation_figure, expectation=PREDICTION)


def draw_both(ax: Axes, line: Line, wanted: Values, found: Values) -> None:
    look = {"color": line.style.colour, "ls": line.style.dash, "lw": 1.2}
    ax.plot(*zip(*wanted, strict=True), label=f"_terms {line.name}", **look)
    if found:
        ax.plot(*zip(*found, strict=True), label=line.name, **look_of(line.style))
    if not_run := [point for point in wanted if point[0] not in dict(found)]:
        ax.plot(*zip(*not_run, strict=True), label="_predicted", **look_of(line.style, **HOLLOW))


def set_difference_axis(ax: Axes, shares: Sequence[float], expectation: Expectation) -> None:
    from matplotlib.ticker import MaxNLocator

    # The axis spans at least 1 %, so that rounding noise does not look large.
    low, high = min([*shares, -0.01]), max([*shares, 0.01])
    margin = 0.08 * (high - low)
    ax.set_ylim(low - margin, high + margin)
    ax.axhline(0, color="black", lw=0.8, ls=":", label="_zero")
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(lambda share, _: difference_words(share, expectation))


def difference_words(share: float, expectation: Expectation) -> str:
    """ "+1.2 %", or as a ratio "1.012 x"."""
    if expectation.ratio:
        return f"{1 + share:.4g} x"
    return "0" if abs(share) < 1e-9 else f"{100 * share:+.3g} %"


def furthest_words(shares: Sequence[float], expectation: Expectation) -> str:
    furthest = max(shares, key=abs)
    if furthest == 0:
        return "exact"
    if expectation.ratio:
        return f"{1 + furthest:.4g} x at {'most' if furthest > 0 else 'least'}"
    return f"{100 * furthest:+.2g} % at most"

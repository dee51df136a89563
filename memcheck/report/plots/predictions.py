"""Plots expected bytes (from terms or predictions) as lines, and measured bytes as marks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.cases import is_predicted, pair
from memcheck.report.plots.lines import Name, dress, expected, measured, name_lines
from memcheck.report.plots.memory import memory_quantities
from memcheck.report.plots.scales import format_value, set_x, set_y
from memcheck.report.plots.series import Line, Quantity, View, refuse_mixed
from memcheck.report.plots.style import GREY, in_house_style, look_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = list[tuple[int, float]]


def from_terms(line: Line, quantity: Quantity) -> Values:
    if line.predicted:
        return []
    return [(x, float(size)) for x, record in line.points if (size := quantity.from_terms(record))]


@dataclass(frozen=True)
class Expectation:
    """A source of expected values, and its wording in the plot."""

    of: Callable[[Line, Quantity], Values]
    lines: str
    difference: str
    ratio: bool  # Otherwise differences are shown as a percentage.


TERMS = Expectation(from_terms, "predicted, from the shapes alone", "measured less predicted", ratio=False)
PREDICTION = Expectation(expected, "predicted", "measured / predicted", ratio=True)


def has_terms(records: Sequence[Record]) -> bool:
    quantity = memory_quantities(records)[-1]
    measured = [record for record in records if not is_predicted(record)]
    return any(quantity.from_terms(record) is not None and quantity.value(record) is not None for record in measured)


def has_prediction(records: Sequence[Record]) -> bool:
    quantity = memory_quantities(records)[-1]
    return any(None not in map(quantity.value, both) for both in pair(records).both)


@in_house_style
def expectation_figure(
    view: View, styles: Mapping[str, Style], *, expectation: Expectation, title: str, subtitle: str, log: bool = True
) -> Figure:
    """Left: expected and measured on one scale. Right: the relative difference."""
    refuse_mixed(view.records)
    quantity = memory_quantities(view.records)[-1]
    lines = [line for line in view.lines(styles) if expectation.of(line, quantity)]
    figure = new_figure(9.6, 4.5, title, subtitle)
    both, difference = figure.subplots(1, 2)
    for line in lines:
        draw_both(both, line, quantity, expectation)
        draw_difference(difference, line, quantity, expectation)
    dress(both, view, quantity, log=log)
    both.set_title(f"{quantity.title}: bytes")
    both.set_ylabel("memory, inputs and output included")
    difference.set_title(expectation.difference)
    difference.set_xlabel(view.label)
    difference.grid()
    set_x(difference, view.positions, log=log)
    set_difference_axis(difference, [differences(line, quantity, expectation) for line in lines], expectation)
    figure.supxlabel(f"lines: {expectation.lines}; marks: measured; hollow: not run", fontsize=9, color=GREY)
    figure.draw_without_rendering()
    set_y(both, [value for line in lines for _, value in expectation.of(line, quantity)], quantity.unit, log=log)
    name_lines(both, [expected_name(line, quantity, expectation) for line in lines], 0)
    apart = [line for line in lines if differences(line, quantity, expectation)]
    name_lines(difference, [difference_name(line, quantity, expectation) for line in apart], 0)
    return figure


terms_lines = functools.partial(expectation_figure, expectation=TERMS)
prediction_lines = functools.partial(expectation_figure, expectation=PREDICTION)


def differences(line: Line, quantity: Quantity, expectation: Expectation) -> Values:
    """x -> measured / expected - 1."""
    wanted = dict(expectation.of(line, quantity))
    return [(x, value / wanted[x] - 1) for x, value in measured(line, quantity) if wanted.get(x)]


def draw_both(ax: Axes, line: Line, quantity: Quantity, expectation: Expectation) -> None:
    wanted, found = expectation.of(line, quantity), measured(line, quantity)
    ax.plot(
        *zip(*wanted, strict=True), color=line.style.colour, ls=line.style.dash, lw=1.2, label=f"_terms {line.name}"
    )
    found = [(x, value) for x, value in found if value > 0]
    if found:
        ax.plot(*zip(*found, strict=True), label=line.name, **look_of(line.style))
    if not_run := [point for point in wanted if point[0] not in dict(found)]:
        ax.plot(*zip(*not_run, strict=True), label="_predicted", **look_of(line.style, mfc="white", mew=1.3))


def draw_difference(ax: Axes, line: Line, quantity: Quantity, expectation: Expectation) -> None:
    if points := differences(line, quantity, expectation):
        ax.plot(*zip(*points, strict=True), label=line.name, **look_of(line.style, ls=line.style.dash))


def set_difference_axis(ax: Axes, found: Sequence[Values], expectation: Expectation) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    shares = [share for values in found for _, share in values]
    # The axis spans at least 1 %, so that rounding noise does not look large.
    low, high = min([*shares, -0.01]), max([*shares, 0.01])
    margin = 0.08 * (high - low)
    ax.set_ylim(low - margin, high + margin)
    ax.axhline(0, color="black", lw=0.8, ls=":", label="_zero")
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: difference_words(y, expectation)))


def difference_words(share: float, expectation: Expectation) -> str:
    """ "+1.2 %", or as a ratio "1.012 x"."""
    if expectation.ratio:
        return f"{1 + share:.4g} x"
    return "0" if abs(share) < 1e-9 else f"{100 * share:+.3g} %"


def expected_name(line: Line, quantity: Quantity, expectation: Expectation) -> Name:
    value = expectation.of(line, quantity)[-1][1]
    return Name(f"{line.name} {format_value(value, quantity.unit)}", value, line.style)


def difference_name(line: Line, quantity: Quantity, expectation: Expectation) -> Name:
    found = [share for _, share in differences(line, quantity, expectation)]
    furthest = max(found, key=abs)
    if furthest == 0:
        words = "exact"
    elif expectation.ratio:
        words = f"{1 + furthest:.4g} x at most" if furthest > 0 else f"{1 + furthest:.4g} x at least"
    else:
        words = f"{100 * furthest:+.2g} % at most"
    return Name(f"{line.name} {words}", found[-1], line.style)

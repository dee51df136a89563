"""Theory beside measurement: bytes by the terms of the records as lines, measured bytes as marks on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.plotting.lines import Name, dress, measured, name_lines
from memcheck.plotting.memory import memory_quantities
from memcheck.plotting.scales import format_value, set_x, set_y
from memcheck.plotting.series import Line, Quantity, View, refuse_mixed
from memcheck.plotting.style import GREY, Style, in_house_style, look_of, new_figure
from memcheck.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def has_theory(records: Sequence[Record]) -> bool:
    quantity = memory_quantities(records)[-1]
    return any(quantity.theory(record) is not None and quantity.value(record) is not None for record in records)


@in_house_style
def theory_lines(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str, log: bool = True) -> Figure:
    """Left, both on one scale; right, by how much the measurement differs."""
    refuse_mixed(view.records)
    quantity = memory_quantities(view.records)[-1]
    lines = [line for line in view.lines(styles) if theory(line, quantity)]
    figure = new_figure(9.6, 4.5, title, subtitle)
    both, difference = figure.subplots(1, 2)
    for line in lines:
        draw_both(both, line, quantity)
        draw_difference(difference, line, quantity)
    dress(both, view, quantity, log=log)
    both.set_title(f"{quantity.title}: bytes")
    both.set_ylabel("memory, inputs and output included")
    difference.set_title("measured less theory")
    difference.set_xlabel(view.label)
    difference.grid()
    set_x(difference, view.positions, log=log)
    set_difference_axis(difference, lines, quantity)
    figure.supxlabel("lines: theory, from the shapes alone; marks: measured; hollow: not run", fontsize=9, color=GREY)
    figure.draw_without_rendering()
    set_y(both, [value for line in lines for _, value in theory(line, quantity)], quantity.unit, log=log)
    name_lines(both, [theory_name(line, quantity) for line in lines], 0)
    name_lines(difference, [difference_name(line, quantity) for line in lines if differences(line, quantity)], 0)
    return figure


def theory(line: Line, quantity: Quantity) -> list[tuple[int, float]]:
    return [(x, float(size)) for x, record in line.points if (size := quantity.theory(record))]


def differences(line: Line, quantity: Quantity) -> list[tuple[int, float]]:
    """x -> measured / theory - 1."""
    expected = dict(theory(line, quantity))
    return [(x, value / expected[x] - 1) for x, value in measured(line, quantity) if expected.get(x)]


def draw_both(ax: Axes, line: Line, quantity: Quantity) -> None:
    expected, found = theory(line, quantity), measured(line, quantity)
    ax.plot(
        *zip(*expected, strict=True), color=line.style.colour, ls=line.style.dash, lw=1.2, label=f"_theory {line.name}"
    )
    found = [(x, value) for x, value in found if value > 0]
    if found:
        ax.plot(*zip(*found, strict=True), label=line.name, **look_of(line.style))
    if not_run := [point for point in expected if point[0] not in dict(found)]:
        ax.plot(*zip(*not_run, strict=True), label="_predicted", **look_of(line.style, mfc="white", mew=1.3))


def draw_difference(ax: Axes, line: Line, quantity: Quantity) -> None:
    if points := differences(line, quantity):
        ax.plot(*zip(*points, strict=True), label=line.name, **look_of(line.style, ls=line.style.dash))


def set_difference_axis(ax: Axes, lines: Sequence[Line], quantity: Quantity) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    found = [difference for line in lines for _, difference in differences(line, quantity)]
    # A percent at least: noise in the last digits should not look like a mountain.
    low, high = min([*found, -0.01]), max([*found, 0.01])
    margin = 0.08 * (high - low)
    ax.set_ylim(low - margin, high + margin)
    ax.axhline(0, color="black", lw=0.8, ls=":", label="_zero")
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "0" if abs(y) < 1e-9 else f"{100 * y:+.3g} %"))


def theory_name(line: Line, quantity: Quantity) -> Name:
    value = theory(line, quantity)[-1][1]
    return Name(f"{line.name} {format_value(value, quantity.unit)}", value, line.style)


def difference_name(line: Line, quantity: Quantity) -> Name:
    found = [difference for _, difference in differences(line, quantity)]
    furthest = max(found, key=abs)
    words = "exact" if furthest == 0 else f"{100 * furthest:+.2g} % at most"
    return Name(f"{line.name} {words}", found[-1], line.style)

"""Axis ticks: MiB in powers of two, milliseconds, and the lengths that ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from memcheck.core.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Height in points of a row of marks for unfinished cases.
ROW = 14


def format_value(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else format_time(value)


def x_ticks(lengths: Collection[int]) -> list[int]:
    """The lengths that ran, from the longest down, without those too close to their neighbour to be readable."""
    ticks: list[int] = []
    for x in sorted(lengths, reverse=True):
        if not ticks or math.log(ticks[-1] / x) > math.log(max(lengths) / min(lengths)) / 7:
            ticks.append(x)
    return ticks


def set_ticks(axis: Axis, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """Sets ticks at these values alone, and their text."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())


def set_x(ax: Axes, positions: Collection[int], *, log: bool, percent: bool = False) -> None:
    if percent:
        ax.set_xlim(0, 105)
        ticks = [0, 25, 50, 75, 100]
    elif log:
        ax.set_xscale("log", base=2)
        # Set explicitly: if no case finished, there are no points from which matplotlib could derive it.
        margin = max(max(positions) / min(positions), 2) ** 0.06
        ax.set_xlim(min(positions) / margin, max(positions) * margin)
        ticks = x_ticks(positions)
    else:
        ax.set_xlim(0, 1.05 * max(positions))
        ticks = list(range(0, max(positions) + 1, max(int(power_of_two_above(max(positions) / 6)), 1)))
    set_ticks(ax.xaxis, ticks, lambda x: f"{x:.0f}")


def set_y(ax: Axes, values: Sequence[float], unit: str, *, log: bool, rows: int = 0) -> None:
    """Sets limits and ticks for all values, with room above for rows of marks. The layout must be settled."""
    share = min(ROW * rows / axes_points(ax), 0.7)
    if not log:
        highest = max(values, default=1.0) or 1.0
        ax.set_ylim(0, 1.06 * highest / (1 - share))
        set_linear_ticks(ax.yaxis, highest, unit)
        return
    values = [value for value in values if value > 0] or [2.0**20 if unit == "bytes" else 1.0]
    low: float
    high: float
    if unit == "bytes":
        # Ticks at powers of two, as powers of ten are hard to read in MiB.
        base, low, high = 2.0, math.floor(math.log2(min(values))) - 0.2, math.ceil(math.log2(max(values)) + 0.1)
        powers = range(math.ceil(low), int(high) + 1)
        ticks = [2.0**power for power in powers[:: math.ceil((len(powers) - 1) / 8)]]
    else:
        base, low, high = 10.0, math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
        # A range below two decades needs additional ticks.
        steps = (1,) if math.floor(high) - math.ceil(low) > 1 else (1, 2, 5)
        powers = range(math.floor(low), math.ceil(high) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps if low <= math.log10(step) + power <= high]
    ax.set_yscale("log", base=base)
    ax.set_ylim(base**low, base ** (high + (high - low) * share / (1 - share)))
    set_ticks(ax.yaxis, ticks, lambda y: format_value(y, unit))


def axes_points(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return float(ax.get_window_extent().height * 72 / figure.dpi)


def power_of_two_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value)) if value > 0 else 1.0


def set_linear_ticks(axis: Axis, highest: float, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    step = power_of_two_above(highest / 5)
    set_ticks(
        axis, [step * count for count in range(int(highest / step) + 1)], lambda y: format_value(y, unit) if y else "0"
    )
    if unit != "bytes":
        axis.set_major_locator(MaxNLocator(6))

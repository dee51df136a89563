"""Axis ticks: MiB in powers of two, milliseconds, and the lengths that ran."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
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


def set_x(ax: Axes, positions: Collection[int], *, log: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if log:
        ax.set_xscale("log", base=2)
        # Set explicitly: if no case finished, there are no points from which matplotlib could derive it.
        margin = max(max(positions) / min(positions), 2) ** 0.06
        ax.set_xlim(min(positions) / margin, max(positions) * margin)
        ax.xaxis.set_major_locator(FixedLocator(x_ticks(positions)))
    else:
        ax.set_xlim(0, 1.05 * max(positions))
        step = power_of_two_above(max(positions) / 6)
        ax.xaxis.set_major_locator(FixedLocator(list(range(0, max(positions) + 1, max(int(step), 1)))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())


def set_y(ax: Axes, values: Sequence[float], unit: str, *, log: bool, rows: int = 0) -> None:
    """Sets limits and ticks for all values, with room above for rows of marks. The layout must be settled."""
    share = min(ROW * rows / axes_points(ax), 0.7)
    if not log:
        highest = max(values, default=1.0) or 1.0
        ax.set_ylim(0, 1.06 * highest / (1 - share))
        set_linear_ticks(ax.yaxis, highest, unit)
    elif unit == "bytes":
        set_log_bytes(ax, [value for value in values if value > 0] or [2.0**20], share)
    else:
        set_log_ms(ax, [value for value in values if value > 0] or [1.0], share)


def axes_points(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return float(ax.get_window_extent().height * 72 / figure.dpi)


def power_of_two_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value)) if value > 0 else 1.0


def set_linear_ticks(axis: Axis, highest: float, unit: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    if unit == "bytes":
        step = power_of_two_above(highest / 5)
        axis.set_major_locator(FixedLocator([step * count for count in range(int(highest / step) + 1)]))
    else:
        axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda y, _: format_value(y, unit) if y else "0"))


def set_log_bytes(ax: Axes, sizes: Sequence[float], share: float) -> None:
    """Ticks at powers of two, as powers of ten are hard to read in MiB."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)) + 0.1)
    room = (high - low + 0.2) * share / (1 - share)
    ax.set_yscale("log", base=2)
    ax.set_ylim(2.0 ** (low - 0.2), 2.0 ** (high + room))
    ax.yaxis.set_major_locator(
        FixedLocator([2.0**power for power in range(low, high + 1, math.ceil((high - low) / 8))])
    )
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))
    ax.yaxis.set_minor_locator(NullLocator())


def set_log_ms(ax: Axes, times: Sequence[float], share: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = math.log10(min(times)) - 0.1, math.log10(max(times)) + 0.1
    ax.set_yscale("log")
    ax.set_ylim(10.0**low, 10.0 ** (high + (high - low) * share / (1 - share)))
    decades = range(math.ceil(low), math.floor(high) + 1)
    # A range below two decades needs additional ticks.
    steps = (1,) if len(decades) > 2 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if 10.0**low <= tick <= 10.0**high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_time(y)))
    ax.yaxis.set_minor_locator(NullLocator())

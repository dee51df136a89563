"""Plots times: medians as lines, quartiles as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.plots.lines import line_figure
from memcheck.report.plots.series import BACKWARD_TIME, FORWARD_TIME, Quantity, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def time_quantities(records: Sequence[Record]) -> list[Quantity]:
    """The phases that were timed."""
    return [quantity for quantity in (FORWARD_TIME, BACKWARD_TIME) if any(map(quantity.value, records))]


def time_lines(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str, log: bool = True) -> Figure:
    quantities = time_quantities(view.records)
    return line_figure(view, quantities, styles, title=title, subtitle=subtitle, log=log)

"""Plots of decoding: the size of the state, and the peak memory of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.plots.lines import line_figure
from memcheck.report.plots.memory import bar_figure
from memcheck.report.plots.series import STATE, STEP, Quantity, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def decode_quantities(records: Sequence[Record]) -> list[Quantity]:
    return [quantity for quantity in (STATE, STEP) if any(quantity.value(record) is not None for record in records)]


def decode_bars(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str) -> Figure:
    """Bars for a single length."""
    return bar_figure(view, decode_quantities(view.records), styles, title=title, subtitle=subtitle)


def decode_lines(view: View, styles: Mapping[str, Style], *, title: str, subtitle: str, log: bool = True) -> Figure:
    """Lines of the state's bytes and of a step's peak for each operator."""
    return line_figure(view, decode_quantities(view.records), styles, title=title, subtitle=subtitle, log=log)

"""Draws what others measured on GPUs beside what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.report.plots.style import distinct_styles, in_house_style, look_of, new_panels, written
from memcheck.studies.field import UNITS, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
SMALLEST_PERCENT = 0.001  # Smaller errors are drawn as this.


@in_house_style
def field_figure(results: Mapping[str, Sequence[Result]]) -> Figure:
    """Predicted against measured memory, and how many rows have at most which error. results: study -> its rows."""
    known = {name: [row for row in rows if row.predicted is not None] for name, rows in results.items()}
    count = sum(map(len, known.values()))
    title, subtitle = "Memory of programs on GPUs: predicted and measured by others", f"{count:,} published figures"
    figure, (sizes, errors) = new_panels(2, title, subtitle, panel=4.2, around=0.9)
    styles = distinct_styles(known, {})
    for name, rows in known.items():
        pairs = [(row.published * UNITS[row.unit] / GIB, (row.predicted or 0) * UNITS[row.unit] / GIB) for row in rows]
        look = look_of(styles[name], ms=4)
        sizes.plot(*zip(*pairs, strict=True), alpha=0.6, mec="none", label=f"{name}: {len(rows):,}", **look)
        off = sorted(max(100 * abs(row.error or 0), SMALLEST_PERCENT) for row in rows)
        shares = [100 * number / len(off) for number in range(1, len(off) + 1)]
        errors.plot(off, shares, color=styles[name].colour, drawstyle="steps-post", label=name)
    finish(sizes, errors)
    return figure


plot_field = written(field_figure)


def finish(sizes: Axes, errors: Axes) -> None:
    """Titles, scales and the line of equal figures."""
    sizes.set_xscale("log")
    sizes.set_yscale("log")
    low, high = sizes.get_xlim()
    sizes.plot([low, high], [low, high], color="black", lw=0.8, ls=":", label="_equal")
    sizes.set_xlabel("measured, GiB")
    sizes.set_ylabel("predicted, GiB")
    sizes.legend(frameon=False)
    errors.set_xscale("log")
    errors.set_xlabel("error at most, %")
    errors.set_ylabel("rows, %")
    errors.set_ylim(0, 101)
    for ax in (sizes, errors):
        ax.grid()

"""Draws what others measured on GPUs beside what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
        draw_shares(errors, [row.error or 0 for row in rows], name, color=styles[name].colour)
        for tool in sorted({tool for row in rows for tool in row.others}):
            theirs = [row.others[tool] for row in rows if tool in row.others]
            draw_shares(errors, theirs, f"{name} by {tool}", color=styles[name].colour, ls="--")
    finish(sizes, errors)
    return figure


plot_field = written(field_figure)


def draw_shares(ax: Axes, errors: Sequence[float], label: str, **look: Any) -> None:
    """For each size of an error, the share of rows whose error is at most that."""
    percent = sorted(max(100 * abs(error), SMALLEST_PERCENT) for error in errors)
    shares = [100 * number / len(percent) for number in range(1, len(percent) + 1)]
    ax.plot(percent, shares, drawstyle="steps-post", label=label, **look)


def finish(sizes: Axes, errors: Axes) -> None:
    """Titles, scales and the line of equal figures."""
    sizes.set_xscale("log")
    sizes.set_yscale("log")
    low, high = sizes.get_xlim()
    sizes.plot([low, high], [low, high], color="black", lw=0.8, ls=":", label="_equal")
    sizes.set_xlabel("measured, GiB")
    sizes.set_ylabel("predicted, GiB")
    sizes.legend(frameon=False)
    errors.legend(frameon=False, loc=(0.03, 0.3))
    errors.set_xscale("log")
    errors.set_xlabel("error at most, %")
    errors.set_ylabel("rows, %")
    errors.set_ylim(0, 101)
    for ax in (sizes, errors):
        ax.grid()

"""Bars of the memory that operators save, and lines of the largest size that fits against another size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import UsageError
from memcheck.core.units import Style
from memcheck.report.plots import style
from memcheck.report.plots.figure import ENDINGS, quantities_of
from memcheck.report.plots.series import Line, Quantity, View, axis_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Names that count as "standard attention", in order of preference.
STANDARDS = ("naive", "memcheck-pyt/naive", "cs336/naive", "softmax/math", "memcheck-pyt/softmax", "softmax")
COLUMNS = 3
MOST_BARS = 9


def standard_among(names: Iterable[str]) -> str | None:
    """The standard operator among the names of lines. None if there is none, or nothing to compare it with."""
    names = list(names)
    found = [name for standard in STANDARDS for name in names if name.split(",")[0] == standard]
    return found[0] if found and len(names) > 1 else None


def standard_in(view: View) -> str | None:
    return standard_among(line.name for line in view.lines({}))


def fullest_view(views: Sequence[View]) -> View | None:
    """The view of savings: the middle one of those with the most cases, several sizes and a standard operator."""
    able = [
        view for view in views if len(view.positions) > 1 and view.records[0].mode != "decode" and standard_in(view)
    ]
    most = max((len(view.records) for view in able), default=0)
    fullest = [view for view in able if len(view.records) == most]
    return fullest[(len(fullest) - 1) // 2] if fullest else None


@style.in_house_style
def savings(view: View, *, styles: Mapping[str, Style], title: str, subtitle: str = "") -> Figure:
    """A panel per operator and a bar per x: the standard's peak memory divided by the operator's."""
    lines = view.lines(styles)
    standard = standard_among(line.name for line in lines)
    if standard is None:
        raise UsageError(f"the savings need a standard to compare with, got none of {', '.join(STANDARDS)}")
    quantity = quantities_of("memory", view.records)[-1]
    (base,) = (line for line in lines if line.name == standard)
    others = [line for line in lines if line is not base and ratios(line, base, quantity)]
    figure, panels = style.new_panels(
        len(others), title, subtitle, panel=2.1, around=1.0, columns=COLUMNS, sharey=True, sharex=True
    )
    places = sorted(style.spaced(view.positions))[-MOST_BARS:]
    for number, (ax, line) in enumerate(zip(panels, others, strict=True)):
        draw_ratios(ax, line, base, quantity, places, style.HATCHES[number % len(style.HATCHES)])
        if number + COLUMNS >= len(others):
            # Two lines where one might run into that of the next panel.
            ax.set_xlabel(axis_words(view.records, view.x).replace(", ", ",\n"))
            ax.xaxis.set_tick_params(labelbottom=True)
    found = [ratio for line in others for ratio, _ in ratios(line, base, quantity).values()]
    if panels:
        # Room for the values below bars that go down.
        lowest = min(found) / 1.7 if min(found) < 1 else 1.0
        style.set_powers(panels[0], [*found, lowest], lambda y: f"{y:.3g}x", room=0.1)
    figure.supylabel(f"{standard} / operator", fontsize=10)
    hollow = any(predicted for line in others for _, predicted in ratios(line, base, quantity).values())
    style.add_note(
        figure, f"peak memory, {quantity.title.lower()}", f"hollow: {standard} predicted, not run" if hollow else ""
    )
    return figure


def ratios(line: Line, base: Line, quantity: Quantity) -> dict[int, tuple[float, bool]]:
    """x -> the standard's bytes divided by this operator's, and whether the standard's bytes are predicted alone."""
    sizes, found = dict(quantity.along(base.points)), {}
    for x, size in quantity.along(line.points):
        whole = sizes.get(x) or base.expected_at(x, quantity)
        if whole and size:
            found[x] = whole / size, x not in sizes
    return found


def draw_ratios(ax: Axes, line: Line, base: Line, quantity: Quantity, places: Sequence[int], hatch: str) -> None:
    known, rows, standard = ratios(line, base, quantity), dict(line.points), dict(base.points)
    for place, x in enumerate(places):
        if x in known:
            ratio, predicted = known[x]
            face, edge = ("white", line.style.colour) if predicted else (line.style.colour, "white")
            # On a logarithmic axis bars start at 1 and go up or down.
            ax.bar(place, ratio - 1, bottom=1, width=0.75, color=face, edgecolor=edge, hatch=hatch, label=line.name)
            text = f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 1.95 else f"{ratio:.2f}x"
            write(ax, text, place, ratio, above=ratio >= 1, fontsize=9 if len(places) < 7 else 8)
        elif x in rows and x in standard:
            one = rows[x] if quantity.value(rows[x]) is None else standard[x]
            words = ("" if one is rows[x] else "standard: ") + ENDINGS.get(one.status, one.status)
            write(ax, words, place, 1, above=True, rotation=90, fontsize=8, color=style.GREY)
    ax.axhline(1, color="black", lw=0.8, ls=":", label="_one")
    ax.set_xticks(range(len(places)), [str(x) for x in places], fontsize=9 if len(places) < 7 else 8)
    ax.set_xlim(-0.6, len(places) - 0.4)
    ax.set_title(line.name)


def write(ax: Axes, text: str, place: int, y: float, *, above: bool, **look: Any) -> None:
    shift, edge = (2, "bottom") if above else (-2, "top")
    ax.annotate(text, (place, y), (0, shift), textcoords="offset points", ha="center", va=edge, **look)


WORDS = {"seq_len": "sequence length", "bsz": "batch size", "dim": "token dimension"}


@dataclass(frozen=True)
class Limit:
    """The largest size that fits at x; 0 if none does. open: the search reached its limit without finding the end."""

    x: int
    largest: int
    open: bool = False


@style.in_house_style
def capacity_figure(
    curves: Mapping[str, Sequence[Limit]],
    styles: Mapping[str, Style],
    *,
    found: str,
    along: str,
    title: str,
    subtitle: str = "",
    note: str = "",
) -> Figure:
    """A line for each operator. found: the searched size; along: the size on the x axis.

    Both are "seq_len", "bsz", "dim" or words of their own.
    """
    figure = style.new_figure(7.6, 4.6, title, subtitle)
    ax = figure.subplots()
    drawn = style.distinct_styles(curves, styles)
    every = [edge for edges in curves.values() for edge in edges]
    nothing = [name for name, edges in curves.items() if not all(edge.largest for edge in edges)]
    for name, edges in curves.items():
        look: dict[str, Any] = {"color": drawn[name].colour, "marker": drawn[name].marker}
        fitting = [(edge.x, edge.largest) for edge in edges if edge.largest]
        ax.plot(*(zip(*fitting, strict=True) if fitting else ([], [])), ls=drawn[name].dash, label=name, **look)
        if more := [(edge.x, edge.largest) for edge in edges if edge.largest and edge.open]:
            ax.plot(*zip(*more, strict=True), ls="none", mfc="white", mew=1.3, label="_open", **look)
        if name in nothing:  # In rows along the lower edge.
            places = [edge.x for edge in edges if not edge.largest]
            heights = [0.03 + 0.05 * nothing.index(name)] * len(places)
            look |= {"marker": "x", "ls": "none", "ms": 9, "mew": 2.2}
            ax.plot(places, heights, transform=ax.get_xaxis_transform(), label="_nothing", **look)
    ax.grid()
    ax.set_xlabel(WORDS.get(along, along))
    ax.set_ylabel(f"largest {WORDS.get(found, found)} that fits")
    ax.set_xscale("log", base=2)
    style.set_ticks(ax.xaxis, style.spaced({edge.x for edge in every}), str)
    style.set_powers(ax, [edge.largest for edge in every], lambda y: f"{y:,.0f}")
    if nothing:
        low, high = ax.get_ylim()
        share = min(0.05 * (len(nothing) + 1), 0.6)
        ax.set_ylim(low / (high / low) ** (share / (1 - share)), high)
    figure.legend(loc="outside right center", handlelength=3)
    unended = "hollow: the search ended there, more may fit" if any(edge.open for edge in every) else ""
    style.add_note(figure, unended, "x: nothing fits" if nothing else "", note)
    return figure


def plot_capacity(curves: Mapping[str, Sequence[Limit]], path: Path | str, **how: Any) -> Figure:
    """Draws the capacities and writes them to `path`. how: as of capacity_figure."""
    figure = capacity_figure(curves, **how)
    style.save(figure, path)
    return figure

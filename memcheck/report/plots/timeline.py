"""Plots one case over time: live bytes, stacked by name, with phases and peaks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcheck.core.style import colour_of
from memcheck.core.units import format_bytes
from memcheck.report.plots.scales import set_linear_ticks
from memcheck.report.plots.style import COLOURS, HATCHES, WIDE, in_house_style, is_narrow, new_figure, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memcheck.measure.timeline import Timeline

# Number of layers with their own name; all others are combined.
MOST_LAYERS = 11
OTHERS = ("other", "others")
FEW_STEPS = 200
LEAST_VISIBLE = 0.004  # Share of the picture's height.
# Approximate number of columns; with more steps than this, each column shows its maximum.
MOST_STEPS = 1500
MOST_LETTERS = 36
# Names that hold less than this share of the maximum at every peak are combined.
LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Layers:
    """The layers that are drawn, longest-lived at the bottom, and the steps that are drawn."""

    steps: list[int]
    layers: dict[str, list[int]]

    @property
    def tops(self) -> list[int]:
        """The height of the stack at each step. Negative bytes (freed, but allocated before the recording) hang below
        the axis.
        """
        columns = zip(*self.layers.values(), strict=True)
        return [sum(size for size in column if size > 0) for column in columns]


@in_house_style
def timeline_figure(timeline: Timeline, *, title: str = "Memory over one case", subtitle: str = "") -> Figure:
    figure, ax = stack_figure(layers_of(timeline), title, subtitle)
    mark_phases(ax, timeline)
    columns = dict(zip(timeline.steps, zip(*timeline.series.values(), strict=True), strict=False))
    phases = {name: (first, last + 1) for name, first, last in timeline.phases}
    peaks = []
    for phase, step in timeline.peak.items():
        if step in columns:
            text = f"{phase} peak {format_bytes(sum(columns[step]))}"
            top = sum(size for size in columns[step] if size > 0)
            # Centred on the step.
            peaks.append(Peak(step + 0.5, top, text, *phases.get(phase, ax.get_xlim())))
    mark_peaks(ax, peaks)
    return figure


plot_timeline = written(timeline_figure)


def stack_figure(stack: Layers, title: str, subtitle: str, *, top: float = 0) -> tuple[Figure, Axes]:
    """The layers on axes of bytes that reach to `top` at least, beside a bar of what is alive at the peak."""
    figure = new_figure(WIDE, 6.4 if is_narrow() else 4.8, title, subtitle)
    ax, bar = figure.subplots(1, 2, width_ratios=[9 if is_narrow() else 18, 1])
    tops = stack.tops
    highest = max([top, *tops]) or 1
    lowest = min((size for sizes in stack.layers.values() for size in sizes), default=0)
    looks = looks_of(stack)
    draw_layers(ax, stack, looks)
    draw_bar(bar, stack, looks, tops.index(max(tops, default=0)) if tops else 0, highest)
    for each in (ax, bar):
        each.set_ylim(1.1 * min(lowest, 0), 1.2 * highest)
    figure.draw_without_rendering()
    set_linear_ticks(ax.yaxis, highest, "bytes")
    ax.set_xlabel("allocations and frees")
    ax.set_ylabel("alive")
    return figure, ax


def layers_of(timeline: Timeline) -> Layers:
    """Chooses the names with the most bytes at a peak, then anywhere, as layers; all other names form one layer."""
    places = [place for place, step in enumerate(timeline.steps) if step in timeline.peak.values()]
    highest = {name: max(map(abs, sizes), default=0) for name, sizes in timeline.series.items()}
    at_peak = {name: max([sizes[place] for place in places], default=0) for name, sizes in timeline.series.items()}
    least = LEAST_SHARE * sum(at_peak.values())
    names = [name for name in timeline.series if highest[name]]
    names.sort(key=lambda name: (-at_peak[name] if at_peak[name] >= least else 0, -highest[name]))
    kept = names if len(names) <= MOST_LAYERS + 1 else names[:MOST_LAYERS]
    # The longest-lived layers go to the bottom, as they change least.
    kept = sorted(kept, key=lambda name: (name in OTHERS, -sum(size > 0 for size in timeline.series[name])))
    layers = {name: list(timeline.series[name]) for name in kept}
    if rest := [timeline.series[name] for name in names[len(kept) :]]:
        layers[f"{len(rest)} others"] = [sum(sizes) for sizes in zip(*rest, strict=True)]
    return thinned(Layers(list(timeline.steps), layers), places)


def thinned(stack: Layers, keep: Sequence[int]) -> Layers:
    """Reduces the steps to the maximum of each group, so that no peak is lost."""
    if len(stack.steps) <= MOST_STEPS:
        return stack
    tops, few = stack.tops, -(-len(stack.steps) // MOST_STEPS)
    fullest = {
        max(range(first, min(first + few, len(tops))), key=tops.__getitem__) for first in range(0, len(tops), few)
    }
    places = sorted(fullest | set(keep) | {0, len(tops) - 1})
    layers = {name: [sizes[place] for place in places] for name, sizes in stack.layers.items()}
    return Layers([stack.steps[place] for place in places], layers)


def looks_of(stack: Layers) -> dict[str, dict[str, Any]]:
    """The colour and hatch of each layer; kinds of memory have their own colours, other names those that are left."""
    kinds = {name: colour for name in stack.layers if (colour := colour_of(name)) is not None}
    left = itertools.cycle([colour for colour in COLOURS if colour not in kinds.values()])
    # White edges tell blocks apart where each has some width; they would hide narrow ones.
    edge = 0.5 if len(stack.steps) < FEW_STEPS else 0
    return {
        name: {"facecolor": kinds.get(name) or next(left), "hatch": hatch, "edgecolor": "white", "lw": edge}
        for name, hatch in zip(stack.layers, itertools.cycle(HATCHES))
    }


def draw_layers(ax: Axes, stack: Layers, looks: Mapping[str, Mapping[str, Any]]) -> None:
    # The last event gets the same width as any other.
    steps = [*stack.steps, *[step + 1 for step in stack.steps[-1:]]]
    below = [0] * len(steps)
    for name, sizes in stack.layers.items():
        levels = [*sizes, *sizes[-1:]]
        above = [low + size if size > 0 else low for low, size in zip(below, levels, strict=True)]
        ax.fill_between(steps, below, above, step="post", label=name, **looks[name])
        if min(levels) < 0:
            under = [min(size, 0) for size in levels]
            ax.fill_between(steps, under, 0, step="post", label="_under", **looks[name])
        below = above
    # A spike that is narrower than a pixel has its outline.
    ax.step(steps, below, where="post", color="black", lw=0.6, label="_outline")


def draw_bar(ax: Axes, stack: Layers, looks: Mapping[str, Mapping[str, Any]], place: int, highest: float) -> None:
    """A bar of what is alive at the place, and the legend: names from top to bottom, with their bytes there.

    Layers that are too thin to be seen anywhere are not named.
    """
    below, handles, names = 0, [], []
    for name, sizes in stack.layers.items():
        size = max(sizes[place], 0) if sizes else 0
        (drawn,) = ax.bar([0], [size], bottom=[below], width=1, **{**looks[name], "lw": 0})
        below += size
        if max(map(abs, sizes), default=0) >= LEAST_VISIBLE * highest:
            handles.append(drawn)
            # Matplotlib omits labels that begin with an underscore, such as _softmax_backward_data.
            names.append(f" {short(name)}".removeprefix("" if name.startswith("_") else " ") + size_words(size))
    ax.set_xlim(-0.5, 0.5)
    ax.set_xticks([0], ["peak"])
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    how: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.1, 0.5)}
    if is_narrow():
        figure = ax.get_figure()
        assert figure is not None
        figure.legend(handles[::-1], names[::-1], frameon=False, fontsize=9, loc="outside lower center", ncols=1)
        return
    ax.legend(handles[::-1], names[::-1], frameon=False, fontsize=9, **how)


def size_words(size: int) -> str:
    return f", {format_bytes(size)}" if size else ""


def short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 3]}..."


def mark_phases(ax: Axes, timeline: Timeline) -> None:
    place = ax.get_xaxis_transform()
    for number, (name, first, last) in enumerate(timeline.phases):
        if number:
            ax.axvline(first, color="black", lw=0.8, ls="--", label="_phase")
        middle = (first + last + 1) / 2
        ax.text(middle, 0.985, name, transform=place, ha="center", va="top", fontsize=11, weight="bold")
    if timeline.steps:
        ax.set_xlim(timeline.steps[0], timeline.steps[-1] + 1)


@dataclass(frozen=True)
class Peak:
    """A peak to mark at (x, top). Its text should stay between first and last."""

    x: float
    top: float
    text: str
    first: float
    last: float


def mark_peaks(ax: Axes, peaks: Sequence[Peak]) -> None:
    """Marks the peaks, with their texts where they cross no phase and no other text, if there is such a place."""
    from matplotlib.transforms import Bbox

    taken: list[Bbox] = []
    low, high = ax.get_xlim()
    for peak in peaks:
        ax.plot([peak.x], [peak.top], marker="v", color="black", ms=7, clip_on=False, label="_peak")
        label = ax.annotate(peak.text, (peak.x, peak.top), textcoords="offset points", xytext=(0, 7), va="bottom")
        sides = ["left", "right"] if (peak.x - low) / (high - low) < 0.7 else ["right", "left"]
        places = [
            (span, lift, side) for span in ((peak.first, peak.last), (low, high)) for lift in (7, 20) for side in sides
        ]
        for (first, last), lift, side in places:
            label.set(ha=side, position=(-4 if side == "left" else 4, lift))
            box = label.get_window_extent()
            left, right = (ax.transData.transform((x, 0))[0] for x in (first, last))
            if left - 1 <= box.x0 and box.x1 <= right + 1 and not any(box.overlaps(other) for other in taken):
                break
        if (first, last) != (peak.first, peak.last):  # The text crosses the line between two phases.
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        taken.append(label.get_window_extent())

"""Memory over time, stacked by what holds it: of one case, of a script, and of a snapshot of torch's allocator."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.script_record import LAYERS, Course, Origin, ScriptRecord
from memcheck.core.snapshot_record import SnapshotRecord
from memcheck.core.units import colour_of, format_bytes, highest
from memcheck.report.plots.style import COLOURS, HATCHES, WIDE, in_house_style, new_figure, save, set_linear

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memcheck.core.timeline import Timeline

# Number of layers with their own name; all others are combined.
MOST_LAYERS = 11
FEW_STEPS = 200
LEAST_VISIBLE = 0.004  # Share of the picture's height.
# Approximate number of columns; with more steps than this, each column shows its maximum.
MOST_STEPS = 1500
MOST_LETTERS = 36
# Names that never hold this share of the highest sum are combined.
LEAST_SHARE = 0.01
PEAKS = ("v", "D", "s")  # Markers of peaks, in order.
# The layers of a script from the bottom: what lives longest first.
ORDER = ("parameters", "buffers", "optimizer state", "gradients")


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
    """One case, with the phases and their peaks."""
    stack = layers_of(timeline.course, attrgetter("operator"), list(timeline.peak.values()))
    tops = dict(zip(stack.steps, stack.tops, strict=False))  # Without layers there are none.
    peaks = [  # Centred on the step.
        (step + 0.5, tops[step], f"{phase} peak {format_bytes(timeline.alive[step])}")
        for phase, step in timeline.peak.items()
    ]
    figure, ax = stack_figure(stack, title, subtitle, peaks=peaks)
    for number, (name, first, last) in enumerate(timeline.phases):
        if number:
            ax.axvline(first, color="black", lw=0.8, ls="--", label="_phase")
        place = ax.get_xaxis_transform()
        ax.text((first + last + 1) / 2, 0.985, name, transform=place, ha="center", va="top", fontsize=11, weight="bold")
    if timeline.steps:
        ax.set_xlim(timeline.steps[0], timeline.steps[-1] + 1)
    return figure


@in_house_style
def script_figure(record: ScriptRecord, *, title: str, subtitle: str = "") -> Figure:
    """A run of a script, with its peak, its limit and the time."""
    # The limit is shown unless it is so far above the peak that it would flatten the picture.
    limit = record.limit_bytes or 0
    limit = limit if limit < 3 * record.peak.bytes else 0
    if record.growing:
        subtitle += f"; grows {format_bytes(record.growth_per_step)} a {record.step_name}"
    if record.process.growth_per_step:
        subtitle += f"; the process grows {format_bytes(record.process.growth_per_step)} more"
    peak = record.peak
    peaks = [(peak.event, peak.bytes, f"peak {format_bytes(peak.bytes)}, {peak.place.phase}")]
    points, layers = record.course.points, record.course.by(attrgetter("layer"))
    order = (layer for layer in dict.fromkeys([*ORDER, *LAYERS]) if layer in layers)
    stack = Layers([0, *(point.event for point in points)], {layer: [0, *layers[layer]] for layer in order})
    lines = {f"limit {format_bytes(limit)}": ([0, record.events + 1], [limit] * 2, "--")} if limit else {}
    figure, ax = stack_figure(stack, title, subtitle, peaks=peaks, lines=lines)
    ax.set_xlim(0, record.events + 1)
    # Along the upper edge, when some of the events were.
    some = points[len(points) // 12 :: max(1, len(points) // 6)]
    upper = ax.secondary_xaxis("top")
    upper.set_xticks([point.event for point in some], [f"{point.seconds:.3g} s" for point in some], fontsize=9)
    upper.tick_params(length=3)
    return figure


@in_house_style
def snapshot_figure(record: SnapshotRecord, *, title: str, subtitle: str = "") -> Figure:
    """A snapshot: what was alive by line of Python, below what was reserved, and where memory ran out."""
    course, peak, end = record.course, record.peak, max(record.events, 1) + 1
    names = dict.fromkeys(place.where for place in course.places)
    counts = Counter(map(without_folders, names))
    short = {name: name if counts[without_folders(name)] > 1 else without_folders(name) for name in names}
    at_peak = [number for number, point in enumerate(course.points) if point.event == peak.event]
    stack = layers_of(course, lambda place: short[place.where], at_peak)
    stack = Layers([event + 1 for event in stack.steps], stack.layers)
    peaks = [(peak.event + 1, peak.allocated_bytes, f"peak {format_bytes(peak.allocated_bytes)}")]
    if record.oom is not None:
        moment, requested = record.oom.moment, format_bytes(record.oom.requested_bytes)
        peaks.append((moment.event + 1, moment.reserved_bytes, f"out of memory: {requested} requested"))
    lines = {"reserved": ([*stack.steps, end], [*course.reserved, *course.reserved[-1:]], "-")}
    figure, ax = stack_figure(stack, title, subtitle, peaks=peaks, lines=lines)
    ax.set_xlabel("events")
    ax.set_xlim(0, end)
    return figure


def plot_timeline(data: Timeline | ScriptRecord | SnapshotRecord, path: Path | str, **how: Any) -> Figure:
    """Draws memory over time and writes it to `path`. how: title and subtitle."""
    figure: Figure
    if isinstance(data, ScriptRecord):
        figure = script_figure(data, **how)
    elif isinstance(data, SnapshotRecord):
        figure = snapshot_figure(data, **how)
    else:
        figure = timeline_figure(data, **how)
    save(figure, path)
    return figure


def without_folders(name: str) -> str:
    return name.rpartition("/")[2]


def layers_of(course: Course, name_of: Callable[[Origin], str], peaks: Sequence[int]) -> Layers:
    """The names with the most bytes at the peaks, then anywhere, as layers; all other and small names form one layer.

    peaks: points of the course, which are drawn in any case.
    """
    sums = course.by(name_of)
    most = {name: max(map(abs, sizes), default=0) for name, sizes in sums.items()}
    at_peak = {name: max([sizes[point] for point in peaks], default=0) for name, sizes in sums.items()}
    names = sorted(filter(most.get, sums), key=lambda name: (-at_peak[name], -most[name]))
    least = LEAST_SHARE * max(course.sums, default=0)
    kept = [name for name in names if most[name] >= least][:MOST_LAYERS]
    rest = [name for name in names if name not in kept]
    kept, rest = (names, []) if len(rest) == 1 else (kept, rest)
    # The longest-lived layers go to the bottom, as they change least.
    layers = {name: sums[name] for name in sorted(kept, key=lambda name: -sum(size > 0 for size in sums[name]))}
    if rest:
        layers[f"{len(rest)} others"] = [sum(sizes) for sizes in zip(*map(sums.get, rest), strict=True)]
    return thinned(Layers([point.event for point in course.points], layers), peaks)


def thinned(stack: Layers, keep: Sequence[int]) -> Layers:
    """Reduces the steps to the maximum of each group, so that no peak is lost."""
    if len(stack.steps) <= MOST_STEPS:
        return stack
    places = highest(stack.tops, MOST_STEPS, [0, *keep])
    layers = {name: [sizes[place] for place in places] for name, sizes in stack.layers.items()}
    return Layers([stack.steps[place] for place in places], layers)


def stack_figure(
    stack: Layers,
    title: str,
    subtitle: str,
    *,
    peaks: Sequence[tuple[float, int, str]],
    lines: Mapping[str, tuple[Sequence[int], Sequence[int], str]] | None = None,
) -> tuple[Figure, Axes]:
    """The layers over their steps, beside a bar of what is alive at the peak, with their names.

    peaks: x, bytes and words of moments to mark. lines: name -> x, bytes and dash.
    """
    figure = new_figure(WIDE, 5, title, subtitle)
    ax, bar = figure.subplots(1, 2, width_ratios=[18, 1])
    tops, looks = stack.tops, looks_of(stack)
    draw_layers(ax, stack, looks)
    marked = []
    for name, (xs, sizes, dash) in (lines or {}).items():
        marked += ax.plot(xs, sizes, drawstyle="steps-post", color="black", lw=1, ls=dash, label=name)
    for (x, top, words), marker in zip(peaks, itertools.cycle(PEAKS)):
        shape = "X" if words.startswith("out of memory") else marker
        marked += ax.plot([x], [top], marker=shape, color="black", ms=7, ls="none", clip_on=False, label=words)
    highest = max([ax.dataLim.y1, *tops]) if tops or marked else 1
    lowest = min((size for sizes in stack.layers.values() for size in sizes), default=0)
    draw_bar(bar, stack, looks, tops.index(max(tops)) if tops else 0, highest)
    for each in (ax, bar):
        each.set_ylim(1.1 * min(lowest, 0), 1.15 * (highest or 1))
    set_linear(ax.yaxis, highest or 1, format_bytes)
    ax.set_xlabel("allocations and frees")
    ax.set_ylabel("alive")
    if marked:
        figure.legend(handles=marked, loc="outside lower center", ncols=3)
    return figure, ax


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
            short = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 3]}..."
            # Matplotlib omits labels that begin with an underscore, such as _softmax_backward_data.
            short = f" {short}" if name.startswith("_") else short
            names.append(f"{short}, {format_bytes(size)}" if size else short)
    ax.set(xlim=(-0.5, 0.5), yticks=[])
    ax.set_xticks([0], ["peak"])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    ax.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.1, 0.5))

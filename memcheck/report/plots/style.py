"""The look of pictures and their files. The user's matplotlib backend and rcParams stay unchanged."""

from __future__ import annotations

import base64
import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from memcheck.core.files import whole_file
from memcheck.core.units import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

GREY = "#666666"
FORMATS = ("png", "svg", "pdf")
WIDE = 9.6  # Inches.
# Text is stored as text in SVG, and element ids are the same in every run.
RC = {
    "figure.dpi": 100,
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "memcheck",
}
# No file has the date on which it was written.
METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None},
}
MIME = {"png": "image/png", "svg": "image/svg+xml"}
# For names without a style: the colour-blind-safe palettes of Tol and of Okabe and Ito. Markers, dashes and hatches
# distinguish lines in greyscale.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#999933"),
    *("#882255", "#44AA99", "#000000", "#E69F00", "#56B4E9", "#A6761D"),
)
MARKERS = ("*", "8", "p", "d", "H", "P", "X", "v", "^", "<", ">", "D", "s", "o", "h")
DASHES = ((0, (9, 2, 2, 2)), (0, (1, 2)), (0, (4, 4)), (0, (6, 1, 2, 1)), "-", "--", "-.", ":")
# Hatches of straight strokes only: in an SVG every dot of a dotted hatch is a path.
HATCHES = ("", "///", "xx", "---", "\\\\\\", "++", "|||", "//", "xxxx", "--", "\\\\", "||", "+++")
P = ParamSpec("P")
T = TypeVar("T")


def distinct_styles(names: Iterable[str], styles: Mapping[str, Style]) -> dict[str, Style]:
    """The style of each name. Names without one get the colour, the marker and the dash that are used least."""
    names = list(names)
    taken = [styles[name] for name in names if name in styles]
    chosen: dict[str, Style] = {}

    def least_used(candidates: Sequence[Any], field: str) -> Any:
        return min(candidates, key=[getattr(style, field) for style in taken].count)

    for name in names:
        if name not in styles:
            parts = (COLOURS, "colour"), (MARKERS, "marker"), (DASHES, "dash")
            taken.append(Style(*(least_used(*part) for part in parts)))
        chosen[name] = styles[name] if name in styles else taken[-1]
    return chosen


@contextmanager
def house_style() -> Iterator[None]:
    """Applies matplotlib's defaults and our settings inside the block, whatever the user's style is."""
    from matplotlib import style

    with style.context(["default", RC]):
        yield


def in_house_style(draw: Callable[P, T]) -> Callable[P, T]:
    """The function, which then draws in the house style."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> T:
        with house_style():
            return draw(*args, **kwargs)

    return styled


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    """A new figure outside pyplot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(fitted(figure, f"{title}\n{subtitle}" if subtitle else title, 11), fontsize=11)
    return figure


def new_panels(
    count: int, title: str, subtitle: str, *, panel: float, around: float, columns: int = 2, **share: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, with at most so many columns.

    panel, around: the height in inches of a panel, and of all that is around the panels.
    """
    columns = max(min(columns, count), 1)
    rows = max(math.ceil(count / columns), 1)
    figure = new_figure(WIDE if columns > 1 else 7.6, around + panel * rows, title, subtitle)
    panels = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in panels[count:]:
        ax.set_visible(False)
    return figure, panels[:count]


def fitted(figure: Figure, text: str, size: float) -> str:
    """The text in lines that fit the figure's width. A letter is about half as wide as its size."""
    letters = int(figure.get_figwidth() * 72 / (0.54 * size))
    return "\n".join(textwrap.fill(line, letters, break_on_hyphens=False) for line in text.splitlines())


def add_note(figure: Figure, *parts: str) -> None:
    """Writes the parts that are not empty below the panels."""
    if note := "; ".join(filter(None, parts)):
        figure.supxlabel(fitted(figure, note, 9), fontsize=9, color=GREY)


def set_ticks(axis: Axis, ticks: Iterable[float], text: Callable[[float], str]) -> None:
    """Sets ticks at these values alone, and their text."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())


def set_powers(ax: Axes, values: Iterable[float], text: Callable[[float], str], *, room: float = 0) -> None:
    """A logarithmic y axis around the values, with ticks at powers of two. room: the share of it above them."""
    known = [math.log2(value) for value in values if value > 0] or [19.5, 20.5]
    low, high = math.floor(min(known)), math.ceil(max(known))
    low, high = (low - 1, high + 1) if low == high else (low, high)
    margin = 0.04 * (high - low)
    ax.set_yscale("log", base=2)
    ax.set_ylim(2.0 ** (low - margin), 2.0 ** (high + margin + (high - low) * room / (1 - room)))
    set_ticks(ax.yaxis, [2.0**power for power in range(low, high + 1, math.ceil((high - low) / 8))], text)


def set_linear(axis: Axis, highest: float, text: Callable[[float], str], count: float = 5) -> None:
    """About so many ticks of a linear axis from 0 to the highest value, at multiples of a power of two."""
    step = 2.0 ** round(math.log2(highest / count))
    set_ticks(axis, [step * number for number in range(int(highest / step) + 1)], lambda y: text(y) if y else "0")


def spaced(values: Iterable[int]) -> list[int]:
    """The values from the largest down, without those too close to their neighbour for the ticks of a log axis."""
    values, ticks = sorted(values, reverse=True), list[int]()
    for x in values:
        if not ticks or math.log(ticks[-1] / x) > math.log(values[0] / values[-1]) / 7:
            ticks.append(x)
    return ticks


@in_house_style
def image_bytes(figure: Figure, suffix: str = "png", dpi: int = 100) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=dpi, metadata=METADATA.get(suffix))
    return buffer.getvalue()


def save(figure: Figure, path: Path | str) -> Path:
    """Writes the figure in the format of the path's suffix, by default as PNG, and returns the path."""
    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    with whole_file(path) as file:
        file.write(image_bytes(figure, path.suffix[1:], dpi=150))
    return path


def image_element(figure: Figure, caption: str, suffix: str = "svg") -> str:
    """The figure as an <img> that holds its data, for an HTML page without a network."""
    data = base64.b64encode(image_bytes(figure, suffix)).decode()
    return f'<img alt="{escape(caption)}" src="data:{MIME[suffix]};base64,{data}">'


def shown(figure: Figure) -> Figure:
    """The figure, which a notebook shows even without %matplotlib inline."""
    vars(figure)["_repr_png_"] = lambda: image_bytes(figure)
    return figure

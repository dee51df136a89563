"""The look of plots, and the files they are written to. The user's matplotlib backend and rcParams stay unchanged."""

from __future__ import annotations

import functools
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from memcheck.core.errors import UsageError
from memcheck.core.files import whole_file
from memcheck.core.options import named
from memcheck.core.style import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#666666"
GRID = "#dddddd"
# The greys of a plot on a dark page, by those on a white one.
DARK = {"#000000": "#e6e9eb", "#ffffff": "#16191c", GREY: "#a4adb5", GRID: "#3c444b"}
LEAST_LIGHT = 0.2  # Luminance of any other colour there.
FORMATS = ("png", "svg", "pdf")
# Inches. At a width of 9 inches, 10-point text has 12 pixels on a web page; at the narrow width, 10 on a phone.
WIDE, NARROW = 9.6, 4.8
widest: ContextVar[float] = ContextVar("widest", default=WIDE)  # Figures are at most as wide.
# Text is stored as text in SVG, and element ids are the same in every run.
RC = {
    "figure.dpi": 100,
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "memcheck",
}
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
PNG_DPI = 150


def look_of(style: Style, **more: Any) -> dict[str, Any]:
    """Keywords of Axes.plot: the style's colour and marker without a line, plus `more`."""
    return {"color": style.colour, "marker": style.marker, "ls": "none", **more}


def shade_of(colour: str) -> tuple[float, float, float]:
    """A shade of the colour with enough contrast to be visible on the colour itself."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    if 0.3 * red + 0.6 * green + 0.1 * blue < 0.2:
        return (red + 3) / 4, (green + 3) / 4, (blue + 3) / 4
    return red / 2.5, green / 2.5, blue / 2.5


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


def distinct_styles(names: Iterable[str], styles: Mapping[str, Style]) -> dict[str, Style]:
    """The style of each name. Names without one get an unused combination of colour, marker and dash where possible."""
    names = list(names)
    taken = [styles[name] for name in names if name in styles]
    chosen: dict[str, Style] = {}
    for name in names:
        if name not in styles:
            taken.append(free_style(taken))
        chosen[name] = styles[name] if name in styles else taken[-1]
    return chosen


def free_style(taken: Sequence[Style]) -> Style:
    """The least used colour, marker and dash, each for itself."""

    def first_free(candidates: Sequence[Any], name: str) -> Any:
        return min(candidates, key=[getattr(style, name) for style in taken].count)

    return Style(first_free(COLOURS, "colour"), first_free(MARKERS, "marker"), first_free(DASHES, "dash"))


P = ParamSpec("P")
T = TypeVar("T")


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


def is_narrow() -> bool:
    return widest.get() < WIDE


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    """A new figure outside pyplot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(width, widest.get()), height), layout="constrained")
    figure.suptitle(fitted(figure, f"{title}\n{subtitle}" if subtitle else title, 11), fontsize=11)
    return figure


def new_panels(
    count: int,
    title: str,
    subtitle: str,
    *,
    panel: float,
    around: float,
    columns: int = 2,
    narrow_columns: int = 1,
    **share: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, with at most so many columns.

    panel, around: the height in inches of a panel, and of all that is around the panels.
    """
    columns = max(min(narrow_columns if is_narrow() else columns, count), 1)
    rows = max(math.ceil(count / columns), 1)
    figure = new_figure(WIDE if columns > 1 else 6.8, around + panel * rows, title, subtitle)
    panels = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in panels[count:]:
        ax.set_visible(False)
    return figure, panels[:count]


def columns_of(ax: Axes) -> int:
    """The number of columns of the figure that the panel belongs to."""
    grid = ax.get_gridspec()
    assert grid is not None
    return grid.ncols


def add_note(figure: Figure, *parts: str) -> None:
    """Writes the parts that are not empty below the panels."""
    if note := "; ".join(filter(None, parts)):
        figure.supxlabel(fitted(figure, note, 9), fontsize=9, color=GREY)


def fitted(figure: Figure, text: str, size: float) -> str:
    """The text in lines that fit the figure's width. A letter is about half as wide as its size."""
    letters = int(figure.get_figwidth() * 72 / (0.54 * size))
    return "\n".join(textwrap.fill(line, letters, break_on_hyphens=False) for line in text.splitlines())


@in_house_style
def save(figure: Figure, path: Path | str) -> Path:
    """Writes the figure in the format of the path's suffix, by default as PNG, and returns the path."""
    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    metadata = {".svg": NO_METADATA, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)
    return path


def written(draw: Callable[Concatenate[T, P], Figure]) -> Callable[Concatenate[T, Path | str, P], Figure]:
    """The same function with a path as its second argument, to which it writes the figure."""

    @functools.wraps(draw)
    def plot(data: T, path: Path | str, *args: P.args, **kwargs: P.kwargs) -> Figure:
        figure = draw(data, *args, **kwargs)
        save(figure, path)
        return figure

    return plot


def check_formats(formats: Iterable[str]) -> tuple[str, ...]:
    formats = tuple(dict.fromkeys(formats))
    for name in formats:
        if name not in FORMATS:
            raise UsageError(f"{named('format')} {name} is unknown; known: {', '.join(FORMATS)}")
    return formats


def inline_svg(draw: Callable[[], Figure], prefix: str, caption: str) -> str:
    """Two <svg> elements for an HTML page, as wide as their container: for a wide window and for a narrow one.

    Each is hidden in the other's window. They have no prologue, and their ids and rules are unique.
    """
    parts = []
    for widest_here, name, elsewhere in (
        (WIDE, prefix, "max-width: 34rem"),
        (NARROW, f"{prefix}-narrow", "min-width: 34.01rem"),
    ):
        token = widest.set(widest_here)
        try:
            figure = draw()
        finally:
            widest.reset(token)
        # Relative to the widest figure, so that the text of all figures is of one size.
        share = figure.get_figwidth() / widest_here
        parts.append(
            svg_element(figure, name, caption, share, f"@media ({elsewhere}) {{ #{name} {{ display: none }} }}")
        )
    return "\n".join(parts)


@in_house_style
def svg_element(figure: Figure, name: str, caption: str, share: float, rule: str) -> str:
    """The figure as an <svg> element. share: its width in the container. rule: further CSS."""
    from xml.sax.saxutils import escape

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg, dark = with_dark_colours(svg, name)
    # The global rule would also apply to the page's own elements.
    svg = svg.replace("*{stroke-linejoin", f"#{name} *{{stroke-linejoin").replace(
        "</style>", f" {rule}\n  {dark}</style>", 1
    )
    head = f'<svg id="{name}" role="img" style="max-width:{share:.1%};height:auto"'
    title = f"<title>{escape(caption)}</title>"
    return re.sub(r"<svg\b([^>]*)>", lambda found: f"{head}{found[1]}>\n {title}", svg, count=1)


def with_dark_colours(svg: str, name: str) -> tuple[str, str]:
    """The element with variables for colours, and the rules that give them other values on a dark page."""
    colours = sorted({colour.lower() for colour in re.findall(r"(?<=: )#[0-9a-fA-F]{6}\b", svg)} | {"#000000"})
    svg = re.sub(r"(?<=: )#([0-9a-fA-F]{6})\b", lambda found: f"var(--{name}-{found[1].lower()}, {found[0]})", svg)
    values = "; ".join(f"--{name}-{colour[1:]}: {dark_colour(colour)}" for colour in colours)
    # Matplotlib leaves out a black fill, which is SVG's default.
    black = f"#{name} {{ fill: var(--{name}-000000, #000000) }}"
    return svg, f"{black} @media screen and (prefers-color-scheme: dark) {{ #{name} {{ {values} }} }}"


def dark_colour(colour: str) -> str:
    """The colour on a dark page: greys are inverted, dark colours become lighter."""
    from matplotlib.colors import to_hex, to_rgb

    if colour in DARK:
        return DARK[colour]
    red, green, blue = to_rgb(colour)
    light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    share = max(0.0, LEAST_LIGHT - light) / (1 - light)
    return to_hex((red + share * (1 - red), green + share * (1 - green), blue + share * (1 - blue)))


def shown(figure: Figure) -> Figure:
    """The figure, which a notebook shows even without %matplotlib inline."""
    vars(figure)["_repr_png_"] = lambda: png_of(figure)
    return figure


@in_house_style
def png_of(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()

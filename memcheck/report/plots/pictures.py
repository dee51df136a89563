"""Chooses the plots that a set of records allows, and writes them as files or inline SVG."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memcheck.core.model_record import ModelRecord
from memcheck.core.record import Record
from memcheck.core.style import Style
from memcheck.report.cases import common_case, has_sizes, models_among, on_measured_devices, operators_among
from memcheck.report.plots.lines import line_figure, time_lines, time_quantities
from memcheck.report.plots.memory import (
    decode_bars,
    decode_lines,
    decode_quantities,
    memory_bars,
    memory_lines,
    memory_overview,
)
from memcheck.report.plots.models import model_bars
from memcheck.report.plots.predictions import has_prediction, has_terms, prediction_lines, terms_lines
from memcheck.report.plots.savings import savings_bars, standard_among
from memcheck.report.plots.series import (
    AXES,
    Quantity,
    View,
    axes_of,
    axis_among,
    fixed_slug,
    heading,
    natural_axis,
    refuse_mixed,
    setting_words,
    slug,
    split_settings,
    views_along,
)
from memcheck.report.plots.style import check_formats, inline_svg, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("memory", "prediction", "terms", "savings", "time", "decode", "models")


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn on demand."""

    name: str  # The file name without its suffix.
    caption: str
    draw: Callable[..., Figure]  # Another title and subtitle can be given.
    # True for the few pictures that represent the whole set.
    main: bool = True


@dataclass(frozen=True)
class PictureRequest:
    """What to draw of the records; None means everything that the records allow."""

    kinds: Sequence[str] | None = None
    x: str | None = None
    quantity: Quantity | None = None
    log: bool | None = None


Watch = Callable[[Sequence[Picture]], Iterable[Picture]]


def plot_memory(
    records: Sequence[Record], path: Path | str, *, styles: Mapping[str, Style], title: str, subtitle: str
) -> Figure:
    """Draws the main picture of memory of records that may share one, and writes it to `path`."""
    records = on_measured_devices(records)
    refuse_mixed(records)  # Among several views as well.
    group = RecordGroup(records, styles, title, "", PictureRequest(["memory", "decode"]))
    figure = main_picture([*group.pictures()]).draw(title=title, subtitle=subtitle)
    save(figure, path)
    return figure


def main_picture(pictures: Sequence[Picture]) -> Picture:
    """The first main picture; the first one if none is."""
    return next((picture for picture in pictures if picture.main), pictures[0])


def write_plots(
    records: Sequence[Record],
    folder: Path | str,
    *,
    styles: Mapping[str, Style],
    title: str,
    formats: Sequence[str] = ("png", "svg"),
    request: PictureRequest | None = None,
    every: bool = True,
    watch: Watch = iter,
) -> list[Path]:
    """Writes the pictures that the records allow into the folder; files of the same name are replaced.

    every: also those that show a part of another picture. watch: passes the pictures on one by one, as tqdm does.
    """
    formats = check_formats(formats)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    pictures = choose_pictures(records, styles=styles, title=title, request=request)
    for picture in watch([picture for picture in pictures if picture.main or every]):
        figure = picture.draw()
        paths += [save(figure, folder / f"{picture.name}.{suffix}") for suffix in formats]
    return paths


def svg_plots(
    records: Sequence[Record],
    *,
    styles: Mapping[str, Style],
    title: str = "",
    watch: Watch = iter,
) -> list[tuple[str, str]]:
    """(caption, inline SVG) of the main pictures, for one HTML page. watch: as of write_plots."""
    pictures = choose_pictures(records, styles=styles, title=title)
    return [
        (picture.caption, inline_svg(picture.draw, f"plot-{picture.name}", picture.caption))
        for picture in watch([picture for picture in pictures if picture.main])
    ]


def choose_pictures(
    records: Sequence[Record],
    *,
    styles: Mapping[str, Style],
    title: str,
    request: PictureRequest | None = None,
) -> list[Picture]:
    """Chooses the pictures. Records of different dtypes, modes, devices or batch sizes go into separate pictures."""
    pictures: list[Picture] = []
    for setting, group in split_settings(operators_among(records)):
        words = setting_words(setting)
        topic = ", ".join(filter(None, (title, words)))
        pictures += RecordGroup(group, styles, topic, slug(words), request or PictureRequest()).pictures()
    return [*pictures, *model_pictures(models_among(records), title, request or PictureRequest())]


def model_pictures(models: Sequence[ModelRecord], title: str, request: PictureRequest) -> Iterator[Picture]:
    """Whole models as bars, if no field or axis was requested."""
    wanted = request.kinds is None or "models" in request.kinds
    if models and wanted and request.quantity is None and request.x is None:
        words, subtitle = heading(title, "memory of whole models"), common_case(models)
        draw = functools.partial(model_bars, models, title=words, subtitle=subtitle)
        yield Picture("models", f"{words}; {subtitle}.", draw)


Draw = Callable[..., "Figure"]


@dataclass(frozen=True)
class RecordGroup:
    """Records that may share a picture, and what was requested of them."""

    records: list[Record]
    styles: Mapping[str, Style]
    title: str
    suffix: str
    request: PictureRequest

    def pictures(self) -> Iterator[Picture]:
        if self.request.quantity is not None:
            yield from self.quantity_pictures(self.request.quantity)
            return
        for kind, pictures in self.kinds().items():
            if self.request.kinds is None or kind in self.request.kinds:
                yield from pictures()

    def kinds(self) -> dict[str, Callable[[], Iterator[Picture]]]:
        """The kinds of pictures that these records allow. Decoding steps are compared only with decoding steps."""
        kinds: dict[str, tuple[str, Draw, Callable[[View], object]]] = {}
        if self.records[0].mode != "decode":
            standard = standard_among({record.operator or "?" for record in self.records})
            kinds = {
                "prediction": (
                    "prediction beside measurement",
                    prediction_lines,
                    lambda view: has_prediction(view.records),
                ),
                "terms": ("predicted terms beside measurement", terms_lines, lambda view: has_terms(view.records)),
                "savings": (
                    f"how many times less than {standard}",
                    savings_bars,
                    lambda view: standard_among(line.name for line in view.lines({})),
                ),
            }
        kinds["time"] = ("time, median and quartiles", time_lines, lambda view: time_quantities(view.records))
        typical = {kind: functools.partial(self.typical_pictures, kind, *how) for kind, how in kinds.items()}
        first = {"decode": self.decode_pictures} if len(kinds) == 1 else {"memory": self.memory_pictures}
        return {**first, **typical}

    def axes(self) -> list[str]:
        """The requested axis, or every axis along which something varies."""
        if self.request.x:
            x = axis_among(self.records, self.request.x)
            return [x] if self.views(x) else []
        return [axis for axis in axes_of(self.records) if self.views(axis)]

    def views(self, x: str) -> list[View]:
        """The views with enough points for a line."""
        return [view for view in views_along(self.records, x) if len(view.positions) > 1]

    def memory_pictures(self) -> Iterator[Picture]:
        """For each axis an overview of all views, and each view alone; bars if nothing varies."""
        axes = self.axes()
        for x in axes:
            views, stem = self.views(x), f"memory-{slug(x)}" if len(axes) > 1 else "memory"
            words = f"peak memory against {AXES[x]}"
            if len(views) > 1:
                if self.request.log is not False:
                    records = [record for view in views for record in view.records]
                    draw = functools.partial(memory_overview, views)
                    yield self.picture(stem, words, records, ", logarithmic axes", draw)
                for view in views:
                    name, log = f"{stem}-{fixed_slug(view)}", bool(self.request.log)
                    yield self.line_picture(view, name, words, memory_lines, main=False, log=log)
                continue
            # Logarithmic axes show how memory grows; linear axes show how much it is.
            for log in (True, False) if self.request.log is None else (self.request.log,):
                name = stem if log else f"{stem}-linear"
                yield self.line_picture(views[0], name, words, memory_lines, main=log, log=log)
        if not axes and self.request.x is None:
            yield from self.bar_pictures("memory", "peak memory", memory_bars)

    def bar_pictures(
        self, stem: str, words: str, draw: Draw, shows: Callable[[View], object] = lambda view: True
    ) -> Iterator[Picture]:
        """Bars for single shapes, or for records that have no sizes."""
        shapes = views_along(self.records, natural_axis(self.records))
        if not any(map(has_sizes, self.records)):
            shapes = [View("length", {}, self.records)]
        views = [view for view in shapes if shows(view)]
        for number, view in enumerate(views):
            name = f"{stem}-{fixed_slug(view)}" if len(views) > 1 else stem
            yield self.line_picture(view, name, words, draw, main=number == len(views) - 1)

    def decode_pictures(self) -> Iterator[Picture]:
        words = "state of decoding, and peak of a step"
        yield from self.typical_pictures("decode", words, decode_lines, lambda view: decode_quantities(view.records))
        if not self.axes() and self.request.x is None:
            yield from self.bar_pictures("decode", words, decode_bars, lambda view: decode_quantities(view.records))

    def typical_pictures(self, stem: str, words: str, draw: Draw, shows: Callable[[View], object]) -> Iterator[Picture]:
        """Pictures of the most informative view, or of every view if the kind was requested by name."""
        axes = self.axes()
        # Plots against the dimension only if nothing else varies or if it was requested.
        x = next((axis for axis in axes if axis != "dim"), "dim" if axes else None)
        views = [view for view in self.views(x) if shows(view)] if x else []
        chosen, every = most_informative(views), self.request.kinds is not None
        for view in views:
            if view is chosen or every:
                name = f"{stem}-{fixed_slug(view)}" if every and len(views) > 1 else stem
                scale = {} if draw is savings_bars else {"log": self.request.log is not False}
                yield self.line_picture(view, name, words, draw, main=view is chosen, **scale)

    def quantity_pictures(self, quantity: Quantity) -> Iterator[Picture]:
        if not any(quantity.value(record) is not None for record in self.records):
            return
        draw = functools.partial(line_figure, quantities=[quantity], log=self.request.log is not False)
        for x in self.axes():
            for view in (views := self.views(x)):
                name = slug(f"{quantity.fields[0]} {x} {fixed_slug(view) if len(views) > 1 else ''}")
                yield self.line_picture(view, name, quantity.title, draw)

    def line_picture(self, view: View, stem: str, words: str, draw: Draw, *, main: bool = True, **how: bool) -> Picture:
        where = f", at {shape}" if (shape := view.fixed_words()) else ""
        return self.picture(stem, words, view.records, where, functools.partial(draw, view, **how), main=main)

    def picture(
        self, stem: str, words: str, records: Sequence[Record], where: str, draw: Draw, *, main: bool = True
    ) -> Picture:
        title, subtitle = heading(self.title, words), common_case(records)
        drawn = functools.partial(draw, styles=self.styles, title=title, subtitle=subtitle)
        name = f"{stem}-{self.suffix}" if self.suffix else stem
        return Picture(name, f"{title}{where}; {subtitle}.", drawn, main)


def most_informative(views: Sequence[View]) -> View | None:
    """The middle one of the views that hold the most cases."""
    most = max((len(view.records) for view in views), default=0)
    fullest = [view for view in views if len(view.records) == most]
    return fullest[(len(fullest) - 1) // 2] if fullest else None

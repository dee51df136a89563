"""The pictures of any set of records: one for each kind and for each group of records that may share one."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import unknown_name
from memcheck.core.record import Record
from memcheck.core.units import Style
from memcheck.report.cases import common_case
from memcheck.report.plots import series, style
from memcheck.report.plots.figure import FIGURES, drawn_views, figure, quantities_of, title_of
from memcheck.report.plots.savings import fullest_view, savings, standard_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (*FIGURES, "savings")


@dataclass(frozen=True)
class Picture:
    """A picture that is drawn on demand."""

    name: str  # The file name without its suffix.
    caption: str
    draw: Callable[[], Figure]


Watch = Callable[[Sequence[Picture]], Iterable[Picture]]


def pictures_of(
    records: Sequence[Record],
    *,
    styles: Mapping[str, Style],
    title: str = "",
    kinds: Sequence[str] = KINDS,
    x: str | None = None,
    log: bool = True,
) -> list[Picture]:
    """The pictures that the records allow.

    kinds: of KINDS, or fields in bytes or ms. x: an axis of series.AXES; default: what varies. title: text before the
    title of each.
    """
    pictures = list[Picture]()
    for words, group in series.groups_of(records, x):
        views = drawn_views(group, x)
        for kind in kinds:
            draw: Callable[..., Figure]
            shown, what, where = group, title_of(kind), ""
            if kind == "savings":
                if (view := fullest_view(views)) is None:
                    continue
                shown, where = view.records, view.words()
                what = f"How many times less than {standard_in(view)}"
                draw = functools.partial(savings, view)
            elif views and quantities_of(kind, group):
                draw = functools.partial(figure, group, kind, x=x, log=log)
            else:
                continue
            topic = ", ".join(filter(None, (title, words)))
            heading = f"{topic}: {what[:1].lower()}{what[1:]}" if topic else what
            case = ", ".join(filter(None, (common_case(shown), where)))
            name = re.sub(r"[^a-z0-9]+", "-", f"{kind} {words}".lower()).strip("-")
            drawn = functools.partial(draw, styles=styles, title=heading, subtitle=case)
            pictures.append(Picture(name, f"{heading}; {case}.", drawn))
    return pictures


def write_pictures(
    records: Sequence[Record],
    folder: Path | str,
    *,
    styles: Mapping[str, Style],
    formats: Sequence[str] = ("png", "svg"),
    watch: Watch = iter,
    **how: Any,
) -> list[Path]:
    """Writes the pictures that the records allow into the folder; files of the same name are replaced.

    watch: passes the pictures on one by one, as tqdm does. how: as of pictures_of.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in watch(pictures_of(records, styles=styles, **how)):
        drawn = picture.draw()
        paths += [style.save(drawn, folder / f"{picture.name}.{suffix}") for suffix in formats]
    return paths


def inline_pictures(pictures: Sequence[Picture], watch: Watch = iter) -> list[tuple[str, str]]:
    """(caption, <img>) of each picture, for an HTML page."""
    return [(picture.caption, style.image_element(picture.draw(), picture.caption)) for picture in watch(pictures)]


def check_kind(kind: str, name: str) -> str:
    """The kind of picture or the field, as it is in records. name: of the option, for the error.

    UsageError: it is unknown.
    """
    fields = [field.name for field in dataclasses.fields(Record) if field.name.endswith(("_bytes", "_ms"))]
    if (word := kind.replace("-", "_")) not in (*KINDS, *fields):
        raise unknown_name(name, kind, (*KINDS, *fields))
    return word


def check_axis(x: str | None, name: str) -> str | None:
    """The axis of series.AXES for "seq-len" and so on. UsageError: it is unknown."""
    known = {"seq_len" if axis == "length" else axis: axis for axis in series.AXES}
    if x is None:
        return None
    if (word := x.replace("-", "_")) not in known:
        raise unknown_name(name, x, [axis.replace("_", "-") for axis in known])
    return known[word]

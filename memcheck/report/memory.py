"""The data of the page's picture: what was alive over time, by place, small enough for one file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memcheck.core.script_record import Course, Line, Origin, Point
from memcheck.core.units import colour_of
from memcheck.report.plots.style import COLOURS

MOST_BYTES = 200_000  # Of a picture's JSON.
MOST_POINTS, FEWEST_POINTS, MOST_PLACES = 500, 20, 600
MOST_LETTERS = 160  # Of a line of source.
OUTSIDE = "outside of modules"
NO_LINE = "no line of Python"
HOLDS = "what it holds"  # A view with few names, which small places keep.
SMALL = "small places"


@dataclass(frozen=True)
class MemoryPicture:
    """Memory over time, and a graph of what is alive at a moment.

    views: heading -> the name that a place has below it. The first one is drawn at first.
    marks: (event, label, "at the peak") of moments to mark. The first one is shown at first.
    graph: what the graph is by: "module, line and operator".
    lines: name -> bytes at each point of the course, to draw above what is alive.
    """

    title: str
    caption: str
    course: Course
    views: Mapping[str, Callable[[Origin], str]]
    marks: Sequence[tuple[int, str, str]]
    graph: str
    lines: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """The picture for the page's script. A picture of too many bytes gets fewer points."""
        most = MOST_POINTS
        while len(json.dumps(found := self._data(most))) > MOST_BYTES and most > FEWEST_POINTS:
            most //= 2
        return found

    def _data(self, most: int) -> dict[str, Any]:
        """points: event, seconds, and in turn each site that changed and its bytes. names: text, source, colour."""
        points, names = self.course.points, dict[str, int]()
        sites, site_of = self._sites(lambda text: names.setdefault(text, len(names)))
        moments = [last_at(points, event) for event, _, _ in self.marks]
        chosen = highest_points(points, most, moments)
        sources = sources_of(self.course.places, *self.course.stacks)
        return {
            "views": list(self.views),
            "sites": sites,
            "names": [[text, sources.get(text), colour_of(text)] for text in names],
            "palette": [colour for colour in COLOURS if colour != "#000000"],
            "points": thinned(points, chosen, site_of),
            "marks": [[chosen.index(at), *mark[1:]] for at, mark in zip(moments, self.marks, strict=True)],
            "graph": self.graph,
            "lines": [[name, [sizes[place] for place in chosen]] for name, sizes in self.lines.items()],
        }

    def _sites(self, number: Callable[[str], int]) -> tuple[list[Any], list[int]]:
        """The names of each site in the views and its path in the graph, and the site of each place of the course."""
        places = self.course.places
        most = Counter[int]()
        for point in self.course.points:
            for place, size in point.changes:
                most[place] = max(most[place], size)
        large = {place for place, _ in most.most_common(MOST_PLACES)}
        sites: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        site_of = []
        for place, origin in enumerate(places):
            views = [name(origin) for name in self.views.values()]
            path = path_of(origin, self.course.stacks[place] if self.course.stacks else ())
            if place not in large:
                views = [name if view == HOLDS else SMALL for view, name in zip(self.views, views, strict=True)]
                path = [SMALL]
            site = tuple(map(number, views)), tuple(map(number, path))
            site_of.append(sites.setdefault(site, len(sites)))
        return list(sites), site_of


def path_of(origin: Origin, stack: Sequence[Line]) -> list[str]:
    """The names from the whole to the operator: of the calls of Python, or of modules and the line."""
    calls = [*map(str, stack)]
    if not calls:
        calls = origin.module.split(".") if origin.module else [OUTSIDE]
        calls += [str(origin.line)] if origin.line else []
    return [*calls, f"{origin.kind} ({origin.operator})" if origin.kind else origin.operator]


def last_at(points: Sequence[Point], event: int) -> int:
    """The last point that is not after the event."""
    return max((place for place, point in enumerate(points) if point.event <= event), default=0)


def highest_points(points: Sequence[Point], most: int, kept: Iterable[int]) -> list[int]:
    """At most so many points and those to keep: of each group of points in a row the highest, and the last of all."""
    sizes, sums = dict[int, int](), list[int]()
    for point in points:
        more = sum(size - sizes.get(place, 0) for place, size in point.changes)
        sums.append((sums[-1] if sums else 0) + more)
        sizes.update(point.changes)
    few = -(-len(points) // most)
    groups = (range(first, min(first + few, len(sums))) for first in range(0, len(sums), few or 1))
    return sorted({*(max(group, key=sums.__getitem__) for group in groups), *kept, *([len(sums) - 1] if sums else [])})


def thinned(points: Sequence[Point], chosen: Sequence[int], site_of: Sequence[int]) -> list[Any]:
    """The chosen points, with the bytes of the sites that differ from those at the one before."""
    sizes, of_site, shown = dict[int, int](), Counter[int](), dict[int, int]()
    rows, wanted = list[Any](), set(chosen)
    for number, point in enumerate(points):
        for place, size in point.changes:
            of_site[site_of[place]] += size - sizes.get(place, 0)
            sizes[place] = size
        if number in wanted:
            changed = {site: size for site, size in of_site.items() if shown.get(site, 0) != size}
            seconds = None if point.seconds is None else float(f"{point.seconds:.4g}")
            rows.append([point.event, seconds, [each for change in changed.items() for each in change]])
            shown = dict(of_site)
    return rows


def sources_of(places: Iterable[Origin | None], *stacks: Iterable[Line]) -> dict[str, str]:
    """The source of each line, by its name. A file that is not Python's is not read: a snapshot may name any."""
    lines = {place.line for place in places if place is not None and place.line}.union(*stacks)
    texts = {str(line): line.text or (line.read() if line.file.endswith(".py") else None) for line in lines}
    return {name: text[:MOST_LETTERS] for name, text in texts.items() if text}

"""The data of the page's picture: what was alive over time, by place, small enough for one file."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from memcheck.core.html import to_json
from memcheck.core.script_record import Course, Line, Origin
from memcheck.core.units import colour_of, format_bytes, highest
from memcheck.report.plots.style import COLOURS

MOST_BYTES = 220_000  # Of a picture's JSON.
MOST_POINTS = 500
# What is tried until a picture is small enough: its points, and the places whose operator the graph names, the largest.
DETAIL = (
    (MOST_POINTS, 1000),
    (MOST_POINTS, 100),
    (MOST_POINTS // 2, 100),
    (MOST_POINTS // 4, 0),
    (MOST_POINTS // 16, 0),
)
MOST_LETTERS = 160  # Of a line of source.
OUTSIDE = "outside of modules"
NO_LINE = "no line of Python"
Views = Mapping[str, Callable[[Origin], str]]
HELD: Views = {"what it holds": attrgetter("layer")}
MODULES: Views = {"module": lambda origin: origin.module or OUTSIDE}


@dataclass(frozen=True)
class MemoryPicture:
    """Memory over time, and a graph of what is alive at a moment.

    views: heading -> the name that a place has below it. The first one is drawn at first.
    marks: (event, label, "at the peak") of moments to mark, see marks_of. The first one is shown at first.
    graph: what the graph is by: "module, line and operator".
    lines: name -> bytes at each point of the course, to draw above what is alive.
    """

    title: str
    caption: str
    course: Course
    views: Views
    marks: Sequence[tuple[int, str, str]]
    graph: str
    lines: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @functools.cached_property
    def sources(self) -> dict[str, str]:
        """The source of each line, by its name. A file that is not Python's is not read: a snapshot may name any."""
        lines = {origin.line for origin in self.course.places if origin.line}.union(*self.course.stacks)
        texts = {str(line): line.text or (line.read() if line.file.endswith(".py") else None) for line in lines}
        return {name: text[:MOST_LETTERS] for name, text in texts.items() if text}

    def data(self) -> dict[str, Any]:
        """The picture for the page's script, in as much detail as MOST_BYTES allow."""
        states = self.course.states()
        for detail in DETAIL:
            found = self._data(states, *detail)
            if len(to_json(found)) <= MOST_BYTES:
                break
        return found

    def _data(self, states: Sequence[Sequence[int]], most: int, operators: int) -> dict[str, Any]:
        """points: event, seconds, and in turn each site that changed and its bytes. names: text, source, colour."""
        points, names = self.course.points, dict[str, int]()
        sites, site_of = self._sites(states, operators, lambda text: names.setdefault(text, len(names)))
        events = [point.event for point in points]
        moments = [max(place for place, event in enumerate(events) if event <= mark[0]) for mark in self.marks]
        chosen = highest(self.course.sums, most, moments)
        rows, before = list[Any](), Counter[int]()
        for place in chosen:
            now = Counter[int]()
            for site, size in zip(site_of, states[place], strict=True):
                now[site] += size
            changes = [each for site, size in now.items() if size != before[site] for each in (site, size)]
            seconds = points[place].seconds
            rows.append([events[place], None if seconds is None else float(f"{seconds:.4g}"), changes])
            before = now
        return {
            "views": list(self.views),
            "sites": sites,
            "names": [[text, self.sources.get(text), colour_of(text)] for text in names],
            "palette": [colour for colour in COLOURS if colour != "#000000"],
            "points": rows,
            "marks": [[chosen.index(place), *mark[1:]] for place, mark in zip(moments, self.marks, strict=True)],
            "graph": self.graph,
            "has_modules": not self.course.stacks,  # A path begins with one.
            "lines": [[name, [sizes[place] for place in chosen]] for name, sizes in self.lines.items()],
        }

    def _sites(
        self, states: Sequence[Sequence[int]], operators: int, number: Callable[[str], int]
    ) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], list[int]]:
        """The names of each site in the views and its path in the graph, and the site of each place of the course."""
        most = [max(map(abs, sizes)) for sizes in zip(*states, strict=True)]
        large = set(sorted(range(len(most)), key=lambda place: -most[place])[:operators])
        sites: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        site_of = []
        for place, origin in enumerate(self.course.places):
            if not most[place]:
                site_of.append(0)  # It adds nothing to any.
                continue
            path = path_of(origin, *self.course.stacks[place : place + 1])
            path[-1] = path[-1] if place in large else "other operators"
            site = tuple(number(name(origin)) for name in self.views.values()), tuple(map(number, path))
            site_of.append(sites.setdefault(site, len(sites)))
        return list(sites), site_of


def marks_of(peak: tuple[int, int], refused: tuple[int, int] | None) -> list[tuple[int, str, str]]:
    """The marks of the (event, bytes) of the peak, and before it of a request without room."""
    marks = [(peak[0], f"peak {format_bytes(peak[1])}", "at the peak")]
    if refused is not None:
        asked = f"out of memory: {format_bytes(refused[1])} requested"
        marks.insert(0, (refused[0], asked, "when memory ran out"))
    return marks


def path_of(origin: Origin, stack: Sequence[Line] = ()) -> list[str]:
    """The names from the whole to the operator: of the calls of Python or, if they are not known, module and line."""
    line = [str(origin.line)] if origin.line else []
    calls = [*map(str, stack)] or [origin.module or OUTSIDE, *line]
    return [*calls, f"{origin.kind} ({origin.operator})" if origin.kind else origin.operator]

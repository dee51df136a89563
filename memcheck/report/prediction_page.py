"""The page of a model's prediction: the verdict, the picture over time, and the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from memcheck.core.script_record import Course, Origin, Point
from memcheck.core.units import format_bytes
from memcheck.report.memory import HOLDS, OUTSIDE, MemoryPicture
from memcheck.report.page import environment_facts, render_page
from memcheck.report.predictions import kinds_of
from memcheck.report.tables import Table

if TYPE_CHECKING:
    from memcheck.core.prediction import Prediction, Trace


def prediction_page(prediction: Prediction, words: Sequence[str], tables: Sequence[Table], command: str) -> str:
    """The prediction as an HTML page. words: the sentences above the picture."""
    record = prediction.record
    return render_page(
        title=f"Predicted memory of {record.operator}",
        paragraphs=words,
        pictures=[prediction_picture(prediction)] if prediction.timeline else [],
        tables=tables,
        facts=environment_facts([record]),
        sweeps=[{"command": command, "started": None, "facts": {}}],
    )


def prediction_picture(prediction: Prediction) -> MemoryPicture:
    """What would be alive over the allocations and releases of a step."""
    trace, sums = prediction.trace, [size for _, size in prediction.timeline]
    assert trace is not None
    event = len(sums) - sums[::-1].index(max(sums))  # That of prediction.peak.
    marks = [(event, f"peak {format_bytes(max(sums))}", "at the peak")]
    refused, room = prediction.refused, prediction.place.room_bytes or 0
    if refused is not None:
        marks.append((refused.born, f"no room for {format_bytes(refused.bytes)}", "when memory runs out"))
    views: dict[str, Callable[[Origin], str]] = {
        HOLDS: attrgetter("layer"),
        "module": lambda place: place.module or OUTSIDE,
        "operator": attrgetter("operator"),
    }
    lines = {f"room {format_bytes(room)}": [room] * len(sums)} if 0 < room < 3 * max(sums) else {}
    caption = "Each point is the highest sum of some allocations and releases in a row, as they are predicted."
    course, graph = course_of(trace), "module and operator"
    return MemoryPicture(f"Memory on the {prediction.device.name}", caption, course, views, marks, graph, lines)


def course_of(trace: Trace) -> Course:
    """What is alive after each event of a trace, by module, operator and what it holds."""
    kinds = kinds_of(trace) | dict.fromkeys(trace.inputs, "inputs")
    places: dict[Origin, int] = {}
    sizes, points = Counter[int](), list[Point]()
    for event, (piece, taken) in enumerate(trace.log.events, 1):
        origin = Origin(piece.name, trace.phase_of(piece.born), kinds.get(piece), piece.module or None)
        place = places.setdefault(origin, len(places))
        sizes[place] += piece.bytes if taken else -piece.bytes
        points.append(Point(event, None, [(place, sizes[place])]))
    return Course(list(places), points)

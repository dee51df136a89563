"""The page of a model's prediction: the verdict, the picture over time, and the tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from memcheck.core.script_record import Course, Origin
from memcheck.core.units import format_bytes, highest
from memcheck.report import page, predictions
from memcheck.report.memory import HELD, MODULES, MOST_POINTS, MemoryPicture, marks_of
from memcheck.report.tables import Table

if TYPE_CHECKING:
    from memcheck.core.prediction import Prediction


def prediction_page(prediction: Prediction, words: Sequence[str], tables: Sequence[Table], command: str) -> str:
    """The prediction as an HTML page. words: the sentences above the picture."""
    record = prediction.record
    return page.render_page(
        title=f"Predicted memory of {record.operator}",
        paragraphs=words,
        pictures=[prediction_picture(prediction)] if prediction.timeline else [],
        tables=tables,
        facts=page.environment_facts([record]),
        sweeps=[{"command": command, "started": None, "facts": {}}],
    )


def prediction_picture(prediction: Prediction) -> MemoryPicture:
    """What would be alive over the allocations and releases of a step."""
    sums, refused, room = (
        [size for _, size in prediction.timeline],
        prediction.refused,
        prediction.place.room_bytes or 0,
    )
    peak = len(sums) - sums[::-1].index(max(sums))  # The event of prediction.peak.
    marks = marks_of((peak, max(sums)), (refused.born, refused.bytes) if refused else None)
    course = course_of(prediction, highest(sums, MOST_POINTS, [event - 1 for event, _, _ in marks]))
    return MemoryPicture(
        f"Memory on the {prediction.device.name}",
        "Each point is the highest sum of some allocations and releases in a row, as they are predicted.",
        course,
        {**HELD, **MODULES, "operator": attrgetter("operator")},
        marks,
        "module and operator",
        {f"room {format_bytes(room)}": [room] * len(course.points)} if 0 < room < 3 * max(sums) else {},
    )


def course_of(prediction: Prediction, chosen: Iterable[int]) -> Course:
    """What is alive after the chosen events, by module, operator and what it holds."""
    trace = prediction.trace
    assert trace is not None
    kinds = predictions.kinds_of(trace) | dict.fromkeys(trace.inputs, "inputs")
    sizes, rows, wanted = dict[Origin, int](), [], set(chosen)
    for event, (piece, taken) in enumerate(trace.log.events):
        origin = Origin(piece.name, trace.phase_of(piece.born), kinds.get(piece), piece.module or None)
        sizes[origin] = sizes.get(origin, 0) + (piece.bytes if taken else -piece.bytes)
        if event in wanted:
            rows.append((event + 1, None, list(sizes.values())))
    return Course.of(list(sizes), rows)

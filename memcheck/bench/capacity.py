"""The capacity of a device, by prediction alone: the largest size at which a case fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from memcheck.bench.case_predictions import predicted_or_skipped
from memcheck.bench.catalog import batch_of, check_case
from memcheck.core.arguments import argument
from memcheck.core.converters import count
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.prediction import Capacity, Prediction
from memcheck.core.step import Place, as_place
from memcheck.core.workload import Case
from memcheck.predict.api import Search, fits_by_interpolation

AXES = ("seq_len", "bsz", "dim")
# Upper end of a search that finds no limit.
MOST = 2**30
MOST_SEQUENCES = 2**16
FIRST = 256
COMPILED_STEP = 64

Predict = Callable[[Case], Prediction]


def find_capacity(
    case: Case,
    find: str,
    place: Place | Device | str,
    *,
    step: int | None = None,
    up_to: int = MOST,
    start: int | None = None,
    predict: Predict | None = None,
) -> Capacity:
    """The largest size of an axis at which the case fits the device. Its other sizes stay.

    find: "seq_len" (S and T at once; in decode mode the tokens of the state), "bsz" or "dim". For packed and
        padded batches, "seq_len" is the length of the longest sequence, to which the others keep their proportion, and
        "bsz" the number of sequences, which repeat the case's lengths.
    place: the device, or a Place with a limit below its memory.
    step: only its multiples are sizes; default: 1, and 64 for a length under torch.compile, which takes seconds for
        each size, and other bytes where a size is no multiple of 8. A dimension is also a multiple of the heads, and a
        number of sequences one of the number of the case's lengths.
    up_to: the largest size of the search.
    start: the size to begin with, ideally near the result.
    predict: replaces the prediction of a case there.

    UsageError: the axis is unknown, or the device has no limit.
    """
    place = as_place(place).resolved()
    device = place.for_device
    if step is None:
        step = COMPILED_STEP if case.compiled and find == "seq_len" else 1
    step, most, start = argument("step", step, count), argument("up_to", up_to, count), argument("start", start, count)
    if find not in AXES:
        raise unknown_name(named("find"), find.replace("_", "-"), known_axes())
    check_has_limit(place)
    if find == "dim":
        step = math.lcm(step, case.heads or 1)
    if find == "bsz" and case.lengths is not None:
        step, most = math.lcm(step, len(case.lengths)), min(most, MOST_SEQUENCES)
    if most < step:
        raise UsageError(f"{named('up_to')} must be at least the step of {step}, got {most}")
    predict = predict or (lambda case: predicted_or_skipped(case, place))
    guess = fits_by_interpolation if case.compiled else None  # The compiler takes seconds for each size.
    search = Search(lambda size: predict(check_case(resized(case, find, size))), step, most, guess)
    found = (search.nearest if case.compiled else search.largest)(start or FIRST)
    if found.size > step and not case.compiled:
        search.fits(found.size - step)  # Sizes that barely fit may leave a gap below them.
    gaps = tuple(size for size in sorted(search.found) if size < found.size and not search.fits(size))
    fields = {**vars(found), "tried": len(search.found)}
    return Capacity(**fields, axis=find, case=resized(case, find, found.size or step), device=device, gaps=gaps)


def check_has_limit(place: Place) -> None:
    """UsageError: neither the place nor its device has a limit."""
    if place.room_bytes is None:
        name, limit = f"{named('device')} {place.for_device.name}", f"{named('memory_limit')} 16GiB"
        raise UsageError(f"{name} has no limit to find: give it one, as {limit}")


def known_axes() -> list[str]:
    """The values of --find."""
    return [axis.replace("_", "-") for axis in AXES]


def resized(case: Case, axis: str, size: int) -> Case:
    """The case with another size. A core dimension equal to the old dimension follows it."""
    if case.lengths is not None and axis != "dim":
        lengths = repeated(case.lengths, size) if axis == "bsz" else scaled(case.lengths, size)
        return dataclasses.replace(case, **batch_of(lengths, case.layout or ""))
    if axis == "bsz":
        return dataclasses.replace(case, bsz=size)
    if axis == "dim":
        return dataclasses.replace(case, dim=size, core_dim=size if case.core_dim == case.dim else case.core_dim)
    keys = None if case.kv_len is None else size
    return dataclasses.replace(case, query_len=1 if case.mode == "decode" else size, kv_len=keys)


def repeated(lengths: Sequence[int], count: int) -> list[int]:
    """`count` lengths: the given ones, repeated."""
    return list(itertools.islice(itertools.cycle(lengths), count))


def scaled(lengths: Sequence[int], longest: int) -> list[int]:
    """The lengths in the same proportions, the longest as given; at least 1."""
    return [max(1, round(length * longest / max(lengths))) for length in lengths]


def capacity_curve(
    case: Case,
    axis: str,
    along: str,
    sizes: Sequence[int],
    place: Place | Device | str,
    *,
    step: int | None = None,
    up_to: int = MOST,
    predict: Predict | None = None,
) -> list[tuple[int, Capacity]]:
    """(size, capacity) for each size along another axis. Each search starts at the previous result."""
    curve: list[tuple[int, Capacity]] = []
    limits: dict[str, Any] = {"step": step, "up_to": up_to, "predict": predict}
    for size in sorted(sizes):
        start = curve[-1][1].largest or None if curve else None
        curve.append((size, find_capacity(resized(case, along, size), axis, place, start=start, **limits)))
    return curve


def capacity_object(capacity: Capacity) -> dict[str, object]:
    """The capacity for JSON: the sizes, and the verdict and the record of the largest that fits and of the next."""
    beyond, at = capacity.beyond, capacity.at
    return {
        "operator": capacity.case.operator,
        "find": capacity.axis.replace("_", "-"),
        "largest": None if capacity.unpredicted else capacity.largest,
        "step": capacity.step,
        "next": capacity.next_size if beyond else None,
        "runs_out_in": beyond.record.oom_phase if beyond else None,  # None with a reason: the inputs alone do not fit.
        "reason": beyond.record.reason if beyond else None,
        "gaps": list(capacity.gaps),
        "tried": capacity.tried,
        "certainty": at.certainty if at else None,
        "unknown": list(at.unknown if at else beyond.unknown if beyond else ()),
        "record": at.record.values() if at else None,
        "next_record": beyond.record.values() if beyond else None,
    }

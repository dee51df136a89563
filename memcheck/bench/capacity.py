"""The capacity of a device, by prediction alone: the largest size at which a case fits."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from memcheck.bench.case import Case
from memcheck.bench.catalog import check_case
from memcheck.bench.predict import predict_case
from memcheck.core import arguments, errors, options
from memcheck.core.converters import count
from memcheck.core.devices import Device
from memcheck.core.prediction import Largest
from memcheck.core.step import Place, as_place
from memcheck.predict.api import largest

AXES = ("seq_len", "bsz", "dim")
# Upper end of a search that finds no limit.
MOST = 2**30
FIRST = 256
COMPILED_STEP = 64


def largest_case(
    case: Case,
    find: str,
    place: Place | Device | str,
    *,
    step: int | None = None,
    up_to: int = MOST,
    start: int | None = None,
) -> Largest:
    """The largest size of an axis at which the case fits the place: memcheck.largest of the resized cases.

    find: "seq_len" (S and T at once; in decode mode the tokens of the state), "bsz" or "dim".
    step: only its multiples are sizes; default: 1, and 64 for a length under torch.compile, which takes seconds for
        each size, and other bytes where a size is no multiple of 8. A dimension is also a multiple of the heads.
    up_to: the largest size of the search. start: the size to begin with, ideally near the result.
    """
    if find not in AXES:
        raise errors.unknown_name(options.named("find"), find.replace("_", "-"), known_axes())
    step = arguments.argument("step", step, count) or (COMPILED_STEP if case.compiled and find == "seq_len" else 1)
    if find == "dim":
        step = math.lcm(step, case.heads or 1)
    place = as_place(place)
    check_has_limit(place)
    make = functools.partial(resized, case, find)
    found = largest(make, device=place, step=step, up_to=up_to, start=start or FIRST)
    below = found.size - step
    if below > 0 and below not in found.gaps and not case.compiled and not predict_case(make(below), place).fits:
        found = dataclasses.replace(found, gaps=(*found.gaps, below))  # Sizes that barely fit may leave a gap below.
    return found


def check_has_limit(place: Place) -> None:
    """UsageError: neither the place nor its device has a limit."""
    if place.room_bytes is None:
        name, limit = f"{options.named('device')} {place.for_device.name}", f"{options.named('memory_limit')} 16GiB"
        raise errors.UsageError(f"{name} has no limit to find: give it one, as {limit}")


def known_axes() -> list[str]:
    """The values of --find."""
    return [axis.replace("_", "-") for axis in AXES]


def resized(case: Case, axis: str, size: int) -> Case:
    """The case with another size, checked. A core dimension equal to the old dimension follows it."""
    sizes: dict[str, Any] = {axis: size}
    if axis == "dim" and case.core_dim == case.dim:
        sizes["core_dim"] = size
    elif axis == "seq_len":
        keys = None if case.kv_len is None else size
        sizes = {"query_len": 1 if case.mode == "decode" else size, "kv_len": keys}
    return check_case(dataclasses.replace(case, **sizes))


def capacity_object(case: Case, axis: str, found: Largest) -> dict[str, object]:
    """What was found, for JSON: the sizes, and the verdict and the record of the largest that fits and of the next."""
    beyond, at = found.beyond, found.at
    return {
        "operator": case.operator,
        "find": axis.replace("_", "-"),
        "largest": None if found.unpredicted else found.size,
        "step": found.step,
        "next": found.size + found.step if beyond else None,
        "runs_out_in": beyond.record.oom_phase if beyond else None,  # None with a reason: the inputs alone do not fit.
        "reason": beyond.record.reason if beyond else None,
        "gaps": list(found.gaps),
        "tried": found.tried,
        "certainty": at.certainty if at else None,
        "unknown": list(at.unknown if at else beyond.unknown if beyond else ()),
        "record": at.record.values() if at else None,
        "next_record": beyond.record.values() if beyond else None,
    }

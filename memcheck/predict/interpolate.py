"""Guesses whether a size fits that was not traced, from the traces of other sizes of the same call."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memcheck.core.collector import collector_at_rest
from memcheck.predict.allocation_log import AllocationLog, Trace
from memcheck.predict.replay import Prediction, Replay


def fits_by_interpolation(predicted: Mapping[int, Prediction], size: int) -> bool | None:
    """Whether the size fits, if the bytes of each allocation are a polynomial of the size.

    predicted: the predictions of up to three other sizes.

    Returns None if these differ in more than bytes, so that nothing can be guessed.
    """
    traces = {each: prediction.trace for each, prediction in predicted.items() if prediction.trace is not None}
    with collector_at_rest(generation=0):  # It would look through all traces for each of the many allocations.
        trace = interpolated(traces, size) if len(traces) == len(predicted) else None
        if trace is None:
            return None
        one = next(iter(predicted.values()))
        return Replay(trace, one.case, one.place, one.record).fits()


def interpolated(traces: Mapping[int, Trace], size: int) -> Trace | None:
    """The events of the size, without roles of allocations. None if the traces differ in more than bytes."""
    first, *others = traces.values()
    shape = shape_of(first)
    if any(shape_of(other) != shape for other in others):
        return None
    weights = [math.prod((size - y) / (x - y) for y in traces if y != x) for x in traces]
    log = AllocationLog(begun=first.log.begun)
    for allocations in zip(*(trace.log.allocations for trace in traces.values()), strict=True):
        found = sum(weight * allocation.bytes for weight, allocation in zip(weights, allocations, strict=True))
        log.allocations.append(allocations[0].resized(max(0, round(found))))
    new = dict(zip(map(id, first.log.allocations), log.allocations, strict=True))
    log.events = [(new[id(allocation)], taken) for allocation, taken in first.log.events]
    return Trace(log, first.phases)


def shape_of(trace: Trace) -> tuple[object, ...]:
    """Everything about the events that does not depend on bytes."""
    return trace.phases, trace.beyond, [(allocation.born, allocation.died) for allocation in trace.log.allocations]

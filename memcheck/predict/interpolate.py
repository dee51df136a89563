"""Guesses whether a size fits that was not traced, from the traces of other sizes of the same call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from memcheck.predict.allocation_log import AllocationLog, Trace
from memcheck.predict.replay import Prediction, Replay


def fits_by_interpolation(predicted: Mapping[int, Prediction], size: int) -> bool | None:
    """Whether the size fits, if the bytes of each allocation are a polynomial of the size.

    predicted: the predictions of up to three other sizes.

    Returns None if these differ in more than bytes, so that nothing can be guessed.
    """
    traces = {each: prediction.trace for each, prediction in predicted.items() if prediction.trace is not None}
    trace = interpolated(traces, size) if len(traces) == len(predicted) else None
    if trace is None:
        return None
    one = next(iter(predicted.values()))
    record = dataclasses.replace(one.record, status="ok")
    return Replay(trace, one.case, one.place, record).prediction().fits


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
        log.allocations.append(dataclasses.replace(allocations[0], bytes=max(0, round(found))))
    new = dict(zip(map(id, first.log.allocations), log.allocations, strict=True))
    log.events = [(new[id(allocation)], taken) for allocation, taken in first.log.events]
    return Trace(log, first.phases)


def shape_of(trace: Trace) -> tuple[object, ...]:
    """Everything about the events that does not depend on bytes."""
    return trace.phases, trace.beyond, [(allocation.born, allocation.died) for allocation in trace.log.allocations]

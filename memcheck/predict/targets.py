"""Where a step is predicted: on a GPU that another process simulates, or on the CPU, simulated in this thread."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from memcheck.allocator import OutOfMemory
from memcheck.core import devices, errors
from memcheck.core.prediction import Prediction
from memcheck.core.record import UNKNOWN, Doubt, Record
from memcheck.core.step import Place, Step
from memcheck.core.trace import Trace
from memcheck.core.units import format_bytes
from memcheck.predict import evidence, process, replay, sent
from memcheck.predict.ranks import pretended, split
from memcheck.predict.run import numbered, predicted_here
from memcheck.simulated import cpu_target, doubts
from memcheck.simulated.probes import table_for

# What makes a step, of the arguments that it is sent with, where the device is simulated.
Maker = Callable[..., Step]
Then = Callable[[Step, Prediction], Prediction]
# Passes of a step from the second on, which find gradients, allocate the same.
MOST_PASSES = 3
# In messages of torch and memcheck: code uses a tensor that it has made on the CPU, or that was not sent; or the GPU is
# too old, or a kernel was not written yet, for this call.
REFUSED = re.compile(r"\bhave the same device|\bon the same device|must be on cuda|of compute capability|\bNYI: ")
KEPT = Doubt(
    "tensors that the model made and keeps, in the cache of a function for example, have no numbers: make them again "
    "before it runs"
)
# Simulations of the CPU follow one thread at a time.
ON_CPU = threading.RLock()


def given(step: Step) -> Step:
    return step


def as_it_is(_step: Step, prediction: Prediction) -> Prediction:
    return prediction


def predicted_at(
    place: Place, *args: Any, make: Maker = given, then: Then = as_it_is, probes: Path | str | bool = True
) -> Prediction:
    """The prediction of make(*args), which is called where the device of the place is simulated.

    probes: as of predict_memory.
    then: called there with the step and its prediction, returns what the prediction becomes.

    If the device has a limit and what the step takes without one exceeds it, the step is run again with the limit.
    """
    table, place = table_for(probes, place)
    on = on_gpu if place.for_device.kind == "cuda" else on_cpu
    runs = {"table": table} if probes else {"probed_first_bytes": -1, "most_probed_bytes": -1}
    infers = torch.is_inference_mode_enabled()
    how = make, then, infers
    try:
        free = dataclasses.replace(on(place, False, how, args, runs), case=args[0])
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "overflow" not in str(error):
            raise
        return without_room(place, args[0], "predicted: a tensor of 2^63 bytes or more does not fit")
    most, room = bytes_taken(free), place.room_bytes
    if most is None or room is None or most <= room:
        return free
    if replay.ONLY_FITS.get() and max(free.record.max_allocated_bytes or 0, *free.record.peaks.values(), 0) > room:
        free.record.status, free.record.reason = "oom", replay.MORE_THAN_ROOM
        return free
    at_start = free.trace and replay.refusal(free.trace.log, place, last=free.trace.phases["inputs"][1])
    try:
        limited = None if at_start else on(place, True, how, args, runs)
    except torch.OutOfMemoryError:
        limited = None
    if limited is None:
        return without_inputs(free, place, most, at_start or None)
    return limited_by(free, limited, place)


def without_room(place: Place, case: Any, reason: str) -> Prediction:
    """The prediction of what cannot even begin."""
    record = evidence.blank_record(place, evidence.target_at(place))
    record.status, record.reason = "oom", reason
    if isinstance(case, Step):
        record.operator, record.mode, record.dtype = case.name, case.mode, case.dtype
    return Prediction(case, place, record, {})


def without_inputs(free: Prediction, place: Place, most: int, refused: OutOfMemory | None) -> Prediction:
    """The prediction of a step whose inputs and parameters do not fit, of which free is the one without a limit."""
    reason = "the inputs alone do not fit"
    if refused is not None:
        in_use = format_bytes(refused.in_use_bytes)
        reason += f": {format_bytes(refused.requested_bytes)} requested with {in_use} in use"
    found = without_room(place, free.case, reason)
    for name in ("operator", "mode", "dtype", "certainty"):
        setattr(found.record, name, getattr(free.record, name))
    return dataclasses.replace(free, record=found.record, terms={}, segments=most)


def bytes_taken(prediction: Prediction) -> int | None:
    """What the allocator takes from the device, without a limit; None if nothing was measured."""
    record = prediction.record
    if record.reserved_bytes is not None:
        return record.reserved_bytes
    return prediction.peak.bytes if prediction.peak is not None else None


def limited_by(free: Prediction, limited: Prediction, place: Place) -> Prediction:
    """The prediction with the record of the run that had a limit, and the trace of the one that had none."""
    trace, record = limited.trace, limited.record
    record.backward_from = record.backward_from or free.record.backward_from
    record.certainty = free.record.certainty  # By the operators of the whole step.
    if trace is None or free.trace is None or record.status != "oom":
        return dataclasses.replace(limited, case=free.case)
    request = f"{format_bytes(record.oom_requested_bytes or 0)} requested with "
    request += f"{format_bytes(record.oom_in_use_bytes or 0)} in use"
    record.reason = f"predicted: {request}, of {format_bytes(place.room_bytes or 0)}"
    at = event_of_refusal(free.trace, record)
    if at is not None:
        alive = numbered((one.name, one.bytes) for one in free.trace.log.alive(at))
        record.terms = {**limited.terms, "oom_in_use_bytes": alive}
    refused = free.trace.log.events[at][0] if at is not None else None
    return dataclasses.replace(
        free, record=record, terms=record.terms or {}, refused=refused, segments=free.record.reserved_bytes
    )


def event_of_refusal(trace: Trace, record: Record) -> int | None:
    """The number of events before the request that has no room, in the trace of a run that had; None if unknown."""
    requested, in_use = record.oom_requested_bytes or 0, record.oom_in_use_bytes or 0
    now = -sum(one.bytes for one in trace.preexisting)
    found: list[
        tuple[int, int]
    ] = []  # Of the requests at that level: bytes, number. torch may have rounded the bytes up.
    for number, (one, taken) in enumerate(trace.log.events):
        if taken and number >= trace.phases["inputs"][1] and now == in_use and one.bytes <= requested:
            found.append((one.bytes, -number))
        now += one.bytes if taken else -one.bytes
    return -max(found)[1] if found else None


How = tuple[Maker, Then, bool]  # And whether it is in inference mode.


def on_gpu(place: Place, limited: bool, how: How, args: Any, _runs: Any) -> Prediction:
    device = place.for_device
    version: devices.Version | None = None if place.torch_version in (None, devices.running()) else place.torch_version  # type: ignore[assignment]
    limit = process.NO_LIMIT if not limited or device.usable_bytes is None else device.usable_bytes
    prediction: Prediction = process.called(
        device, version, limit, here, place, limited, how, args, expandable_segments=place.expandable_segments
    )
    return prediction


def here(place: Place, limited: bool, how: How, args: Any) -> Prediction:
    """Called in the process of the GPU."""
    return run(place, limited, how, args, doubts.heard_by)


def on_cpu(place: Place, limited: bool, how: How, args: Any, runs: dict[str, Any]) -> Prediction:
    try:
        data = sent.packed(args)
    except Exception:
        data = None  # A lock, for example: the model itself runs.
    before = torch.get_num_threads()
    with ON_CPU, ExitStack() as stack:
        if place.threads is not None and place.threads != before:
            torch.set_num_threads(place.threads)
            stack.callback(torch.set_num_threads, before)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        cpu = stack.enter_context(cpu_target.simulated_cpu(**runs))
        given = args if data is None else sent.unpacked(data)
        prediction = run(place, limited, how, given, cpu.heard_by)
        del given
        if cpu.keeps_tensors():
            prediction.record.doubts += (KEPT,)
        return prediction


def run(place: Place, limited: bool, how: How, args: Any, heard_by: Any) -> Prediction:
    """The prediction, without its step: that may not be sent, and its tensors would live on."""
    make, then, infers = how
    heard: list[str] = []
    with heard_by(heard.append):
        step = make(*args)
    step = dataclasses.replace(step, accumulate=min(step.accumulate, MOST_PASSES))
    limit = None if not limited else place.limit_bytes if place.for_device.kind == "cuda" else place.room_bytes
    try:
        with pretended(place.ranks, place.for_device.kind) as mesh, torch.inference_mode() if infers else nullcontext():
            name, words = step.name, ""
            if place.ranks is not None:
                words = place.ranks.words(step.model)
                step = dataclasses.replace(step, model=split(step.model, place.ranks, mesh))
            prediction = predicted_here(step, place, heard_by, limit, heard)
            prediction.record.operator = name
            prediction = then(step, prediction)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if not isinstance(error, NotImplementedError) and not REFUSED.search(str(error)):
            raise
        return not_predicted(place, step, error)
    return dataclasses.replace(prediction, case=None, split=words)


def not_predicted(place: Place, step: Step, error: Exception) -> Prediction:
    """The prediction of a step that the simulated device cannot run."""
    record = evidence.blank_record(place, evidence.target_at(place))
    record.operator, record.mode, record.dtype = step.name, step.mode, step.dtype
    first_line = str(error).strip().partition("\n")[0]
    why = re.sub(r"^(\w+: )+NYI: ", "", first_line).rstrip("!.") + errors.place_of_failure(error)
    record.status, record.reason, record.doubts = "skipped", f"not predicted: {why}", (Doubt(why, UNKNOWN),)
    return Prediction(None, place, record, {})

"""Measures one case of the catalog. Every outcome is a record, including errors of the operator."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from memcheck._extension import extension
from memcheck.bench.case_predictions import closed_bytes, closed_terms, prepare
from memcheck.bench.catalog import CONTENDERS, Case, Terms
from memcheck.core.arguments import argument
from memcheck.core.converters import count, size_in_bytes
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.record import Doubt, Record
from memcheck.core.step import Place, Step
from memcheck.core.tensors import storages_of, tensors_in
from memcheck.core.timeline import Timeline
from memcheck.core.units import format_bytes
from memcheck.core.workload import Workload
from memcheck.measure.compile import backend_in_code, with_generated_code
from memcheck.measure.export import write_snapshot, write_trace
from memcheck.measure.measurement import machine_facts, measure_memory, measure_time
from memcheck.measure.sdpa_backend import BackendWitness, fused_refusals
from memcheck.measure.timeline import record_timeline
from memcheck.measure.tracker import track
from memcheck.predict.api import predict_memory

# The timing stops after this time unless the number of passes was requested.
TIMING_SECONDS = 3.0
DEFAULT_PASSES = 10
CPU_SECONDS = 60.0  # Seconds per case on a CPU unless requested otherwise.


def find_device(name: str | None) -> str:
    """A device of this machine, "cpu" or "cuda:0". Without a name: CUDA if there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"{named('device')} {name} is no device of this machine, and running needs one; "
            "a GPU that is not here is a question for memcheck predict, fit and sweep --predict-only"
        ) from None
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UsageError(f"{named('device')} must be cpu or cuda, got {name}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UsageError(
            f"{named('device')} {name} is absent: torch {torch.__version__} sees {count} CUDA devices here"
        )
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def check_can_measure(device: str) -> None:
    """ExtensionError if the device is the CPU, whose memory the extension counts, and that is missing."""
    if device == "cpu":
        extension("measuring on the CPU")


def profile_case(
    case: Case,
    *,
    details: bool = False,
    max_seconds: float | None = None,
    passes: int | None = None,
    timed: bool = True,
    memory_limit: int | str | None = None,
    skip_predicted: bool = False,
    on_memory: Callable[[Record], None] | None = None,
) -> Record:
    """The record of a case: its memory, then its time, in separate passes. Errors of the operator are recorded.

    details: also records the tensors alive at the peaks and the tensors saved; see memcheck.measure_memory.
    max_seconds: for the whole case. No timed pass begins that would exceed it if it took as long as measuring the
        memory did. A pass that takes longer is not interrupted.
    passes: the number of timed passes; without it, as many as fit into 3 s, at most 10.
    memory_limit: a larger case runs out of memory.
    skip_predicted: a case whose closed terms exceed it is not run; its status is "skipped". A case whose
        closed terms exceed the machine is always skipped: the available memory of a CPU, the total of a GPU.
    on_memory: called with the record when everything but the times is known.

    In decode mode the peak and the time are those of one step; the state before it is part of input_bytes.
    """
    limit_bytes = argument("memory_limit", memory_limit, size_in_bytes)
    passes = argument("passes", passes, count)
    deadline = None if max_seconds is None else time.perf_counter() + max_seconds
    record = Record(**machine_facts(case.device))
    terms: Terms | None = None

    def described(record: Record) -> Record:
        return dataclasses.replace(record, **case.fields(), terms=terms)

    def tell(record: Record) -> None:
        if on_memory is not None:
            on_memory(described(record))

    try:
        terms = closed_terms(case)
        failure = predicted_failure(case, record, limit_bytes if skip_predicted else None)
        if failure is not None:
            record = dataclasses.replace(record, **failure)
        else:
            record = run_case(case, record, details, deadline, passes, timed, limit_bytes, tell)
    except NotImplementedError as error:
        record.status, record.reason = "unsupported", str(error)
    except Exception as error:
        record.status, record.reason = "error", f"{type(error).__name__}: {error}"
    return described(record)


def predicted_failure(case: Case, machine: Record, limit_bytes: int | None) -> dict[str, Any] | None:
    """The fields of the record if the closed terms exceed the limit or the machine; None if they do not."""
    rooms = {} if limit_bytes is None else {f"the limit of {format_bytes(limit_bytes)}": limit_bytes}
    if machine.device == "cpu" and machine.device_free_bytes:
        rooms[f"the {format_bytes(machine.device_free_bytes)} that this machine has left"] = machine.device_free_bytes
    elif machine.device_total_bytes:
        rooms[f"the {format_bytes(machine.device_total_bytes)} of this GPU"] = machine.device_total_bytes
    peaks = closed_bytes(case) if rooms else {}
    for words, room in rooms.items():
        for phase in ("forward", "backward"):
            peak = peaks.get(f"{phase}_peak_bytes", 0)
            if peak > room:
                reason = f"predicted: {phase} peak {format_bytes(peak)}, above {words}"
                return {"status": "skipped", "oom_phase": phase, "reason": reason}
    return None


def run_case(
    case: Case,
    machine: Record,
    details: bool,
    deadline: float | None,
    passes: int | None,
    timed: bool,
    limit_bytes: int | None,
    on_memory: Callable[[Record], None],
) -> Record:
    if machine.device == "cpu":
        # Beyond this the kernel would kill the process, and its results with it.
        limit_bytes = min(limit_bytes or sys.maxsize, machine.device_free_bytes or sys.maxsize)
    try:
        # Under a tracker, the CPU also raises OutOfMemoryError and respects the limit. A GPU does both by itself.
        with track(saved=False, memory_limit=limit_bytes) if machine.device == "cpu" else nullcontext():
            workload = prepare(case)
    except torch.OutOfMemoryError as error:
        return dataclasses.replace(machine, status="oom", reason=f"the inputs alone do not fit: {error}")
    start = time.perf_counter()
    record = run_memory(workload, details, limit_bytes)
    if timed and record.status == "ok":
        on_memory(record)
        # Compile time is no estimate of pass time.
        note_times(record, workload, deadline, passes, 0 if case.compiled else time.perf_counter() - start)
    return record


def run_memory(workload: Workload, details: bool, limit_bytes: int | None) -> Record:
    case, contender = workload.case, CONTENDERS[workload.case.operator]
    place = Place(memory_limit=limit_bytes)

    def measure(operator: Any = None) -> Record:
        return measure_memory(workload.step(operator), place, details=details)

    if case.compiled:
        # Runs once before to compile, with the same hooks open, because torch.compile depends on them.
        _, sources = with_generated_code(measure)
        record = measure()
        record.backend, record.backend_reason = backend_in_code(sources, case.device.partition(":")[0])
    elif contender.backend is not None:
        record = measure()
        record.backend = contender.backend(case)
    else:
        witness = BackendWitness(workload.operator)
        record = measure(witness)
        record.backend = contender.unfused if witness.backend == "math" else witness.backend
        if record.backend == "math" and case.operator == "softmax" and case.mode != "decode":
            record.backend_reason = fused_refusals(*workload.inputs, causal=bool(case.causal))
    if case.mode == "decode":
        state_bytes = sum(storages_of(tensors_in(workload.state), torch.device(case.device)).values())
        record.note_state(state_bytes, case.bsz, case.kv_len)
    return record


def note_times(
    record: Record, workload: Workload, deadline: float | None, passes: int | None, pass_seconds: float
) -> None:
    """Adds the times. pass_seconds: expected duration of a pass; one warm-up pass and one more must end in time."""
    left = None if deadline is None else deadline - time.perf_counter() - pass_seconds
    if left is not None and left <= pass_seconds:
        record.passes = 0
        record.doubts += (
            Doubt("there are no times: measuring memory took too many of the seconds that the case had", "no time"),
        )
        return
    limits = [seconds for seconds in (left, None if passes else TIMING_SECONDS) if seconds is not None]
    most_seconds = min(limits, default=None)
    times: dict[str, Any] = measure_time(workload.step(), passes=passes or DEFAULT_PASSES, max_seconds=most_seconds)
    record.doubts += tuple(times.pop("doubts", ()))
    for field, value in times.items():
        setattr(record, field, value)


def profile_step(
    step: Step, place: Place, *, timed: bool = True, passes: int | None = None, details: bool = False, predicted: bool
) -> tuple[Record, Record | None]:
    """The record of a step, with its times, and the predicted one if it is asked for. Errors of the model are raised.

    Other arguments are those of profile_case.
    """
    record = measure_memory(step, place, details=details)
    record.operator, record.dtype = step.name, step.dtype
    if timed and record.status == "ok":
        seconds = None if passes else TIMING_SECONDS
        times: dict[str, Any] = measure_time(step, place.device, passes=passes or DEFAULT_PASSES, max_seconds=seconds)
        record.doubts += tuple(times.pop("doubts", ()))
        record = dataclasses.replace(record, **times)
    there = dataclasses.replace(place, device=str(record.device))
    return record, predict_memory(step, there).record if predicted else None


def timeline_of_case(case: Case) -> Timeline:
    """The timeline of the case's memory; see memcheck.measure.timeline.record_timeline."""
    return record_timeline(prepare(case).step())


def snapshot_case(case: Case, path: Path) -> Path:
    """Writes the case's memory over time; see memcheck.measure.export.write_snapshot."""
    return write_snapshot(prepare(case).step(), path=path)


def trace_case(case: Case, path: Path) -> list[dict[str, Any]]:
    """Writes torch.profiler's trace of the case, and returns the time of each operator; see export.write_trace."""
    return write_trace(prepare(case).step(), path=path)

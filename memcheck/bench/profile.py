"""Measures cases and steps. Every outcome of a case is a record, including errors of the operator."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from memcheck._extension import extension
from memcheck.bench import catalog, predict
from memcheck.bench.case import Case
from memcheck.bench.decoders import DecoderCase
from memcheck.core import arguments, options, tensors
from memcheck.core.converters import count, size_in_bytes
from memcheck.core.errors import ExtensionError, UsageError
from memcheck.core.record import Doubt, Record, Terms
from memcheck.core.step import Place, Step
from memcheck.core.units import format_bytes
from memcheck.measure import export, measurement, modules, sdpa_backend, tracker
from memcheck.measure.compile import backend_in_code, with_generated_code

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
            f"{options.named('device')} {name} is no device of this machine, and running needs one; "
            "a GPU that is not here is a question for memcheck predict, fit and sweep --predict-only"
        ) from None
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UsageError(f"{options.named('device')} must be cpu or cuda, got {name}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UsageError(
            f"{options.named('device')} {name} is absent: torch {torch.__version__} sees {count} CUDA devices here"
        )
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def check_can_measure(device: str) -> None:
    """ExtensionError if the device is the CPU, whose memory the extension counts, and that is missing."""
    if device == "cpu":
        extension("measuring on the CPU")


# The fields that a measured record's terms cover.
TERM_FIELDS = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "state_bytes")


def known_terms(case: Case | DecoderCase) -> Terms | None:
    """The predicted terms of the fields that are known to the byte, on the case's device without a limit.

    None if no field is known, as without the extension, of registered operators, whose code could crash or hang here,
    and where the compiler decides.
    """
    if isinstance(case, Case) and (case.compiled or case.operator not in catalog.BUILT_IN):
        return None
    if not case.device.startswith("cpu") and not torch.cuda.is_available():
        return None
    try:
        prediction = predict.predict_case(case, Place(case.device).unlimited)
    except ExtensionError:  # A measurement of the case is refused with the same words.
        return None
    return {name: terms for name, terms in prediction.known_terms.items() if name in TERM_FIELDS} or None


def profile_case(
    case: Case | DecoderCase,
    *,
    details: bool = False,
    max_seconds: float | None = None,
    passes: int | None = None,
    timed: bool = True,
    memory_limit: int | str | None = None,
    skip_predicted: bool = False,
    nvtx: bool = False,
    on_memory: Callable[[Record], None] | None = None,
) -> Record:
    """The record of a case: its memory, then its time, in separate passes. Errors of the operator are recorded.

    details: also records the tensors alive at the peaks and the tensors saved; see memcheck.measure_memory.
    max_seconds: for the whole case. No timed pass begins that would exceed it if it took as long as measuring the
        memory did. A pass that takes longer is not interrupted.
    passes: the number of timed passes; without it, at most 10, and as many as fit into 3 s, of whole models into 10 s.
    memory_limit: a larger case runs out of memory.
    skip_predicted: a case whose predicted peaks exceed it is not run; its status is "skipped". A case whose predicted
        peaks exceed the machine is always skipped: the available memory of a CPU, the total of a GPU.
    nvtx: a range around every module of a model; see memcheck.measure.export.nvtx_ranges.
    on_memory: called with the record when everything but the times is known.

    In decode mode the peak and the time are those of one step; the state before it is part of input_bytes.
    """
    limit_bytes = arguments.argument("memory_limit", memory_limit, size_in_bytes)
    passes = arguments.argument("passes", passes, count)
    deadline = None if max_seconds is None else time.perf_counter() + max_seconds
    record = Record(**measurement.machine_facts(case.device))
    terms: Terms | None = None

    def described(record: Record) -> Record:
        return dataclasses.replace(record, **case.fields(), terms=terms if isinstance(case, Case) else None)

    try:
        terms = known_terms(case)
        failure = predicted_failure(terms, record, limit_bytes if skip_predicted else None)
        if failure is not None:
            return described(dataclasses.replace(record, **failure))
        if record.device == "cpu":  # Beyond this the kernel would kill the process, and its results with it.
            limit_bytes = min(limit_bytes or sys.maxsize, record.device_free_bytes or sys.maxsize)
        try:
            # Under a tracker, the CPU also raises OutOfMemoryError and respects the limit. A GPU does both by itself.
            with tracker.track(saved=False, memory_limit=limit_bytes) if record.device == "cpu" else nullcontext():
                step = case.step()
        except torch.OutOfMemoryError as error:
            record.status, record.reason = "oom", f"the inputs alone do not fit: {error}"
            return described(record)
        start = time.perf_counter()
        record = case.note(step, run_memory(case, step, Place(case.device, limit_bytes), details))
        if timed and record.status == "ok":
            if on_memory is not None:
                on_memory(described(record))
            # Compile time is no estimate of pass time.
            pass_seconds = 0 if case.compiled else time.perf_counter() - start
            left = None if deadline is None else deadline - time.perf_counter() - pass_seconds
            if left is not None and left <= pass_seconds:  # One warm-up pass and one more must end in time.
                words = "there are no times: measuring memory took too many of the seconds that the case had"
                record.passes, record.doubts = 0, (*record.doubts, Doubt(words, "no time"))
            else:
                note_times(record, step, Place(case.device), passes, left, case.timing_seconds, nvtx)
    except NotImplementedError as error:
        record.status, record.reason = "unsupported", str(error)
    except Exception as error:
        record.status, record.reason = "error", f"{type(error).__name__}: {error}"
    return described(record)


def predicted_failure(terms: Terms | None, machine: Record, limit_bytes: int | None) -> dict[str, Any] | None:
    """The fields of the record if the predicted terms exceed the limit or the machine; None if they do not."""
    rooms = {} if limit_bytes is None else {f"the limit of {format_bytes(limit_bytes)}": limit_bytes}
    if machine.device == "cpu" and machine.device_free_bytes:
        rooms[f"the {format_bytes(machine.device_free_bytes)} that this machine has left"] = machine.device_free_bytes
    elif machine.device_total_bytes:
        rooms[f"the {format_bytes(machine.device_total_bytes)} of this GPU"] = machine.device_total_bytes
    peaks = {field: sum(parts.values()) for field, parts in (terms or {}).items()}
    for words, room in rooms.items():
        for phase in ("forward", "backward"):
            peak = peaks.get(f"{phase}_peak_bytes", 0)
            if peak > room:
                reason = f"predicted: {phase} peak {format_bytes(peak)}, above {words}"
                return {"status": "skipped", "oom_phase": phase, "reason": reason}
    return None


def run_memory(case: Case | DecoderCase, step: Step, place: Place, details: bool) -> Record:
    """The record of the step's memory, with the backend that ran."""

    def measure(model: Any = None) -> Record:
        return measurement.measure_memory(dataclasses.replace(step, model=model or step.model), place, details=details)

    if case.compiled:
        # Runs once before to compile, with the same hooks open, because torch.compile depends on them.
        _, sources = with_generated_code(measure)
        record = measure()
        if isinstance(case, Case):
            record.backend, record.backend_reason = backend_in_code(sources, case.device.partition(":")[0])
        return record
    if not isinstance(case, Case) or case.contender.backend is not None:
        record = measure()
        record.backend = case.backend(None)
        return record
    witness = sdpa_backend.BackendWitness(step.model)
    record = measure(witness)
    record.backend = case.contender.unfused if witness.backend == "math" else witness.backend
    if record.backend == "math" and case.operator == "softmax" and case.mode != "decode":
        record.backend_reason = sdpa_backend.fused_refusals(*step.inputs, causal=bool(case.causal))
    return record


def note_times(
    record: Record,
    step: Step,
    place: Place,
    passes: int | None,
    left: float | None = None,
    seconds: float = Case.timing_seconds,
    nvtx: bool = False,
) -> None:
    """Adds the times. left: the seconds that remain. seconds: when timed passes end, unless their number is given."""
    limits = [limit for limit in (left, None if passes else seconds) if limit is not None]
    with ranges_around(step, torch.cuda.nvtx.range) if nvtx and torch.cuda.is_available() else nullcontext():
        most = min(limits, default=None)
        times: dict[str, Any] = measurement.measure_time(step, place, passes=passes or DEFAULT_PASSES, max_seconds=most)
    record.doubts += tuple(times.pop("doubts", ()))
    for field, value in times.items():
        setattr(record, field, value)


def profile_step(
    step: Step, place: Place, *, timed: bool = True, passes: int | None = None, details: bool = False
) -> Record:
    """The record of a step, with its times. Errors of the model are raised. Other arguments: as of profile_case."""
    record = measurement.measure_memory(step, place, details=details)
    record.operator, record.dtype = step.name, step.dtype
    if timed and record.status == "ok":
        note_times(record, step, Place(place.device), passes)
    return record


def ranges_around(step: Step, kind: Any) -> AbstractContextManager[Any]:
    """A context with a range around every module of the step's model, if it is one."""
    model = tensors.module_called(step.model)
    return nullcontext() if model is None else modules.ranges_around_modules(model, kind)


def snapshot_case(case: Case | DecoderCase, path: Path) -> Path:
    """Writes the case's memory over time; see memcheck.measure.export.write_snapshot."""
    return export.write_snapshot(case.step(), path=path)


def trace_case(case: Case | DecoderCase, path: Path) -> list[dict[str, Any]]:
    """Writes torch.profiler's trace of the case, and returns the time of each operator; see export.write_trace."""
    step = case.step()
    with ranges_around(step, torch.profiler.record_function):
        return export.write_trace(step, path=path)

"""Runs and measures one model case, with the prediction beside it. Every outcome is a record."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from memcheck.bench.models.case import ModelCase, prepare_model
from memcheck.bench.models.predict import describe, held_bytes, kept_of, predict_model, predicted_figures
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import UsageError
from memcheck.core.model_record import ModelRecord, by_layer
from memcheck.core.record import PHASES, Record
from memcheck.core.units import format_bytes
from memcheck.core.workload import Workload
from memcheck.measure import timing
from memcheck.measure.compile import with_generated_code
from memcheck.measure.export import write_snapshot, write_trace
from memcheck.measure.measurement import Times, machine_facts, measure_memory, time_passes
from memcheck.measure.modules import ranges_around_modules
from memcheck.measure.run import Subject as MeasuredSubject
from memcheck.measure.tracker import track
from memcheck.predict.replay import Prediction

WARMUP = 2
DEFAULT_PASSES = 10
TIMING_SECONDS = 10.0  # Passes per case, unless the number was requested.


def profile_model_case(
    case: ModelCase,
    *,
    timed: bool = True,
    passes: int | None = None,
    limit_bytes: int | None = None,
    nvtx: bool = False,
) -> ModelRecord:
    """Memory first, then what each component keeps, then time, in passes of their own.

    A case that by its prediction does not fit into what the machine has left is not run: "skipped", with the figures
    that were predicted. One that runs out of limit_bytes is "oom", and any error is a row. nvtx: a range around
    every module, where memcheck.measure.export.nvtx_ranges is open, too.
    """
    record = describe(ModelRecord(**machine_facts(case.device)), case)
    try:
        prediction = predict_model(case, here(case.device), limit_bytes=limit_bytes)
        record.predicted = predicted_figures(prediction)
        refusal = beyond_this_machine(prediction, record)
        if refusal is not None:
            return dataclasses.replace(record, status="skipped", reason=refusal)
        return measured(case, record, timed, passes, limit_bytes, nvtx)
    except torch.OutOfMemoryError as error:
        reason = f"the model alone does not fit: {str(error).partition(chr(10))[0]}"
        return dataclasses.replace(record, status="oom", reason=reason)
    except NotImplementedError as error:
        return dataclasses.replace(record, status="unsupported", reason=str(error))
    except UsageError:
        raise
    except Exception as error:
        return dataclasses.replace(record, status="error", reason=f"{type(error).__name__}: {error}")


def here(name: str) -> Device:
    """This machine as a device without a memory limit of its own."""
    return dataclasses.replace(device_named(name), usable_bytes=None)


def beyond_this_machine(prediction: Prediction, record: ModelRecord) -> str | None:
    room = record.device_free_bytes if record.device == "cpu" else record.device_total_bytes
    known = [getattr(prediction.record, f"{phase}_peak_bytes") for phase in PHASES]
    peak = max((peak for peak in known if peak is not None), default=None)
    if peak is None or room is None or peak <= room:
        return None
    return f"predicted: {format_bytes(peak)}, above the {format_bytes(room)} that this machine has left"


def measured(
    case: ModelCase, record: ModelRecord, timed: bool, passes: int | None, limit_bytes: int | None, nvtx: bool
) -> ModelRecord:
    room = min(limit_bytes or sys.maxsize, record.device_free_bytes or sys.maxsize) if record.device == "cpu" else None
    room = limit_bytes if room is None else room
    with track(device=case.device, saved=False, limit_bytes=room):
        subject = prepare_model(case)
    found = measured_memory(subject, room)
    taken: dict[str, Any] = {name: getattr(found, name) for name in TAKEN_OVER}
    record = dataclasses.replace(record, **{**taken, **held_bytes(subject)})
    record.note_peak()
    if record.status == "ok" and case.mode != "forward" and not case.compiled:
        record.activations = by_layer(kept_of(subject), case.sizes.layers)
    if timed and record.status == "ok":
        with module_ranges(subject) if nvtx and torch.cuda.is_available() else nullcontext():
            note_times(record, subject, passes)
    return record


# Fields taken from the operator's record.
TAKEN_OVER = (
    "status",
    "oom_phase",
    "oom_requested_bytes",
    "oom_in_use_bytes",
    "reason",
    "input_bytes",
    "output_bytes",
    "saved_bytes",
    "gradient_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "optimizer_peak_bytes",
    "workspace_bytes",
    "library_workspace_bytes",
    "forward_max_allocated_bytes",
    "backward_max_allocated_bytes",
    "reserved_bytes",
    "doubts",
)


def measured_memory(subject: Workload, limit_bytes: int | None) -> Record:
    def run() -> Record:
        return measure_memory(
            subject.operator,
            *subject.inputs,
            parameters=subject.parameters,
            backward=subject.backward,
            optimizer_step=subject.optimizer_step,
            limit_bytes=limit_bytes,
        )

    if subject.case.compiled:
        # Runs once before to compile, with the same hooks open, because torch.compile depends on them.
        with_generated_code(run)
    return run()


def note_times(record: ModelRecord, subject: Workload, passes: int | None) -> None:
    times = time_passes(
        MeasuredSubject(
            subject.operator,
            subject.inputs,
            {},
            subject.parameters,
            subject.backward,
            None,
            subject.optimizer_step,
        ),
        warmup=WARMUP,
        passes=passes or DEFAULT_PASSES,
        max_seconds=None if passes else TIMING_SECONDS,
    )
    record.doubts += times.doubts
    record.passes = len(times.passes)
    record.times = summaries(times)
    for phase in PHASES:
        for name, value in timing.summary(f"{phase}_ms", times.of(phase)).items():
            setattr(record, name, value)


def summaries(times: Times) -> dict[str, dict[str, float]]:
    """Summaries of each phase that ran, and of the whole pass."""
    columns = {phase: times.of(phase) for phase in PHASES}
    columns["total"] = [sum(run.values()) for run in times.passes]
    return {name: summary(column) for name, column in columns.items() if column}


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Mean, deviation and median. deviation: of the sample; 0 for a single pass."""
    return {
        "mean_ms": statistics.fmean(milliseconds),
        "deviation_ms": statistics.stdev(milliseconds) if len(milliseconds) > 1 else 0.0,
        "median_ms": statistics.median(milliseconds),
    }


def snapshot_model(case: ModelCase, path: Path) -> Path:
    """Writes the memory of one pass over time; see memcheck.measure.export.write_snapshot."""
    subject = prepare_model(case)
    return write_snapshot(subject.operator, *subject.inputs, path=path, **arguments_of(subject))


def trace_model(case: ModelCase, path: Path) -> list[dict[str, Any]]:
    """Writes torch.profiler's trace of a pass, with a range for every module, and returns who took the time."""
    subject = prepare_model(case)
    with module_ranges(subject, torch.profiler.record_function):
        return write_trace(subject.operator, *subject.inputs, path=path, **arguments_of(subject))


def module_ranges(subject: Workload, kind: Any = torch.cuda.nvtx.range) -> AbstractContextManager[None]:
    return ranges_around_modules(subject.parameters[1]["model"], kind)


def arguments_of(subject: Workload) -> dict[str, Any]:
    names = ("parameters", "backward", "optimizer_step")
    return {name: getattr(subject, name) for name in names}

"""Measures one model case, and predicts it, too. Every outcome is a record."""

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
from memcheck.bench.models.model_predictions import (
    describe_model,
    held_bytes,
    kept_by_path,
    predict_model,
    predicted_figures,
)
from memcheck.bench.profile import check_can_measure
from memcheck.core.arguments import argument
from memcheck.core.converters import count, size_in_bytes
from memcheck.core.errors import UsageError
from memcheck.core.model_record import ModelRecord, by_layer
from memcheck.core.place import Place
from memcheck.core.record import PHASES, Record
from memcheck.core.units import format_bytes
from memcheck.core.workload import Workload
from memcheck.measure import timing
from memcheck.measure.compile import with_generated_code
from memcheck.measure.export import write_snapshot, write_trace
from memcheck.measure.measurement import machine_facts, measure_memory, time_passes
from memcheck.measure.modules import ranges_around_modules
from memcheck.measure.run import MeasuredCall
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
    memory_limit: int | str | None = None,
    nvtx: bool = False,
) -> ModelRecord:
    """The record of a model: its memory, then what each component keeps, then its time, in separate passes.

    A case whose prediction exceeds the memory that the machine has left is not run; its status is "skipped". A case
    that exceeds memory_limit is "oom", and errors are recorded. nvtx: a range around every module, for use inside
    memcheck.measure.export.nvtx_ranges.
    """
    limit_bytes = argument("memory_limit", memory_limit, size_in_bytes)
    passes = argument("passes", passes, count)
    check_can_measure(case.device)
    record = describe_model(ModelRecord(**machine_facts(case.device)), case)
    try:
        here = Place(case.device).unlimited  # Without a limit of its own.
        prediction = predict_model(case, dataclasses.replace(here, memory_limit=limit_bytes))
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


def beyond_this_machine(prediction: Prediction, record: ModelRecord) -> str | None:
    """Why the prediction exceeds the machine; None if it does not."""
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
    with track(device=case.device, saved=False, memory_limit=room):
        workload = prepare_model(case)
    memory = measured_memory(workload, room)
    taken: dict[str, Any] = {name: getattr(memory, name) for name in TAKEN_OVER.split()}
    record = dataclasses.replace(record, **{**taken, **held_bytes(workload)})
    record.note_peak()
    if record.status == "ok" and case.mode != "forward" and not case.compiled:
        record.activations = by_layer(kept_by_path(workload), case.sizes.layers)
    if timed and record.status == "ok":
        with module_ranges(workload) if nvtx and torch.cuda.is_available() else nullcontext():
            note_times(record, workload, passes)
    return record


# Fields taken from the operator's record.
TAKEN_OVER = """
    status oom_phase oom_requested_bytes oom_in_use_bytes reason input_bytes output_bytes saved_bytes
    gradient_bytes forward_peak_bytes backward_peak_bytes optimizer_peak_bytes workspace_bytes
    library_workspace_bytes forward_max_allocated_bytes backward_max_allocated_bytes reserved_bytes doubts
    backward_from
"""


def measured_memory(workload: Workload, limit_bytes: int | None) -> Record:
    def run() -> Record:
        return measure_memory(workload.step(), memory_limit=limit_bytes)

    if workload.case.compiled:
        # Runs once before to compile, with the same hooks open, because torch.compile depends on them.
        with_generated_code(run)
    return run()


def note_times(record: ModelRecord, workload: Workload, passes: int | None) -> None:
    times = time_passes(
        MeasuredCall(workload.step()),
        warmup=WARMUP,
        passes=passes or DEFAULT_PASSES,
        max_seconds=None if passes else TIMING_SECONDS,
    )
    record.doubts += times.doubts
    record.passes = len(times.passes)
    columns = {phase: times.of(phase) for phase in PHASES}
    columns["total"] = [sum(run.values()) for run in times.passes]
    record.times = {name: statistics_of(column) for name, column in columns.items() if column}
    for phase in PHASES:
        for name, value in timing.summary(f"{phase}_ms", times.of(phase)).items():
            setattr(record, name, value)


def statistics_of(milliseconds: Sequence[float]) -> dict[str, float]:
    """Mean, sample deviation (0 for a single pass) and median."""
    return {
        "mean_ms": statistics.fmean(milliseconds),
        "deviation_ms": statistics.stdev(milliseconds) if len(milliseconds) > 1 else 0.0,
        "median_ms": statistics.median(milliseconds),
    }


def snapshot_model(case: ModelCase, path: Path) -> Path:
    """Writes the memory of one pass over time; see memcheck.measure.export.write_snapshot."""
    return write_snapshot(prepare_model(case).step(), path=path)


def trace_model(case: ModelCase, path: Path) -> list[dict[str, Any]]:
    """Writes torch.profiler's trace of a pass, with a range for every module, and returns who took the time."""
    workload = prepare_model(case)
    with module_ranges(workload, torch.profiler.record_function):
        return write_trace(workload.step(), path=path)


def module_ranges(workload: Workload, kind: Any = torch.cuda.nvtx.range) -> AbstractContextManager[None]:
    return ranges_around_modules(workload.parameters[1]["model"], kind)

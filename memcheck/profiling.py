"""One case, run and measured: always a record, whatever happens to the operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from memcheck.backends import BackendWitness, fused_refusals
from memcheck.catalog import CONTENDERS, Case, Operator
from memcheck.errors import UsageError
from memcheck.measurement import machine_facts, measure_memory, measure_time
from memcheck.records import Record
from memcheck.tracking import track

# The time pass stops here unless the number of passes was asked for.
TIMING_SECONDS = 1.5
DEFAULT_PASSES = 10


def find_device(name: str | None) -> str:
    """A device of this machine, "cpu" or "cuda:0"; CUDA where there is one when no name is given."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"--device {name} is no device of this machine, and running needs one; "
            "a GPU that is not here is a question for memcheck predict, which this release does not have yet"
        ) from None
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UsageError(f"--device must be cpu or cuda, got {name}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UsageError(f"--device {name} is absent: torch {torch.__version__} sees {count} CUDA devices here")
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def profile_case(
    case: Case, *, passes: int | None = None, timed: bool = True, limit_bytes: int | None = None
) -> Record:
    """Memory first, then time, each in passes of its own. An error of the operator is a row, not the end."""
    record = unmeasured(case)
    try:
        record = run_memory(case, limit_bytes)
        if timed and record.status == "ok":
            for field, value in run_time(case, passes).items():
                # Doubts about the bytes stay beside those about the times.
                setattr(record, field, (*record.doubts, *value) if field == "doubts" else value)
    except NotImplementedError as error:
        record.status, record.reason = "unsupported", str(error)
    except Exception as error:
        record.status, record.reason = "error", f"{type(error).__name__}: {error}"
    record.compiled = False
    for field, value in dataclasses.asdict(case).items():
        if field != "device":
            setattr(record, field, value)
    return record


def unmeasured(case: Case) -> Record:
    return Record(**machine_facts(case.device))


def run_memory(case: Case, limit_bytes: int | None) -> Record:
    contender = CONTENDERS[case.operator]
    try:
        # Under a tracker the CPU, too, says OutOfMemoryError when there is no room, and keeps to the limit.
        with track(saved=False, limit_bytes=limit_bytes):
            inputs, parameters = contender.inputs(case), contender.parameters(case)
    except torch.OutOfMemoryError as error:
        return dataclasses.replace(unmeasured(case), status="oom", reason=f"the inputs alone do not fit: {error}")
    operator = bind(contender.build(case), parameters)
    witness = BackendWitness(operator) if contender.backend is None else None
    record = measure_memory(
        witness or operator,
        *inputs,
        parameters=parameters,
        backward=case.mode == "train",
        limit_bytes=limit_bytes,
    )
    record.backend = contender.backend(case) if contender.backend else witness.backend if witness else None
    if record.backend == "math" and case.operator == "softmax":
        record.backend_reason = fused_refusals(*inputs, causal=bool(case.causal))
    return record


def bind(operator: Operator, parameters: tuple[Tensor, ...]) -> Operator:
    """The operator as a function of its inputs alone, as a module is that owns its parameters."""
    return (lambda *inputs: operator(*inputs, *parameters)) if parameters else operator


def run_time(case: Case, passes: int | None) -> dict[str, Any]:
    contender = CONTENDERS[case.operator]
    parameters = contender.parameters(case)
    return measure_time(
        bind(contender.build(case), parameters),
        *contender.inputs(case),
        parameters=parameters,
        backward=case.mode == "train",
        passes=passes or DEFAULT_PASSES,
        max_seconds=None if passes else TIMING_SECONDS,
    )

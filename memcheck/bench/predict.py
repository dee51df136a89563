"""Predicts cases of the catalog: the record, the terms of its figures, and whether a case fits."""

from __future__ import annotations

import dataclasses
import functools

import torch

from memcheck.bench.catalog import CONTENDERS, Contender
from memcheck.bench.workloads import prepare
from memcheck.core.case import Case, Terms
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import UnsupportedError
from memcheck.core.record import Record
from memcheck.measure.sdpa_backend import fused_backend
from memcheck.predict.replay import Prediction, Replay, basis_of, blank, target_for
from memcheck.predict.scratch import Target
from memcheck.predict.torch_versions import Version
from memcheck.predict.trace import Run, Trace


def predict_memory(
    case: Case,
    device: Device | str = "cpu",
    *,
    limit_bytes: int | None = None,
    dense_grad: bool = False,
    threads: int | None = None,
    expandable_segments: bool = False,
    torch_version: Version | None = None,
    drops_workspaces: bool = True,
) -> Prediction:
    """The record that measuring the case on the device would give, without it: nothing is run or allocated.

    device: of memcheck.core.devices, or a name for memcheck.core.devices.device_named: "A100-40GB", "cpu", "40GiB".
    limit_bytes: a budget as memcheck.measure_memory has it; on CUDA a per-process limit of segments.
    dense_grad: the gradient of the output is a full tensor, instead of one element expanded.
    threads: of the CPU; as many as torch has, unless given. expandable_segments: as in PYTORCH_ALLOC_CONF.
    torch_version: (2, 7), say, the torch whose memory is meant; that of this process, unless given. Where it, or the
        one of this process, is newer than the newest that predictions were compared with, no figure is exact.
    drops_workspaces: after each phase, as a measurement does. A program keeps those of both of its threads.

    Running out of memory is an answer: status "oom", its phase, the request and what was in use. Compiled operators
    are "skipped" as not predicted. What an operator takes and shapes do not tell is in `unknown`, and in the record's
    doubts. On CUDA the process has just begun: its allocator has cached nothing.
    """
    device = device_named(device) if isinstance(device, str) else device
    target = target_for(device, threads, torch_version)
    return predicted_for(
        target,
        case,
        device,
        limit_bytes,
        dense_grad,
        expandable_segments=expandable_segments,
        drops_workspaces=drops_workspaces,
    )


def predicted_for(
    target: Target,
    case: Case,
    device: Device,
    limit_bytes: int | None = None,
    dense_grad: bool = False,
    *,
    expandable_segments: bool = False,
    drops_workspaces: bool = True,
) -> Prediction:
    """The prediction for a target; arguments as of predict_memory."""
    record = blank_of(case, device, target)
    contender = CONTENDERS[case.operator]
    if case.compiled:
        return unpredicted(case, device, record, "the compiler decides what is allocated")
    try:
        trace = traced(contender, dataclasses.replace(case, device="meta"), target, dense_grad, drops_workspaces)
    except UnsupportedError as error:
        record.status, record.reason, record.basis = "unsupported", str(error), None
        return Prediction(case, device, record, {}, False, ())
    except NotImplementedError as error:
        return unpredicted(case, device, record, f"it does not run on meta tensors: {first_line(error)}")
    except torch.OutOfMemoryError as error:
        record.status, record.reason = "oom", f"the inputs alone do not fit: {error}"
        return Prediction(case, device, record, {}, False, ())
    record.backend = backend_of(trace, contender, case, device)
    basis = basis_of(trace, case.dtype, device, target, expandable_segments)
    return Replay(trace, case, device, record, limit_bytes, expandable_segments, basis=basis).prediction()


# The fields that a record's theory covers.
THEORY = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "state_bytes")


def terms_of(case: Case, torch_version: Version | None = None) -> Terms | None:
    """Of those fields that are known to the byte, what they are the sum of, on the device that the case names; None
    where nothing is known. No memory is too small; of a GPU that is not here, cuBLAS's workspaces come on top."""
    kind = case.device.partition(":")[0]
    device = (
        device_named(case.device)
        if kind == "cpu" or torch.cuda.is_available()
        else Device(kind, kind, None, 0, None, "")
    )
    target = target_for(device, torch_version=torch_version)
    if device.architecture is None and kind != "cpu":
        # Without the workspaces from the start, so that they do not decide which moment is the fullest.
        target = dataclasses.replace(target, has_workspaces=False)
    prediction = predicted_for(target, case, dataclasses.replace(device, usable_bytes=None))
    return {name: terms for name, terms in prediction.known_terms.items() if name in THEORY} or None


def blank_of(case: Case, device: Device, target: Target) -> Record:
    fields = {name: value for name, value in dataclasses.asdict(case).items() if name != "device"}
    return dataclasses.replace(blank(Record, device, target), **fields)


def unpredicted(case: Case, device: Device, record: Record, why: str) -> Prediction:
    record.status, record.reason, record.exact, record.basis = "skipped", f"not predicted: {why}", False, None
    return Prediction(case, device, record, {}, False, (why,))


@functools.lru_cache(maxsize=128)
def traced(contender: Contender, case: Case, target: Target, dense_grad: bool, drops_workspaces: bool) -> Trace:
    """Traces the case. contender: passed explicitly because names can be registered again."""
    return Run(target, dense_grad=dense_grad, drops_workspaces=drops_workspaces).trace(prepare(case))


def backend_of(trace: Trace, contender: Contender, case: Case, device: Device) -> str:
    if contender.backend is not None:
        return contender.backend(dataclasses.replace(case, device=device.kind))
    return next(filter(None, map(fused_backend, trace.operators)), contender.unfused)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


PEAKS = {"forward": "forward_peak_bytes", "backward": "backward_peak_bytes"}


def closed_terms(case: Case) -> Terms | None:
    """Record field -> bytes alive at that moment: name -> bytes. None if nothing is known to the byte."""
    contender = CONTENDERS[case.operator]
    if case.compiled:
        return None  # The compiler decides.
    if case.mode == "decode":
        if contender.decode is None:
            return None
        own = contender.decode.terms
    else:
        own = contender.terms
    return terms_of(case) if own is None else own(case)


def closed_bytes(case: Case) -> dict[str, int]:
    """Record field -> bytes from the closed terms; empty if nothing is known."""
    return {field: sum(terms.values()) for field, terms in (closed_terms(case) or {}).items()}


def phase_beyond(case: Case, room_bytes: int) -> tuple[str, int] | None:
    """The first phase whose peak exceeds the room, from the closed terms, with that peak."""
    peaks = closed_bytes(case)
    for phase, field in PEAKS.items():
        if peaks.get(field, 0) > room_bytes:
            return phase, peaks[field]
    return None

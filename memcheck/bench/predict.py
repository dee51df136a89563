"""Predicts cases of the catalog: their records and the terms of each figure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcheck.bench.catalog import CONTENDERS, Contender
from memcheck.bench.workloads import prepare
from memcheck.core.arguments import bytes_given
from memcheck.core.case import Case, Terms
from memcheck.core.devices import Device, device_given, device_named
from memcheck.core.errors import ExtensionError, UnsupportedError
from memcheck.core.record import Record
from memcheck.core.workload import Workload
from memcheck.measure.sdpa_backend import fused_backend
from memcheck.predict.allocation_log import Trace
from memcheck.predict.replay import Prediction, Replay, basis_of, blank_record, target_for
from memcheck.predict.scratch import Target
from memcheck.predict.torch_versions import Version


def predict_memory(
    case: Case,
    device: Device | torch.device | str = "cpu",
    *,
    limit_bytes: int | str | None = None,
    dense_grad: bool = False,
    threads: int | None = None,
    expandable_segments: bool = False,
    torch_version: Sequence[int] | str | None = None,
    drops_workspaces: bool = True,
) -> Prediction:
    """The record that measuring the case on the device would give. Nothing is run or allocated.

    device: a memcheck.core.devices.Device, or a name for device_named there: "A100-40GB", "cpu", "40GiB".
    limit_bytes: a budget as in memcheck.measure_memory; on CUDA a per-process limit of segments. Or a text, "40GiB".
    dense_grad: the gradient of the output is a full tensor, instead of one element expanded.
    threads: of the CPU; torch's number by default. expandable_segments: as in PYTORCH_ALLOC_CONF.
    torch_version: the version to predict for, such as (2, 7) or "2.13"; that of this process by default. If either
        version is newer than the newest that predictions were compared with, no figure is exact.
    drops_workspaces: free cuBLAS's workspaces after each phase, as a measurement does. A program keeps those of both
        of its threads.

    Running out of memory is a result: status "oom", the phase, the request and the bytes in use. Compiled operators
    are "skipped". Allocations that shapes do not determine are named in `unknown` and in the record's doubts. On CUDA
    the allocator of the process has cached nothing yet.

    ExtensionError: the operator is memcheck's own, and its extension, which plans its scratch, is missing.
    """
    device, limit_bytes = device_given(device), bytes_given("limit_bytes", limit_bytes)
    modes: Any = {"expandable_segments": expandable_segments, "drops_workspaces": drops_workspaces}
    return predicted_for(target_for(device, threads, torch_version), case, device, limit_bytes, dense_grad, **modes)


def predicted_for(
    target: Target,
    case: Case,
    device: Device,
    limit_bytes: int | None = None,
    dense_grad: bool = False,
    *,
    expandable_segments: bool = False,
    drops_workspaces: bool = True,
    make: Callable[[Case], Workload] = prepare,
) -> Prediction:
    """The prediction for a target; arguments as of predict_memory. make: makes the workload of a case on meta."""
    record = dataclasses.replace(blank_record(Record, device, target), **case.fields())
    contender = CONTENDERS[case.operator]
    if case.compiled:
        return unpredicted(case, device, record, "the compiler decides what is allocated")
    try:
        trace = traced(contender, dataclasses.replace(case, device="meta"), target, dense_grad, drops_workspaces, make)
    except UnsupportedError as error:
        record.status, record.reason, record.basis = "unsupported", str(error), None
        return Prediction(case, device, record, {}, False, ())
    except NotImplementedError as error:
        reason = str(error).strip().partition("\n")[0]
        return unpredicted(case, device, record, f"it does not run on meta tensors: {reason}")
    except torch.OutOfMemoryError as error:
        record.status, record.reason = "oom", f"the inputs alone do not fit: {error}"
        return Prediction(case, device, record, {}, False, ())
    if contender.backend is not None:
        record.backend = contender.backend(dataclasses.replace(case, device=device.kind))
    else:
        record.backend = next(filter(None, map(fused_backend, trace.operators)), contender.unfused)
    basis = basis_of(trace, case.dtype, device, target, expandable_segments)
    return Replay(trace, case, device, record, limit_bytes, expandable_segments, basis=basis).prediction()


def predicted_or_skipped(case: Case, device: Device, **how: Any) -> Prediction:
    """predict_memory, but skipped with the reason if the case is of an operator whose extension is missing."""
    try:
        return predict_memory(case, device, **how)
    except ExtensionError as error:
        record = dataclasses.replace(blank_record(Record, device, target_for(device)), **case.fields())
        return unpredicted(case, device, record, str(error))


def unpredicted(case: Case, device: Device, record: Record, why: str) -> Prediction:
    record.status, record.reason, record.exact, record.basis = "skipped", f"not predicted: {why}", False, None
    return Prediction(case, device, record, {}, False, (why,))


@functools.lru_cache(maxsize=128)
def traced(
    contender: Contender,
    case: Case,
    target: Target,
    dense_grad: bool,
    drops_workspaces: bool,
    make: Callable[[Case], Workload],
) -> Trace:
    """Traces the case. contender: passed explicitly because names can be registered again."""
    from memcheck.predict.trace_runner import TraceRunner  # Loaded with the first prediction.

    return TraceRunner(target, dense_grad=dense_grad, drops_workspaces=drops_workspaces).trace(make(case))


# The fields that a measured record's terms cover.
TERM_FIELDS = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "state_bytes")


def terms_of(case: Case, torch_version: Version | None = None) -> Terms | None:
    """The predicted terms of the fields that are known to the byte, on the case's device without a limit.

    None if no field is known, as of memcheck's operators without the extension. Without that GPU in this machine,
    cuBLAS's workspaces are left out.
    """
    kind = case.device.partition(":")[0]
    device = Device(kind, kind, None, 0, None, "")
    if kind == "cpu" or torch.cuda.is_available():
        device = dataclasses.replace(device_named(case.device), usable_bytes=None)
    target = target_for(device, torch_version=torch_version)
    if device.architecture is None and kind != "cpu":
        # Without the workspaces from the start, so that they do not decide which moment is the fullest.
        target = dataclasses.replace(target, has_workspaces=False)
    try:
        prediction = predicted_for(target, case, device)
    except ExtensionError:  # A measurement of the case is refused with the same words.
        return None
    return {name: terms for name, terms in prediction.known_terms.items() if name in TERM_FIELDS} or None


def closed_terms(case: Case) -> Terms | None:
    """Record field -> bytes alive at that moment: name -> bytes. None if nothing is known to the byte."""
    contender = CONTENDERS[case.operator]
    source = contender.decode if case.mode == "decode" else contender
    if case.compiled or source is None:
        return None  # The compiler decides, or there is no decoding step.
    return terms_of(case) if source.terms is None else source.terms(case)


def closed_bytes(case: Case) -> dict[str, int]:
    """Record field -> bytes from the closed terms; empty if nothing is known."""
    return {field: sum(terms.values()) for field, terms in (closed_terms(case) or {}).items()}

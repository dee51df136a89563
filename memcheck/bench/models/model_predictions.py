"""Predicts the memory of a whole model from its sizes; nothing is run or allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memcheck.bench.models.case import ModelCase, prepare_model
from memcheck.bench.models.formulas import held_formulas, kept_formulas
from memcheck.core.devices import Device
from memcheck.core.errors import UnsupportedError
from memcheck.core.model_record import FIGURES, Activations, ModelRecord, by_layer
from memcheck.core.place import Place, as_place
from memcheck.core.record import PHASES
from memcheck.core.tensors import overflow_as_out_of_memory
from memcheck.core.workload import Workload
from memcheck.measure.modules import kept_by_component
from memcheck.predict.allocation_log import AllocationLog, Trace
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.autocast import autocast_followed
from memcheck.predict.device_functions import DeviceFunctions
from memcheck.predict.replay import Prediction, Replay, blank_record, certainty_of, target_at
from memcheck.predict.scratch import Target
from memcheck.predict.trace_runner import TraceRunner


@dataclass(frozen=True)
class ModelTrace:
    """A traced model."""

    trace: Trace
    activations: Activations | None
    held: dict[str, int]  # Record field -> bytes.


def predict_model(case: ModelCase, place: Place | Device | str = "cpu") -> Prediction:
    """The record that measuring the case at the place would give.

    The state of AdamW is there from the start, as in any step but the first. Compiled models are "skipped" as not
    predicted, beside what their parameters, gradients and optimizer hold.
    """
    place = as_place(place).resolved()
    target = target_at(place)
    record = describe_model(blank_record(ModelRecord, place, target), case)
    try:
        model = traced_model(dataclasses.replace(case, device="meta", compiled=False), target)
    except torch.OutOfMemoryError as error:
        record.status, record.reason = "oom", f"predicted: {error} does not fit"
        return Prediction(case, place, record, {}, False, ())
    except UnsupportedError as error:
        record.status, record.reason, record.basis = "unsupported", str(error), None
        return Prediction(case, place, record, {}, False, ())
    certainty = certainty_of(model.trace, case.dtype, place, target)
    prediction = Replay(model.trace, case, place, record, certainty=certainty).prediction()
    for name, size in model.held.items():
        setattr(record, name, size)
    record.terms = {field: by_kind(terms) for field, terms in prediction.terms.items()}
    record.note_peak()
    # The highest peak is a bound if a phase's peak is one.
    peaks = {"peak_bytes"} if any(f"{phase}_peak_bytes" in prediction.bounds for phase in PHASES) else set()
    record.activations, record.bounds = model.activations, tuple(sorted(prediction.bounds | peaks))
    return compiled_prediction(prediction) if case.compiled else prediction


def describe_model(record: ModelRecord, case: ModelCase) -> ModelRecord:
    """The record with the case's fields and closed formulas."""
    kind = record.device or case.kind
    fields: dict[str, Any] = {"operator": case.attention_type, "query_len": case.context, "kv_len": case.context}
    fields |= {"causal": True, **vars(case.sizes), **{name: getattr(case, name) for name in CASE_FIELDS}}
    if case.attention_type == "softplus":
        fields["heads"] = None
    held = held_formulas(case, kind)
    # The compiler decides what is kept.
    formulas = held if case.compiled else {**held, **kept_formulas(case, kind)}
    return dataclasses.replace(
        record,
        **fields,
        parameters=held["parameters"].value,
        formulas={name: {"formula": found.text, "value": found.value} for name, found in formulas.items()},
    )


CASE_FIELDS = (
    *("size", "feed_forward", "bsz", "factor", "window", "mode"),
    *("dtype", "autocast", "checkpointing", "compiled"),
)


@functools.lru_cache(maxsize=32)
@overflow_as_out_of_memory()
def traced_model(case: ModelCase, target: Target) -> ModelTrace:
    """The trace of the case on "meta", with what its components keep and what the model holds."""
    workload = prepare_model(case, target.kind)
    held, activations = held_bytes(workload, target), None
    if case.mode != "forward":
        followed = autocast_followed(target.kind, target.torch_version)
        with followed, AllocationMode(AllocationLog(), target) as mode, DeviceFunctions(mode):
            kept = kept_by_path(workload, lambda tensor: mode.storages.allocation_of(tensor) is not None)
        activations = by_layer(kept, case.sizes.layers)
    # Last, because it leaves gradients behind.
    return ModelTrace(TraceRunner(target).trace(workload), activations, held)


def kept_by_path(workload: Workload, counts: Callable[[torch.Tensor], bool] | None = None) -> dict[str, int]:
    """Module path -> bytes kept for backward by one more forward; of tensors on the model's device, or as `counts`."""
    decoder = workload.parameters[1]["model"]
    place = decoder.embedding.weight.device
    counts = counts or (lambda tensor: tensor.device == place)
    return kept_by_component(decoder, lambda: workload.operator(*workload.inputs), workload.inputs, counts=counts)


def held_bytes(workload: Workload, target: Target | None = None) -> dict[str, int]:
    """Bytes held by the model and its optimizer. AdamW's step counters are CPU tensors and count only for the CPU."""
    owned = workload.parameters[1]
    sizes = {
        "parameter_bytes": sum(tensor.nbytes for tensor in owned["model"].parameters()),
        "buffer_bytes": sum(tensor.nbytes for tensor in owned["model"].buffers()),
    }
    if "AdamW" in owned:
        on_cpu = target is not None and target.kind == "cpu"
        states = [tensor for tensors in owned["AdamW"].values() for tensor in tensors]
        place = owned["model"].embedding.weight.device
        sizes["optimizer_bytes"] = sum(state.nbytes for state in states if on_cpu or state.device == place)
    return sizes


def by_kind(terms: Mapping[str, int]) -> dict[str, int]:
    """Terms of all layers combined, because terms per tensor would dominate the record."""
    sums: dict[str, int] = {}
    for name, size in terms.items():
        kind = KINDS.get(name.partition(".")[0]) or name.rstrip("0123456789 ")
        sums[kind] = sums.get(kind, 0) + size
    return sums


KINDS = {"model": "model", "dmodel": "gradients", "AdamW": "AdamW"}


def compiled_prediction(prediction: Prediction) -> Prediction:
    """A prediction without the figures that the compiler decides."""
    why = "the compiler decides what is allocated"
    record: Any = prediction.record
    for name in (*FIGURES, "workspace_bytes", "output_bytes", "reserved_bytes", "library_workspace_bytes"):
        if name not in ("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes"):
            setattr(record, name, None)
    record.status, record.reason, record.exact = "skipped", f"not predicted: {why}", False
    record.activations, record.terms, record.bounds, record.doubts = None, None, (), (why,)
    record.basis = None
    return dataclasses.replace(prediction, terms={}, exact=False, unknown=(why,), bounds=frozenset())


def predicted_figures(prediction: Prediction) -> dict[str, Any]:
    """The predicted figures that a measured record carries."""
    record: Any = prediction.record
    names = ("status", "reason", "oom_phase", "parameters", *FIGURES, "activations", "exact", "basis")
    unknown = {"unknown": prediction.unknown, "bounds": list(record.bounds)}
    return {**{name: getattr(record, name) for name in names}, **unknown}

"""Cases of the catalog as workloads, their predictions, and cases that differ in one setting."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memcheck.bench.catalog import CONTENDERS, Contender, batch_of, make_case
from memcheck.bench.operators import one_token
from memcheck.core.arguments import place_of
from memcheck.core.devices import Device, Version, device_named
from memcheck.core.errors import ExtensionError, MemcheckError, UnsupportedError, UsageError
from memcheck.core.options import named, options_of
from memcheck.core.prediction import Prediction, Trace
from memcheck.core.record import UNKNOWN, Doubt, Record
from memcheck.core.step import Place, as_place
from memcheck.core.tensors import named_tensors_in, overflow_as_out_of_memory
from memcheck.core.workload import Case, Operator, Terms, Workload
from memcheck.measure.compile import compiled
from memcheck.measure.sdpa_backend import fused_backend
from memcheck.predict import process
from memcheck.predict.replay import Replay, blank_record, certainty_of, target_at
from memcheck.predict.scratch import Target


@overflow_as_out_of_memory()
def prepare(case: Case) -> Workload:
    """The workload of the case. UnsupportedError if the operator has no decoding step."""
    contender = CONTENDERS[case.operator]
    state: Any = None
    parameters: tuple[Tensor, ...] = ()
    if case.mode == "decode":
        if contender.decode is None:
            raise UnsupportedError(f"{case.operator} has no decoding step")
        state = contender.decode.state(case)
        operator, inputs = contender.decode.step(case), (*contender.inputs(one_token(case)), state)
    else:
        parameters = contender.parameters(case)
        operator, inputs = contender.build(case), contender.inputs(case)
    call = bind(operator, parameters)
    # A module's own parameters count, even if it is wrapped.
    owned = (parameters, operator if any(True for _ in named_tensors_in(operator)) else ())
    return Workload(case, compiled(call) if case.compiled else call, inputs, owned, argument_names(operator), state)


def bind(operator: Operator, parameters: tuple[Tensor, ...]) -> Operator:
    """The operator as a function of its inputs alone, with the parameters bound."""
    return (lambda *inputs: operator(*inputs, *parameters)) if parameters else operator


def argument_names(operator: Operator) -> tuple[str, ...]:
    """The names of its positional arguments; empty if it has no signature."""
    try:
        parameters = inspect.signature(
            operator.forward if isinstance(operator, torch.nn.Module) else operator
        ).parameters
    except (TypeError, ValueError):  # C functions have no signature.
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in parameters.items() if parameter.kind in named)


def predict_case(
    case: Case,
    place: Place | Device | str = "cpu",
    *,
    dense_grad: bool = False,
    target: Target | None = None,
) -> Prediction:
    """The record that measuring the case at the place would give. Nothing is run or allocated.

    dense_grad: the gradient of the output is a full tensor, instead of one element expanded.
    target: replaces that of the place.

    Running out of memory is a result: status "oom", the phase, the request and the bytes in use. Compiled operators
    are predicted in a process of their own. Allocations that shapes do not determine are named in `unknown` and in the
    record's doubts. On CUDA the allocator of the process has cached nothing yet.

    ExtensionError: the operator is memcheck's own, and its extension, which plans its scratch, is missing.
    UsageError: the place has ranks, which are for models.
    """
    place = as_place(place).resolved()
    if place.ranks is not None:
        raise UsageError(f"{named('ranks')} split a model; {case.operator} is an operator")
    target = target or target_at(place)
    record = dataclasses.replace(blank_record(Record, place, target), **case.fields())
    contender = CONTENDERS[case.operator]
    if case.operator == "flex":  # Inductor writes it from a template.
        return unpredicted(case, place, record, "what flex_attention allocates under torch.compile is not predicted")
    if case.compiled and not process.IS_CHILD:
        if words := process.missing(place.for_device.kind):
            return unpredicted(case, place, record, words)
        options: dict[str, Any] = {"dense_grad": dense_grad, "target": target}
        try:
            prediction: Prediction = process.predicted(place.for_device, predict_case, case, place, **options)
            return prediction
        except UnsupportedError as error:
            return unpredicted(case, place, record, str(error))
    try:
        on_meta = dataclasses.replace(case, device="meta")
        # Compiled code is traced again, as it may be other code.
        trace = (traced.__wrapped__ if case.compiled else traced)(
            contender, on_meta, target, dense_grad, place.drop_workspaces is not False
        )
    except UnsupportedError as error:
        record.status, record.reason = "unsupported", str(error)
        return Prediction(case, place, record, {})
    except NotImplementedError as error:
        reason = str(error).strip().partition("\n")[0]
        return unpredicted(
            case, place, record, reason if case.compiled else f"it does not run on meta tensors: {reason}"
        )
    except torch.OutOfMemoryError as error:
        record.status, record.reason = "oom", f"the inputs alone do not fit: {error}"
        return Prediction(case, place, record, {})
    if case.compiled:
        record.backend = "inductor"
    elif contender.backend is not None:
        record.backend = contender.backend(dataclasses.replace(case, device=place.for_device.kind))
    else:
        record.backend = next(filter(None, map(fused_backend, trace.operators)), contender.unfused)
    return Replay(trace, case, place, record, certainty=certainty_of(trace, case.dtype, place, target)).prediction()


def predicted_of_case(case: Case, *places: Any, dense_grad: bool = False, **options: Any) -> Prediction:
    """predict_memory of a case of the catalog, at a place or at a device with the options of a Place."""
    known = [*(name for name in options_of(Place) if name != "ranks"), "place", "dense_grad"]
    if wrong := [name for name in options if name not in known]:
        raise TypeError(f"predict_memory of a Case takes {', '.join(known)}, not {wrong[0]}: the Case says all else")
    return predict_case(case, place_of("predict_memory", places, options), dense_grad=dense_grad)


def predicted_or_skipped(case: Case, place: Place | Device | str, *, dense_grad: bool = False) -> Prediction:
    """predict_case, but skipped with the reason if the case is of an operator whose extension is missing."""
    place = as_place(place).resolved()
    try:
        return predict_case(case, place, dense_grad=dense_grad)
    except ExtensionError as error:
        record = dataclasses.replace(blank_record(Record, place, target_at(place)), **case.fields())
        return unpredicted(case, place, record, str(error))


def unpredicted(case: Case, place: Place, record: Record, why: str) -> Prediction:
    record.status, record.reason, record.doubts = "skipped", f"not predicted: {why}", (Doubt(why, UNKNOWN),)
    return Prediction(case, place, record, {})


@functools.lru_cache(maxsize=128)
def traced(
    contender: Contender,
    case: Case,
    target: Target,
    dense_grad: bool,
    drop_workspaces: bool,
) -> Trace:
    """Traces the case. contender: passed explicitly because names can be registered again."""
    from memcheck.predict.trace_runner import TraceRunner  # Loaded with the first prediction.

    return TraceRunner(target, dense_grad=dense_grad, drop_workspaces=drop_workspaces).trace(prepare(case))


# The fields that a measured record's terms cover.
TERM_FIELDS = ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "state_bytes")


def terms_of(case: Case, torch_version: Version | None = None) -> Terms | None:
    """The predicted terms of the fields that are known to the byte, on the case's device without a limit.

    None if no field is known, as for memcheck's operators without the extension. Without that GPU in this machine,
    cuBLAS's workspaces are left out.
    """
    kind = case.device.partition(":")[0]
    device = Device(kind, kind, None, 0, None, "")
    if kind == "cpu" or torch.cuda.is_available():
        device = dataclasses.replace(device_named(case.device), usable_bytes=None)
    place = Place(device, torch_version=torch_version)
    target = target_at(place)
    if device.architecture is None and kind != "cpu":
        # Without the workspaces from the start, so that they do not decide which moment is the fullest.
        target = dataclasses.replace(target, has_workspaces=False)
    try:
        prediction = predict_case(case, place, target=target)
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


# Attentions that are proposed in place of another; the first computes the same as naive.
OTHERS = ("softmax", "compressed", "linear-causal", "softplus")


def single_changes(case: Case) -> Iterator[tuple[str, Case]]:
    """The flags and the case of each change: half the batch, or half the length; a 16-bit dtype; other attentions.

    For packed and padded sequences: half their lengths, and packed in place of padded.
    """
    if case.lengths is not None:
        if case.layout == "padded":
            yield "--packed", dataclasses.replace(case, **batch_of(case.lengths, "packed"))
        halves = [math.ceil(length / 2) for length in case.lengths]
        yield (
            f"--lengths {','.join(map(str, halves))}",
            dataclasses.replace(case, **batch_of(halves, case.layout or "")),
        )
    elif case.bsz > 1:
        yield f"--bsz {case.bsz // 2}", dataclasses.replace(case, bsz=case.bsz // 2)
    elif case.mode == "decode" and case.kv_len:
        yield f"--kv-len {case.kv_len // 2}", dataclasses.replace(case, kv_len=case.kv_len // 2)
    elif case.query_len > 1 and case.kv_len in (None, case.query_len):
        half = case.query_len // 2
        yield f"--seq-len {half}", dataclasses.replace(case, query_len=half, kv_len=case.kv_len and half)
    if case.dtype in ("float32", "float64"):
        yield "--dtype bf16", dataclasses.replace(case, dtype="bfloat16")
    for name in OTHERS if case.kv_len is not None else ():
        if name == case.operator.partition("/")[0]:
            continue
        try:
            yield f"--attention-type {name}", like(case, name)
        except MemcheckError:  # It does not take the sizes or the mask.
            continue


def like(case: Case, name: str) -> Case:
    """The case of another attention, with its default core dimension and factor."""
    sizes = {field: getattr(case, field) for field in ("bsz", "query_len", "kv_len", "lengths", "dim", "dtype", "mode")}
    return make_case(
        name,
        **sizes,
        heads=case.heads or 1,
        core_dim=case.core_dim,
        factor=case.factor,
        causal=case.causal is not False,
        compiled=case.compiled,
    )

"""Measures a step on a device that is simulated here. The device's log says what its record's figures are made of."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memcheck.core import devices, optimizers, options, tensors, units
from memcheck.core.errors import UsageError
from memcheck.core.prediction import Prediction
from memcheck.core.record import Certainty, Record, Terms
from memcheck.core.step import Place, Step
from memcheck.core.trace import ANY_PHASE, WARM_UP, Allocation, Trace
from memcheck.measure.compile import compiled
from memcheck.measure.run import MeasuredCall, MeasuredRun
from memcheck.predict import evidence, ranks
from memcheck.predict.watch import KeepingMachine, Watch
from memcheck.simulated.log import CpuLog, DeviceLog, GpuLog
from memcheck.simulated.rules import UNKNOWN
from memcheck.simulated.scratch import Unknown, Unlisted

OTHER_KERNELS = "what kernels of another version of torch take on the CPU: those of the installed one ran"


@contextmanager
def recorded(kind: str) -> Iterator[DeviceLog]:
    """The log of the device of this kind that is simulated here, which begins."""
    if kind == "cuda":
        yield GpuLog()
        return
    log = CpuLog()
    try:
        yield log
    finally:
        log.close()


def compiled_frames() -> int:
    """How many frames torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters["frames"]["total"] if dynamo is not None else 0


def predicted_here(
    step: Step, place: Place, heard_by: Any, limit_bytes: int | None, heard: Iterable[str]
) -> Prediction:
    """As predicted_once. If code was compiled on the way, the step runs again, as that costs memory of its own."""
    before = compiled_frames()
    how = place, heard_by, limit_bytes, heard
    with optimizers.attributes_kept(tensors.module_called(step.model)):
        prediction = predicted_once(step, *how)
    if is_compiled(step.model) or step.compile or compiled_frames() == before:
        return prediction
    torch._dynamo.reset()  # That code may have hooks of modules in it.
    return predicted_once(step, *how, compiles=True)


def predicted_once(
    step: Step,
    place: Place,
    heard_by: Any,
    limit_bytes: int | None = None,
    heard: Iterable[str] = (),
    compiles: bool = False,
) -> Prediction:
    """The measurement of the step on the device of the place, which is simulated here, with the trace of it.

    heard_by: a context in which the function that it is given gets the device's doubts. heard: those of before.
    compiles: whether torch.compile is known to compile code; is_compiled finds it in the model alone.
    """
    device, target = place.for_device, evidence.target_at(place)
    unknown: dict[str, dict[str, None]] = {ANY_PHASE: dict.fromkeys(heard)} if heard else {}
    module = tensors.module_called(step.model)
    for part in module.modules() if module is not None else ():
        if device.kind == "cuda" and isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # As module.cuda() does.
    if step.compile:
        if device.kind == "cuda" and importlib.util.find_spec("triton") is None:
            raise UsageError(f"{options.named('compile')} for a GPU needs triton: pip install triton")
        step = dataclasses.replace(step, model=compiled(step.model))
    call = MeasuredCall(step, device.kind)
    check_optimizers(call)
    compiles = compiles or is_compiled(step.model)
    if compiles:
        with optimizers.attributes_kept(module):
            MeasuredRun(call).measure()  # Compiles.
        if device.kind == "cuda":
            torch.cuda.empty_cache()
    with recorded(device.kind) as log:

        def hear(words: str) -> None:
            words = words if isinstance(words, Unknown) else UNKNOWN.get(words, Unlisted(words))
            unknown.setdefault(log.phase, {}).setdefault(words)

        if device.kind == "cuda" and not place.drop_workspaces:
            call.machine = KeepingMachine(call.device.index or 0, log)
        if words := devices.untried(target.torch_version):
            unknown.setdefault(ANY_PHASE, {})[words] = None
        for phase, found in ranks.unknown_of(place.ranks, device.kind).items() if place.ranks is not None else ():
            unknown.setdefault(phase, {}).update(dict.fromkeys(found))
        if device.kind == "cpu" and target.torch_version != devices.running():
            unknown.setdefault(ANY_PHASE, {})[OTHER_KERNELS] = None
        watch = Watch(call, log, hear)
        beside = sum(one.bytes for one in watch.trace.preexisting if not one.is_library)
        run = watch.run = MeasuredRun(call, limit_bytes, phase=watch.phase, earlier=watch.earlier, beside_bytes=beside)
        with ExitStack() as stack:
            stack.enter_context(heard_by(hear))
            if not compiles:
                stack.enter_context(log.modules.of(module))
            if place.ranks is not None:
                stack.enter_context(ranks.Collectives(log, place.ranks, target, hear))
            record = run.measure()
        trace = watch.finish()
        trace.unknown = {phase: tuple(words) for phase, words in unknown.items()}
        record = as_predicted(record, step, place)
        segments = segments_by_kind() if device.kind == "cuda" else None
    return predicted(step, place, record, trace, segments)


def check_optimizers(call: MeasuredCall) -> None:
    """UsageError: the step's factory made optimizers of other parameters than the model's, which were not sent."""
    module = tensors.module_called(call.step.model)
    if module is None or not callable(call.step.optimizer):
        return
    own = set(map(id, module.parameters()))
    stepped = [part for optimizer in call.optimizers for group in optimizer.param_groups for part in group["params"]]
    if stepped and own.isdisjoint(map(id, stepped)):
        rule = "must make an optimizer of the parameters, or of the model, that it is given"
        raise UsageError(f"{options.named('optimizer')} {rule}: a prediction runs on a copy of the model")


def is_compiled(model: Any) -> bool:
    """Whether torch.compile has made the callable, or a part of it."""
    module = tensors.module_called(model)
    parts = [model] if module is None else [*module.modules()]
    names = "_orig_mod", "_compiled_call_impl", "_torchdynamo_orig_callable"
    return any(getattr(part, name, None) is not None for part in parts for name in names)


def as_predicted(measured: Record, step: Step, place: Place) -> Record:
    """The measured record as one of the place."""
    blank = evidence.blank_record(place, evidence.target_at(place))
    names = "source", "device", "device_name", "device_total_bytes", "torch_version", "allocator", "threads"
    facts = {name: getattr(blank, name) for name in names}
    facts |= dict.fromkeys(("device_index", "device_uuid", "device_free_bytes", "certainty"))
    return dataclasses.replace(measured, operator=step.name, mode=step.mode, dtype=step.dtype, **facts)


def predicted(step: Any, place: Place, record: Record, trace: Trace, segments: dict[str, int] | None) -> Prediction:
    """The prediction with this record, whose terms, doubts and certainty are filled in. segments: as of terms_of."""
    device = place.for_device
    record.terms = terms_of(trace, record, segments, device.context_bytes)
    phases = trace.phases.keys() - {"inputs", WARM_UP}
    unknown = [*evidence.unknown_allocations(trace, record, phases, device)]
    certainty = evidence.certainty_of(trace, record.dtype or "", place, evidence.target_at(place))
    record.certainty = Certainty.VERIFIED if certainty is Certainty.EXACT and unknown else certainty
    record.doubts = (*unknown, *record.doubts, *evidence.doubts_of_verdict(trace, record, phases, place))
    known = evidence.evidence_of(trace.operators, device.architecture) if device.kind == "cuda" else None
    return Prediction(step, place, record, record.terms, trace, evidence=known)


def segments_by_kind() -> dict[str, int]:
    """Reserved bytes by kind of segment."""
    found: dict[str, int] = {}
    for segment in torch.cuda.memory_snapshot():
        small, size = segment["segment_type"] == "small", segment["total_size"]
        unit = 2 if small or size == 2 * 2**20 else 20
        kind = f"{'pages' if segment.get('is_expandable') else 'segments'} of {unit} MiB"
        if small:
            kind += ", small pool"
        elif not segment.get("is_expandable") and size != unit * 2**20:
            kind = "larger segments"
        found[kind] = found.get(kind, 0) + size
    return found


def terms_of(trace: Trace, record: Record, segments: dict[str, int] | None, context_bytes: int | None) -> Terms:
    """The summands of the record's figures: field -> name -> bytes."""
    terms: Terms = {}

    def note(field: str, sizes: Iterable[tuple[str, int]]) -> None:
        terms[field] = numbered(sizes)

    def alive(event: int) -> Iterator[tuple[str, int]]:
        return ((one.name, one.bytes) for one in trace.log.alive(event))

    roles = {"input": trace.inputs, "parameter": [one for one in trace.parameters if one not in trace.inputs]}
    roles |= {"optimizer": trace.optimizer} if trace.has_optimizer else {}
    if "forward" in trace.phases:
        roles |= {"output": trace.outputs, "saved": trace.saved}
    if "backward" in trace.phases:
        roles |= {"gradient": trace.gradients}
    for role, allocations in roles.items():
        note(f"{role}_bytes", ((one.name, one.bytes) for one in allocations))
    fullest = 0, 0
    for phase in ("forward", "backward", "optimizer"):
        if phase not in trace.phases or getattr(record, f"{phase}_peak_bytes") is None:
            continue
        (_, event), in_blocks = highest(trace, phase, "bytes"), highest(trace, phase, "block_bytes")
        note(f"{phase}_peak_bytes", alive(event))
        if segments is not None:
            fullest = max(fullest, in_blocks, key=lambda moment: moment[0])
            if phase != "optimizer":
                blocks = trace.log.alive(fullest[1])
                note(f"{phase}_max_allocated_bytes", ((block_name(one), one.block_bytes) for one in blocks))
    if segments is not None:
        terms["reserved_bytes"] = segments
        if record.status == "ok":
            record.max_allocated_bytes = fullest[0]
        if context_bytes is not None:
            terms["process_bytes"] = {**segments, "CUDA context": context_bytes}
            record.process_bytes = sum(terms["process_bytes"].values())
        record.library_workspace_bytes = library_bytes(trace)
    return {field: found for field, found in terms.items() if getattr(record, field) is not None}


def highest(trace: Trace, phase: str, size: str) -> tuple[int, int]:
    """The highest sum of a phase, and its event. size: what is summed, an attribute of allocations."""
    first, last = trace.phases[phase]
    now = sum(getattr(one, size) for one in trace.log.alive(first))
    best = now, first
    for event, (one, taken) in enumerate(trace.log.events[first:last], first + 1):
        now += getattr(one, size) if taken else -getattr(one, size)
        if now > best[0]:
            best = now, event
    return best


def library_bytes(trace: Trace) -> int:
    """The most that library workspaces take, at the end of a phase or at its peak."""
    moments = []
    for phase in ("forward", "backward"):
        if phase in trace.phases:
            first, last = trace.phases[phase]
            events = reversed(trace.log.events[first:last])
            dropped = itertools.takewhile(lambda event: event[0].is_library and not event[1], events)
            moments.append([*trace.log.alive(last), *(one for one, _ in dropped)])
            moments.append(trace.log.alive(highest(trace, phase, "bytes")[1]))
    return max((sum(one.bytes for one in alive if one.is_library) for alive in moments), default=0)


def block_name(one: Allocation) -> str:
    """The allocation's name, with the reason if its block is larger than the rounded size."""
    if one.block_bytes <= -(-one.bytes // 512) * 512:
        return one.name
    return f"{one.name} of {units.format_bytes(one.bytes)}, for which a larger block was taken whole"


def numbered(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Name -> bytes; a repeated name becomes "name 2"."""
    terms: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, size in sizes:
        counts[name] = count = counts.get(name, 0) + 1
        key = name if count == 1 else f"{name} {count}"
        while key in terms:
            counts[name] = count = count + 1
            key = f"{name} {count}"
        terms[key] = size
    return terms

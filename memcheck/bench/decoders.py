"""Whole decoders as cases: their sizes, the step of a case with its loss and AdamW, its record and its prediction."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from memcheck.bench.profile import check_can_measure
from memcheck.core.arguments import argument
from memcheck.core.converters import count, size_in_bytes
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.prediction import AllocationLog
from memcheck.core.record import Record
from memcheck.core.step import Place, Step, as_place
from memcheck.core.tensors import overflow_as_out_of_memory
from memcheck.core.units import format_bytes
from memcheck.core.workload import DEFAULT_FACTOR, DTYPES, SHORT_DTYPES, module_called
from memcheck.measure.compile import with_generated_code
from memcheck.measure.export import write_snapshot, write_trace
from memcheck.measure.measurement import machine_facts, measure_memory, measure_time
from memcheck.measure.modules import kept_by_component, ranges_around_modules
from memcheck.measure.tracker import track
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS, Decoder
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.api import predict_memory
from memcheck.predict.autocast import autocast_followed
from memcheck.predict.device_functions import DeviceFunctions
from memcheck.predict.replay import blank_record, target_at

DEFAULT_PASSES = 10
TIMING_SECONDS = 10.0  # Passes per case, unless the number was requested.
MODES = ("forward", "backward", "train")


@dataclass(frozen=True)
class DecoderSize:
    """The sizes of a decoder: E, F, the number of layers, H and V."""

    dim: int
    feed_forward_dim: int
    layers: int
    heads: int
    vocabulary: int = 10_000


# The sizes of the CS336 course, one for tests, and the one that benchmarks/language_model.py trains.
SIZES = {
    "tiny": DecoderSize(64, 256, 2, 2, vocabulary=512),
    "mini": DecoderSize(96, 256, 3, 3, vocabulary=56),
    "small": DecoderSize(768, 3072, 12, 12),
    "medium": DecoderSize(1024, 4096, 24, 16),
    "large": DecoderSize(1280, 5120, 36, 20),
    "xl": DecoderSize(1600, 6400, 48, 25),
    "2.7B": DecoderSize(2560, 10240, 32, 32),
}


class LanguageModel(Decoder):
    """A decoder with its loss."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets (B,S) -> the mean negative log-likelihood of the targets"""
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class ComparedByTests:
    """A probe for the decoder that runs nothing: tests compare all of its functions with their predictions."""

    def __call__(self, *_: Any) -> None:
        return None

    def check(self, call: Any) -> None:
        return None


@dataclass(frozen=True)
class DecoderCase:
    """One size of the decoder with one attention, at one context length.

    mode: "forward" is inference, under no_grad; "backward" a forward and a backward; "train" these and AdamW's step.
    dtype: of the parameters. autocast: the dtype of torch.autocast, or None. factor, window: of compressed attention
    alone, which other attentions ignore.

    UsageError with the flag, the rule and the value if a field is invalid.
    """

    size: str
    attention_type: str = "softmax"
    feed_forward: str = "swiglu"
    bsz: int = 1
    context: int = 128
    factor: int | None = None
    window: int | None = None
    mode: str = "train"
    dtype: str = "float32"
    autocast: str | None = None
    checkpointing: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        is_compressed = self.attention_type == "compressed"
        factor = (DEFAULT_FACTOR if self.factor is None else self.factor) if is_compressed else None
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "window", self.window if is_compressed else None)
        known: dict[str, Iterable[str]] = {"size": SIZES, "attention_type": ATTENTIONS}
        known |= {"feed_forward": FEED_FORWARDS, "mode": MODES}
        for name, names in known.items():
            if (given := getattr(self, name)) not in [*names]:
                raise unknown_name(named(name), given, names)
        if self.dtype not in DTYPES:
            raise unknown_name(named("dtype"), self.dtype, (*SHORT_DTYPES, *DTYPES))
        for name in ("bsz", "context", "factor", "window"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UsageError(f"{named(name)} must be at least 1, got {given}")
        if self.autocast is not None and self.dtype != "float32":
            raise UsageError(f"{named('autocast')} needs parameters in float32, got {named('dtype')} {self.dtype}")

    def fields(self) -> dict[str, Any]:
        """The fields of a record of the case. Its operator is the attention, and its lengths are the context."""
        own = {name: value for name, value in vars(self).items() if name not in ("attention_type", "context")}
        sizes = SIZES[self.size]
        heads = None if self.attention_type == "softplus" else sizes.heads
        lengths = {"query_len": self.context, "kv_len": self.context}
        return {"operator": self.attention_type, **lengths, "causal": True, "dim": sizes.dim, "heads": heads, **own}

    @overflow_as_out_of_memory()
    def model(self, device: str) -> LanguageModel:
        """The decoder on a device, or on "meta"."""
        sizes = SIZES[self.size]
        model = LanguageModel(
            *(sizes.vocabulary, sizes.dim, sizes.feed_forward_dim, sizes.layers, sizes.heads),
            context=self.context,
            attention=self.attention_type,
            factor=self.factor or DEFAULT_FACTOR,
            window=self.window,
            feed_forward=self.feed_forward,
            checkpointing=self.checkpointing,
            device=device,
            dtype=DTYPES[self.dtype],
        )
        if self.compiled:
            model.compile(dynamic=False)
        return model

    @overflow_as_out_of_memory()
    def step(self, device: str) -> Step:
        """The step on a device, or on "meta": of the logits in "forward" mode, else of the loss, with random tokens."""
        model = self.model(device)
        if self.mode == "forward":
            return Step(model, self.tokens(device), backward=False, autocast=self.autocast)
        optimizer = "adamw" if self.mode == "train" else None
        inputs = self.tokens(device), self.tokens(device)
        return Step(model.loss, inputs, optimizer=optimizer, autocast=self.autocast)

    def tokens(self, device: str) -> Tensor:
        """Random token ids (B,S)."""
        shape = self.bsz, self.context
        if device == "meta":
            return torch.empty(shape, dtype=torch.int64, device=device)
        generator = torch.Generator(device).manual_seed(0)
        return torch.randint(SIZES[self.size].vocabulary, shape, generator=generator, device=device)


def predict_decoder(case: DecoderCase, place: Place | Device | str = "cpu") -> Record:
    """The record that measuring the case at the place would give. Nothing is run or allocated."""
    place = dataclasses.replace(as_place(place).resolved(), drop_workspaces=True)
    try:
        step = case.step("meta")
        record = predict_memory(step, place, probes=ComparedByTests()).record
    except torch.OutOfMemoryError as error:
        reason = f"predicted: {error} does not fit"
        blank = blank_record(Record, place, target_at(place))
        return dataclasses.replace(blank, **case.fields(), status="oom", reason=reason)
    record.terms = None  # Those of all tensors would dominate a folder's records.
    if record.status in ("ok", "oom") and case.mode != "forward":
        target = target_at(place)
        followed = autocast_followed(target.kind, target.torch_version)
        with followed, AllocationMode(AllocationLog(), target) as mode, DeviceFunctions(mode):
            counts = mode.storages.allocation_of
            record.kept_by_part = kept_by_part(step, target.kind, lambda tensor: counts(tensor) is not None)
    return dataclasses.replace(record, **case.fields())


def kept_by_part(step: Step, kind: str, counts: Callable[[Tensor], bool]) -> dict[str, int]:
    """Module path -> bytes kept for backward by one more forward. kind: of autocast. counts: which tensors count."""
    model = module_called(step.model)
    assert model is not None

    def run() -> Any:
        with torch.autocast(kind, step.autocast) if step.autocast else nullcontext():
            return step.model(*step.inputs)

    return kept_by_component(model, run, step.inputs, counts=counts)


def profile_decoder(
    case: DecoderCase,
    device: str,
    *,
    timed: bool = True,
    passes: int | None = None,
    memory_limit: int | str | None = None,
    nvtx: bool = False,
) -> tuple[Record, Record | None]:
    """The record of a decoder and its prediction: its memory, what each part keeps, then its time, in separate passes.

    A case whose prediction exceeds the memory that the machine has left is not run; its status is "skipped". A case
    that exceeds memory_limit is "oom", and errors are recorded. nvtx: a range around every module, for use inside
    memcheck.measure.export.nvtx_ranges.
    """
    limit_bytes = argument("memory_limit", memory_limit, size_in_bytes)
    passes = argument("passes", passes, count)
    check_can_measure(device)
    record, predicted = Record(**machine_facts(device), **case.fields()), None
    try:
        predicted = predict_decoder(case, dataclasses.replace(Place(device).unlimited, memory_limit=limit_bytes))
        if (refusal := beyond_this_machine(predicted, record)) is not None:
            record.status, record.reason = "skipped", refusal
        else:
            step, record = run_decoder(case, device, record, limit_bytes)
            if timed and record.status == "ok":
                record = timed_decoder(step, device, record, passes, nvtx)
    except torch.OutOfMemoryError as error:
        record.status, record.reason = "oom", f"the model alone does not fit: {str(error).partition(chr(10))[0]}"
    except NotImplementedError as error:
        record.status, record.reason = "unsupported", str(error)
    except UsageError:
        raise
    except Exception as error:
        record.status, record.reason = "error", f"{type(error).__name__}: {error}"
    return record, predicted


def beyond_this_machine(prediction: Record, machine: Record) -> str | None:
    """Why the prediction exceeds the machine; None if it does not."""
    room = machine.device_free_bytes if machine.device == "cpu" else machine.device_total_bytes
    peak = max(prediction.peaks.values(), default=None)
    if peak is None or room is None or peak <= room:
        return None
    return f"predicted: {format_bytes(peak)}, above the {format_bytes(room)} that this machine has left"


def run_decoder(case: DecoderCase, device: str, machine: Record, limit_bytes: int | None) -> tuple[Step, Record]:
    """The step of the case on the device, and the record of its memory."""
    room = limit_bytes
    if machine.device == "cpu":  # Beyond what is free the kernel would kill the process.
        room = min(limit_bytes or sys.maxsize, machine.device_free_bytes or sys.maxsize)
    with track(device=device, saved=False, memory_limit=room):
        step = case.step(device)

    def measure() -> Record:
        return measure_memory(step, Place(device, memory_limit=room))

    if case.compiled:
        # Runs once before to compile, with the same hooks open, because torch.compile depends on them.
        with_generated_code(measure)
    record = dataclasses.replace(measure(), **case.fields())
    if record.status == "ok" and case.mode != "forward" and not case.compiled:
        here = step.inputs[0].device
        record.kept_by_part = kept_by_part(step, here.type, lambda tensor: tensor.device == here)
    return step, record


def timed_decoder(step: Step, device: str, record: Record, passes: int | None, nvtx: bool) -> Record:
    """The record with its times."""
    with ranges_around(step) if nvtx and torch.cuda.is_available() else nullcontext():
        seconds = None if passes else TIMING_SECONDS
        times = measure_time(step, Place(device), passes=passes or DEFAULT_PASSES, max_seconds=seconds)
    return dataclasses.replace(record, **{**times, "doubts": record.doubts + tuple(times["doubts"])})


def snapshot_decoder(case: DecoderCase, device: str, path: Path) -> Path:
    """Writes the memory of one pass over time; see memcheck.measure.export.write_snapshot."""
    return write_snapshot(case.step(device), path=path)


def trace_decoder(case: DecoderCase, device: str, path: Path) -> list[dict[str, Any]]:
    """Writes torch.profiler's trace of a pass, with a range for every module, and returns who took the time."""
    step = case.step(device)
    with ranges_around(step, torch.profiler.record_function):
        return write_trace(step, path=path)


def ranges_around(step: Step, kind: Any = torch.cuda.nvtx.range) -> Any:
    """A context with a range around every module of the step's model."""
    model = module_called(step.model)
    assert model is not None
    return ranges_around_modules(model, kind)

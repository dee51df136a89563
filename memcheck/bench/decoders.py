"""Whole decoders as cases: their sizes, and the step of a case with its loss and AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from memcheck.bench.case import DEFAULT_FACTOR, DTYPES
from memcheck.bench.predict import predict_memory_of
from memcheck.core import converters, tensors
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.record import Record
from memcheck.core.step import Step
from memcheck.measure.modules import kept_by_component
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS, Decoder
from memcheck.predict.api import INSTEAD

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
    device: str = "cpu"
    timing_seconds: ClassVar[float] = 10.0  # Timed passes end then, unless their number was requested.

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
            raise unknown_name(named("dtype"), self.dtype, (*converters.SHORT_DTYPES, *DTYPES))
        for name in ("bsz", "context", "factor", "window"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UsageError(f"{named(name)} must be at least 1, got {given}")
        if self.autocast is not None and self.dtype != "float32":
            raise UsageError(f"{named('autocast')} needs parameters in float32, got {named('dtype')} {self.dtype}")

    def fields(self) -> dict[str, Any]:
        """The fields of a record of the case. Its operator is the attention, and its lengths are the context."""
        own = {name: value for name, value in vars(self).items() if name not in ("attention_type", "context", "device")}
        sizes = SIZES[self.size]
        heads = None if self.attention_type == "softplus" else sizes.heads
        lengths = {"query_len": self.context, "kv_len": self.context}
        return {"operator": self.attention_type, **lengths, "causal": True, "dim": sizes.dim, "heads": heads, **own}

    @property
    def name(self) -> str:
        return f"{self.size} {self.attention_type}"

    @property
    def maker(self) -> Callable[[DecoderCase], Step]:
        """What makes the step of such a case."""
        return DecoderCase.step

    def backend(self, operators: Iterable[str] | None) -> None:
        """Not one: each layer may run another."""

    def note(self, step: Step, record: Record) -> Record:
        """The record of the step with the case, and with what each part keeps."""
        record = dataclasses.replace(record, **self.fields(), terms=None)  # Terms of all tensors would be most of it.
        if step.backward and record.status == "ok" and not self.compiled:
            record.kept_by_part = kept_by_part(step)
        return record

    @tensors.overflow_as_out_of_memory()
    def model(self) -> LanguageModel:
        """The decoder on the case's device."""
        sizes = SIZES[self.size]
        model = LanguageModel(
            *(sizes.vocabulary, sizes.dim, sizes.feed_forward_dim, sizes.layers, sizes.heads),
            context=self.context,
            attention=self.attention_type,
            factor=self.factor or DEFAULT_FACTOR,
            window=self.window,
            feed_forward=self.feed_forward,
            checkpointing=self.checkpointing,
            device=self.device,
            dtype=DTYPES[self.dtype],
        )
        if self.compiled:
            model.compile(dynamic=False)
        return model

    @tensors.overflow_as_out_of_memory()
    def step(self) -> Step:
        """The step on the case's device: of the logits in "forward" mode, else of the loss, with random tokens."""
        model = self.model()
        if self.mode == "forward":
            return Step(model, self.tokens(), backward=False, autocast=self.autocast)
        optimizer = "adamw" if self.mode == "train" else None
        inputs = self.tokens(), self.tokens()
        return Step(model.loss, inputs, optimizer=optimizer, autocast=self.autocast)

    def tokens(self) -> Tensor:
        """Random token ids (B,S)."""
        shape = self.bsz, self.context
        if self.device == "meta":
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(SIZES[self.size].vocabulary, shape, generator=generator, device=self.device)


def kept_by_part(step: Step) -> dict[str, int]:
    """Module path -> bytes kept for backward by one more forward."""
    model, here = tensors.module_called(step.model), step.inputs[0].device
    assert model is not None

    def run() -> Any:
        with torch.autocast(here.type, step.autocast) if step.autocast else nullcontext():
            return step.model(*step.inputs)

    return kept_by_component(model, run, step.inputs, counts=lambda tensor: tensor.device == here)


INSTEAD[DecoderCase] = predict_memory_of

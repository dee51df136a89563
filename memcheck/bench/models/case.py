"""Whole models as cases: their sizes, and the workload of a case with its loss and its optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from memcheck.core.case import DEFAULT_FACTOR, DTYPES, SHORT_DTYPES
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.tensors import overflow_as_out_of_memory
from memcheck.core.workload import Workload
from memcheck.measure.compile import compiled
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS, Decoder

MODES = ("forward", "backward", "train")


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder: E, F, the number of layers, H and V."""

    dim: int
    feed_forward_dim: int
    layers: int
    heads: int
    vocabulary: int = 10_000


# The sizes of the CS336 course, one for tests, and the one that benchmarks/language_model.py trains.
SIZES = {
    "tiny": ModelSize(64, 256, 2, 2, vocabulary=512),
    "mini": ModelSize(96, 256, 3, 3, vocabulary=56),
    "small": ModelSize(768, 3072, 12, 12),
    "medium": ModelSize(1024, 4096, 24, 16),
    "large": ModelSize(1280, 5120, 36, 20),
    "xl": ModelSize(1600, 6400, 48, 25),
    "2.7B": ModelSize(2560, 10240, 32, 32),
}


@dataclass(frozen=True)
class ModelCase:
    """One size of the decoder with one attention, at one context length.

    mode: "forward" is inference, under no_grad; "backward" a forward and a backward; "train" these and AdamW's step.
    dtype: of the parameters. autocast: the dtype of torch.autocast, or None.
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

    @property
    def sizes(self) -> ModelSize:
        """The sizes that `size` names."""
        return SIZES[self.size]

    @property
    def kind(self) -> str:
        """The device's type: "cpu", "cuda" or "meta"."""
        return self.device.partition(":")[0]


def make_model_case(
    size: str, *, attention_type: str = "softmax", factor: int | None = None, window: int | None = None, **fields: Any
) -> ModelCase:
    """A checked case. UsageError with the flag, the rule and the value if it is invalid."""
    blocks: Any = {"factor": DEFAULT_FACTOR if factor is None else factor, "window": window}
    case = ModelCase(size, attention_type, **(blocks if attention_type == "compressed" else {}), **fields)
    check_known(named("size"), size, SIZES)
    check_known(named("attention_type"), attention_type, ATTENTIONS)
    check_known(named("feed_forward"), case.feed_forward, FEED_FORWARDS)
    check_known(named("mode"), case.mode, MODES)
    if case.dtype not in DTYPES:
        raise unknown_name(named("dtype"), case.dtype, (*SHORT_DTYPES, *DTYPES))
    for name in ("bsz", "context", "factor", "window"):
        given = getattr(case, name)
        if given is not None and given < 1:
            raise UsageError(f"{named(name)} must be at least 1, got {given}")
    if case.autocast is not None and case.dtype != "float32":
        raise UsageError(f"{named('autocast')} needs parameters in float32, got {named('dtype')} {case.dtype}")
    return case


def check_known(flag: str, name: str, known: Any) -> None:
    if name not in known:
        raise unknown_name(flag, name, known)


def parameter_tensors(case: ModelCase) -> int:
    """The number of parameter tensors."""
    # Embedding, head and norm; per layer two norms, four projections and the feed-forward's.
    return 3 + case.sizes.layers * (6 + (3 if case.feed_forward == "swiglu" else 1))


def build_decoder(case: ModelCase) -> Decoder:
    sizes = case.sizes
    return Decoder(
        sizes.vocabulary,
        sizes.dim,
        sizes.feed_forward_dim,
        sizes.layers,
        sizes.heads,
        context=case.context,
        attention=case.attention_type,
        factor=case.factor or DEFAULT_FACTOR,
        window=case.window,
        feed_forward=case.feed_forward,
        checkpointing=case.checkpointing,
        device=case.device,
        dtype=DTYPES[case.dtype],
    )


@overflow_as_out_of_memory()
def prepare_model(case: ModelCase, kind: str | None = None) -> Workload:
    """The workload of the case: the model's logits in "forward" mode, else its loss.

    kind: the device that a case on "meta" stands for, "cpu" or "cuda".
    """
    decoder = build_decoder(case).requires_grad_()
    autocast = autocast_of(case, kind or case.kind)
    run = ModelRun(decoder, autocast, case.compiled)
    operator, tensors = (run.logits, 1) if case.mode == "forward" else (run.loss, 2)
    owners: dict[str, Any] = {"model": decoder}
    step = None
    if case.mode == "train":
        optimizer = make_optimizer(decoder, kind or case.kind)
        owners["AdamW"], step = optimizer_state(optimizer), optimizer.step
    return Workload(case, operator, token_ids(case, tensors), ((), owners), ("tokens", "targets"), optimizer_step=step)


class ModelRun:
    """Computes a decoder's logits or its loss, under autocast and compiled if asked."""

    def __init__(self, decoder: Decoder, autocast: Callable[[], AbstractContextManager[Any]], compile_: bool) -> None:
        self.decoder = decoder
        self.call = compiled(decoder) if compile_ else decoder
        self.autocast = autocast

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens (B,S) -> (B,S,V)"""
        with self.autocast():
            logits: Tensor = self.call(tokens)
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets (B,S) -> the mean negative log-likelihood of the targets"""
        with self.autocast():
            return cross_entropy(self.call(tokens).flatten(0, 1), targets.flatten())


def autocast_of(case: ModelCase, kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the case's autocast context, on the kind of device."""
    if case.autocast is None:
        return nullcontext
    dtype = DTYPES[case.autocast]
    return lambda: torch.autocast(kind, dtype)


def token_ids(case: ModelCase, count: int) -> tuple[Tensor, ...]:
    """Random token ids, each (B,S) of int64."""
    shape = case.bsz, case.context
    if case.device == "meta":
        return tuple(torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(count))
    generator = torch.Generator(case.device).manual_seed(0)
    options: Any = {"generator": generator, "device": case.device}
    return tuple(torch.randint(case.sizes.vocabulary, shape, **options) for _ in range(count))


def make_optimizer(decoder: Decoder, kind: str) -> torch.optim.AdamW:
    """AdamW as torch implements it on the device by default, after one step on zero gradients, so that it has state."""
    optimizer = torch.optim.AdamW(decoder.parameters(), foreach=kind == "cuda")
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """The state by name: the moments, as large as the parameters, and per parameter a step counter on the CPU."""
    states = list(optimizer.state.values())
    return {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")}

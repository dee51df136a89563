"""Predictions whose measured step is copied from the first one: equal to the event with a trace of both."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import memcheck
from memcheck.predict.second_step import TRACE_ALL

COUNT = 0
STEPS = [0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Language(nn.Module):
    """A language model with tied weights, dropout and a mask among its buffers, which returns a dict."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(50, 32), nn.ModuleList(Block() for _ in range(3))
        self.head, self.dropout, self.checkpointed = nn.Linear(32, 50, bias=False), nn.Dropout(0.1), checkpointed
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(16, 16).tril().bool())

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.dropout(self.embedding(tokens)) * self.mask.sum(1).unsqueeze(-1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        return {"logits": logits, "loss": cross_entropy(logits.flatten(0, 1), tokens.flatten())}


class Picture(nn.Sequential):
    """A convolutional net whose batch normalization counts its batches."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


def tokens() -> Tensor:
    return torch.zeros(2, 16, dtype=torch.long)


def rows() -> Tensor:
    return torch.randn(4, 32)


REPEATED: dict[str, tuple[Callable[[], Any], Callable[[], Tensor], dict[str, Any]]] = {
    "language": (Language, tokens, {}),
    "checkpointed": (lambda: Language(True), tokens, {"optimizer": torch.optim.Adafactor}),
    "autocast": (Language, tokens, {"autocast": torch.bfloat16, "clip_grad_norm": 1.0}),
    "batch normalization": (Picture, lambda: torch.randn(2, 3, 8, 8), {}),
    "outputs that go": (Language, tokens, {"keep_outputs": False}),
    "a gradient of the input": (lambda: nn.Linear(32, 32), lambda: rows().requires_grad_(), {"dense_grad": True}),
    "a function": (lambda: nn.Linear(32, 1).requires_grad_().forward, rows, {"optimizer": torch.optim.SGD}),
    "frozen": (lambda: nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 4)), rows, {}),
}


def with_forward(forward: Callable[[Any, Tensor], Any], **attributes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(32, 32)
                for name, value in attributes.items():
                    setattr(self, name, value() if callable(value) else value)

            def forward(self, x: Tensor) -> Any:
                return forward(self, x)

        return Model()

    return make


def counts(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    y: Tensor = self.layer(x)
    return y.exp().sin() if self.count > 1 else y


def counts_in_a_global(self: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    y: Tensor = self.layer(x)
    return y.exp().sin() if COUNT > 1 else y


def counts_in_a_list(self: Any, x: Tensor) -> Tensor:
    STEPS[0] += 1
    y: Tensor = self.layer(x)
    return y.exp().sin() if STEPS[0] > 1 else y


def keeps(self: Any, x: Tensor) -> Tensor:
    if self.kept is None:
        self.kept = torch.ones(300, device=x.device)
    y: Tensor = self.layer(x) * self.kept[:32]
    return y


def draws(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.layer(x)
    return y.exp().sin() if random.random() > 0.5 else y


def counts_in_a_tensor(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.layer(x)
    with torch.no_grad():
        self.total += 1
    return y.exp().sin() if int(self.total) > 1 else y


def counts_on(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.layer(x)
    return y.exp().sin() if next(self.numbers) > 1 else y


TRACED: dict[str, Callable[[], nn.Module]] = {
    "an attribute": with_forward(counts, count=0),
    "a global": with_forward(counts_in_a_global),
    "a list": with_forward(counts_in_a_list),
    "a tensor that stays": with_forward(keeps, kept=None),
    "random numbers": with_forward(draws),
    "a tensor that is read": with_forward(counts_in_a_tensor, total=lambda: torch.tensor(0)),
    "an iterator": with_forward(counts_on, numbers=lambda: iter(range(1, 100))),
}


def events_of(prediction: Any) -> list[Any]:
    """The events up to the last phase's end."""
    trace = prediction.trace
    numbers = {id(allocation): number for number, allocation in enumerate(trace.log.allocations)}
    last = max(last for _, last in trace.phases.values())
    return [
        (numbers[id(one)], one.bytes, one.name, one.module, one.made_by, one.stream, taken)
        for one, taken in trace.log.events[:last]
    ]


def roles_of(prediction: Any) -> list[Any]:
    trace = prediction.trace
    names = ("carried_over", "optimizer", "outputs", "saved", "incoming", "gradients", "first_gradients")
    return [trace.phases, trace.operators, trace.unknown, *([vars(one) for one in getattr(trace, n)] for n in names)]


def predict(make: Callable[[], Any], given: Tensor, **how: Any) -> Any:
    global COUNT
    COUNT, STEPS[0] = 0, 0
    random.seed(0)
    return memcheck.predict_memory(make(), given, **{"optimizer": torch.optim.AdamW, **how})


@pytest.mark.parametrize("device", ["cpu", "A100-40GB", "RTX-4090"])
@pytest.mark.parametrize("name", REPEATED)
def test_a_copied_step_is_that_of_a_trace(
    name: str, device: str, repeated: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, given, how = REPEATED[name]
    copied = predict(make, given(), device=device, **how)
    assert repeated == [True]
    monkeypatch.setenv(TRACE_ALL, "1")
    traced = predict(make, given(), device=device, **how)
    assert repeated == [True]
    assert events_of(copied) == events_of(traced)
    assert roles_of(copied) == roles_of(traced)
    assert copied.record == traced.record


@pytest.mark.parametrize("name", TRACED)
def test_a_step_that_may_differ_is_traced(name: str, repeated: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found = predict(TRACED[name], rows(), device="A100-40GB")
    assert repeated == [False]
    monkeypatch.setenv(TRACE_ALL, "1")
    traced = predict(TRACED[name], rows(), device="A100-40GB")
    assert events_of(found) == events_of(traced)
    assert found.record == traced.record

"""Compiled code is predicted as it is measured, for the CPU to the byte."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from predict.compared import figures
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memcheck
from memcheck.core.errors import UsageError
from memcheck.predict import process

pytestmark = pytest.mark.extension


def wave(x: Tensor) -> Tensor:
    return (x * 2).exp().sin()


class Waves:
    wave = staticmethod(torch.compile(wave))

    def __init__(self) -> None:
        self.layer = in_place(Part())

    def __call__(self, x: Tensor) -> Any:
        return self.layer(x)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).exp()

    @torch.compile
    def method(self, x: Tensor) -> Any:
        return self.layer(x).exp()


class WaveBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Waves.wave(*gradients)


def in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# What is compiled: a model, and more options of the step.
COMPILED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a model": (lambda: torch.compile(Part()), {}),
    "a model of torch": (lambda: torch.compile(nn.Linear(4, 4)), {}),
    "a model in place": (lambda: in_place(Part()), {}),
    "a part": (lambda: nn.Sequential(torch.compile(Part())), {}),
    "a part in place": (lambda: nn.Sequential(in_place(Part())), {}),
    "a part of an object": (Waves, {}),
    "a method": (lambda: Part().method, {}),
    "a function": (lambda: Waves.wave, {}),
    "a function of torch": (lambda: torch.compile(functional.gelu), {}),
    "a called function": (lambda: lambda x: Waves.wave(x) + 1, {}),
    "without code": (lambda: lambda x: torch.compile(wave, backend="eager")(x), {}),
    "a backward": (lambda: WaveBackward.apply, {}),
    "a loss": (Part, {"loss": lambda y: Waves.wave(y).sum()}),
    "all of a step": (lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), {"compile": True}),
}


class Block(nn.Module):
    """A block of a Transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.feed_forward = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (y.view(2, 8, 4, 4).transpose(1, 2) for y in self.project(self.norm(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(2, 8, 16))
        return x + self.feed_forward(self.norm(x))


class Tied(nn.Module):
    """A language model whose head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(50, 16), Block(), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return functional.cross_entropy(self.head(self.block(self.embedding(tokens))).flatten(0, 1), tokens.flatten())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Any:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def broken(x: Tensor) -> Any:
    y = (x * 2).exp()
    torch._dynamo.graph_break()
    return (y.sin() * x).sum()


def written(x: Tensor) -> Any:
    y = x * 2
    y.add_(1).relu_()
    return y.sin()


def several_shapes(x: Tensor) -> Any:
    return Waves.wave(x).sum() + Waves.wave(x.repeat(2, 1)).sum() + Waves.wave(x.double()).sum()


def in_and_out_of_autocast(x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = LINEAR(x)
    return y.sum() + LINEAR(x).sum()


LINEAR = torch.compile(nn.Linear(8, 8))


def of_shape(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)


ALL = {"compile": True}
# Classes of programs: a model, its input, and more options of the step.
PROGRAMS: dict[str, tuple[Callable[[], Any], Tensor, dict[str, Any]]] = {
    "block": (Block, of_shape(2, 8, 16), ALL),
    "inference": (Block, of_shape(2, 8, 16), {**ALL, "backward": False}),
    "evaluation": (Block, of_shape(2, 8, 16), {**ALL, "training": False}),
    "tied head": (Tied, torch.arange(16).view(2, 8), {**ALL, "optimizer": "adamw"}),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)),
        of_shape(2, 3, 16, 16),
        ALL,
    ),
    "checkpointing": (Checkpointed, of_shape(2, 8, 16), ALL),
    "autocast": (Block, of_shape(2, 8, 16), {**ALL, "autocast": "bf16"}),
    "graph break": (lambda: broken, of_shape(64, 8), ALL),
    "written in place": (lambda: written, of_shape(64, 8), ALL),
    "several shapes": (lambda: several_shapes, of_shape(64, 8), {}),
    "in and out of autocast": (lambda: in_and_out_of_autocast, of_shape(64, 8), {}),
    "accumulated": (Block, of_shape(2, 8, 16), {**ALL, "accumulate": 3}),
}


def measured(model: Any, x: Tensor, **how: Any) -> Any:
    """The second pass, as the first one compiles."""
    torch._dynamo.reset()
    for _ in range(2):
        record = memcheck.measure_memory(model, x, device="cpu", **how)
    return record


def assert_predicted(model: Any, x: Tensor, **how: Any) -> None:
    found, real = memcheck.predict_memory(model, x, device="cpu", **how), measured(model, x, **how)
    assert found.exact, found.record.doubts
    assert figures(found.record) == figures(real)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_is_predicted_wherever_it_runs(name: str) -> None:
    make, how = COMPILED[name]
    assert_predicted(make(), of_shape(2, 4), **how)


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_programs_are_predicted_to_the_byte(name: str) -> None:
    make, x, how = PROGRAMS[name]
    assert_predicted(make(), x, **how)


OFTEN = ("a part", "a loss", "block", "checkpointing")


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.ci) for name in (*COMPILED, *PROGRAMS)],
)
def test_compiled_code_is_predicted_for_a_gpu_that_is_not_here(name: str) -> None:
    make, x, how = PROGRAMS[name] if name in PROGRAMS else (COMPILED[name][0], of_shape(2, 4), COMPILED[name][1])
    record = memcheck.predict_memory(make(), x, device="A100-40GB", **how).record
    assert record.status == "ok", record.reason
    assert record.certainty != "exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["T4", "A100-40GB", "H100-80GB"])
def test_compiled_attention_takes_the_backend_of_eager_attention(device: str, dtype: torch.dtype) -> None:
    def attends(q: Tensor) -> Any:
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True).sin()

    q = torch.empty(2, 4, 64, 32, dtype=dtype, device="meta", requires_grad=True)
    found = []
    for how in ({}, ALL):
        trace = memcheck.predict_memory(attends, q, device=device, **how).trace
        assert trace is not None
        found.append([name for name in trace.operators if "_attention" in name])
    assert found[0] == found[1]
    assert bool(found[0]) == ((device, dtype) != ("T4", torch.bfloat16))


def test_a_split_model_is_not_predicted() -> None:
    ranks = memcheck.Ranks(fsdp=2)
    with pytest.raises(UsageError, match="compile is not predicted for a model that is split over processes"):
        memcheck.predict_memory(Part(), of_shape(2, 4), compile=True, ranks=ranks, device="A100-40GB")


def orthogonal(gradient: Tensor) -> Tensor:
    return 1.5 * gradient - 0.5 * (gradient @ gradient.T) @ gradient


class Muon(torch.optim.Optimizer):
    """Calls a compiled function in its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.orthogonal = torch.compile(orthogonal)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.orthogonal(parameter.grad) if parameter.ndim == 2 else parameter.grad


def warm_muon(parameters: Any) -> torch.optim.Optimizer:
    made = Muon(parameters)
    made.orthogonal(torch.zeros(48, 64))
    return made


def compiled_adam(parameters: Any, steps: int = 0) -> torch.optim.Optimizer:
    """AdamW with a compiled step. steps: that it has made, as the first two compile, which takes memory, too."""
    parameters = list(parameters)
    made = torch.optim.AdamW(parameters)
    made.step = torch.compile(made.step)  # type: ignore[method-assign]
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        made.step()
    for parameter in parameters:
        parameter.grad = None
    return made


@pytest.mark.isolated  # Behind the other tests, the measured step of AdamW takes 32 bytes more.
@pytest.mark.parametrize(
    ("optimizer", "warm"),
    [(Muon, warm_muon), (compiled_adam, functools.partial(compiled_adam, steps=3))],
    ids=["a function in a step", "a step"],
)
def test_compiled_optimizers_are_predicted(optimizer: Any, warm: Any) -> None:
    model, x = nn.Linear(64, 48), torch.zeros(8, 64)
    found = memcheck.predict_memory(model, x, optimizer=optimizer)
    torch._dynamo.reset()
    real = memcheck.measure_memory(model, x, optimizer=warm)
    names = ("optimizer_bytes", "optimizer_peak_bytes", "backward_peak_bytes")
    assert [getattr(found.record, name) for name in names] == [getattr(real, name) for name in names]
    on_gpu = memcheck.predict_memory(model, x, optimizer=optimizer, device="A100-40GB").record
    assert (on_gpu.status, on_gpu.optimizer_peak_bytes is None) == ("ok", False)


class Remembers(nn.Module):
    """Keeps its last output, and the first call's for good."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None
        self.wave = torch.compile(wave)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.wave(x)
        if self.first is None:
            self.first = self.last.detach().clone()
        return self.last


@pytest.mark.smoke
def test_steps_begin_with_the_attributes_that_the_model_had() -> None:
    model = Remembers()
    found = memcheck.predict_memory(model, torch.zeros(64, 64), backward=False, device="cpu")
    assert found.terms["forward_peak_bytes"].get("aten::clone") == 4 * 64 * 64
    assert model.first is None


def test_a_terminal_shows_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    process.end_all()  # To start one takes seconds.
    memcheck.predict_memory(wave, of_shape(2, 4), device="T4")
    line = r"(\rmemcheck: torch runs the step on a simulated T4: \d+ s)+\r\x1b\[K"
    assert re.fullmatch(line, terminal.getvalue())

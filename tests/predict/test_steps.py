"""Predictions of training steps: optimizers, scalers of gradients, and gradients that are sparse, equal measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import memcheck
from memcheck.measure.measurement import measure_memory

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

FIGURES = ("parameter_bytes", "optimizer_bytes", "forward_peak_bytes", "saved_bytes", "backward_peak_bytes")
FIGURES += ("gradient_bytes", "workspace_bytes", "optimizer_peak_bytes")


@pytest.fixture(scope="module", autouse=True)
def a_table_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        patch.setenv("MEMCHECK_PROBES", str(tmp_path_factory.mktemp("probes") / "probes.jsonl"))
        yield


def compare(model: nn.Module, *inputs: Any, **how: Any) -> None:
    """Compares the prediction, which must be exact, with the measurement of the same step."""
    prediction = memcheck.predict_memory(model, *inputs, device="cpu", **how)
    assert prediction.exact, (prediction.record.reason, prediction.unknown)
    measured = measure_memory(model, *inputs, **how)
    assert [(name, getattr(prediction.record, name)) for name in FIGURES] == [
        (name, getattr(measured, name)) for name in FIGURES
    ]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(37, 53), nn.GELU(), nn.Linear(53, 19))


class Scaled:
    """Steps an optimizer by a scaler of gradients."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu")
        self.scaler.scale(torch.zeros(()))  # Makes the scale, without which the scaler refuses to step.

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ScaledLoss:
    """A scaler with the loss that it scales and the optimizer that it steps."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(y.square().mean())

    def of(self, parameters: Any) -> ScaledLoss:
        self.optimizer = optim.AdamW(parameters)
        return self

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Own:
    """An optimizer with a state of its own, which is none of torch's."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.sums = {x: torch.zeros_like(x) for x in self.parameters}

    @torch.no_grad()
    def step(self) -> None:
        for x in self.parameters:
            self.sums[x] = self.sums[x] + x.grad
            x.sub_(self.sums[x], alpha=0.1)


class Held:
    def __init__(self, first: Any, second: Any) -> None:
        self.step = lambda: (first.step(), second.step())


def rate() -> torch.Tensor:
    return torch.tensor(1e-3)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name}, tensor rate": lambda p, name=name: getattr(optim, name)(p, lr=rate())
        for name in ("AdamW", "NAdam", "ASGD", "Adagrad", "Adadelta", "Rprop", "SGD")
    },
    "AdamW, rate of one element": lambda p: optim.AdamW(p, lr=torch.tensor([1e-3])),
    "Adam, tensor betas": lambda p: optim.Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
    "Adafactor": lambda p: optim.Adafactor(p),
    "fused SGD": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: optim.Adagrad(p, fused=True),
    "fused AdamW, tensor rate": lambda p: optim.AdamW(p, lr=rate(), fused=True),
    "Muon": lambda p: optim.Muon([x for x in p if x.dim() == 2]),
    "scaled": lambda p: Scaled(optim.AdamW(p)),
    "scaled, fused": lambda p: Scaled(optim.AdamW(p, fused=True)),
    "two in a closure": lambda p: Held(optim.AdamW(p[:2]), optim.SGD(p[2:], lr=0.1, momentum=0.9)),
    "none of torch's": Own,
}


@pytest.mark.parametrize("how", [{}, {"steps": 1}, {"accumulate": 2, "set_to_none": False}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_is_predicted_exactly(name: str, how: dict[str, Any]) -> None:
    compare(mlp(), torch.randn(5, 37), optimizer=OPTIMIZERS[name], **how)


def test_gradients_of_an_optimizer_in_another_object_are_clipped() -> None:
    how: dict[str, Any] = {"optimizer": OPTIMIZERS["scaled"], "clip_grad_norm": 1.0}
    compare(mlp(), torch.randn(5, 37), **how)


def test_a_loss_is_scaled_by_the_scaler_of_the_step() -> None:
    predicted, measured = ScaledLoss(), ScaledLoss()
    model, x = mlp(), torch.randn(5, 37)
    prediction = memcheck.predict_memory(model, x, loss=predicted.loss, optimizer=predicted.of)
    assert prediction.exact, prediction.unknown
    record = measure_memory(model, x, loss=measured.loss, optimizer=measured.of)
    assert prediction.record.optimizer_peak_bytes == record.optimizer_peak_bytes
    assert predicted.scaler._scale is None  # The prediction scaled by a copy.


def test_an_optimizer_that_needs_a_closure_is_named() -> None:
    model, x = mlp(), torch.randn(5, 37)
    prediction = memcheck.predict_memory(model, x, optimizer=lambda p: optim.LBFGS(p))
    assert prediction.record.status == "skipped" and "needs a closure" in prediction.record.reason
    with pytest.raises(ValueError, match="LBFGS.step needs a closure"):
        measure_memory(model, x, optimizer=lambda p: optim.LBFGS(p))

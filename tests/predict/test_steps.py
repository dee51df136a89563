"""Predictions of training steps equal measurements: optimizers of any kind, scalers of gradients, and hooks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from predict.compared import compare, figures
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import memcheck
from memcheck.core.errors import UsageError
from memcheck.measure.measurement import measure_memory

pytestmark = [pytest.mark.cpu, pytest.mark.extension]


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


class Configured(nn.Sequential):
    """Makes its optimizer itself, as nanoGPT's model does."""

    def configure_optimizers(self, **how: Any) -> optim.Optimizer:
        parameters = [parameter for _, parameter in self.named_parameters()]
        matrices, others = ([x for x in parameters if (x.dim() > 1) is many] for many in (True, False))
        return optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], **how)


MODEL = Configured(nn.Linear(37, 53), nn.GELU(), nn.Linear(53, 19))
ELSEWHERE = types.ModuleType("elsewhere")
ELSEWHERE.model = MODEL


def of_the_global(parameters: Any, **how: Any) -> optim.Optimizer:
    return MODEL.configure_optimizers(**how)


def of_another_file(parameters: Any, **how: Any) -> optim.Optimizer:
    return ELSEWHERE.model.configure_optimizers(**how)


def of_the_named(model: Any, **how: Any) -> optim.Optimizer:
    return model.configure_optimizers(**how)


def of_the_annotated(network: Configured, **how: Any) -> optim.Optimizer:
    return network.configure_optimizers(**how)


def of_the_closure(model: Configured) -> Callable[[Any], optim.Optimizer]:
    return lambda parameters, **how: optim.AdamW(model.parameters(), **how)


MAKERS = [of_the_global, of_the_named, of_the_annotated, of_the_closure(MODEL)]


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("makes", MAKERS, ids=["global", "named", "annotated", "closure"])
def test_an_optimizer_of_the_model_itself_is_predicted(makes: Any, how: dict[str, Any]) -> None:
    x, optimizer = torch.randn(5, 37), functools.partial(makes, **how)
    compare(MODEL, x, optimizer=optimizer)
    found = memcheck.predict_memory(MODEL, x, optimizer=optimizer, device="RTX-4090").record
    numbers = sum(parameter.numel() for parameter in MODEL.parameters())
    assert (found.status, found.reason) == ("ok", None)
    assert found.optimizer_bytes == 8 * numbers + (16 if "fused" in how else 0)  # A fused step counts on the GPU.
    assert not any(parameter.is_meta for parameter in MODEL.parameters())


@pytest.mark.parametrize("device", ["cpu", "RTX-4090"])
def test_an_optimizer_of_the_model_that_was_not_sent_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="optimizer must make an optimizer of the parameters, or of the"):
        memcheck.predict_memory(MODEL, torch.randn(5, 37), optimizer=of_another_file, device=device)
    assert all(parameter.grad is None for parameter in MODEL.parameters())


def test_an_optimizer_that_is_there_is_not_changed() -> None:
    ELSEWHERE.ready = ready = optim.AdamW(MODEL.parameters())
    for device in ("cpu", "RTX-4090"):
        for makes in (lambda _: ready, lambda _: ELSEWHERE.ready):
            prediction = memcheck.predict_memory(MODEL, torch.randn(5, 37), optimizer=makes, device=device)
            assert prediction.record.optimizer_bytes >= 8 * sum(x.numel() for x in MODEL.parameters())
    assert not ready.state
    assert [id(x) for x in ready.param_groups[0]["params"]] == [id(x) for x in MODEL.parameters()]


def test_parameters_that_the_optimizer_alone_has_count() -> None:
    """Its factory reaches them among its globals, in its closure, or as an attribute."""
    alone = torch.nn.Parameter(torch.zeros(3000))
    ELSEWHERE.alone = alone
    compare(mlp(), torch.randn(5, 37), optimizer=lambda own: optim.AdamW([*own, alone]))
    compare(mlp(), torch.randn(5, 37), optimizer=lambda own: optim.AdamW([*own, ELSEWHERE.alone]))
    compare(mlp(), torch.randn(5, 37), optimizer=lambda own: optim.SGD([{"params": own}, {"params": [alone]}], lr=0.1))


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
    for call in (memcheck.predict_memory, measure_memory):
        with pytest.raises(ValueError, match=r"LBFGS\.step needs a closure"):
            call(model, x, optimizer=lambda p: optim.LBFGS(p))


def stepping(**how: Any) -> nn.Module:
    """A model whose hooks step an optimizer of each parameter in the backward."""
    model = mlp()
    optimizers = {parameter: optim.AdamW([parameter], **how) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def mean(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def peaks_of_a_loop() -> list[int]:
    """The peaks of the backwards of two steps, with all that is made from an empty start."""
    peaks = []
    with memcheck.track(saved=False) as tracked:
        model, x = stepping(), torch.randn(5, 37)
        for _ in range(2):
            y = model(x)
            loss = mean(y)
            tracked.reset_peak()
            loss.backward()
            peaks.append(tracked.peak_bytes)
            del y, loss
    return peaks


@pytest.mark.parametrize(
    "how",
    [{"steps": 1}, {"steps": 2}, {"steps": 2, "accumulate": 2}, {"accumulate": 2}, {"optimizer": "sgd"}],
    ids=str,
)
def test_hooks_that_step_optimizers_are_predicted_exactly(how: dict[str, Any]) -> None:
    compare(stepping(), torch.randn(5, 37), loss=mean, **how)


def test_a_later_step_has_the_state_that_hooks_made() -> None:
    x = torch.randn(5, 37)
    first, later = (memcheck.predict_memory(stepping(), x, loss=mean, device="cpu", steps=steps) for steps in (1, 2))
    assert [one.record.backward_peak_bytes for one in (first, later)] == peaks_of_a_loop()
    state = 8 * sum(parameter.numel() for parameter in mlp().parameters()) + 4 * 4
    assert (first.record.optimizer_bytes, later.record.optimizer_bytes) == (0, state)
    assert first.exact
    assert later.exact


def test_a_step_in_which_hooks_make_state_is_not_claimed_to_be_exact() -> None:
    model, x = stepping(), torch.randn(5, 37)
    prediction = memcheck.predict_memory(model, x, loss=mean, device="cpu")
    (doubt,) = prediction.record.doubts
    assert doubt.endswith("of state that optimizers made in this backward: predict it with steps 2")
    assert "a training step needs at least " in repr(prediction)
    assert {"forward_peak_bytes", "backward_peak_bytes"} <= prediction.bounds
    mean(model(x)).backward()
    compare(model, x, loss=mean)  # The state is there.


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"lr": rate()}], ids=str)
def test_hooks_step_optimizers_of_any_kind(how: dict[str, Any]) -> None:
    x = torch.randn(5, 37)
    compare(stepping(**how), x, loss=mean, steps=2)
    later = memcheck.predict_memory(stepping(**how), x, loss=mean, steps=2, device="RTX-4090")
    assert later.record.optimizer_bytes >= 8 * sum(parameter.numel() for parameter in mlp().parameters())


def test_a_second_step_without_an_optimizer_is_like_the_first() -> None:
    model, x = mlp(), torch.randn(5, 37)
    compare(model, x, loss=mean, steps=2)
    first, later = (memcheck.predict_memory(model, x, loss=mean, steps=steps).record for steps in (None, 2))
    assert figures(first) == {**figures(later), "optimizer_bytes": first.optimizer_bytes}


def detached(y: torch.Tensor) -> torch.Tensor:
    return y.detach().square().mean()


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(37, 53)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize(("make", "loss"), [(mlp, detached), (Reentrant, None)])
def test_no_step_is_claimed_where_no_backward_runs(make: Any, loss: Any, optimizer: str | None) -> None:
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    compare(make(), torch.ones(11, 37), **how)
    measured = measure_memory(make(), torch.ones(11, 37), **how)
    for device in ("cpu", "RTX-4090"):
        prediction = memcheck.predict_memory(make(), torch.ones(11, 37), device=device, **how)
        assert measured.doubts == prediction.record.doubts[-1:]
        assert measured.doubts[0].startswith("no backward ran: no output requires grad, though parameter ")
        assert "a training step" not in repr(prediction)
        assert f"N{measured.doubts[0][1:]}." in repr(prediction).replace("\n", " ")
    assert "a training step" not in repr(memcheck.largest(lambda n: torch.ones(n, 37), make(), "RTX-4090", **how))

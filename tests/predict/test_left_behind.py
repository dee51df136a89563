"""A prediction leaves models, inputs and random states as they are, and names what functions store elsewhere."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memcheck

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

Run = Callable[[Tensor], Tensor]
WORDS = "the prediction left tensors without data, on which the model will fail; clear them by "
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
MASKS: dict[int, Tensor] = {}
NESTED: dict[str, dict[int, Any]] = {"masks": {}}
LATEST: Tensor | None = None
SEEN: list[Tensor] = []
WINDOW = deque([torch.ones(8), torch.zeros(8)], maxlen=2)
SUMS: set[Any] = {1}
RECENT: OrderedDict[int, Tensor] = OrderedDict({1: torch.ones(8)})
PARTS: defaultdict[str, list[Tensor]] = defaultdict(list)


@pytest.fixture(autouse=True, scope="module")
def frozen_modules() -> None:
    """Python finds no holders among frozen objects."""
    gc.unfreeze()


def triangle(length: int) -> Tensor:
    return torch.ones(length, length).tril()


@functools.lru_cache
def cached(length: int) -> Tensor:
    return torch.ones(length, length).tril()


@functools.lru_cache(None)
def endless(length: int) -> Tensor:
    return torch.ones(length, length).tril()


def global_dict(x: Tensor) -> Tensor:
    if len(x) not in MASKS:
        MASKS[len(x)] = triangle(len(x))
    return x * MASKS[len(x)]


def nested_dict(x: Tensor) -> Tensor:
    full, parts = NESTED["masks"].setdefault(len(x), [triangle(len(x)), {"half": triangle(len(x)) / 2}])
    return x * full + parts["half"]


def replaced_global(x: Tensor) -> Tensor:
    global LATEST
    LATEST = triangle(len(x)) if LATEST is None else LATEST
    return x * LATEST


def hook_of_a_gradient(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(SEEN.append)
    return y + len(SEEN)


def window(x: Tensor) -> Tensor:
    WINDOW.append(x.sum(0))
    return x + len(WINDOW)


def set_of_sums(x: Tensor) -> Tensor:
    SUMS.add(x.sum())
    return x * 2


def ordered_dict(x: Tensor) -> Tensor:
    RECENT[8] = x.sum(0)
    return x + RECENT[1]


def new_lists(x: Tensor) -> Tensor:
    PARTS["x"].append(x * 2)
    return x + len(PARTS)


def default_argument(x: Tensor, cache: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return x * cache.setdefault(len(x), triangle(len(x)))


def own_attribute(x: Tensor) -> Tensor:
    vars(own_attribute).setdefault("mask", triangle(len(x)))
    return x * (triangle(len(x)) if own_attribute.mask is None else own_attribute.mask)  # type: ignore[attr-defined]


class Masked(nn.Module):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        Masked.mask = triangle(len(x)) if self.mask is None else self.mask
        return x * Masked.mask


class Helper:
    __slots__ = ("mask", "more")

    def __init__(self) -> None:
        self.mask: Tensor | None = None


class Log:
    def __init__(self) -> None:
        self.last: Any = None

    def note(self, value: Tensor) -> Tensor:
        self.last = value
        return value


HELPER, LOG = Helper(), Log()


def slot_of_an_object(x: Tensor) -> Tensor:
    HELPER.mask = triangle(len(x)) if HELPER.mask is None else HELPER.mask
    return x * HELPER.mask


def attribute_of_an_object(x: Tensor) -> Tensor:
    return LOG.note(x * 2)


# A model, and the lines that clear what a prediction leaves, in which HERE is this module.
LEFT: dict[str, tuple[Any, str]] = {
    "lru_cache": (lambda x: x * cached(len(x)), "HERE.cached.cache_clear()"),
    "lru_cache without an end": (lambda x: x * endless(len(x)), "HERE.endless.cache_clear()"),
    "a global dict": (global_dict, "HERE.MASKS.clear()"),
    "a nested dict": (nested_dict, "HERE.NESTED['masks'].clear()"),
    "a replaced global": (replaced_global, "HERE.LATEST = None"),
    "a list that a hook fills": (hook_of_a_gradient, "HERE.SEEN.clear()"),
    "a deque": (window, "HERE.WINDOW.clear()"),
    "a set": (set_of_sums, "HERE.SUMS.clear()"),
    "an ordered dict": (ordered_dict, "del HERE.RECENT[8]"),
    "a list of a defaultdict": (new_lists, "HERE.PARTS['x'].clear()"),
    "a default argument": (default_argument, "HERE.default_argument.__defaults__[0].clear()"),
    "an attribute of a function": (own_attribute, "HERE.own_attribute.mask = None"),
    "an attribute of a class": (Masked(), "HERE.Masked.mask = None"),
    "a slot of an object": (slot_of_an_object, "HERE.HELPER.mask = None"),
    "an attribute of an object": (attribute_of_an_object, "HERE.LOG.last = None"),
}


def predict(run: Any, **how: Any) -> Any:
    return memcheck.predict_memory(run, X.clone().requires_grad_(), **how)


def line_left(run: Any, **how: Any) -> str:
    with pytest.warns(UserWarning, match="tensors without data") as found:
        predict(run, **how)
    (line,) = [str(one.message).removeprefix(WORDS) for one in found]
    return line


def output(run: Any) -> Tensor:
    y: Tensor = run(X.clone().requires_grad_())
    y.sum().backward()
    return y.detach()


OFTEN = ("lru_cache", "a global dict", "an attribute of an object")


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.ci) for name in LEFT])
def test_what_functions_store_is_named_with_the_line_that_clears_it(name: str) -> None:
    run, expected = LEFT[name]
    line = line_left(run)
    assert line == expected.replace("HERE", __name__)
    exec(line.replace(__name__, "here"), {"here": sys.modules[__name__]})
    assert torch.isfinite(output(run)).all()


def test_variables_of_closures_are_named() -> None:
    mask, seen = None, [torch.ones(2)]

    def run(x: Tensor) -> Tensor:
        nonlocal mask
        mask = triangle(len(x)) if mask is None else mask
        seen.append(x * mask)
        return seen[-1]

    place = f"{__name__}.{test_variables_of_closures_are_named.__name__}.<locals>"
    assert line_left(run) == f"(mask of {place}.run) = None; (seen of {place}.run).clear()"


def test_a_holder_without_a_name_is_named_by_what_it_is() -> None:
    """A generator that waits has a tensor in a local variable."""

    def numbers() -> Any:
        x = yield
        while True:
            x = yield x

    numbers_of = numbers()
    next(numbers_of)
    assert line_left(lambda x: numbers_of.send(x * 2)).startswith("dropping (numbers_of of ")


@pytest.mark.parametrize("how", [{"device": "A100-40GB"}, {"backward": False}, {"optimizer": torch.optim.SGD}])
def test_any_prediction_names_it(how: dict[str, Any]) -> None:
    MASKS.clear()
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_forward_hook(lambda module, given, output: output * MASKS.setdefault(8, output.detach()))
    assert f"{__name__}.MASKS" in line_left(model, **how)
    MASKS.clear()


@pytest.mark.parametrize("error", [KeyError, NotImplementedError])
def test_a_prediction_that_stops_names_it(error: type[Exception]) -> None:
    def stop(output: Tensor) -> Tensor:
        raise error("data-dependent")

    MASKS.clear()
    with pytest.warns(UserWarning, match="MASKS"), suppress(KeyError):
        predict(global_dict, loss=stop)
    MASKS.clear()


def test_nested_tensors_can_be_made_after_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nested._internal.nested_tensor._dummy_instance", None)

    def pack(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)

    memcheck.predict_memory(pack, X)
    assert pack(X).values().shape == (len(X) + 1, X.shape[1])
    for given in (pack(X), torch.nested.nested_tensor([X, X[:1]])):
        reason = memcheck.predict_memory(torch.sin, given).record.reason
        assert "nested tensors are not predicted" in str(reason)
    assert memcheck.predict_memory(lambda x: torch.nested.nested_tensor([x]), X).record.reason == reason


class Resizing(nn.Module):
    """Writes into its buffer, resizes it and stores a table in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor
        self.masks: dict[torch.device, Tensor] = {}
        self.register_buffer("counts", torch.tensor([0], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        self.counts.resize_(len(x)).fill_(1)
        self.masks.setdefault(x.device, triangle(len(x)))
        return x * self.counts.view(-1, 1) * self.masks[x.device]


def test_the_model_and_its_inputs_stay_as_they_are() -> None:
    resizing, total, norm = Resizing(), torch.zeros(8), nn.BatchNorm1d(8)
    predict(resizing)
    assert (resizing.counts.untyped_storage().nbytes(), resizing.counts.tolist(), resizing.masks) == (4, [0], {})
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval().requires_grad_(False)
    model[0].weight.requires_grad_().grad = torch.ones(8, 8)
    optimizer, before = torch.optim.SGD(model.parameters(), momentum=0.9), {**model.state_dict()}
    x = X.clone().requires_grad_()
    memcheck.predict_memory(lambda x: norm(model.train()(x)) + total.add_(x.detach().sum(0)), x, loss=lambda y: y.sum())
    memcheck.predict_memory(model, x, optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    assert not any(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, False, False]
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert x.grad is None
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not optimizer.state
    assert int(norm.num_batches_tracked) == total.sum() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_random_states_and_the_collector_stay_as_they_are(enabled: bool) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()), gc.isenabled()]

    before = states()
    predict(
        lambda x: x + torch.rand(8) + random.random() + np.random.rand() + torch.linalg.inv(torch.randn(8, 8)).sum()
    )
    if not enabled:
        gc.disable()
    try:
        predict(torch.sin)
        assert states() == [*before[:3], enabled]
    finally:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_of_the_loss_scales_after_any_number_of_predictions(enabled: bool) -> None:
    model, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cpu", enabled=enabled)
    before = dict(vars(scaler))
    for _ in range(2):
        memcheck.predict_memory(model, X, loss=lambda y: scaler.scale(y.sum()), device="cpu")
        assert vars(scaler) == before
    assert torch.isfinite(scaler.scale(model(X).sum()))

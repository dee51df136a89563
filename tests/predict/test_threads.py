"""A prediction changes nothing for other threads: they see torch as it is, and predict for themselves."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import memcheck

pytestmark = pytest.mark.cpu

MODULES = [
    *("torch", "torch._C", "torch._C._nn", "torch._ops", "torch._tensor", "torch.amp", "torch.amp.autocast_mode"),
    *("torch.autograd", "torch.cuda", "torch.cuda.amp.common", "torch.functional", "torch.nn.functional"),
    *("torch.nn.init", "torch.nn.modules.activation", "torch.nn.modules.transformer", "torch.nn.utils.clip_grad"),
    *("torch.optim.adamw", "torch.overrides", "torch.random", "torch.utils._foreach_utils", "torch.utils.checkpoint"),
]
CLASSES = (Tensor, nn.Module, nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer, torch.autocast)
FOUND: queue.SimpleQueue[Any] = queue.SimpleQueue()


def tell(function: Callable[[], Any]) -> None:
    """Puts what the function returns in another thread into FOUND."""
    thread = threading.Thread(target=lambda: FOUND.put(function()))
    thread.start()
    thread.join()


class Interrupted(nn.Module):
    """While it is called, another thread runs a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.first(x)
            tell(self.function)
        return checkpoint(self.layer, self.first(x.float()), use_reentrant=False)


def found_while_predicting(function: Callable[[], Any]) -> Any:
    x = torch.zeros(2, 4, 8, requires_grad=True)
    assert memcheck.predict_memory(Interrupted(function), x).record.status == "ok"
    found = FOUND.get(timeout=1)
    while not FOUND.empty():
        FOUND.get()
    return found


def attributes() -> dict[tuple[str, str], Any]:
    """What the modules and the classes hold."""
    owners = [(name, vars(importlib.import_module(name))) for name in MODULES]
    owners += [(kind.__name__, vars(kind)) for kind in CLASSES]
    owners.append(("checks", checkpoints._allowed_determinism_checks_to_fns))
    return {(name, key): value for name, held in owners for key, value in held.items()}


@pytest.mark.extension
def test_another_thread_finds_every_attribute_of_torch_as_it_was() -> None:
    found_while_predicting(attributes)  # Torch imports some of its modules late.
    before = attributes()
    found = found_while_predicting(attributes)
    assert [key for key, value in found.items() if before.get(key) is not value] == []
    assert before.keys() == found.keys()


class Wrapped(Tensor):
    """A tensor that notes the functions that it is given to."""

    seen: tuple[str, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen += (func.__name__,)
        return super().__torch_function__(func, types, args, kwargs or {})


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True), nn.Linear(8, 1))


def step() -> list[Any]:
    """A step of training, with what torch decides on the way."""
    model, x = small_model(), torch.rand(2, 4, 8, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = checkpoint(model[1], model[0](model[0](x)), use_reentrant=False)
        y = model[2](hidden)
        state = torch.get_rng_state()
    y.square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return [y.dtype, y, norm, state, *model.parameters(), *(each.grad for each in model.parameters())]


def decisions() -> list[Any]:
    """What functions of torch say that a prediction answers for its target."""
    x, encoder = torch.rand(2, 4, 8), small_model()[1].eval()
    Wrapped.seen = ()
    nn.functional.silu(x.as_subclass(Wrapped)).split(2)
    nn.functional.dropout(nn.functional.max_pool1d(x.as_subclass(Wrapped), 2), 0.5)
    with Noting() as mode:
        nn.functional.layer_norm(x, (8,)).unflatten(2, (2, 4))
        encoder(x)
        nn.init.ones_(x)
    with Noting() as around, torch.no_grad():
        nn.MultiheadAttention(8, 2, batch_first=True).eval()(x, x, x)
    nested: list[Any] = [torch.overrides.has_torch_function((x,)), torch.is_autocast_enabled("cpu")]
    return [Wrapped.seen, mode.seen, around.seen, nested, said_of_cuda()]


def said_of_cuda() -> list[Any]:
    try:
        capability: Any = torch.cuda.get_device_capability()
    except Exception as error:
        capability = str(error)
    supported, count = torch.cuda.is_bf16_supported(), torch.cuda.device_count()
    return [capability, supported, count, torch.cuda.amp.common.amp_definitely_not_available()]


@pytest.mark.extension
def test_another_thread_computes_what_it_does_without_a_prediction() -> None:
    assert found_while_predicting(decisions) == decisions()
    for found, alone in zip(found_while_predicting(step), step(), strict=True):
        assert torch.equal(found, alone) if isinstance(found, Tensor) else found == alone


def record(dtype: torch.dtype | None) -> dict[str, Any]:
    how: dict[str, Any] = {"optimizer": torch.optim.AdamW, "clip_grad_norm": 1.0, "autocast": dtype}
    return dataclasses.asdict(memcheck.predict_memory(small_model(), torch.zeros(2, 4, 8), **how).record)


@pytest.mark.extension
@pytest.mark.parametrize("other", [None, torch.bfloat16])
def test_two_threads_predict_what_each_predicts_alone(other: torch.dtype | None) -> None:
    """They take turns."""
    pair = [torch.bfloat16, other]
    alone, found = [record(each) for each in pair], [{}, {}]
    barrier = threading.Barrier(2)

    def predict(index: int) -> None:
        barrier.wait(timeout=60)
        found[index] = record(pair[index])

    threads = [threading.Thread(target=predict, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def run_in_turn(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> list[bool]:
    """Whether the collector is enabled inside, between and after two users: the first begins and ends first."""
    inside, ended = threading.Event(), threading.Event()
    found: list[bool] = []

    def wait(x: Tensor) -> Tensor:
        inside.set()
        assert ended.wait(timeout=60)
        found.append(gc.isenabled())
        return x * 2

    def begin_second(x: Tensor) -> Tensor:
        if not inside.is_set():
            thread.start()
            assert inside.wait(timeout=60)
        found.append(gc.isenabled())
        return x * 2

    thread = threading.Thread(target=lambda: second(wait))
    first(begin_second)
    found.append(gc.isenabled())
    ended.set()
    thread.join()
    return [*found, gc.isenabled()]


USERS: dict[str, Callable[[Any], Any]] = {
    "predict": lambda run: memcheck.predict_memory(run, torch.ones(8), backward=False),
    "measure": lambda run: memcheck.measure_memory(run, torch.ones(8), backward=False),
}


@pytest.mark.extension
@pytest.mark.parametrize("enabled", [True, False])
# Two threads that predict for the CPU take turns.
@pytest.mark.parametrize(
    "names", [names for names in itertools.product(USERS, USERS) if "measure" in names], ids=" ".join
)
def test_the_collector_rests_until_the_last_of_two_threads_ends(names: tuple[str, str], enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        *during, after = run_in_turn(*(USERS[name] for name in names))
        assert not any(during)
        assert after == enabled
    finally:
        gc.enable()

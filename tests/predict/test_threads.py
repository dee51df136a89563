"""A prediction changes nothing for other threads: they see torch as it is, and predict for themselves."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import memcheck
from memcheck.predict import probe
from memcheck.predict.python_functions import ANSWERED, function_named

pytestmark = pytest.mark.cpu

MODULES = [
    *("torch", "torch._C", "torch._C._nn", "torch._ops", "torch._tensor", "torch.amp", "torch.amp.autocast_mode"),
    *("torch.autograd", "torch.cuda", "torch.cuda.amp.common", "torch.functional", "torch.nn.functional"),
    *("torch.nn.init", "torch.nn.modules.activation", "torch.nn.modules.transformer", "torch.nn.utils.clip_grad"),
    *("torch.optim.adamw", "torch.overrides", "torch.random", "torch.utils._foreach_utils", "torch.utils.checkpoint"),
]
CLASSES = (Tensor, nn.Module, nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer, torch.autocast)
DEVICES = ["cpu", "RTX-4090"]
FOUND: queue.SimpleQueue[Any] = queue.SimpleQueue()


@pytest.fixture(autouse=True)
def a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))


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


def found_while_predicting(function: Callable[[], Any], device: str) -> Any:
    x = torch.zeros(2, 4, 8, requires_grad=True)
    assert memcheck.predict_memory(Interrupted(function), x, device=device).fits is not None
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
@pytest.mark.parametrize("device", DEVICES)
def test_another_thread_finds_every_attribute_of_torch_as_it_was(device: str) -> None:
    found_while_predicting(attributes, device)  # Torch imports some of its modules late.
    before = attributes()
    found = found_while_predicting(attributes, device)
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
@pytest.mark.parametrize("device", DEVICES)
def test_another_thread_computes_what_it_does_without_a_prediction(device: str) -> None:
    assert found_while_predicting(decisions, device) == decisions()
    for found, alone in zip(found_while_predicting(step, device), step(), strict=True):
        assert torch.equal(found, alone) if isinstance(found, Tensor) else found == alone


@pytest.mark.extension
def test_functions_run_their_own_code_after_a_prediction() -> None:
    def code() -> list[Any]:
        return [function_named(name).__code__ for name in ANSWERED]

    before = code()
    assert found_while_predicting(code, "RTX-4090") != before
    assert code() == before


BARRIERS: dict[int, threading.Barrier] = {}  # By thread.


class Together(nn.Module):
    """Waits twice in its forward until a model of another thread is there too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def forward(self, x: Tensor) -> Tensor:
        barrier = BARRIERS.get(threading.get_ident())
        first, layer, last = self.model
        x = first(first(x))
        if barrier is not None:
            barrier.wait(timeout=60)
        x = last(checkpoint(layer, x, use_reentrant=False))
        if barrier is not None:
            barrier.wait(timeout=60)
        return x


def record(device: str, dtype: torch.dtype | None) -> dict[str, Any]:
    how: dict[str, Any] = {"optimizer": torch.optim.AdamW, "clip_grad_norm": 1.0, "autocast": dtype}
    return dataclasses.asdict(memcheck.predict_memory(Together(), torch.zeros(2, 4, 8), device=device, **how).record)


@pytest.mark.extension
@pytest.mark.parametrize("other", [("cpu", None), ("cpu", torch.bfloat16), ("RTX-4090", torch.float16)])
def test_two_threads_predict_what_each_predicts_alone(other: tuple[str, torch.dtype | None]) -> None:
    pair = [("cpu", torch.bfloat16), other]
    alone, found = [record(*each) for each in pair], [{}, {}]
    barrier = threading.Barrier(2)

    def predict(index: int) -> None:
        BARRIERS[threading.get_ident()] = barrier
        try:
            found[index] = record(*pair[index])
        finally:
            del BARRIERS[threading.get_ident()]

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
@pytest.mark.parametrize("names", list(itertools.product(USERS, USERS)), ids=" ".join)
def test_the_collector_rests_until_the_last_of_two_threads_ends(names: tuple[str, str], enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        *during, after = run_in_turn(*(USERS[name] for name in names))
        assert not any(during)
        assert after == enabled
    finally:
        gc.enable()


@pytest.mark.extension
def test_a_probe_is_repeated_if_other_threads_may_have_been_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, count = torch.zeros(4, 4), itertools.count()
    alone = memcheck.predict_memory(torch.linalg.qr, x, backward=False)
    assert alone.unknown == ()

    def disturbed(*given: Any) -> Any:
        found = run(*given)
        return dataclasses.replace(found, scratch_bytes=found.scratch_bytes + 1000 * (next(count) % 3 == 0))

    run = probe.probed
    monkeypatch.setattr(probe, "probed", disturbed)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "another.jsonl"))
    found = memcheck.predict_memory(torch.linalg.qr, x, backward=False)
    end.set()
    thread.join()
    assert next(count) > len(probe.FACTORS) * probe.REPEATS
    assert dataclasses.asdict(found.record) == dataclasses.asdict(alone.record)

"""A prediction leaves nothing behind: what functions store outside of the model's copy is as it was before."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcheck

pytestmark = pytest.mark.cpu

Run = Callable[[Tensor], Tensor]
MASKS: dict[int, Tensor] = {}
NESTED: dict[str, dict[int, Any]] = {"masks": {}}
LATEST: Tensor | None = None
LENGTH = 0


def triangle(length: int) -> Tensor:
    return torch.ones(length, length).tril()


def lru_cache(maxsize: int | None = 128, filled: bool = False) -> Run:
    mask = functools.lru_cache(maxsize)(triangle)
    if filled:
        mask(8)
    return lambda x: x @ x.mT * mask(x.shape[-1])


def global_dict() -> Run:
    MASKS.clear()

    def run(x: Tensor) -> Tensor:
        if len(x) not in MASKS:
            MASKS[len(x)] = triangle(len(x))
        return x * MASKS[len(x)]

    return run


def nested_dict() -> Run:
    NESTED["masks"].clear()

    def run(x: Tensor) -> Tensor:
        if len(x) not in NESTED["masks"]:
            NESTED["masks"][len(x)] = [triangle(len(x)), {"half": triangle(len(x)) / 2}]
        full, parts = NESTED["masks"][len(x)]
        return x * full + parts["half"]

    return run


def replaced_global() -> Run:
    global LATEST, LENGTH
    LATEST, LENGTH = None, 0

    def run(x: Tensor) -> Tensor:
        global LATEST, LENGTH
        if len(x) > LENGTH:
            LATEST, LENGTH = triangle(len(x)), len(x)
        assert LATEST is not None
        return x * LATEST

    return run


def class_attribute() -> Run:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(Masked, "mask"):
                Masked.mask = triangle(len(x))
            return x * Masked.mask

    return Masked()


def replaced_class_attribute() -> Run:
    class Base(nn.Module):
        mask: Tensor | None = None
        length = 0

    class Masked(Base):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.length:
                Base.mask, Base.length = triangle(len(x)), len(x)
            assert self.mask is not None
            return x * self.mask

    return Masked()


def hook_list() -> Run:
    model, seen = nn.Linear(8, 8), [torch.ones(2)]
    model.register_forward_hook(lambda module, given, output: seen.append(output.detach()))

    def run(x: Tensor) -> Tensor:
        return model(x) + sum(part.sum() for part in seen)

    return run


def hooks_of_a_module() -> Run:
    seen: list[Tensor] = []

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + len(seen) + sum(part.sum() for part in seen)

    model = Model(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    model[1].register_full_backward_hook(lambda module, given, output: seen.append(output[0]))
    return model


def gradient_hook() -> Run:
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(seen.append)
        return y + len(seen)

    return run


def default_argument() -> Run:
    def run(x: Tensor, cache: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
        return x * cache.setdefault(len(x), triangle(len(x)))

    return run


def closure_list() -> Run:
    cache: list[Any] = [None, 3]

    def run(x: Tensor) -> Tensor:
        if cache[0] is None:
            cache[0] = triangle(len(x))
        return x * cache[0] + cache[1]

    return run


def closure_variable() -> Run:
    mask: Tensor | None = None

    def run(x: Tensor) -> Tensor:
        nonlocal mask
        mask = triangle(len(x)) if mask is None else mask
        return x * mask

    return run


def attribute_by_device() -> Run:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks: dict[torch.device, Tensor] = {torch.device("cuda"): torch.ones(8)}

        def forward(self, x: Tensor) -> Tensor:
            if x.device not in self.masks:
                self.masks[x.device] = triangle(len(x))
            return x * self.masks[x.device]

    return Masked()


class Helper:
    def __init__(self) -> None:
        self.length = 0
        self.mask: Tensor | None = None

    def of(self, length: int) -> Tensor:
        if length > self.length:
            self.length, self.mask = length, triangle(length)
        assert self.mask is not None
        return self.mask


class Slotted:
    __slots__ = ("mask",)


def helper_object() -> Run:
    helper = Helper()
    return lambda x: x * helper.of(len(x))


def slotted_object() -> Run:
    helper = Slotted()

    def run(x: Tensor) -> Tensor:
        if not hasattr(helper, "mask"):
            helper.mask = triangle(len(x))
        return x * helper.mask

    return run


def helper_of_a_class() -> Run:
    helper = Helper()

    class Model(nn.Module):
        shared = helper

        def forward(self, x: Tensor) -> Tensor:
            return x * self.shared.of(len(x))

    return Model()


def window() -> Run:
    """The oldest part falls out of the deque."""
    latest = deque([torch.ones(8), torch.zeros(8)], maxlen=2)

    def run(x: Tensor) -> Tensor:
        latest.append(x.sum(0))
        return x + sum(latest)

    return run


def hook_of_a_parameter() -> Run:
    model, seen = nn.Linear(8, 8), [torch.ones(8)]
    model.weight.register_hook(lambda gradient: seen.append(gradient * 2))
    return lambda x: model(x) + sum(part.sum() for part in seen)


def identities() -> Run:
    seen: set[Any] = {1}

    def run(x: Tensor) -> Tensor:
        seen.add(x.sum())
        return x + len(seen)

    return run


def ordered_cache() -> Run:
    """The oldest entry is dropped."""
    cache: OrderedDict[int, Tensor] = OrderedDict({1: torch.ones(8), 2: torch.ones(8)})

    def run(x: Tensor) -> Tensor:
        cache[len(cache) + 8] = x.sum(0)
        dropped = cache.popitem(last=False)
        return x + dropped[1]

    return run


def new_lists() -> Run:
    seen: defaultdict[str, list[Tensor]] = defaultdict(list)

    def run(x: Tensor) -> Tensor:
        seen["x"].append(x * 2)
        return x + len(seen["x"])

    return run


def function_attribute() -> Run:
    def run(x: Tensor) -> Tensor:
        if not hasattr(run, "mask"):
            run.mask = triangle(len(x))  # type: ignore[attr-defined]
        return x * run.mask  # type: ignore[attr-defined]

    return run


def statistics_of_a_closure() -> Run:
    norm = nn.BatchNorm1d(8)
    return lambda x: norm(x) + norm.running_mean


def writes_in_place() -> Run:
    total = torch.zeros(8)

    def run(x: Tensor) -> Tensor:
        total.add_(x.detach().sum(0))
        return x + total

    return run


@dataclasses.dataclass
class Log:
    """What a loss writes to."""

    last: Any = None
    steps: int = 0
    inner: Any = None

    def note(self, value: Tensor) -> Tensor:
        self.last, self.steps = value, self.steps + 1
        return value


class SlottedLog(Log):
    __slots__ = ("__first", "latest", "seen")

    def __init__(self, latest: Any) -> None:
        super().__init__()
        self.latest, self.__first, self.seen = latest, latest, 0

    def note(self, value: Tensor) -> Tensor:
        self.latest = self.__first = value
        self.seen += 1
        return value

    def state(self) -> tuple[Any, ...]:
        return self.latest, self.__first, self.seen, vars(self)


class StrictLog(Log):
    """Its attributes have names that its __setattr__ chooses."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert not name.startswith("my_")
        vars(self)[f"my_{name}"] = value

    def __getattr__(self, name: str) -> Any:
        return vars(self)[f"my_{name}"]


class LogOfADict(dict[str, Any]):
    last: Any

    def note(self, value: Tensor) -> Tensor:
        self.last = value
        return value


LOGS: dict[str, Any] = {}


def local_to_a_thread() -> Run:
    local = threading.local()

    def run(x: Tensor) -> Tensor:
        if not hasattr(local, "mask"):
            local.mask = triangle(len(x))
        return x * local.mask

    return run


def random_numbers() -> Run:
    return lambda x: x + torch.rand(8) + random.random() + torch.linalg.inv(torch.randn(8, 8)).sum()


PATTERNS: dict[str, Callable[[], Run]] = {
    "lru_cache": lru_cache,
    "lru_cache without an end": lambda: lru_cache(None),
    "lru_cache, filled before": lambda: lru_cache(filled=True),
    **{
        pattern.__name__.replace("_", " "): pattern
        for pattern in (
            global_dict,
            nested_dict,
            replaced_global,
            class_attribute,
            replaced_class_attribute,
            hook_list,
            hooks_of_a_module,
            gradient_hook,
            default_argument,
            closure_list,
            closure_variable,
            attribute_by_device,
            helper_object,
            slotted_object,
            helper_of_a_class,
            window,
            hook_of_a_parameter,
            identities,
            ordered_cache,
            new_lists,
            function_attribute,
            statistics_of_a_closure,
            writes_in_place,
            local_to_a_thread,
            random_numbers,
        )
    },
}
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def outputs(make: Callable[[], Run], predict: Callable[[Run, Tensor], None]) -> list[Tensor]:
    """What the model returns before a prediction, if that changes nothing, and after it."""
    torch.manual_seed(0)
    random.seed(0)
    run = make()
    predict(run, X.clone().requires_grad_())
    found = []
    for _ in range(2):
        x = X.clone().requires_grad_()
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


def predict(run: Run, x: Tensor, **how: Any) -> None:
    memcheck.predict_memory(run, x, **how)


def predict_for_a_gpu(run: Run, x: Tensor) -> None:
    predict(run, x, device="A100-40GB")


def predict_without_backward(run: Run, x: Tensor) -> None:
    predict(run, x, backward=False)


def predict_and_fail(run: Run, x: Tensor) -> None:
    def fail(output: Tensor) -> Tensor:
        raise KeyError("in the loss")

    with pytest.raises(KeyError, match="in the loss"):
        predict(run, x, loss=fail)


def predict_and_skip(run: Run, x: Tensor) -> None:
    def stop(output: Tensor) -> Tensor:
        raise NotImplementedError("data-dependent")

    assert memcheck.predict_memory(run, x, loss=stop).fits is None


@pytest.mark.extension
@pytest.mark.parametrize("how", [predict, predict_and_fail])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_model_runs_as_in_a_fresh_process(name: str, how: Callable[[Run, Tensor], None]) -> None:
    check(name, how)


@pytest.mark.extension
@pytest.mark.parametrize("how", [predict_for_a_gpu, predict_without_backward, predict_and_skip])
@pytest.mark.parametrize(
    "name", ["lru_cache", "nested dict", "replaced class attribute", "hooks of a module", "window"]
)
def test_the_model_runs_after_any_prediction(name: str, how: Callable[[Run, Tensor], None]) -> None:
    check(name, how)


def check(name: str, how: Callable[[Run, Tensor], None]) -> None:
    expected = outputs(PATTERNS[name], lambda run, x: None)
    enabled = gc.isenabled()
    found = outputs(PATTERNS[name], how)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert gc.isenabled() == enabled


@pytest.mark.extension
def test_a_tensor_that_cannot_be_taken_out_is_named() -> None:
    """A generator that waits has a tensor in a local variable."""

    def numbers() -> Any:
        x = yield
        while True:
            x = yield x

    numbers_of = numbers()
    next(numbers_of)
    with pytest.warns(UserWarning, match="left a tensor without data in a generator; take it out"):
        memcheck.predict_memory(lambda x: numbers_of.send(x * 2), X)


@pytest.mark.extension
def test_entries_of_others_stay() -> None:
    """Those that another function adds meanwhile, and those from before."""
    cache: dict[str, Any] = {"before": torch.ones(2), "list": [1, 2]}
    before = dict(cache)

    def run(x: Tensor) -> Tensor:
        cache["mask"] = triangle(len(x))
        cache["other"] = "added"
        cache["list"].append(x * 2)
        cache["list"].append(3)
        return x * cache["mask"]

    memcheck.predict_memory(run, X)
    assert cache == {**before, "other": "added"}
    assert cache["list"] == [1, 2, 3]
    assert cache["before"] is before["before"]


@pytest.mark.extension
def test_the_user_s_objects_keep_their_flags() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval().requires_grad_(False)
    model[0].weight.requires_grad_().grad = torch.ones(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    memcheck.predict_memory(lambda x: model.train()(x), X, loss=lambda y: y.sum())
    memcheck.predict_memory(model, X, optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    assert not any(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, False, False]
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not optimizer.state
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.extension
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_of_the_loss_scales_after_any_number_of_predictions(enabled: bool) -> None:
    model, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cpu", enabled=enabled)
    before = dict(vars(scaler))
    for _ in range(2):
        memcheck.predict_memory(model, X, loss=lambda y: scaler.scale(y.sum()), device="cpu")
        assert vars(scaler) == before
    assert torch.isfinite(scaler.scale(model(X).sum()))


def losses(log: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that reach the log in one way each."""
    logs, tree = [log], Log(inner={"logs": (log,)})
    LOGS["loss"] = log

    def with_default(y: Tensor, log: Any = log) -> Tensor:
        return log.note(y.sum())  # type: ignore[no-any-return]

    def with_keyword(y: Tensor, *, log: Any) -> Tensor:
        return log.note(y.sum())  # type: ignore[no-any-return]

    return {
        "closure": lambda y: log.note(y.sum()),
        "list": lambda y: logs[0].note(y.sum()),
        "nested": lambda y: tree.inner["logs"][0].note(y.sum()),
        "global": lambda y: LOGS["loss"].note(y.sum()),
        "default": with_default,
        "partial": functools.partial(with_keyword, log=log),
        "method": log.note,
    }


@pytest.mark.extension
@pytest.mark.parametrize("way", losses(Log()))
@pytest.mark.parametrize("kind", [Log, StrictLog])
def test_an_object_that_the_loss_reaches_keeps_its_attributes(kind: type[Log], way: str) -> None:
    log = kind(torch.ones(2), 3)
    before = dict(vars(log))
    model = nn.Flatten(0) if way != "method" else nn.Sequential(nn.Flatten(0), nn.Linear(64, 1))
    memcheck.predict_memory(model, X.clone().requires_grad_(), loss=losses(log)[way])
    assert vars(log).keys() == before.keys()
    assert all(vars(log)[name] is value for name, value in before.items())


@pytest.mark.extension
@pytest.mark.parametrize("latest", [None, torch.ones(2)])
def test_slots_get_their_older_values_back(latest: Any) -> None:
    log = SlottedLog(latest)
    memcheck.predict_memory(nn.Linear(8, 8), X, loss=lambda y: log.note(y.sum()))
    found, first, *others = log.state()
    assert found is latest
    assert first is latest
    assert others == [0, vars(Log())]


@pytest.mark.extension
def test_attributes_of_containers_hooks_and_keyword_inputs_come_back() -> None:
    log, hooked, given = LogOfADict(), Log("older"), Log("oldest")
    log.last = "old"

    class Model(nn.Linear):
        def forward(self, x: Tensor, sink: Any = None) -> Tensor:
            sink.note(x)
            return super().forward(x)

    model = Model(8, 8)
    model.register_forward_hook(lambda module, inputs, output: hooked.note(output.detach()) * 0 + output)
    memcheck.predict_memory(model, X, loss=lambda y: log.note(y.sum()), kwargs={"sink": given})
    assert (log.last, hooked.last, given.last) == ("old", "older", "oldest")
    assert hooked.steps == given.steps == 0


@pytest.mark.extension
def test_a_cache_of_a_library_is_empty_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nested._internal.nested_tensor._dummy_instance", None)

    def pack(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)

    prediction = memcheck.predict_memory(pack, X)
    assert "nested tensors are not predicted" in str(prediction.record.reason)
    assert pack(X).values().shape == (len(X) + 1, X.shape[1])
    for given in (pack(X), torch.nested.nested_tensor([X, X[:1]])):
        assert memcheck.predict_memory(torch.sin, given).record.reason == prediction.record.reason
    strided = memcheck.predict_memory(lambda x: torch.nested.nested_tensor([x]), X)
    assert strided.record.reason == prediction.record.reason


class Resizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor
        self.register_buffer("counts", torch.tensor([0], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        self.counts.resize_(len(x)).fill_(1)
        return x * self.counts.view(-1, 1)


def test_a_buffer_that_the_forward_resizes_keeps_its_memory() -> None:
    model = Resizing()
    memcheck.predict_memory(model, X)
    assert model.counts.untyped_storage().nbytes() == 4
    assert model.counts.tolist() == [0]

"""Tensors that a model reaches without owning them count as measurements count them: they are there from the start."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from predict.compared import compare, figures
from torch import Tensor, nn

import memcheck

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

TABLE, MASK, WEIGHT = torch.randn(100, 16), torch.ones(7, 7).tril().bool(), nn.Parameter(torch.randn(16, 16))
LAYER = nn.Linear(16, 16)


class Model(nn.Module):
    """A linear layer, and a forward of the test."""

    def __init__(self, forward: Callable[[Model, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(16, 16), forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def x() -> Tensor:
    return torch.randn(7, 16, generator=torch.Generator().manual_seed(0))


def leaf() -> Tensor:
    return x().requires_grad_()


def check(model: Any, given: Any, **how: Any) -> None:
    for _ in range(2):  # Measuring a model changes nothing either.
        for leaf_besides in (WEIGHT, getattr(model, "table", WEIGHT)):  # Its gradient would stand in the next one.
            leaf_besides.grad = None
        compare(model, given, **how)


def attributes() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layer(x) * self.table[: len(x)] * self.scale + self.more["a"][0][3:10].exp()
        return y * 2 if self.scale.item() > 0.3 else y

    more = {"a": [torch.randn(100, 16)]}
    return Model(forward, table=torch.randn(100, 16), scale=torch.tensor(0.5), more=more)


def written() -> nn.Module:
    total = torch.zeros(7, 16)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layer(x)
        total.add_(y.detach())
        self.table[: len(x)] = y.detach()
        return y + total + self.table[:7]

    return Model(forward, table=torch.zeros(100, 16))


def returned() -> nn.Module:
    table = torch.randn(100, 16)
    return Model(lambda self, x: (self.layer(x), self.table[:5], table), table=torch.randn(100, 16))


def in_a_hook() -> nn.Module:
    table = torch.randn(7, 16)
    model = nn.Linear(16, 16)
    model.register_forward_hook(lambda module, given, output: output * table + table.t().sum(0)[:16].mean())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attributes": attributes,
    "globals": lambda: Model(lambda self, x: self.layer(x) * TABLE[:7] + (x @ x.t()).masked_fill(~MASK, 0).sum()),
    "written": written,
    "returned": returned,
    "in a hook": in_a_hook,
    "decided by contents": lambda: Model(lambda self, x: self.layer(x) * 2 if MASK.any() and MASK.sum() > 3 else x),
}
STEPS: dict[str, dict[str, Any]] = {
    "training": {"optimizer": adamw},
    "accumulated": {"accumulate": 3},
    "no optimizer": {},
    "inference": {"backward": False},
}


@pytest.mark.parametrize("step", ["training", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_reaches_is_there_already(name: str, step: str) -> None:
    check(MODELS[name](), x(), **STEPS[step])


def test_a_closure_and_its_weights() -> None:
    weight, layer = torch.randn(16, 16), nn.Linear(16, 16).requires_grad_(False)
    for function in (
        lambda x: x @ weight.t() + weight.new_zeros(16),
        lambda x: layer(x) * TABLE[:7],
        lambda x: x * MASK[:, :1].to(x.device).to(x.dtype),
        lambda x: x @ weight if torch.equal(weight, weight) else x,
    ):
        check(function, leaf())


def a_module() -> Callable[[Tensor], Tensor]:
    layer = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    return lambda x: layer(x)


def a_function() -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        return LAYER(x).relu()

    return lambda x: step(x)


def an_object() -> Callable[[Tensor], Tensor]:
    class Helper:
        def __init__(self) -> None:
            self.layers = [nn.Linear(16, 16)]

        def run(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    helper = Helper()
    return lambda x: helper.run(x)


def an_autograd_function() -> Callable[[Tensor], Tensor]:
    layer = nn.Linear(16, 16)
    return lambda x: Product.apply(x, layer.weight)


CLOSURES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "a module": a_module,
    "a function": a_function,
    "an object": an_object,
    "an autograd function": an_autograd_function,
    "a leaf": lambda: lambda x: (x @ WEIGHT).relu() @ WEIGHT.t(),
    "a global module in a method": lambda: Model(lambda self, x: LAYER(x)),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_parameters_of_a_closure_get_gradients_that_do_not_reach_the_user(name: str) -> None:
    """Measured once: the gradients of parameters that the measurement does not know stay."""
    for parameter in (WEIGHT, *LAYER.parameters()):
        parameter.grad = None
    function = CLOSURES[name]()
    prediction = memcheck.predict_memory(function, leaf())
    assert WEIGHT.grad is None
    assert LAYER.weight.grad is None
    record = memcheck.measure_memory(function, leaf())
    assert prediction.exact, prediction.unknown
    assert figures(prediction.record) == figures(record)


def doubled_and_logged() -> nn.Module:
    model = Model(lambda self, x: self.layer(x), norms=[], factor=2.0)
    model.layer.weight.register_hook(lambda gradient: gradient * model.factor)
    model.layer.weight.register_hook(lambda gradient: model.norms.append(gradient.norm()))
    model.layer.bias.register_hook(functools.partial(torch.mul, other=torch.ones(16)))
    return model


def stepped_in_the_backward() -> nn.Module:
    """A step of each parameter's optimizer as soon as its gradient is there, of optimizers that have their state."""
    model = nn.Linear(16, 16)
    optimizers = {parameter: torch.optim.SGD([parameter], momentum=0.9) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(x()).sum().backward()
    return model


def of_several_gradients() -> nn.Module:
    model = nn.Linear(16, 16)
    torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda gradients: print(end=""))
    return model


def of_a_stored_tensor() -> nn.Module:
    table = torch.randn(16, 16, requires_grad=True)
    table.register_hook(torch.exp)
    return Model(lambda self, x: x @ self.table, table=table)


def with_an_attribute() -> nn.Module:
    model = Model(lambda self, x: self.layer(x) @ (self.layer.weight * self.layer.weight.factor))
    model.layer.weight.factor = torch.ones(16, 1)
    return model


HOOKS: dict[str, Callable[[], nn.Module]] = {
    "doubled and logged": doubled_and_logged,
    "stepped in the backward": stepped_in_the_backward,
    "of several gradients": of_several_gradients,
    "of a stored tensor": of_a_stored_tensor,
    "an attribute": with_an_attribute,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_and_attributes_of_tensors(name: str) -> None:
    model = HOOKS[name]()
    before = [(dict(p._backward_hooks or {}), vars(p).copy()) for p in model.parameters()]
    check(model, leaf())
    assert [(dict(p._backward_hooks or {}), vars(p)) for p in model.parameters()] == before


def test_a_hook_of_an_input_and_of_a_global_leaf() -> None:
    given = leaf()
    given.register_hook(lambda gradient: gradient * 3)
    handle = WEIGHT.register_hook(torch.exp)
    check(lambda x: x @ WEIGHT, given)
    handle.remove()


def test_partials_and_methods_own_their_module_s_parameters() -> None:
    for function in (functools.partial(nn.Linear(16, 16)), functools.partial(nn.Linear(16, 16).forward)):
        assert memcheck.measure_memory(function, x()).parameter_bytes == 16 * 17 * 4
        check(function, x())
        check(function, x(), loss=lambda y: y.sum(), optimizer=adamw)


def test_on_a_gpu_they_are_alive() -> None:
    """They are in the peaks, and neither inputs nor parameters."""

    class Table(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.table = torch.randn(rows, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table[: len(x)]

    small, large = (memcheck.predict_memory(Table(rows), leaf(), device="A100-40GB") for rows in (100, 1100))
    for name in ("forward_peak_bytes", "backward_peak_bytes"):
        assert getattr(large.record, name) - getattr(small.record, name) == 1000 * 16 * 4
    for name in ("input_bytes", "parameter_bytes", "saved_bytes", "output_bytes", "workspace_bytes"):
        assert getattr(large.record, name) == getattr(small.record, name)
    late = memcheck.predict_memory(lambda x: x.exp() * TABLE[:7], leaf(), device="A100-40GB").record
    early = memcheck.predict_memory(lambda x: x.exp() * x, leaf(), device="A100-40GB").record
    assert late.forward_peak_bytes == (early.forward_peak_bytes or 0) + TABLE.nbytes


class Last(nn.Module):
    """Keeps its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last.relu()


class Averaged(nn.Module):
    """Makes a new buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + self.layer.weight.detach() * 0.1
        return self.layer(x) + self.mean.sum()


class Recurrent(nn.Module):
    """Adds its last output, which it also returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(16, 16), torch.zeros(7, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.state
        self.state = y.detach()
        return y


REPLACING: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(16, 16)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
    "the last output": Last,
    "a buffer": Averaged,
    "a state": Recurrent,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", REPLACING)
def test_attributes_that_each_step_replaces(name: str, step: str) -> None:
    check(REPLACING[name](), x(), **STEPS[step])


def test_saved_bytes_are_what_the_forward_keeps() -> None:
    """Also in a step in the steady state, where the forward frees as much of the step before."""
    for step in STEPS.values():
        assert memcheck.measure_memory(Averaged(), x(), **step).saved_bytes == 0
    weight = memcheck.measure_memory(Last(), x(), optimizer=adamw)
    assert weight.saved_bytes == memcheck.measure_memory(Last(), x()).saved_bytes == 7 * 16 * 4


class Untouchable(nn.Module):
    """Refuses to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def __deepcopy__(self, memo: Any) -> Untouchable:
        raise RuntimeError("do not copy me")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Remade(nn.Module):
    """Is copied by its own hook."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def __deepcopy__(self, memo: Any) -> Remade:
        return memo.setdefault(id(self), Remade(self.weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def with_a_generator() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        noise = torch.randn(7, 16, generator=self.generators[0])
        return self.layer(x) * torch.empty(7, 16).bernoulli_(0.5, generator=self.generator) + noise

    generators = [torch.Generator(), torch.Generator()]
    model = Model(forward, generator=torch.Generator(), generators=generators)
    model.last = torch.Generator()  # The last attribute, after which nothing is copied.
    return model


def with_locks() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        with self.locks[0]:
            return self.layer(x)

    return Model(
        forward, locks=[threading.Lock(), threading.RLock()], numbers=iter(i for i in range(3)), file=threading
    )


REFUSING: dict[str, Callable[[], nn.Module]] = {
    "a generator": with_a_generator,
    "locks": with_locks,
    "a module": lambda: nn.Sequential(Untouchable(), nn.ReLU()),
    "the whole model": Untouchable,
    "a copy of its own": lambda: Remade(torch.randn(16, 16)),
}


@pytest.mark.parametrize("step", ["training", "no optimizer"])
@pytest.mark.parametrize("name", REFUSING)
def test_models_that_cannot_be_copied(name: str, step: str) -> None:
    model = REFUSING[name]()
    parameters = {path: parameter.clone() for path, parameter in model.named_parameters()}
    memcheck.predict_memory(model, x(), **STEPS[step])
    for path, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, parameters[path])
    check(model, x(), **STEPS[step])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_functions_and_modules_of_torchscript() -> None:
    scripted = torch.jit.script(nn.Linear(16, 16))
    compare(lambda x: scripted(x), leaf())
    compare(nn.Sequential(nn.Linear(16, 16), scripted), leaf())


def test_a_module_without_shapes_says_what_to_do() -> None:
    for call in (memcheck.predict_memory, memcheck.measure_memory):
        with pytest.raises(ValueError, match="has no shape before the first call of its module; call the model once"):
            call(nn.LazyLinear(16), x())

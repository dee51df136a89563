"""Predictions of models whose shapes depend on values, that resize storages, hook saved tensors and read NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memcheck
from memcheck.measure.measurement import measure_memory
from memcheck.predict.known_contents import KnownContents

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

FIGURES = ("output_bytes", "forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "gradient_bytes")
FIGURES += ("forward_end_allocated_bytes", "backward_end_allocated_bytes")
ARRAY = np.ones((30, 17), dtype=np.float32)


@pytest.fixture(autouse=True)
def a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))


def is_exact(model: Callable[..., Any], *inputs: Any, **how: Any) -> None:
    prediction, record = memcheck.predict_memory(model, *inputs, **how), measure_memory(model, *inputs, **how)
    assert prediction.unknown == ()
    assert prediction.exact
    predicted = {name: getattr(prediction.record, name) for name in FIGURES}
    assert predicted == {name: getattr(record, name) for name in FIGURES}


def of_x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(30, 17, requires_grad=True)


class Experts(nn.Module):
    """A mixture of experts: each gets the rows that the router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(17, 3)
        self.experts = nn.ModuleList([nn.Linear(17, 17) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        chosen = functional.one_hot(self.router(x).argmax(-1), 3)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen[:, number])
            y = y.index_add(0, rows, expert(x[rows]))
        return y


def assigned(x: Tensor) -> Tensor:
    y = x * 1
    y[y > 0] = x[x > 0] * 2
    return y


BY_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "a mask": lambda x: x[x > 0].exp(),
    "masked_select": lambda x: x.masked_select(x > 0).exp(),
    "a loss over a mask": lambda x: functional.mse_loss(x[x > 0], x[x > 0].detach() * 2),
    "nonzero": lambda x: x[x.relu().nonzero(as_tuple=True)].exp(),
    "argwhere": lambda x: x * torch.argwhere(x[0] > 0).sum(),
    "where": lambda x: x[torch.where(x[:, 0] > 0)[0]].exp(),
    "unique": lambda x: x * torch.unique(x.detach().round(), return_counts=True)[1].sum(),
    "unique_consecutive": lambda x: x * torch.unique_consecutive(x.detach().round()).sum(),
    "repeats": lambda x: x.repeat_interleave(x[:, 0].detach().abs().long() + 1, 0).exp(),
    "bincount": lambda x: x * torch.bincount((x.detach().abs() * 3).long().flatten()).sum(),
    "assignment": assigned,
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.detach() * 2),
    "a list as index": lambda x: x[[0, 3, 5]].exp(),
    "tolist": lambda x: x * sum(x[0].tolist()),
    "a branch": lambda x: x.exp() if (x > 9).any() else (x * 2).exp(),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_shapes_that_depend_on_values_are_exact(name: str) -> None:
    is_exact(BY_VALUES[name], of_x())


def test_a_mixture_of_experts_is_exact() -> None:
    torch.manual_seed(0)
    is_exact(Experts(), of_x().detach())


def test_the_size_of_an_unknown_mask_is_assumed_and_named() -> None:
    def model(x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.5)
        return functional.mse_loss(x[x > 0], x[x > 0].detach() * 2)

    prediction = memcheck.predict_memory(model, of_x())
    words = "aten::index reads or writes where a mask is True, which depends on values; assumed: everywhere"
    assert words in prediction.unknown
    assert not prediction.exact
    assert {"forward_peak_bytes", "saved_bytes", "backward_peak_bytes"} <= prediction.bounds
    assert prediction.record.forward_peak_bytes > measure_memory(model, of_x()).forward_peak_bytes


def test_contents_are_computed_when_they_are_asked_for_and_not_before() -> None:
    known = KnownContents()
    x, y = torch.zeros(4, device="meta"), torch.zeros(4, device="meta")
    known.note(x, torch.arange(4.0))
    known.note_call(torch.ops.aten.add.Tensor, (x, x), {}, [y])
    contents = known._of(y)
    assert contents is not None
    assert contents.real is None
    known.note_call(torch.ops.aten.mul_.Tensor, (x, 10), {}, [x])
    del x
    read = known.read(y)
    assert read is not None
    assert read.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert contents.step is None


def into(operator: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        out = torch.empty(0)
        operator(x.detach(), out=out)
        return out.sum() * x

    return model


def emptied(x: Tensor) -> Tensor:
    y = x.detach() * 2
    z = (y * y).sum()
    y.untyped_storage().resize_(0)
    return x.exp() * z


def other_data(x: Tensor) -> Tensor:
    a, b = torch.zeros(50, 50), torch.ones(7)
    a.data = b
    c = torch.zeros(60, 60)
    torch.utils.swap_tensors(b, c)
    return x * a.sum() * b.sum()


STORAGES: dict[str, Callable[[Tensor], Any]] = {
    "out= that grows": into(torch.exp),
    "out= of a product": into(lambda x, out: torch.mm(x, x.mT, out=out)),
    "out= of a mask": into(lambda x, out: torch.masked_select(x, x > 0, out=out)),
    "a storage that is emptied": emptied,
    "data that are replaced": other_data,
}


@pytest.mark.parametrize("name", STORAGES)
def test_storages_that_change_are_exact(name: str) -> None:
    is_exact(STORAGES[name], of_x())


def saved_on_cpu(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x.exp() * x).sigmoid()


def hooked(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return (x.exp() * x).sigmoid()

    return model


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "save_on_cpu": saved_on_cpu,
    "bfloat16": hooked(lambda x: x.bfloat16(), lambda x: x.float()),
    "a copy": hooked(lambda x: x.to("cpu", copy=True), lambda x: x.to("cpu")),
    "NumPy": hooked(lambda x: x.detach().numpy(), torch.from_numpy),
}


@pytest.mark.parametrize("name", HOOKS)
def test_saved_tensors_are_packed_as_on_the_device(name: str) -> None:
    is_exact(HOOKS[name], of_x())


def with_hook(hook: Callable[[Tensor], Any], on_node: bool = False) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        if on_node:
            y.grad_fn.register_prehook(lambda gradients: (hook(gradients[0]),))  # type: ignore[union-attr]
        else:
            y.register_hook(hook)
        return y * 3

    return model


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "a product in a hook": with_hook(lambda g: g * 2),
    "a quotient in a hook": with_hook(lambda g: g / 2),
    "a sum in a hook": with_hook(lambda g: g + 1),
    "a hook of a node": with_hook(lambda g: g * 2, on_node=True),
    "an imaginary number": lambda x: torch.view_as_real(x * 1j),
    "a complex number": lambda x: torch.view_as_real(x.to(torch.complex64) * (1 + 2j) / 2j),
    "of numbers alone": lambda x: x * torch.div(7, 2, rounding_mode="trunc"),
    "a derivative of a product": lambda x: (
        torch.autograd.grad(((x * 2).exp() * 3.0).sum(), x, create_graph=True)[0] * 2
    ),
    "a derivative of a square": lambda x: torch.autograd.grad((x * x).sum() * 2, x, create_graph=True)[0] * 2,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_autograd_keeps_are_exact(name: str) -> None:
    is_exact(NUMBERS[name], of_x())


def with_tangent(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def model(x: Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent

    return model


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, with_tangent])
def test_numbers_in_transforms_of_functions_are_a_doubt(transform: Any) -> None:
    model = transform(lambda row: row.exp() * 2)
    prediction = memcheck.predict_memory(model, torch.randn(8), device="cpu", backward=False)
    assert "how long forward-mode AD and transforms of functions keep their numbers" in prediction.unknown
    assert not prediction.exact


OF_NUMPY: dict[str, Callable[[Tensor], Any]] = {
    "from_numpy": lambda x: x * torch.from_numpy(ARRAY),
    "a view": lambda x: x @ torch.from_numpy(ARRAY).t(),
    "as_tensor": lambda x: x * torch.as_tensor(ARRAY, device=x.device),
    "another dtype": lambda x: x * torch.as_tensor(ARRAY, dtype=torch.float64).float(),
    "tensor": lambda x: x * torch.tensor(ARRAY, device=x.device),
    "Tensor": lambda x: x * torch.Tensor(ARRAY),
    "a list": lambda x: x * torch.as_tensor([2.0] * 17),
    "frombuffer": lambda x: x * torch.frombuffer(bytearray(68), dtype=torch.float32),
    "that of a tensor": lambda x: x * torch.from_numpy(x.detach().exp().numpy()),
    "an index": lambda x: x[np.array([1, 3, 4])],
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_memory_of_numpy_does_not_count(name: str) -> None:
    is_exact(OF_NUMPY[name], of_x())


def test_an_array_of_unknown_values_stops_the_prediction_and_says_what_to_do() -> None:
    prediction = memcheck.predict_memory(lambda x: x * x.detach().numpy().sum(), torch.rand(3, 4, device="meta"))
    assert prediction.record.status == "skipped"
    assert "pass inputs and a model with data" in (prediction.record.reason or "")


def test_a_function_of_numbers_alone_is_exact() -> None:
    is_exact(lambda x: x[: int(torch.div(7, 2, rounding_mode="trunc"))] * torch.div(7, 2), of_x())


def checked(x: Tensor) -> Tensor:
    x = functional.dropout(x, 0.1)
    assert (x < 99).all()
    assert x.max() < 99
    torch._assert((x < 99).all(), "too large")
    torch._assert_async((x < 99).all())
    for bound in (-99, -98):
        if not x.min() > bound:
            raise ValueError(f"{x} is too small")
    if (x > 99).any() or not torch.isfinite(x).all():
        raise ValueError(f"{x} is too large")
    if x.isnan().any().item():
        raise ValueError(f"{x} has no values")
    return x.exp()


ASSUMED = "a branch on the value of aten::{}, assumed to be {}"
CHECKS: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "assertions and raised errors": (
        checked,
        {ASSUMED.format(*one) for one in (("all", True), ("any", False), ("lt", True), ("gt", True))},
    ),
    "samples of a normal distribution": (lambda x: torch.distributions.Normal(x, x.exp()).rsample().exp(), set()),
    "likelihoods of samples": (
        lambda x: (lambda d: d.log_prob(d.sample()))(torch.distributions.Categorical(logits=x, validate_args=True)),
        {ASSUMED.format("_is_all_true", True)},
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_are_assumed_to_pass_with_a_doubt(name: str) -> None:
    model, unknown = CHECKS[name]
    prediction, record = memcheck.predict_memory(model, of_x()), measure_memory(model, of_x())
    assert {name: getattr(prediction.record, name) for name in FIGURES} == {
        name: getattr(record, name) for name in FIGURES
    }
    assert set(prediction.unknown) == unknown
    assert prediction.exact == (not unknown)


@pytest.mark.parametrize("device", ["cpu", "A100-40GB"])
def test_an_error_that_no_assumed_value_prevents_is_raised(device: str) -> None:
    def model(x: Tensor) -> Tensor:
        assert functional.dropout(x, 0.1).max() < 0
        raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        memcheck.predict_memory(model, of_x(), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_extrema_and_of_bounds_are_exact(dtype: torch.dtype, transposed: bool) -> None:
    """Their backward has other operators under a mode."""
    x = of_x().to(dtype)
    x = (x.t() if transposed else x).detach().requires_grad_()
    low, high = torch.zeros(1, dtype=dtype, requires_grad=True), torch.ones_like(x, requires_grad=True)
    is_exact(lambda x: x / x.max(), x)
    is_exact(torch.min, x)
    is_exact(torch.clamp, x, low, high)


def test_what_a_transform_keeps_in_a_cycle_is_a_doubt() -> None:
    """The gradient of a sum does not depend on x, and torch keeps the sum until the garbage collector runs."""
    prediction = memcheck.predict_memory(torch.func.grad(torch.sum), of_x())
    assert "when torch frees what a transform of a function made" in prediction.unknown
    is_exact(torch.func.grad(torch.sum), of_x().detach())


def test_transforms_of_functions_write_no_gradient_in_place() -> None:
    for function in (lambda x: x.max(1)[0].sum(), lambda x: x.sort()[0][0, 0]):
        is_exact(torch.func.grad(function), of_x().detach(), backward=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_powers_of_true_are_exact(dtype: torch.dtype) -> None:
    for base in (True, False, 1, 2):
        is_exact(lambda x, base=base: torch.pow(base, x), torch.ones(4, 8).to(dtype))

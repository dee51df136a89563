"""Operators that are listed as allocating only their outputs do so; each runs alone on real tensors."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from memcheck.core.tensors import tensors_in
from memcheck.measure.tracker import track
from memcheck.predict.plain_operators import SHOWN_ON_CPU, takes_nothing
from memcheck.predict.scratch import Scratch, Target, call_of, scratch_of

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

# Operators with exact rules for their scratch, which the same calls test.
RULED = {"mean", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "scatter"}
RULED |= {"sum", "logsumexp"}
UNARY = ["abs", "cos", "erf", "exp", "log", "neg", "reciprocal", "relu", "rsqrt", "sgn", "sigmoid", "sin", "sqrt"]
UNARY += ["tanh"]
ACTIVATIONS = ["elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "silu", "softplus"]


def positions(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.int64)


def first_classes(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64)


def on_matrices(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x) if x.dim() == 2 else x * 1


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in UNARY},
    **{name: getattr(functional, name) for name in ACTIVATIONS},
    "threshold": lambda x: functional.threshold(x, 0.2, 0.0),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "reductions": lambda x: x.amax(-1) + x.amin(-1) + x.sum(-1),
    "reductions of columns": lambda x: x.amax(0) + x.sum(0),
    "sum": lambda x: x.sum(),
    "sums in other types": lambda x: x.sum(0, dtype=torch.float64) + x.sum(0, dtype=torch.float32) + (x > 0.3).sum(0),
    "logsumexp": lambda x: x.logsumexp(0) + torch.stack([x, x]).logsumexp(0).logsumexp(0),
    "mean": lambda x: x.mean(-1),
    "mean of all": lambda x: x.mean(),
    "clamp": lambda x: x.clamp(0.2, 0.4) + x.clamp_min(0.3),
    "cumsum": lambda x: x.cumsum(-1) + x.cumsum(0),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "masked_fill": lambda x: x.masked_fill(x > 0.3, 0.0),
    "maximum": lambda x: torch.maximum(x, x * 2) + torch.minimum(x, x * 2),
    "pow": lambda x: x**2 + x**3.3 + x**x,
    "where": lambda x: torch.where(x > 0.3, x, x * 2),
    "scatter": lambda x: x.scatter(-1, positions(x), x),
    "cat": lambda x: torch.cat([x, x * 2], -1),
    "stack": lambda x: torch.stack([x, x * 2]),
    "flip": lambda x: x.flip(-1),
    "clone": lambda x: x.clone(),
    "pad": lambda x: functional.pad(x, (1, 2)),
    "slice": lambda x: x[..., 1:] * 1,
    "select": lambda x: x.select(-1, 1) * 1,
    "softmax": lambda x: x.softmax(-1) + x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "conversions": lambda x: x.double().sum() + x.bfloat16().sum() + x.float().sum(),
    "copies": lambda x: torch.empty(x.shape, dtype=torch.float32).copy_(x) * x.new_empty(x.shape).copy_(x),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "factories": lambda x: x * torch.full_like(x, 2) * x.new_full(x.shape, 2) * x.new_ones(x.shape),
    "zeros": lambda x: x * x.new_zeros(x.shape) * torch.zeros_like(x) * torch.ones_like(x) * torch.rand_like(x),
    "more factories": lambda x: x * torch.arange(x.shape[-1], dtype=x.dtype) * torch.full((), 2, dtype=x.dtype),
    "views": lambda x: (x.mT if x.dim() > 1 else x).reshape(-1) * 1,
    "product": lambda x: torch.matmul(x, x.new_ones(x.shape[-1], 3)),
    "embedding": on_matrices(lambda x: functional.embedding(torch.tensor([[0, 1], [1, 0]]), x)),
    "cross_entropy": on_matrices(lambda x: functional.cross_entropy(x, first_classes(x))),
    "nll_loss": on_matrices(lambda x: functional.nll_loss(x, first_classes(x), reduction="none")),
}


def in_place(x: Tensor) -> Tensor:
    y = x.detach() * 1
    y.addcmul_(y, y).addcdiv_(y, y + 1).lerp_(x, 0.1).sqrt_().relu_().masked_fill_(y > 0.3, 0.0)
    torch.ops.aten.new_empty_strided(y, (3,), (1,))
    rest = torch.empty_strided((3,), (1,)).fill_(1).zero_(), torch.zeros(3), torch.ones(3), torch.scalar_tensor(3.0)
    float(y.sum() + rest[0].sum())
    torch.promote_types(y.dtype, torch.float32)
    for kind in (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        for rate in (1e-3, torch.tensor(1e-3)):
            parameter = y.detach().clone().requires_grad_()
            parameter.grad = torch.ones_like(parameter)
            kind([parameter], lr=rate, fused=True).step()
    return y


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    def numbers(*sizes: int) -> Tensor:
        return (torch.rand(*sizes) * 0.8 + 0.1).to(dtype)

    yield numbers(*shape)
    if len(shape) > 1:
        yield numbers(*shape[:-2], shape[-1], shape[-2]).mT
        yield numbers(*shape[:-1], 2 * shape[-1])[..., ::2]
        yield numbers(*shape[:-2], 1, shape[-1]).expand(shape)
        yield numbers(1).expand(shape)


class Alone(TorchDispatchMode):
    """Collects, for every operator that runs, its call and the bytes beyond results and predicted scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
        self.target = Target("cpu", torch.get_num_threads())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        with track(saved=False) as memory:
            output = func(*args, **kwargs)
        results = {x.untyped_storage()._cdata: x for x in tensors_in(output)}
        # Sizes as on meta tensors, whose storages are exactly as large as needed.
        sizes = sum(x.numel() * x.element_size() for key, x in results.items() if key not in given)
        call = call_of(func, args, kwargs, output, self.target)
        operands = list(tensors_in((args, kwargs)))
        name = call.name.removeprefix("aten::")
        scratch = [part for part in scratch_of(call) if isinstance(part, Scratch)]
        known = len(scratch) == len(scratch_of(call))
        if takes_nothing(call.name, "cpu", operands, call.outputs) or (name in RULED and known):
            words = f"{name} of {[(x.dtype, tuple(x.shape), x.stride()) for x in operands]}"
            self.found[name].append((memory.peak_bytes - sizes - sum(part.bytes for part in scratch), words))
        return output


@functools.cache
def found() -> dict[str, list[tuple[int, str]]]:
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling allocates a number of 8 bytes
    with Alone() as alone:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for shape in ((3, 40, 24), (7, 33), (19,)):
                for x in layouts(shape, dtype):
                    in_place(x)
                    for call in CALLS.values():
                        for dense in (False, True):
                            run(call, x.detach().requires_grad_(), dense)
    return alone.found


def run(call: Callable[[Tensor], Tensor], x: Tensor, dense: bool) -> None:
    y = call(x)
    if y.requires_grad:
        gradient = torch.ones(y.shape if dense else (), dtype=y.dtype).expand(y.shape)
        torch.autograd.grad(y, x, gradient)


@pytest.mark.parametrize("name", sorted(SHOWN_ON_CPU | RULED))
def test_an_operator_allocates_what_is_predicted(name: str) -> None:
    calls = found()[name]
    assert calls, "no call runs it"
    assert [words for beside, words in calls if beside] == []


def test_operators_without_a_rule_are_named() -> None:
    x = torch.ones(3, 4, device="meta")
    call = call_of(torch.ops.aten.gelu.default, (x,), {}, torch.empty_like(x), Target("cpu"))
    assert scratch_of(call) == ["what aten::gelu takes beside its outputs"]
    view = call_of(torch.ops.aten.transpose.int, (x, 0, 1), {}, x.mT, Target("cpu"))
    assert scratch_of(view) == []
    mixed = call_of(torch.ops.aten.maximum.default, (x, x.double()), {}, x.double(), Target("cpu"))
    assert scratch_of(mixed) == ["what aten::maximum takes beside its outputs"]

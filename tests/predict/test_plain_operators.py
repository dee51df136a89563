"""Operators that are listed as allocating only their outputs do so; each runs alone on real tensors."""

from __future__ import annotations

import collections
import functools
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import memcheck
from memcheck.core.tensors import tensors_in
from memcheck.measure.tracker import track
from memcheck.predict.plain_operators import SHOWN_ON_CPU
from memcheck.predict.scratch import RULES, Scratch, Target, Unknown, call_of, scratch_of
from tests.fuzzing import CASES

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

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
    "sum of products": lambda x: torch.baddbmm(x.new_ones(1), x, x.mT) if x.dim() == 3 else x * 1,
    "embedding": on_matrices(lambda x: functional.embedding(torch.tensor([[0, 1], [1, 0]]), x)),
    "cross_entropy": on_matrices(lambda x: functional.cross_entropy(x, first_classes(x))),
    "nll_loss": on_matrices(lambda x: functional.nll_loss(x, first_classes(x), reduction="none")),
}


def in_place(x: Tensor) -> Tensor:
    y = x.detach() * 1
    y.addcmul_(y, y).addcdiv_(y, y + 1).lerp_(x, 0.1).sqrt_().relu_().masked_fill_(y > 0.3, 0.0)
    torch.empty(3, dtype=y.dtype).set_(y)
    torch._assert_async(torch.ones(1, dtype=torch.bool))
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


def numbers_in(args: Any, kwargs: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, (args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, int | float | complex | torch.dtype)]


def is_ordinary(name: str, operands: list[Tensor], args: Any, kwargs: Any) -> bool:
    """Whether the operands are contiguous, of float32, float64 or bfloat16, and no number is complex."""
    operands = operands[1:] if name == "where" else operands
    dtypes = {x.dtype for x in operands if name not in WITH_OTHERS or x.dtype not in (torch.int64, torch.bool)}
    usual = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64, torch.bfloat16}
    others = any(isinstance(leaf, complex | torch.dtype) for leaf in numbers_in(args, kwargs))
    return usual and not others and all(x.is_contiguous() and not x.is_neg() for x in operands)


# Operators of indices or masks.
WITH_OTHERS = {"embedding", "embedding_dense_backward", "masked_fill", "masked_fill_", "nll_loss_backward"}
WITH_OTHERS |= {"nll_loss_forward", "scatter"}


class Alone(TorchDispatchMode):
    """Collects, for every operator that is claimed, its call and the bytes beyond results and predicted scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
        self.unclaimed: dict[str, list[str]] = collections.defaultdict(list)  # Calls with contiguous operands.
        self.target = Target("cpu", torch.get_num_threads())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        with track(saved=False) as memory:
            output = func(*args, **kwargs)
        results = {x.untyped_storage()._cdata: x for x in tensors_in(output)}
        # Sizes as on meta tensors, whose storages are exactly as large as needed.
        sizes = sum(
            x.numel() * x.element_size() for key, x in results.items() if key not in given and not x._is_zerotensor()
        )
        call = call_of(func, args, kwargs, output, self.target)
        name = call.name.removeprefix("aten::")
        operands = list(tensors_in((args, kwargs)))
        scratch = scratch_of(call)
        words = f"{name} of {[(x.dtype, tuple(x.shape), x.stride()) for x in operands]} {numbers_in(args, kwargs)}"
        if not any(isinstance(part, Unknown) for part in scratch):
            beside = memory.peak_bytes - sizes - sum(part.bytes for part in scratch if isinstance(part, Scratch))
            self.found[name].append((beside, words))
        elif is_ordinary(name, operands, args, kwargs):
            self.unclaimed[name].append(words)
        return output


@functools.cache
def found() -> Alone:
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling allocates a number of 8 bytes
    with Alone() as alone:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for shape in ((3, 40, 24), (7, 33), (19,)):
                for x in layouts(shape, dtype):
                    in_place(x)
                    for call in CALLS.values():
                        for dense in (False, True):
                            run(call, x.detach().requires_grad_(), dense)
        for number in range(CASES or 700):
            run_drawn(random.Random(number if not CASES else None))
    return alone


# Functions of a tensor x, a second operand, a dimension and a number.
DRAWN: dict[str, Callable[[Tensor, Any, int, Any], Any]] = {
    **{name: lambda x, y, d, n, name=name: getattr(torch, name)(x, y) for name in ("add", "sub", "mul", "div")},
    **{name: lambda x, y, d, n, name=name: getattr(torch, name)(x, n) for name in ("rsub", "gt", "le", "eq", "ne")},
    "lt": lambda x, y, d, n: (x < y, x >= y),
    "scaled": lambda x, y, d, n: (torch.add(x, y, alpha=2), x.sub(n, alpha=3)),
    "rounded": lambda x, y, d, n: (torch.div(x, n, rounding_mode="floor"), torch.div(x, y, rounding_mode="trunc")),
    "in place": lambda x, y, d, n: x.clone().add_(n).sub_(y).mul_(n).div_(y),
    "from the left": lambda x, y, d, n: (n + x, n - x, n * x, n / x, n**x),
    "powers": lambda x, y, d, n: (x**n, x**y),
    "sum": lambda x, y, d, n: (x.sum(), x.sum(d), x.sum(d, keepdim=True)),
    "sum of two": lambda x, y, d, n: (x.sum((0, -1)), x.sum((d, 1)), x.sum((0, 1))),
    "sum in a type": lambda x, y, d, n: (x.sum(d, dtype=y.dtype), x.sum((0, -1), dtype=y.dtype)),
    "mean": lambda x, y, d, n: (x.mean(), x.mean(d), x.mean((0, -1))),
    "mean in a type": lambda x, y, d, n: (x.mean(dtype=y.dtype), x.mean(d, dtype=y.dtype)),
    "cat": lambda x, y, d, n: (torch.cat([x, x, y], d), torch.cat([x, x], d)),
    "stack": lambda x, y, d, n: (torch.stack([x, x], d), torch.stack([x, y], d)),
    "where": lambda x, y, d, n: (torch.where(x > 0, x, y), torch.where(x > 0, n, x)),
    "clamp": lambda x, y, d, n: (x.clamp(n, 9), x.clamp_min(n), x.clamp(x, x)),
    "masked_fill": lambda x, y, d, n: (x.masked_fill(x > 0, n), x.clone().masked_fill_(x[0] > 0, n)),
    "lerp": lambda x, y, d, n: (torch.lerp(x, x, n), torch.lerp(x, y, y)),
    "addcmul": lambda x, y, d, n: (torch.addcmul(x, x, y, value=n), torch.addcdiv(x, x, y, value=n)),
    "extremes": lambda x, y, d, n: (x.amax(d), x.amin((0, -1)), torch.maximum(x, y), x.max(d), x.min(d), x.max()),
    "cumsum": lambda x, y, d, n: (x.cumsum(d), x.cumsum(d, dtype=y.dtype)),
    "softmax": lambda x, y, d, n: (x.softmax(d), x.log_softmax(d), x.softmax(d, dtype=y.dtype)),
    "logsumexp": lambda x, y, d, n: (x.logsumexp(d), x.logsumexp((0, -1))),
    "copies": lambda x, y, d, n: (x.clone(), x.contiguous(), x.to(y.dtype), y.clone().copy_(x), x.reshape(-1)),
    "transposed copies": lambda x, y, d, n: (x.transpose(0, -1).contiguous(), x.flatten(1).T.clone()),
    "filled": lambda x, y, d, n: (torch.full_like(x, n), x.clone().fill_(n), x.new_full((3, 2), n), x.clone().zero_()),
    "made": lambda x, y, d, n: (torch.empty_like(x), torch.rand_like(x), torch.ones_like(x), x.new_zeros(7)),
    "padded": lambda x, y, d, n: (functional.pad(x, (1, 2), value=n), x.flip(d), x.flip(0, -1)),
    "parts": lambda x, y, d, n: (x[..., 1:] * 1, x.select(d, 0) * 1, x[:, ::2] * 1, x.narrow(d, 0, 1) * 1),
    "triangles": lambda x, y, d, n: (x.tril(), x.triu(1)),
    "scatter": lambda x, y, d, n: (x.scatter(d, positions(x), x), x.scatter(d, positions(x), n)),
    "matrices": lambda x, y, d, n: (x.flatten(1) @ x.flatten(1).T, torch.addmm(x.flatten(1), x[:, :1], x[:1])),
    "batches": lambda x, y, d, n: (x @ x.mT, torch.baddbmm(x @ x.mT, x, x.mT)),
    "negated": lambda x, y, d, n: (x.abs(), -x, x.sgn(), x.reciprocal(), x.rsqrt(), x.exp(), x.cos(), x.tanh()),
    "activated": lambda x, y, d, n: [getattr(functional, name)(x) for name in (*ACTIVATIONS, "relu", "gelu")],
    "thresholds": lambda x, y, d, n: (functional.threshold(x, 0.2, n), functional.hardtanh(x, -1, n)),
    "embedding": lambda x, y, d, n: functional.embedding(positions(x)[:2], x.flatten(1)),
    "classes": lambda x, y, d, n: functional.nll_loss(x, positions(x).select(1, 0)),
}
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
TYPES += (torch.uint8, torch.complex64)


def drawn_tensor(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in one of many layouts."""

    def numbers(*sizes: int) -> Tensor:
        return (torch.rand(*sizes) * 4 + 0.1).to(dtype)

    kinds: list[Callable[[], Tensor]] = [
        lambda: numbers(*shape),
        lambda: numbers(*shape[:-1], 2 * shape[-1])[..., ::2],
        lambda: numbers(*shape[:-1], 2 * shape[-1])[..., : shape[-1]],
        lambda: numbers(shape[0] + 2, *shape[1:])[1:-1],
        lambda: numbers(1).expand(shape),
        lambda: numbers(1, *shape[1:]).expand(shape),
        lambda: numbers(*shape[:-1], 1).expand(shape),
        lambda: numbers(*shape[::-1]).permute(*range(len(shape))[::-1]),
    ]
    if len(shape) > 1:
        kinds += [lambda: numbers(*shape[:-2], shape[-1], shape[-2]).mT]
    if len(shape) == 3:
        kinds += [lambda: numbers(shape[1], shape[0], shape[2]).transpose(0, 1)]
    if len(shape) == 4:
        kinds += [lambda: numbers(*shape).to(memory_format=torch.channels_last)] * 3
    tensor = draw.choice([*kinds, kinds[0], kinds[0]])()
    if dtype.is_complex and draw.random() < 0.5:
        return tensor.conj() if draw.random() < 0.5 else tensor.conj().imag
    return tensor


def drawn(draw: random.Random) -> tuple[str, Callable[[Tensor, Tensor], Any], Tensor, Tensor]:
    """A function, its name, and two operands for it."""
    sizes = tuple(draw.choice([1, 2, 3, 5, 8, 17]) for _ in range(draw.choice([1, 2, 2, 3, 3, 4])))
    shape = draw.choice([sizes, sizes, sizes, (61, 67), (61, 67), ()])
    if draw.random() < 0.05:
        shape = (*shape[:-1], 0)
    x = drawn_tensor(draw, shape, draw.choice(TYPES)) if shape else torch.ones((), dtype=draw.choice(TYPES))
    again = draw.choice([shape, shape, shape[1:]]) or shape
    second = drawn_tensor(draw, again, draw.choice([x.dtype, *TYPES])) if again else x.detach()
    number, dim = draw.choice([2, 2.5, 0, 1, -1.0, True, 1 + 2j]), draw.choice([0, 1, -1])
    name, call = draw.choice(list(DRAWN.items()))
    x = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
    return name, lambda x, second: call(x, second, dim, number), x, second


def run_drawn(draw: random.Random) -> None:
    """Runs a function of drawn operands, and its backward, if it takes them."""
    _, call, x, second = drawn(draw)
    try:
        for y in tensors_in(call(x, second)):
            if y.requires_grad:
                torch.autograd.grad(y, x, torch.ones(()).to(y.dtype).expand(y.shape), retain_graph=True)
    except (RuntimeError, IndexError, NotImplementedError, TypeError):
        return  # Such operands are refused.


def run(call: Callable[[Tensor], Tensor], x: Tensor, dense: bool) -> None:
    y = call(x)
    if y.requires_grad:
        gradient = torch.ones(y.shape if dense else (), dtype=y.dtype).expand(y.shape)
        torch.autograd.grad(y, x, gradient)


# Rules that other tests compare with measurements.
TESTED_ELSEWHERE = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
RULED = {name.removeprefix("aten::") for name, kind in RULES if kind == "cpu" and name.startswith("aten::")}
RULED |= {"logsumexp"}
# 16-bit products, the largest of all elements, and sums of very few exponentials are left to a probe.
LEFT_TO_A_PROBE = {"mm", "addmm", "bmm", "baddbmm", "max", "min", "logsumexp"}


@pytest.mark.parametrize("name", sorted((SHOWN_ON_CPU | RULED) - TESTED_ELSEWHERE))
def test_an_operator_allocates_what_is_predicted(name: str) -> None:
    calls = found().found[name]
    assert calls, "no call runs it"
    assert [words for beside, words in calls if beside] == []
    assert name in LEFT_TO_A_PROBE or found().unclaimed[name] == []


def test_no_other_operator_is_claimed_in_vain() -> None:
    assert [words for calls in found().found.values() for beside, words in calls if beside] == []


FIGURES = ("output_bytes", "forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "gradient_bytes")


def test_functions_are_predicted_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))
    torch.utils.deterministic.fill_uninitialized_memory = False
    seeds, exact, wrong = random.Random(None if CASES else 0), [], []
    for _ in range(CASES // 20 or 80):
        draw = random.Random(seeds.random())
        name, call, x, second = drawn(draw)
        try:
            record = memcheck.measure_memory(call, x, second)
        except (RuntimeError, IndexError, NotImplementedError, TypeError, AttributeError):
            gc.collect()  # Such operands are refused; what the error holds must not be freed in the next measurement.
            continue
        prediction = memcheck.predict_memory(call, x, second, device="cpu")
        exact.append(prediction.exact)
        figures = {figure: (getattr(prediction.record, figure), getattr(record, figure)) for figure in FIGURES}
        unlike = {figure: pair for figure, pair in figures.items() if pair[0] != pair[1]}
        if prediction.exact and unlike:
            wrong.append((name, [(x.dtype, x.shape, x.stride()) for x in (x, second)], unlike))
    assert wrong == []
    assert sum(exact) >= 0.95 * len(exact)


def test_operators_without_a_rule_are_named() -> None:
    x = torch.ones(3, 4, device="meta")
    call = call_of(torch.ops.aten.gelu.default, (x,), {}, torch.empty_like(x), Target("cpu"))
    assert scratch_of(call) == ["what aten::gelu takes beside its outputs"]
    view = call_of(torch.ops.aten.transpose.int, (x, 0, 1), {}, x.mT, Target("cpu"))
    assert scratch_of(view) == []
    mixed = call_of(torch.ops.aten.maximum.default, (x, x.double()), {}, x.double(), Target("cpu"))
    assert scratch_of(mixed) == ["what aten::maximum takes beside its outputs"]

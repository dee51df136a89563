"""The same bits for any number of threads, in a batch and alone, with gradients and without; how far a NaN reaches."""

from __future__ import annotations

import functools

import pytest
import torch
from ops.checks import ON_HOST, assert_threads_change_no_bit, generator, run, same_bits
from ops.operators import DENSE_ATTENTIONS, EVERY, Operator, every
from torch import Tensor

import memcheck

GEMM = ("combinator", "linear_r", "linear_l")  # Their products are the library's.
EVERY_ATTENTION = every(DENSE_ATTENTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_ATTENTION
def test_a_sample_alone_has_the_bits_of_its_batch(it: Operator, dtype: torch.dtype) -> None:
    """y and all gradients."""
    inputs, grad_y = it.inputs((3, *it.middle[1:]), dtype)
    together = run(it.function, inputs, grad_y)
    for b in range(3):
        alone = run(it.function, [x[b : b + 1] for x in inputs], grad_y[b : b + 1])
        assert same_bits(alone, [x[b : b + 1] for x in together])


@pytest.mark.cpu
@pytest.mark.isolated
def test_neither_threads_nor_the_batch_change_a_bit() -> None:
    """The sequences are so long that threads share one that is alone, and have one each in a batch."""
    for it in DENSE_ATTENTIONS.values():
        inputs, grad_y = it.inputs((4, *it.large[1:]))
        together = run(it.function, inputs, grad_y)
        for _ in assert_threads_change_no_bit((1, 2, 3, 8), run, it.function, inputs, grad_y):
            alone = run(it.function, [x[1:2] for x in inputs], grad_y[1:2])
            assert same_bits(alone, [x[1:2] for x in together])


@pytest.mark.cpu
@pytest.mark.isolated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_sums_inside_products_may_depend_on_threads(dtype: torch.dtype) -> None:
    """Each sum of these products has one term (in the combinator's gradient of x two), so it has no order."""
    E, rows = 130, 3000
    x, grad_y = random(dtype, (1, rows, E), (1, rows, E))
    grad_y[:, 1:] = 0
    weight = torch.eye(E, dtype=dtype).flip(0)
    calls = {
        "combinator": ([x, torch.stack([weight, weight])], grad_y),
        "linear_r": ([x, weight], grad_y),
        "linear_l": ([x, weight], grad_y.mT),
    }
    for name, (inputs, grad) in calls.items():
        [*assert_threads_change_no_bit((1, 2, 3, 8), run, getattr(memcheck, name), inputs, grad)]


@EVERY
def test_the_bits_of_y_do_not_depend_on_grad_mode(it: Operator) -> None:
    for sizes in (it.small, it.middle if ON_HOST else it.large):
        inputs, _ = it.inputs(sizes)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.no_grad():
            expected = it.function(*leaves)
        with torch.inference_mode():
            assert same_bits([it.function(*inputs)], [expected])
        assert same_bits([it.function(*inputs)], [expected])
        assert same_bits([it.function(*leaves).detach()], [expected])


# ---- how far a NaN reaches: the tables of docs/operators/same-bits.md

LENGTH, AT = 600, 430  # positions, of several chunks and segments, and the one that is not finite
POISON = pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def not_finite(x: Tensor) -> Tensor:
    return ~x.isfinite()


def random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    numbers = generator(3)
    return [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]


@DTYPE
@POISON
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_reach_in_softplus_attention(name: str, value: float, dtype: torch.dtype) -> None:
    """y: its channel, from its position on; q: only there. Gradients: its channel. The rest has the same bits."""
    given = dict(zip("qkv", random(dtype, (2, LENGTH, 3), (2, 3, LENGTH), (2, 3, LENGTH)), strict=True))
    grad_y = torch.ones(2, LENGTH, 3, dtype=dtype)
    clean = run(memcheck.softplus_attention, [*given.values()], grad_y)
    given[name][(1, AT, 2) if name == "q" else (1, 2, AT)] = value
    y, *gradients = run(memcheck.softplus_attention, [*given.values()], grad_y)
    expected = torch.zeros(2, LENGTH, 3, dtype=torch.bool)
    expected[1, AT : AT + 1 if name == "q" else None, 2] = True
    assert torch.equal(not_finite(y), expected)
    assert torch.equal(y[~expected], clean[0][~expected])
    for x, other in zip(gradients, clean[1:], strict=True):
        channels = (1, slice(None), slice(2)) if x.shape == y.shape else (1, slice(2))
        assert x[0].isfinite().all()
        assert x[channels].isfinite().all()
        assert torch.equal(x[0], other[0])


@DTYPE
@POISON
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_reach_in_linear_attention(name: str, value: float, dtype: torch.dtype) -> None:
    """y: its group of heads, from its position on, and for v up to 31 positions before (CUDA: 63); q: only there."""
    given = dict(zip("qkv", random(dtype, (2, 4, LENGTH, 5), (2, 2, LENGTH, 5), (2, 2, LENGTH, 5)), strict=True))
    head = 3 if name == "q" else 1
    function, grad_y = (
        functools.partial(memcheck.linear_attention, causal=True),
        torch.ones(2, 4, LENGTH, 5, dtype=dtype),
    )
    clean = run(function, [*given.values()], grad_y)
    given[name][1, head, AT, 2] = value
    y, *gradients = run(function, [*given.values()], grad_y)
    bad = not_finite(y)
    mine = bad[1, 3:] if name == "q" else bad[1, 2:]
    if name == "q":
        assert mine[:, AT].all()
    else:
        assert mine[:, AT:].any(2).all()
        assert mine[..., 2][:, AT:].all()
    if name == "v":
        assert not mine[..., [0, 1, 3, 4]].any()
    before = 63 if ON_HOST else 31
    assert not mine[:, : max(0, AT - before) if name == "v" else AT].any()
    assert not bad[0].any()
    assert not bad[1, : 3 if name == "q" else 2].any()
    assert name != "q" or not mine[:, AT + 1 :].any()
    outside = torch.ones_like(bad)
    outside[1, 3 if name == "q" else 2 :, AT - before :] = False
    assert torch.equal(y[outside], clean[0][outside])
    for x, other in zip(gradients, clean[1:], strict=True):
        assert x[0].isfinite().all()
        assert x[1, : x.shape[1] // 2].isfinite().all()
        assert torch.equal(x[0], other[0])
        assert torch.equal(x[1, : x.shape[1] // 2], other[1, : x.shape[1] // 2])


@DTYPE
@POISON
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_reach_in_compressed_attention(name: str, value: float, dtype: torch.dtype) -> None:
    """y: its group of heads, at least where its block is seen; of v its channel. Gradients: its group of heads."""
    given = dict(zip("qkv", random(dtype, (2, 4, LENGTH, 5), (2, 2, LENGTH, 5), (2, 2, LENGTH, 5)), strict=True))
    head = 3 if name == "q" else 1
    given[name][1, head, AT, 2] = value
    y, *gradients = run(
        lambda *x: memcheck.compressed_attention(*x, factor=8),
        [*given.values()],
        torch.ones(2, 4, LENGTH, 5, dtype=dtype),
    )
    allowed = torch.zeros(2, 4, LENGTH, 5, dtype=torch.bool)
    allowed[1, 2:, :, 2 if name == "v" else slice(None)] = True
    bad = not_finite(y)
    assert not (bad & ~allowed).any()
    sees = allowed[1, 3, AT] if name == "q" else allowed[1, 2:, AT // 8 * 8 + 7 :]
    found = bad[1, 3, AT] if name == "q" else bad[1, 2:, AT // 8 * 8 + 7 :]
    assert torch.equal(found, sees) or (value == torch.inf and name != "v")
    for x in gradients:
        assert x[0].isfinite().all()
        assert x[1, : x.shape[1] // 2].isfinite().all()


@DTYPE
@POISON
@pytest.mark.parametrize("name", GEMM)
def test_reach_in_products(name: str, value: float, dtype: torch.dtype) -> None:
    """y and the gradient of x: its token, or for a weight its column of y."""
    x, w = random(dtype, (2, LENGTH, 6), (2, 6, 6) if name == "combinator" else (6, 6))
    function = getattr(memcheck, name)
    grad_y = torch.ones(2, LENGTH, 6, dtype=dtype) if name != "linear_l" else torch.ones(2, 6, LENGTH, dtype=dtype)
    of_tokens = (lambda y: y.mT) if name == "linear_l" else (lambda y: y)
    bad_x = x.clone()
    bad_x[1, AT, 2] = value
    y, grad_x, _ = run(function, [bad_x, w], grad_y)
    expected = torch.zeros(2, LENGTH, 6, dtype=torch.bool)
    expected[1, AT] = True
    found = not_finite(of_tokens(y))
    assert not (found & ~expected).any()
    assert found[1, AT].any()
    assert not (not_finite(grad_x) & ~expected).any()
    bad_w = w.clone()
    bad_w[(1, 2, 4) if name == "combinator" else (4, 2)] = value
    found = not_finite(of_tokens(run(function, [x, bad_w], grad_y)[0]))
    assert found[..., 2].all()
    assert not found[..., [0, 1, 3, 4, 5]].any()


EVERYTHING, NOTHING = (), None
# Where a number that is not finite is, and what it reaches: of y and of the gradients of x and of the weight.
TOKEN, OF_WEIGHT = (1, AT), (slice(None), 2)
REACH_OF_PRODUCTS = {
    ("combinator", "x"): [(1, AT, 2), (TOKEN, TOKEN, EVERYTHING)],
    ("combinator", "weight"): [(0, 2, 4), ((..., 2), EVERYTHING, OF_WEIGHT)],
    ("combinator", "grad_y"): [(1, AT, 2), (NOTHING, TOKEN, OF_WEIGHT)],
    ("linear_r", "x"): [(1, AT, 2), (TOKEN, NOTHING, (2,))],
    ("linear_r", "weight"): [(4, 2), ((..., 2), (..., 4), NOTHING)],
    ("linear_r", "grad_y"): [(1, AT, 2), (NOTHING, TOKEN, (..., 2))],
    ("linear_l", "x"): [(1, AT, 2), ((1, slice(None), AT), NOTHING, (2,))],
    ("linear_l", "weight"): [(4, 2), ((slice(None), 2), (..., 4), NOTHING)],
    ("linear_l", "grad_y"): [(1, 2, AT), (NOTHING, TOKEN, (..., 2))],
}
# Of attention that is not causal: of y and of the gradients of q, k and v.
ROW, CHANNEL = (1, 3, AT), (1, slice(2, 4), slice(None), 2)
GROUP, KEY_HEAD, VALUES = (1, slice(2, 4)), (1, 1), (1, 1, slice(None), 2)
OF_HEADS = {
    "q": [(1, 3, AT, 2), (ROW, ROW, KEY_HEAD, KEY_HEAD)],
    "k": [(1, 1, AT, 2), (GROUP, GROUP, KEY_HEAD, KEY_HEAD)],
    "v": [(1, 1, AT, 2), (CHANNEL, GROUP, KEY_HEAD, NOTHING)],
    "grad_y": [(1, 3, AT, 2), (NOTHING, ROW, KEY_HEAD, VALUES)],
}
ELEMENT, OF_QUERIES, OF_KEYS = (1, AT, 2), (1, slice(None), 2), (1, 2)
OF_CHANNELS = {
    "q": [ELEMENT, (ELEMENT, ELEMENT, OF_KEYS, OF_KEYS)],
    "k": [(1, 2, AT), (OF_QUERIES, OF_QUERIES, OF_KEYS, OF_KEYS)],
    "v": [(1, 2, AT), (OF_QUERIES, OF_QUERIES, OF_KEYS, NOTHING)],
    "grad_y": [ELEMENT, (NOTHING, ELEMENT, OF_KEYS, OF_KEYS)],
}


def assert_reach(function, tensors: dict[str, Tensor], name: str, value: float, at, reached) -> None:
    """A NaN reaches exactly this; an infinity no more than this. The rest is as it is without."""
    *inputs, grad_y = tensors.values()
    clean = run(function, inputs, grad_y)
    tensors[name][at] = value
    for result, other, part in zip(run(function, inputs, grad_y), clean, reached, strict=True):
        expected = torch.zeros(result.shape, dtype=torch.bool)
        if part is not NOTHING:
            expected[part] = True
        found = not_finite(result)
        assert not (found & ~expected).any()
        assert value == torch.inf or torch.equal(found, expected)
        torch.testing.assert_close(result[~expected], other[~expected])


@DTYPE
@POISON
@pytest.mark.parametrize(("operator", "name"), REACH_OF_PRODUCTS)
def test_reach_in_gradients_of_products(operator: str, name: str, value: float, dtype: torch.dtype) -> None:
    of_y = (2, 6, LENGTH) if operator == "linear_l" else (2, LENGTH, 6)
    shapes = [(2, LENGTH, 6), (2, 6, 6) if operator == "combinator" else (6, 6), of_y]
    tensors = dict(zip(("x", "weight", "grad_y"), random(dtype, *shapes), strict=True))
    assert_reach(getattr(memcheck, operator), tensors, name, value, *REACH_OF_PRODUCTS[operator, name])


@DTYPE
@POISON
@pytest.mark.parametrize("name", OF_HEADS)
@pytest.mark.parametrize("operator", ["softplus_attention", "linear_attention", "compressed_attention"])
def test_reach_if_not_causal(operator: str, name: str, value: float, dtype: torch.dtype) -> None:
    channels = operator == "softplus_attention"
    queries, keys = ((2, LENGTH, 3), (2, 3, LENGTH)) if channels else ((2, 4, LENGTH, 5), (2, 2, LENGTH, 5))
    options = {"causal": False, **({"factor": 8} if operator == "compressed_attention" else {})}
    tensors = dict(zip(("q", "k", "v", "grad_y"), random(dtype, queries, keys, keys, queries), strict=True))
    function = functools.partial(getattr(memcheck, operator), **options)
    assert_reach(function, tensors, name, value, *(OF_CHANNELS if channels else OF_HEADS)[name])

"""What merges compressed attention with other attention: its lse, a sink, and merge_attention."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    KERNELS,
    ON_HOST,
    Bound,
    assert_threads_change_no_bit,
    assert_within,
    doubles,
    generator,
    largest_error,
    same_bits,
    same_numbers,
    saved_for_backward,
)
from ops.operators import MODES
from ops.operators import compressed_plan as plan_of
from ops.test_compressed_attention import make_inputs
from torch import Tensor

from memcheck import compressed_attention, compressed_attention_pooled, decompositions, merge_attention, track
from memcheck.ops.reference import compressed_attention as reference

forward_op = torch.ops.memcheck.compressed_attention.default

# B, H, Hkv, S, T, D
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 9, 9, 3),
    (1, 6, 2, 63, 129, 33),
    (3, 8, 2, 1, 257, 65),
    (1, 1, 1, 300, 300, 64),
    (1, 2, 1, 5, 9, 130),
    (1, 2, 1, 5, 9, 257),
]
NAMES = ["y", "lse", "grad_q", "grad_k", "grad_v", "grad_sink"]


def make_more(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """[q, k, v, sink (H,)] and the gradients of y and lse (B,H,S)"""
    inputs, grad_y = make_inputs(*sizes, dtype)
    accumulation = torch.promote_types(dtype, torch.float32)
    random = generator(2)
    sink = torch.randn(sizes[1], generator=random).to(accumulation)
    return [*inputs, sink], [grad_y, torch.randn(grad_y.shape[:3], generator=random).to(accumulation)]


def run_both(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns y, lse and the gradients of all inputs but a sink that is None."""
    *qkv, sink = (x if x is None else x.detach().requires_grad_() for x in inputs)
    outputs = function(*qkv, sink=sink, return_lse=True)
    leaves = [*qkv, *([] if sink is None else [sink])]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, list(grads))]


def assert_merging_contract(
    kv_len: int, factor: int, mode: str, inputs: list[Tensor | None], grads: list[Tensor]
) -> None:
    """Asserts that y, lse and all gradients of the pooled operator are within the tolerance."""
    options = {"factor": factor, "kv_len": kv_len, **MODES[mode]}
    results = run_both(functools.partial(compressed_attention_pooled, **options), inputs, grads)
    with torch.device("cpu"):
        wide = [x if x is None else x.double().cpu() for x in inputs]
        wide_grads = doubles([x.cpu() for x in grads])
        truths = run_both(functools.partial(reference.compressed_attention_pooled, **options), wide, wide_grads)
        none = torch.full((inputs[0].shape[1],), -math.inf, dtype=torch.float64)
        sink = none if wide[3] is None else wide[3]
        bounds = error_bounds.compressed_attention_merging_bounds(wide_grads, *wide[:3], sink, **options)
    for name, result, truth, bound in zip(NAMES, results, truths, bounds, strict=False):
        blind = truth == -math.inf
        assert torch.equal(result.cpu() == -math.inf, blind), name
        result, truth, bound = (x.masked_fill(blind, 0) for x in (result.cpu(), truth, bound))
        terms = grads[1].numel() if name == "grad_sink" else kv_len
        assert_within(result, truth, Bound(bound, terms=terms, stored=name not in ("lse", "grad_sink")), name)


# ---- lse and its gradient


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], mode: str, dtype: torch.dtype, with_sink: bool) -> None:
    *sizes, T, D = shape
    for factor in (1, 3, 8):
        (q, kc, vc, sink), grads = make_more(*sizes, -(-T // factor), D, dtype=dtype)
        assert_merging_contract(T, factor, mode, [q, kc, vc, sink if with_sink else None], grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_lse_changes_no_bit_of_the_rest(mode: str, dtype: torch.dtype) -> None:
    (q, k, v, _), (grad_y, _) = make_more(2, 4, 2, 40, 50, 20, dtype=dtype)
    for function, more in ((compressed_attention, {}), (compressed_attention_pooled, {"kv_len": 350})):
        options = {"factor": 7, **MODES[mode], **more}
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        other = [x.clone().requires_grad_() for x in (q, k, v)]
        y = function(*plain, **options)
        with_lse, lse = function(*other, return_lse=True, **options)
        assert lse.shape == (2, 4, 40)
        assert lse.dtype == torch.promote_types(dtype, torch.float32)
        gradients = torch.autograd.grad(y, plain, grad_y)
        assert same_bits([y, *gradients], [with_lse, *torch.autograd.grad(with_lse, other, grad_y)])
        with torch.no_grad():
            assert same_bits([y, lse], function(*plain, return_lse=True, **options))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_pooling_and_then_attending_is_the_same(mode: str, dtype: torch.dtype, with_sink: bool) -> None:
    """Both functions run the same kernel, and in float32 the blocks are not rounded in between."""
    (q, k, v, sink), grads = make_more(2, 4, 2, 40, 50, 20, dtype=dtype)
    sink = sink if with_sink else None
    options = {"factor": 7, **MODES[mode]}
    whole = run_both(functools.partial(compressed_attention, **options), [q, k, v, sink], grads)
    _, _, kc, vc = forward_op(q, k, v, **options, keep=True)
    pooled = functools.partial(compressed_attention_pooled, kv_len=50, **options)
    y, lse, grad_q, *of_blocks = run_both(pooled, [q, kc, vc, sink], grads)
    assert same_bits([*whole[:3], *whole[5:]], [y, lse, grad_q, *of_blocks[2:]])
    if dtype in (torch.float32, torch.float64):
        lengths = reference.block_lengths(50, 7, k)
        spread = [(x / lengths[:, None]).repeat_interleave(lengths.long(), 2) for x in of_blocks[:2]]
        assert same_bits(whole[3:5], spread)
        torch.testing.assert_close(kc, reference.compress(k, 7))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_16_bits_are_as_accurate_as_plain_pytorch(dtype: torch.dtype) -> None:
    """At most twice the error of plain PyTorch, for y and every gradient."""
    inputs, grads = make_more(2, 4, 2, 63, 129, 33, dtype=dtype)
    truths = run_both(functools.partial(reference.compressed_attention, factor=3), doubles(inputs), doubles(grads))
    ours = run_both(functools.partial(compressed_attention, factor=3), inputs, grads)
    plain = run_both(
        functools.partial(reference.compressed_attention, factor=3), inputs, [grads[0], grads[1].to(dtype)]
    )
    for name, one, other, truth in zip(NAMES, ours, plain, truths, strict=True):
        blind = truth == -math.inf
        one, other, truth = (x.masked_fill(blind, 0) for x in (one, other, truth))
        assert largest_error(one, truth) <= 2 * largest_error(other, truth), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_lse_alone(dtype: torch.dtype) -> None:
    """The gradient of y is undefined, which is the same as zeros; values have a gradient of zeros."""
    inputs, (grad_y, grad_lse) = make_more(2, 4, 2, 40, 50, 20, dtype=dtype)
    function = functools.partial(compressed_attention, factor=7)
    _, _, *both = run_both(function, inputs, [torch.zeros_like(grad_y), grad_lse])
    leaves = [x.requires_grad_() for x in inputs]
    _, lse = function(*leaves[:3], sink=leaves[3], return_lse=True)
    assert same_bits(torch.autograd.grad(lse, leaves, grad_lse), both)
    assert not both[2].any()


def test_nan_in_the_gradient_of_an_lse_of_minus_infinity_reaches_nothing() -> None:
    inputs, grads = make_more(2, 4, 2, 40, 50, 20)
    inputs[3] = None
    function = functools.partial(compressed_attention, factor=17)
    expected = run_both(function, inputs, grads)
    blind = expected[1] == -math.inf
    assert 0 < blind.sum() < blind.numel()
    grads[1] = grads[1].masked_fill(blind, math.nan)
    results = run_both(function, inputs, grads)
    assert same_numbers(results, expected)
    assert not results[0][blind].any()
    assert not results[2][blind].any()


# ---- sinks


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_of_any_size(dtype: torch.dtype) -> None:
    """-inf is no sink; a large one takes all the weight, and nothing overflows."""
    inputs, grads = make_more(2, 4, 2, 40, 50, 20, dtype=dtype)
    function = functools.partial(compressed_attention, factor=7)
    inputs[3] = torch.tensor([-math.inf, -1e4, 1e4, 1e30]).to(inputs[3].dtype)
    y, lse, *gradients = run_both(function, inputs, grads)
    plain_y, plain_lse, *_ = run_both(function, [*inputs[:3], None], grads)
    assert same_bits([y[:, :2], lse[:, 0]], [plain_y[:, :2], plain_lse[:, 0]])
    assert not y[:, 2:].any()
    assert (lse[:, 2:] == inputs[3][2:, None]).all()
    assert all(x.isfinite().all() for x in gradients)
    assert gradients[3][0] == 0


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_sink_takes_all_the_weight(dtype: torch.dtype, window: int | None) -> None:
    """y = 0, lse = inf, and no gradient, in the reference and as decomposed too."""
    inputs, grads = make_more(2, 4, 2, 40, 50, 20, dtype=dtype)
    inputs[3][1] = math.inf
    options = {"factor": 7, "window": window}
    results = run_both(functools.partial(compressed_attention, **options), inputs, grads)
    assert all(x.isfinite().all() for i, x in enumerate(results) if i != 1)
    y, lse, grad_q, *_, grad_sink = results
    assert not y[:, 1].any()
    assert not grad_q[:, 1].any()
    assert grad_sink[1] == 0
    assert (lse[:, 1] == math.inf).all()
    if dtype == torch.float64:
        torch.testing.assert_close(
            run_both(functools.partial(reference.compressed_attention, **options), inputs, grads), results
        )
        q, k, v, sink = inputs
        decomposed = decompositions()[torch.ops.memcheck.compressed_attention.default]
        both = decomposed(q, k, v, sink, return_lse=True, **options)[:2]
        torch.testing.assert_close(both, tuple(results[:2]))


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit() -> None:
    function = functools.partial(compressed_attention, factor=8)
    [*assert_threads_change_no_bit((1, 2, 7), run_both, function, *make_more(3, 4, 2, 300, 700, 33))]


def test_equal_gradients_of_a_sink_add_up() -> None:
    """Rounding errors of equal terms have the same sign and do not cancel."""
    (q, kc, vc, _), grads = make_more(1, 1, 1, 5_000 if ON_HOST else 20_000, 1, 2)
    grads = [x[:, :, :1].expand_as(x) for x in grads]
    assert_merging_contract(1, 1, "not causal", [q[:, :, :1].expand_as(q), kc, vc, torch.zeros(1)], grads)


# ---- memory


def test_only_lse_and_the_sink_are_kept_more() -> None:
    inputs, _ = make_more(2, 4, 2, 40, 50, 20)
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v, sink = leaves
    plain = saved_for_backward(lambda: compressed_attention(q, k, v, factor=7))
    with_sink = saved_for_backward(lambda: compressed_attention(q, k, v, factor=7, sink=sink, return_lse=True)[0])
    assert [x.shape for x in with_sink] == [*(x.shape for x in plain), sink.shape]


def test_memory_to_the_byte() -> None:
    """The forward takes what it keeps, and the backward the gradients, delta and scratch; a dense lse is not copied."""
    inputs, grads = make_more(2, 4, 2, 300, 300, 40)
    leaves = [x.requires_grad_() for x in inputs]
    plan = plan_of(*leaves[:2])
    with track(device=DEVICE) as memory:
        y, lse = compressed_attention(*leaves[:3], sink=leaves[3], factor=8, return_lse=True)
        outputs = y.nbytes + lse.nbytes
        assert memory.peak_bytes == outputs + plan["compressed"] + plan["forward_scratch"]
        memory.reset_peak()
        torch.autograd.backward([y, lse], grads)
        gradients = sum(leaf.grad.nbytes for leaf in leaves)
        working = gradients + plan["delta"] + plan["backward_scratch"]
        assert memory.peak_bytes == outputs + plan["compressed"] + working


# ---- torch's own checks


@pytest.mark.glue
@pytest.mark.parametrize(("dynamic", "window"), [(True, None), (False, None), (True, 11)])
def test_compile(dynamic: bool, window: int | None) -> None:
    torch._dynamo.reset()
    inputs, grads = make_more(2, 4, 2, 40, 50, 20)

    def merged(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        with_sink = compressed_attention(q, k, v, factor=7, sink=sink, return_lse=return_lse, window=window)
        return merge_attention(*zip(with_sink, compressed_attention(q, k, v, factor=3, return_lse=True), strict=True))

    compiled = torch.compile(merged, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert same_bits(run_both(compiled, inputs, grads), run_both(merged, inputs, grads))


# ---- merging


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Attention to the last positions, and its lse: plain PyTorch."""
    scores = q @ k.mT * q.shape[3] ** -0.5
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    lse = scores.logsumexp(3)
    return torch.exp(scores - lse[..., None]) @ v, lse


def union_attention(q: Tensor, k: Tensor, v: Tensor, window: int, factor: int) -> Tensor:
    """One softmax over blocks and window."""
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    near = (q @ k.mT * q.shape[3] ** -0.5).masked_fill((distance < 0) | (distance >= window), -torch.inf)
    kc, vc = reference.compress(k, factor), reference.compress(v, factor)
    far = (q @ kc.mT * q.shape[3] ** -0.5).masked_fill(
        reference.hidden_from(q, kc, factor, k.shape[2], True, False), -torch.inf
    )
    return torch.softmax(torch.cat([near, far], 3), 3) @ torch.cat([v, vc], 2)


def test_blocks_and_a_window_are_one_softmax_over_both() -> None:
    (q, k, v), grad_y = make_inputs(2, 2, 2, 70, 70, 20, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    parts = [compressed_attention(*leaves, factor=8, return_lse=True), window_attention(*leaves, window=9)]
    y, lse = merge_attention(*zip(*parts, strict=True))
    truth = union_attention(*leaves, window=9, factor=8)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(lse, torch.logaddexp(parts[0][1], parts[1][1]))
    gradients, truths = (torch.autograd.grad(x, leaves, grad_y) for x in (y, truth))
    torch.testing.assert_close(gradients, truths)


@pytest.mark.cpu
def test_the_gradient_of_a_merge() -> None:
    random = generator()
    outputs = [torch.randn(1, 2, 3, 2, dtype=torch.float64, generator=random).requires_grad_() for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, generator=random).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge_attention(x[:3], x[3:]), (*outputs, *lses))
    assert torch.autograd.gradgradcheck(lambda *x: merge_attention(x[:3], x[3:]), (*outputs, *lses))


def test_attention_that_saw_nothing_adds_nothing() -> None:
    """Whatever its y; where all saw nothing, y is 0, lse -inf and every gradient 0."""
    random = generator()
    outputs = [torch.randn(1, 2, 4, 3, generator=random) for _ in range(2)]
    lses = [torch.randn(1, 2, 4, generator=random) for _ in range(2)]
    lses[0][:, :, :2], lses[1][:, :, 1:3] = -math.inf, -math.inf
    outputs[0][:, :, :2], outputs[1][:, :, 1:3] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (*outputs, *lses)]
    y, lse = merge_attention(leaves[:2], leaves[2:])
    for s, of in ((0, 1), (2, 0)):
        assert same_bits([y[:, :, s], lse[:, :, s]], [outputs[of][:, :, s], lses[of][:, :, s]])
    assert not y[:, :, 1].any()
    assert (lse[:, :, 1] == -math.inf).all()
    gradients = torch.autograd.grad([y, lse], leaves, [torch.ones_like(y), torch.ones_like(lse)])
    assert all(x.isfinite().all() for x in gradients)
    assert not any(x[:, :, 1].any() for x in gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merge_is_rounded_once(dtype: torch.dtype) -> None:
    random = generator()
    outputs = [torch.randn(2, 2, 40, 5, generator=random).to(dtype) for _ in range(3)]
    accumulation = torch.promote_types(dtype, torch.float32)
    lses = [torch.randn(2, 2, 40, generator=random).to(accumulation) for _ in range(3)]
    y, lse = merge_attention(outputs, lses)
    truth, lse_truth = merge_attention(doubles(outputs), doubles(lses))
    size = merge_attention([x.abs() for x in doubles(outputs)], doubles(lses))[0]
    assert (y.dtype, lse.dtype) == (dtype, accumulation)
    assert_within(y, truth, Bound(size, terms=3), "y")
    assert_within(lse, lse_truth, Bound(1 + lse_truth.abs(), terms=3), "lse")


# ---- packed and padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kind", ["packed", "pair", "right", "left"])
def test_lse_and_sinks_of_sequences(kind: str, return_lse: bool, window: int | None, dtype: torch.dtype) -> None:
    """Each sequence has the bits that it has alone; the gradient of a sink is the sum over sequences."""
    keys = [30, 0, 1, 40]
    queries = [9, 0, 1, 30] if kind == "pair" else keys
    if kind in ("packed", "pair"):
        B, S, T = 1, sum(queries), sum(keys)
        ends = [torch.tensor([0, *itertools.accumulate(x)]) for x in (queries, keys)]
        options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
        places = [(0, *(slice(*x[n : n + 2].tolist()) for x in ends)) for n in range(4)]
    else:
        B, S, T = 4, 43, 43
        options = {"lengths": torch.tensor(keys), "padding": kind}
        places = [(n, *[slice(T - x, T) if kind == "left" else slice(x)] * 2) for n, x in enumerate(keys)]
    (q, k, v, sink), grads = make_more(B, 4, 2, S, T, 20, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    count, how = 2 if return_lse else 1, {"factor": 7, "window": window, "return_lse": True}
    y, lse = compressed_attention(*leaves[:3], sink=sink, **how, **options)
    torch.autograd.backward([y, lse][:count], grads[:count])
    inside, of_sink = torch.zeros_like(lse, dtype=torch.bool), torch.zeros(4, dtype=torch.float64)
    for row, *parts in places:
        of_q, of_k = ((slice(row, row + 1), slice(None), part) for part in parts)
        one = [x.detach()[here].requires_grad_() for x, here in zip((q, k, v), (of_q, of_k, of_k), strict=True)]
        its_sink = sink.detach().requires_grad_()
        alone = compressed_attention(*one, sink=its_sink, **how)
        torch.autograd.backward(alone[:count], [x[of_q] for x in grads[:count]])
        assert same_bits([y[of_q], lse[of_q]], alone)
        assert same_bits([q.grad[of_q], k.grad[of_k], v.grad[of_k]], [x.grad for x in one])
        inside[of_q] = True
        of_sink += its_sink.grad
    if KERNELS == "cpu":
        assert same_bits([sink.grad], [of_sink.float()])
    torch.testing.assert_close(sink.grad, of_sink.float())
    assert (lse[~inside] == -math.inf).all()
    assert not y[~inside].any()
    assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.cpu
def test_blocks_of_packed_sequences_are_kept_to_the_byte() -> None:
    """T / factor + N of them, whatever the lengths: with q, y and lse they are all that is kept."""
    (q, k, v, _), _ = make_more(1, 4, 2, 100, 100, 20)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for cu_seqlens in ([0, 50, 100], [0, 1, 100], [0, 0, 100]):
        options = {"factor": 7, "cu_seqlens": torch.tensor(cu_seqlens)}
        kept = saved_for_backward(lambda options=options: compressed_attention(*leaves, **options))
        blocks = (1, 2, 100 // 7 + 2, 20)
        lse = (1, 4, 100)
        assert [tuple(x.shape) for x in kept] == [q.shape, blocks, blocks, q.shape, lse, (3,), (3,)]

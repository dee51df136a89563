"""Softplus attention: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import math

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    KERNELS,
    ON_HOST,
    Bound,
    assert_contract,
    assert_within,
    doubles,
    run,
    run_truth,
    same_bits,
    same_where_not_finite,
)
from ops.operators import SOFTPLUS
from ops.operators import softplus_contract as contract
from ops.operators import softplus_plan as plan_of
from torch import Tensor

from memcheck import softplus_attention, softplus_attention_step, track
from memcheck.ops.reference import softplus_attention as reference

make_inputs = SOFTPLUS.make


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("eps", "shift"), [(0.5, 0.0), (1e-6, -14.0), (1e3, 0.0)])
def test_eps_that_matters(eps: float, shift: float, causal: bool, dtype: torch.dtype) -> None:
    (q, k, v), grad_y = make_inputs(2, 40, 70, 35, dtype)
    assert_contract(contract(causal, eps), [q, k + shift, v], grad_y, against_plain=True)


@pytest.mark.parametrize("causal", [True, False])
def test_bounds_are_the_formulas_without_cancellation(causal: bool) -> None:
    """With positive v and g, the bounds of y, dq and dv are their values; only dk has a minus, which becomes a plus."""
    (q, k, v), grad_y = make_inputs(2, 5, 9, 3, torch.float64)
    inputs, grad_y = [q, k, v.abs()], grad_y.abs()
    y, grad_q, grad_k, grad_v = run(contract(causal).reference, inputs, grad_y)
    of_y, of_q, of_k, of_v = (bound.values for bound in contract(causal).bounds(grad_y, *inputs))
    positive_part = torch.sigmoid(k) * v.abs() * grad_v / reference.softplus(k)
    for value, bound in ((y, of_y), (grad_q, of_q), (2 * positive_part - grad_k, of_k), (grad_v, of_v)):
        torch.testing.assert_close(value, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_right_where_softplus_bends(dtype: torch.dtype) -> None:
    """Softplus and its derivative at 0, a frequent value of 16-bit inputs, and at large values."""
    x = torch.tensor([0.0, -0.0, -math.inf, -30.0, 30.0], dtype=dtype, requires_grad=True)
    values = reference.softplus(x)
    values.sum().backward()
    tail = math.log1p(math.exp(-30))
    torch.testing.assert_close(values, torch.tensor([math.log(2)] * 2 + [0, tail, 30 + tail], dtype=dtype))
    torch.testing.assert_close(x.grad, torch.tensor([0.5, 0.5, 0, math.exp(-30), 1], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("S", "T", "causal"), [(700, 700, True), (300, 700, True), (700, 700, False), (700, 300, False)]
)
def test_splitting_over_positions_changes_no_bit(S: int, T: int, causal: bool, dtype: torch.dtype) -> None:
    """On the CPU, few channels are split over chunks of positions, and the same channels among many others are not."""
    B = 32
    R = 31 if KERNELS == "cpu" else 17  # CUDA: two blocks of channels
    inputs, grad_y = make_inputs(B, S, T, R, dtype)
    if KERNELS == "cpu":
        # A forward that saves nothing takes scratch only if it is split.
        q, k, _ = inputs
        scratch = "forward_scratch" if causal else "forward_sums"
        assert plan_of(q, k, causal, threads=4)[scratch] == 0
        assert plan_of(q[:1], k[:1], causal, threads=4)[scratch] > 0
    whole = run(contract(causal).function, inputs, grad_y)
    for b in range(B):
        alone = run(contract(causal).function, [x[b : b + 1] for x in inputs], grad_y[b : b + 1])
        assert same_bits(alone, [x[b : b + 1] for x in whole])


# ---- decoding


def assert_step_is_right(dtype: torch.dtype, prompt: int, eps: float = 1e-6) -> None:
    """Asserts that after a prompt, the y of each step is the last row of a forward over all keys so far."""
    T = prompt + 4
    (q, k, v), _ = make_inputs(3, T, T, 35, dtype)
    truth = reference.softplus_attention(*doubles([q, k, v]), eps=eps)
    bound = error_bounds.softplus_attention_bound(*doubles([q, k, v]), eps=eps)
    state, done = None, 0
    for now in range(max(prompt, 1), T + 1):
        new = slice(done, now)
        y, state = softplus_attention_step(q[:, now - 1 : now], k[..., new], v[..., new], state, eps=eps)
        done = now
        assert_within(y, truth[:, now - 1 : now], Bound(bound[:, now - 1 : now], terms=now), "y")
    weights = reference.softplus(k.double())
    for name, x, weighted in (("Z", state[0], weights), ("A", state[1], weights * v.double())):
        assert x.dtype == torch.promote_types(dtype, torch.float32)
        # The state is not rounded to the dtype of q.
        assert_within(x, weighted.sum(2), Bound(weighted.abs().sum(2), terms=T), name)


def test_step_with_an_eps_that_matters() -> None:
    assert_step_is_right(torch.float32, prompt=5, eps=0.5)


# ---- extremes


def assert_softplus_is_accurate() -> None:
    """Asserts that softplus is accurate: with one key that is a power of two and has value 1, y is softplus(q)."""
    q = torch.linspace(-87, 88, 350_001)[None, :, None]
    key = torch.full((1, 1, 1), 8192.0)
    y = softplus_attention(q, key, torch.ones_like(key), causal=False)
    truth = reference.softplus(q.double())
    assert ((y.double() - truth).abs() / truth).max() <= 4 * 2.0**-24


def assert_softplus_of_16_bits_is_accurate(dtype: torch.dtype) -> None:
    """Asserts that the sums get softplus(k) with an error that is small beside the rounding of k."""
    k = torch.linspace(-87, 88, 35_001).to(dtype)[None, :, None]
    _, (z, _) = softplus_attention(torch.zeros_like(k).transpose(1, 2), k, torch.zeros_like(k), return_state=True)
    truth = reference.softplus(k.double())[..., 0]
    assert ((z.double() - truth).abs() / truth).max() <= (1e-5 if KERNELS == "cuda" else 5e-7)


def test_softplus_is_accurate() -> None:
    assert_softplus_is_accurate()
    for dtype in (torch.float16, torch.bfloat16):
        assert_softplus_of_16_bits_is_accurate(dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key", [-math.inf, -1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("everywhere", [True, False])
def test_extreme_keys(key: float, everywhere: bool, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(2, 40, 70, 35)
    if everywhere:
        k.fill_(key)
    else:
        k[:, ::2, ::3] = key
    assert_contract(contract(causal), [q, k, v], grad_y)


@pytest.mark.parametrize("query", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_queries(query: float) -> None:
    (q, k, v), grad_y = make_inputs(2, 40, 70, 35)
    q[:, ::3, ::2] = query
    assert_contract(contract(), [q, k, v], grad_y)


def test_infinite_queries() -> None:
    (q, k, v), _ = make_inputs(2, 40, 70, 35)
    plain = softplus_attention(q, k, v)
    q[:, 3] = math.inf
    q[:, 5] = -math.inf
    y = softplus_attention(q, k, v)
    assert torch.equal(y[:, 3], torch.full_like(y[:, 3], math.inf) * plain[:, 3].sign())
    assert torch.equal(y[:, 5], torch.zeros_like(y[:, 5]))
    plain[:, [3, 5]] = y[:, [3, 5]]
    assert torch.equal(y, plain)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "grad_y"])
def test_results_are_not_finite_where_those_of_plain_pytorch_are_not(poisoned: str, value: float, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(1, 300, 600, 2)
    {"q": q.mT, "k": k, "v": v, "grad_y": grad_y.mT}[poisoned][0, 1, 200] = value
    ours = run(contract(causal).function, [q, k, v], grad_y)
    plain = run(contract(causal).reference, [q, k, v], grad_y)
    if poisoned == "v" and math.isinf(value) and not causal:
        # Plain PyTorch subtracts infinities in grad_k, and the formula here has none to subtract.
        ours, plain = [ours[i] for i in (0, 1, 3)], [plain[i] for i in (0, 1, 3)]
    assert same_where_not_finite(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_of_any_bits_is_summed(dtype: torch.dtype) -> None:
    """CUDA marks sums that no thread block has passed on yet with every bit set, which is a NaN."""
    (q, k, v), grad_y = make_inputs(1, 600, 600, 2, dtype)
    whole_number = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    every_bit = torch.tensor(-1, dtype=whole_number, device=DEVICE).view(dtype)
    for poisoned, at in ((k, (0, 1, 3)), (v, (0, 1, 3)), (grad_y, (0, 590, 1))):
        clean = poisoned[at].clone()
        poisoned[at] = every_bit
        y, _, grad_k, _ = run(contract().function, [q, k, v], grad_y)
        assert y[..., 1].isnan().any() == (poisoned is not grad_y)
        assert grad_k[:, 1].isnan().any()
        assert not any(x.isnan().any() for x in (y[..., 0], grad_k[:, 0]))
        poisoned[at] = clean


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [256, 20_000])
@pytest.mark.parametrize("B", [1, 20])
def test_equal_terms_add_up(B: int, T: int, causal: bool) -> None:
    """Padding consists of equal terms. Their rounding errors have the same sign and do not cancel."""
    (q, k, v), grad_y = make_inputs(B, T, T, 2)
    k, v, q, grad_y = (
        k[..., :1].expand_as(k),
        v[..., :1].expand_as(v),
        q[:, :1].expand_as(q),
        grad_y[:, :1].expand_as(q),
    )
    assert_contract(contract(causal), [q, k, v], grad_y)


def make_equal_terms(B: int, T: int, k: float, v: float) -> tuple[list[Tensor], Tensor]:
    """Returns inputs and grad_y as make_inputs does, with one channel and equal positions."""
    q, keys, values, grad_y = (torch.tensor(x) for x in (0.3, k, v, 0.7))
    return [q.expand(B, T, 1), keys.expand(B, 1, T), values.expand(B, 1, T)], grad_y.expand(B, T, 1)


LONG = [
    # B, T, k, v: plain sums of softplus(k) and of softplus(k) v would have large errors, of opposite signs.
    pytest.param(1, 1_000_000, -0.17, 1.65, id="split"),
    pytest.param(8, 400_000, -0.02, 0.85, id="not split"),
]


@pytest.mark.skipif(ON_HOST, reason="takes minutes on the host's CUDA")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("B", "T", "k", "v"), LONG)
def test_equal_terms_add_up_however_many(B: int, T: int, k: float, v: float, causal: bool) -> None:
    inputs, grad_y = make_equal_terms(B, T, k, v)
    assert_contract(contract(causal), inputs, grad_y)


@pytest.mark.host_cuda
@pytest.mark.ci
@pytest.mark.parametrize("causal", [True, False])
def test_equal_terms_add_up_on_cuda_too(causal: bool) -> None:
    inputs, grad_y = make_equal_terms(1, 400_000, -0.02, 0.85)
    assert_contract(contract(causal), inputs, grad_y)


@pytest.mark.skipif(ON_HOST, reason="takes minutes on the host's CUDA")
def test_a_million_random_terms_are_as_accurate_as_in_plain_pytorch() -> None:
    """On the CPU, plain PyTorch computes a float32 cumsum in float64."""
    inputs, grad_y = make_inputs(1, 1_000_000, 1_000_000, 1)
    results = run(contract().function, inputs, grad_y)
    plain = run(contract().reference, inputs, grad_y)
    truths = run_truth(contract().reference, inputs, grad_y)
    bounds = contract().bounds(*(x.cpu() for x in doubles([grad_y, *inputs])))
    for ours, theirs, truth, bound in zip(results, plain, truths, bounds, strict=True):
        error, plain_error = (((x.double().cpu() - truth).abs() / bound.values).max() for x in (ours, theirs))
        assert error <= 4 * plain_error


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("B", [1, 8])
def test_a_sum_that_overflows_is_infinite(B: int, causal: bool) -> None:
    """As in plain PyTorch, it is not NaN, although sums keep a compensation term."""
    (q, k, v), _ = make_inputs(B, 1500, 1500, 2)
    v = torch.full_like(v, 3e38)
    k = k.abs()
    assert torch.equal(
        softplus_attention(q, k, v, causal=causal)[:, 500:],
        reference.softplus_attention(q, k, v, causal=causal)[:, 500:],
    )
    y, (_, a) = softplus_attention_step(q[:, :1], k, v)
    assert y.isposinf().all()
    assert a.isposinf().all()


@pytest.mark.slow
@pytest.mark.parametrize("R", [1, 520])
def test_a_long_sequence_keeps_its_accuracy(R: int) -> None:
    assert_contract(contract(), *make_inputs(1, 20_000 if R == 1 else 5_000, 20_000, R))


# ---- memory


@pytest.mark.cpu
@pytest.mark.isolated
def test_memory_of_sequences_to_the_byte() -> None:
    """Padded or packed: results, carries of a batch of that size, states, and the scratch of one sequence."""
    torch.set_num_threads(1)
    (q, k, v), grad_y = make_inputs(1, 1500, 1500, 64)
    for options in ({"cu_seqlens": torch.tensor([0, 512, 700, 1500])}, {"lengths": torch.tensor([800])}):
        for causal in (True, False):
            longest = plan_of(q[:, :800], k[..., :800], causal)
            slots = len(options.get("cu_seqlens", [0, 1500])) - 1
            carries = plan_of(q, k, causal)["carries"] * (1 if causal else slots)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            with track(device=DEVICE) as memory:
                y = softplus_attention(*leaves, causal=causal, **options)
                assert memory.peak_bytes == y.nbytes + carries + longest["forward_sums"]
                memory.reset_peak()
                y.backward(grad_y)
                gradients = sum(leaf.grad.nbytes for leaf in leaves)
                assert memory.peak_bytes == y.nbytes + carries + gradients + longest["backward_scratch"]
            del y
            with track(device=DEVICE) as memory:
                y = softplus_attention(q, k, v, causal=causal, **options)
                assert memory.peak_bytes == y.nbytes + longest["forward_scratch"]
            del y
            with track(device=DEVICE) as memory:
                y, state = softplus_attention(q, k, v, causal=causal, return_state=True, **options)
                states = 2 * sum(x.nbytes for x in state)  # with rests, which are dropped
                assert memory.peak_bytes == y.nbytes + states + longest["forward_scratch"]
                assert memory.current_bytes == y.nbytes + states / 2
            del y, state

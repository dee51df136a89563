"""Softplus attention: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    CPU_LEVELS,
    DEVICE,
    DTYPES,
    HERE,
    KERNELS,
    LAYOUTS,
    ON_HOST,
    Bound,
    Contract,
    assert_contract,
    assert_strides,
    assert_within,
    doubles,
    generator,
    laid_out,
    run,
    run_truth,
    same_bits,
    same_where_not_finite,
    saved_for_backward,
    subsets,
)
from torch import Tensor
from torch.autograd import forward_ad

from memcheck import measure_memory, softplus_attention, softplus_attention_step, track
from memcheck._extension import _C
from memcheck.core.record import Record
from memcheck.ops.reference import softplus_attention as reference

forward_op = torch.ops.memcheck.softplus_attention.default
backward_op = torch.ops.memcheck.softplus_attention_backward.default
step_op = torch.ops.memcheck.softplus_attention_step.default

# B, S, T, R
SHAPES = [
    (1, 1, 1, 1),
    (3, 1, 129, 63),
    (2, 63, 63, 127),
    (2, 127, 129, 63),
    (17, 129, 257, 1),
    (3, 257, 257, 129),
    (17, 63, 300, 63),
    (1, 257, 513, 63),  # few channels and more than 256 positions: each chunk is a task
    (2, 513, 513, 1),
    (1, 300, 300, 127),
    (3, 1, 513, 300),
]
NOT_CAUSAL_SHAPES = [(2, 129, 63, 127), (1, 513, 1, 63), (3, 300, 257, 300), (2, 513, 300, 129)]
EMPTY_SHAPES = [(0, 5, 7, 3), (2, 0, 7, 3), (2, 0, 0, 3), (2, 5, 7, 0), (0, 0, 0, 0)]
CASES = [
    *(pytest.param(*shape, causal, id=f"{shape} {causal=}") for shape in SHAPES for causal in (True, False)),
    *(pytest.param(*shape, False, id=f"{shape} causal=False") for shape in NOT_CAUSAL_SHAPES),
    *(pytest.param(*shape, causal, id=f"{shape} {causal=}") for shape in EMPTY_SHAPES for causal in (True, False)),
    pytest.param(2, 5, 0, 3, False, id="(2, 5, 0, 3) causal=False"),
]


def contract(causal: bool = True, eps: float = 1e-6) -> Contract:
    options = {"causal": causal, "eps": eps}

    def bounds(grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
        of_y = error_bounds.softplus_attention_bound(q, k, v, **options)
        of_gradients = error_bounds.softplus_attention_gradient_bounds(grad_y, q, k, v, **options)
        return [Bound(bound, terms=k.shape[2]) for bound in (of_y, *of_gradients)]

    return Contract(
        functools.partial(softplus_attention, **options),
        functools.partial(reference.softplus_attention, **options),
        bounds,
    )


def make_inputs(
    B: int, S: int, T: int, R: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[list[Tensor], Tensor]:
    """[q (B,S,R), k (B,R,T), v (B,R,T)] and grad_y (B,S,R)"""
    random = generator()
    shapes = [(B, S, R), (B, R, T), (B, R, T), (B, S, R)]
    q, k, v, grad_y = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
    return [q, k, v], grad_y


def plan_of(q: Tensor, k: Tensor, causal: bool, threads: int | None = None) -> dict[str, int]:
    """The plan for so many threads; by default those there are."""
    (B, S, R), T = q.shape, k.shape[2]
    threads = torch.get_num_threads() if threads is None else threads
    options = {"dtype": str(q.dtype).removeprefix("torch."), "threads": threads, "device": KERNELS}
    return _C.softplus_attention_plan(B=B, S=S, T=T, R=R, causal=causal, **options)


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "S", "T", "R", "causal"), CASES)
def test_values_and_gradients(B: int, S: int, T: int, R: int, causal: bool, dtype: torch.dtype) -> None:
    assert_contract(contract(causal), *make_inputs(B, S, T, R, dtype), against_plain=True)


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


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_and_only_the_planned_bytes() -> None:
    """Three blocks of channels are split for seven threads, one for two. On few cores threads take turns."""
    for shape in ((1, 300, 700, 70), (1, 900, 1000, 20), (17, 300, 300, 33)):
        for causal in (True, False):
            inputs, grad_y = make_inputs(*shape)
            results, scratch = [], []
            for threads in (1, 2, 3, 7, 16):
                torch.set_num_threads(threads)
                results.append(run(contract(causal).function, inputs, grad_y))
                scratch.append(plan_of(*inputs[:2], causal)["forward_scratch" if causal else "forward_sums"])
                assert same_bits(results[0], results[-1])
                assert_memory_is_planned(*inputs, causal=causal)
            assert scratch[0] == 0
            assert scratch[-1] > 0 or shape[0] > 1


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_in_16_and_64_bits() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        inputs, grad_y = make_inputs(1, 700, 900, 40, dtype)
        for causal in (True, False):
            results = []
            for threads in (1, 7):
                torch.set_num_threads(threads)
                results.append(run(contract(causal).function, inputs, grad_y))
            assert same_bits(*results)


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_of_a_step() -> None:
    results = []
    for threads in (1, 3, 16):
        torch.set_num_threads(threads)
        (q, k, v), _ = make_inputs(4, 1, 900, 200)
        y, state = softplus_attention_step(q, k, v)
        results.append([y, *state])
        assert same_bits(results[0], results[-1])


@CPU_LEVELS
def test_every_cpu_level(level: str) -> None:
    assert _C.cpu_level() == level
    for causal in (True, False):
        for dtype in DTYPES:
            for shape in ((2, 63, 129, 35), (1, 257, 300, 33)):
                assert_contract(contract(causal), *make_inputs(*shape, dtype))
        assert_contract(contract(causal), *make_equal_terms(1, 400_000, -0.02, 0.85))
    assert_softplus_is_accurate()
    assert_softplus_of_16_bits_is_accurate(torch.bfloat16)
    assert_step_is_right(torch.float32, prompt=300)


# ---- strides


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, dtype: torch.dtype, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(2, 70, 300, 40, dtype)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        before = [x.clone() for x in (*inputs, grad)]
        results = assert_contract(contract(causal), inputs, grad)
        assert_strides(results, inputs)
        assert same_bits(before, [*inputs, grad])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_cost_no_byte(layout: str, causal: bool) -> None:
    """The operator makes no contiguous copy."""
    (q, k, v), grad_y = make_inputs(2, 70, 300, 40)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        leaves = [x.detach().requires_grad_() for x in inputs]
        plan = plan_of(q, k, causal)
        with track(device=DEVICE) as memory:
            y = softplus_attention(*leaves, causal=causal)
            assert memory.peak_bytes == y.nbytes + plan["carries"] + plan["forward_sums"]
            memory.reset_peak()
            y.backward(grad)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            assert memory.peak_bytes == y.nbytes + plan["carries"] + gradients + plan["backward_scratch"]
            del y
            assert memory.current_bytes == gradients


# ---- autograd


@pytest.mark.parametrize("mask", subsets(3))
def test_only_what_backward_reads_is_kept(mask: tuple[bool, ...]) -> None:
    inputs, _ = make_inputs(2, 70, 300, 40)
    q, k, v = leaves = [x.requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    *kept, carries = saved_for_backward(lambda: softplus_attention(*leaves))
    # grad_v is softplus(k) W, which does not need v.
    expected = [q, k, v] if mask[0] or mask[1] else [q, k]
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in expected]
    assert carries.nbytes == plan_of(q, k, causal=True)["carries"]


# ---- torch's own checks


def opcheck_inputs(requires_grad: bool) -> list[list[Tensor]]:
    dense, _ = make_inputs(2, 5, 7, 3)
    long, _ = make_inputs(1, 257, 300, 3)
    strided = [LAYOUTS["transposed"](x) for x in dense]
    return [[x.detach().requires_grad_(requires_grad) for x in inputs] for inputs in (dense, long, strided)]


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_forward(causal: bool, requires_grad: bool) -> None:
    for inputs in opcheck_inputs(requires_grad):
        torch.library.opcheck(forward_op, inputs, {"causal": causal})
        if not requires_grad:
            torch.library.opcheck(forward_op, inputs, {"causal": causal, "keep_carries": True})


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_backward(causal: bool, requires_grad: bool) -> None:
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # Tracing differentiates the backward, which raises by contract.
    if not requires_grad:
        utilities.append("test_aot_dispatch_dynamic")
    for q, k, v in opcheck_inputs(requires_grad):
        _, carries, *_ = forward_op(q.detach(), k.detach(), v.detach(), causal=causal, keep_carries=True)
        for mask in ([True, True, True], [False, True, False], [True, False, True]):
            options = {"causal": causal, "eps": 1e-6, "output_mask": [*mask, False, False]}
            arguments = (torch.randn_like(q), q, k, v, carries)
            torch.library.opcheck(backward_op, arguments, options, test_utils=utilities)


SEQUENCES = {
    "packed": {"cu_seqlens_q": torch.tensor([0, 2, 2, 300]), "cu_seqlens_k": torch.tensor([0, 5, 9, 600])},
    "padded": {"lengths": torch.tensor([600]), "left_padded": True},
}


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_opcheck_sequences(kind: str, causal: bool, requires_grad: bool) -> None:
    inputs, _ = make_inputs(1, 300, 600, 3)
    inputs = [x.requires_grad_(requires_grad) for x in inputs]
    options = {"causal": causal, **SEQUENCES[kind]}
    torch.library.opcheck(forward_op, inputs, options)
    if not requires_grad:
        torch.library.opcheck(forward_op, inputs, {**options, "keep_carries": True})


@pytest.mark.glue
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_opcheck_sequences_backward(kind: str, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(1, 300, 600, 3)
    options = {"cu_seqlens_q": None, "cu_seqlens_k": None, "lengths": None, "left_padded": False} | SEQUENCES[kind]
    carries = forward_op(q, k, v, causal=causal, keep_carries=True, **options)[1]
    for mask in ([True, True, True], [False, True, False], [True, False, True]):
        more = {"causal": causal, "eps": 1e-6, "output_mask": [*mask, False, False]}
        torch.library.opcheck(backward_op, (grad_y, q, k, v, carries, None, None), options | more)


@pytest.mark.glue
def test_opcheck_step() -> None:
    (q, k, v), _ = make_inputs(2, 1, 5, 3)
    torch.library.opcheck(step_op, (q, k, v, torch.rand(2, 3), torch.rand(2, 3)))


@pytest.mark.glue
def test_autocast_of_a_step_leaves_the_state() -> None:
    (q, k, v), _ = make_inputs(2, 1, 5, 3)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, state = softplus_attention_step(q, k, v)
        y, state = softplus_attention_step(q, k, v, state)
    assert [x.dtype for x in (y, *state)] == [torch.bfloat16, torch.float32, torch.float32]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [0, 1, 63, 300, 513])
def test_step(prompt: int, dtype: torch.dtype) -> None:
    assert_step_is_right(dtype, prompt)


def test_a_state_drifts_by_a_rounding_a_step() -> None:
    """As documented: rounding errors of a sum of equal terms have one sign. Keys of one step have no such error."""
    steps, before = 3000, 200_000
    (q, k, v) = torch.zeros(1, 1, 8), torch.linspace(-3, 3, 8).view(1, 8, 1), torch.linspace(0.5, 1.9, 8).view(1, 8, 1)
    weights = reference.softplus(k.double())[..., 0]
    terms = torch.stack([weights, weights * v.double()[..., 0]])
    start = torch.stack([weights, weights * v.double()[..., 0]]).mul(before).float()
    truth = start.double() + steps * terms
    state = (start[0], start[1])
    for _ in range(steps):
        _, state = softplus_attention_step(q, k, v, state)
    drift = (torch.stack(state).double() - truth).abs() / truth
    assert (drift <= steps * 2.0**-24).all()
    assert drift.max() > 100 * 2.0**-24
    together = softplus_attention_step(q, k.expand(1, 8, steps), v.expand(1, 8, steps), (start[0], start[1]))[1]
    assert ((torch.stack(together).double() - truth).abs() / truth).max() <= 4 * 2.0**-24


def test_step_with_an_eps_that_matters() -> None:
    assert_step_is_right(torch.float32, prompt=5, eps=0.5)


@pytest.mark.parametrize("layout", ["transposed", "every second column", "every second row", "at an offset"])
def test_step_takes_any_strides(layout: str) -> None:
    (q, k, v), _ = make_inputs(3, 1, 5, 35)
    state = (torch.rand(3, 35), torch.randn(3, 35))
    expected = softplus_attention_step(q, k, v, state)
    change = LAYOUTS[layout]
    y, new_state = softplus_attention_step(change(q), change(k), change(v), (change(state[0]), change(state[1])))
    assert same_bits([y, *new_state], [expected[0], *expected[1]])
    assert all(x.is_contiguous() for x in (y, *new_state))


def test_step_leaves_the_old_state_alone() -> None:
    (q, k, v), _ = make_inputs(3, 1, 5, 35)
    _, state = softplus_attention_step(q, k, v)
    before = [x.clone() for x in state]
    softplus_attention_step(q, k, v, state)
    assert same_bits(state, before)


@pytest.mark.parametrize(("B", "R", "T"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_step_of_nothing(B: int, R: int, T: int) -> None:
    """Without new keys the query reads the unchanged state."""
    (q, k, v), _ = make_inputs(B, 1, T, R)
    state = (torch.rand(B, R) + 1, torch.randn(B, R))
    y, (z, a) = softplus_attention_step(q, k, v, state)
    assert (y.shape, z.shape, a.shape) == ((B, 1, R), (B, R), (B, R))
    if T == 0:
        assert same_bits([z, a], state)


@pytest.mark.parametrize("wanted", range(5))
def test_step_has_no_gradient_and_says_so(wanted: int) -> None:
    (q, k, v), _ = make_inputs(2, 1, 5, 3)
    tensors = [q, k, v, torch.rand(2, 3), torch.rand(2, 3)]
    tensors[wanted].requires_grad_()
    q, k, v, *state = tensors
    with pytest.raises(NotImplementedError, match="softplus_attention_step: has no gradient"):
        softplus_attention_step(q, k, v, (state[0], state[1]))
    with torch.no_grad():
        softplus_attention_step(q, k, v, (state[0], state[1]))


@pytest.mark.parametrize("dual", [0, 1, 2])
def test_forward_mode_through_a_step_raises(dual: int) -> None:
    inputs = list(make_inputs(2, 1, 7, 3)[0])
    with forward_ad.dual_level():
        inputs[dual] = forward_ad.make_dual(inputs[dual], torch.ones_like(inputs[dual]))
        with pytest.raises(NotImplementedError, match="softplus_attention_step: forward-mode differentiation"):
            softplus_attention_step(*inputs)


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
    assert ((z.double() - truth).abs() / truth).max() <= 5e-7


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
@pytest.mark.parametrize("poisoned", [1, 2])
def test_nan_stays_in_its_channel_and_the_future(poisoned: int, causal: bool) -> None:
    S, T = 300, 700
    inputs, grad_y = make_inputs(2, S, T, 35)
    clean = run(contract(causal).function, inputs, grad_y)
    inputs[poisoned][1, 20, 500] = math.nan
    y, *gradients = run(contract(causal).function, inputs, grad_y)
    spoilt = torch.zeros_like(y, dtype=torch.bool)
    spoilt[1, 500 - (T - S) if causal else 0 :, 20] = True
    assert torch.equal(y.isnan(), spoilt)
    assert torch.equal(y[~spoilt], clean[0][~spoilt])
    for gradient, other in zip(gradients, clean[1:], strict=True):
        channel = gradient.isnan().any(1) if gradient.shape == y.shape else gradient.isnan().any(2)  # (B,R)
        assert channel.nonzero().tolist() in ([], [[1, 20]])
        assert torch.equal(gradient[0], other[0])


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


def test_nan_in_a_query_stays_in_its_position() -> None:
    (q, k, v), _ = make_inputs(2, 40, 70, 35)
    q[1, 7, 20] = math.nan
    assert softplus_attention(q, k, v).isnan().nonzero().tolist() == [[1, 7, 20]]


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


def assert_memory_is_planned(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[Record]:
    """Asserts to the byte that peaks are inputs, output, carries, gradients and the plan's scratch.

    Returns the records for an expanded and for a dense gradient of y.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    plan = plan_of(q, k, causal)
    records = [measure_memory(softplus_attention, *leaves, causal=causal, dense_grad=dense) for dense in (False, True)]
    for record, dense in zip(records, (False, True), strict=True):
        held = record.input_bytes + record.output_bytes
        assert record.saved_bytes == plan["carries"]
        assert record.forward_peak_bytes == held + plan["carries"] + plan["forward_sums"]
        assert record.gradient_bytes == q.nbytes + k.nbytes + v.nbytes
        grad_y_bytes = record.output_bytes if dense else q.itemsize
        working = plan["carries"] + grad_y_bytes + record.gradient_bytes + plan["backward_scratch"]
        assert record.backward_peak_bytes == held + working
    record = measure_memory(softplus_attention, *leaves, causal=causal, backward=False)
    assert record.forward_peak_bytes == record.input_bytes + record.output_bytes + plan["forward_scratch"]
    assert record.saved_bytes == 0
    return records


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "length", "R"), [(8, 512, 512), (1, 512, 4096), (2, 4096, 512), (1, 4096, 256)])
def test_memory_to_the_byte_and_within_the_targets(
    B: int, length: int, R: int, dtype: torch.dtype, causal: bool
) -> None:
    (q, k, v), _ = make_inputs(B, length, length, R, dtype)
    carries = (2 if dtype == torch.float32 else 4) / 256
    for record, backward in zip(assert_memory_is_planned(q, k, v, causal=causal), (7, 8), strict=True):
        for measured, units in (
            (record.forward_peak_bytes, 4 + carries),
            (record.saved_bytes, carries),
            (record.backward_peak_bytes, backward + carries),
        ):
            assert measured <= 1.02 * units * q.nbytes + 2**20


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


# ---- what is refused

RAISES = {
    "q of rank 2": ({"q": torch.ones(5, 3)}, ValueError, r"q must be \(B,S,R\), of 3 dimensions, got \[5, 3\]"),
    "k of rank 4": (
        {"k": torch.ones(2, 3, 7, 1)},
        ValueError,
        r"k must be \(B,R,T\), of 3 dimensions, got \[2, 3, 7, 1\]",
    ),
    "v of rank 1": ({"v": torch.ones(7)}, ValueError, r"v must be \(B,R,T\), of 3 dimensions, got \[7\]"),
    "another R": (
        {"k": torch.ones(2, 4, 7)},
        ValueError,
        r"k must be \(B,R,T\) = \[2, 3, 7\] to match q, got \[2, 4, 7\]",
    ),
    "another B": (
        {"k": torch.ones(1, 3, 7)},
        ValueError,
        r"k must be \(B,R,T\) = \[2, 3, 7\] to match q, got \[1, 3, 7\]",
    ),
    "another T": (
        {"v": torch.ones(2, 3, 6)},
        ValueError,
        r"v must be \(B,R,T\) = \[2, 3, 7\] to match k, got \[2, 3, 6\]",
    ),
    "token-major k": (
        {"k": torch.ones(2, 7, 3)},
        ValueError,
        r"k must be \(B,R,T\) = \[2, 3, 3\] to match q, got \[2, 7, 3\]; pass k.mT$",
    ),
    "token-major v": (
        {"v": torch.ones(2, 7, 3)},
        ValueError,
        r"v must be \(B,R,T\) = \[2, 3, 7\] to match k, got \[2, 7, 3\]; pass v.mT$",
    ),
    "token-major v of another T": ({"v": torch.ones(2, 6, 3)}, ValueError, r"to match k, got \[2, 6, 3\]$"),
    "float64 k": ({"k": torch.ones(2, 3, 7).double()}, TypeError, "k must be float32 to match q, got float64"),
    "bfloat16 v": ({"v": torch.ones(2, 3, 7).bfloat16()}, TypeError, "v must be float32 to match q, got bfloat16"),
    "integers": ({"q": torch.ones(2, 5, 3).int()}, TypeError, "q must be float64, .* or bfloat16, got int32"),
    "booleans": ({"q": torch.ones(2, 5, 3).bool()}, TypeError, "q must be float64, .* or bfloat16, got bool"),
    "complex": ({"q": torch.ones(2, 5, 3).cfloat()}, TypeError, "q must be float64, .* or bfloat16, got complex64"),
    "8 bits": (
        {"q": torch.ones(2, 5, 3).to(torch.float8_e4m3fn)},
        TypeError,
        "q must be float64, .* or bfloat16, got float8_e4m3fn",
    ),
    "k elsewhere": ({"k": torch.ones(2, 3, 7, device="meta")}, ValueError, f"k must be on {HERE} as q is, got meta"),
    "v elsewhere": ({"v": torch.ones(2, 3, 7, device="meta")}, ValueError, f"v must be on {HERE} as q is, got meta"),
    "q elsewhere": ({"q": torch.ones(2, 5, 3, device="meta")}, ValueError, f"k must be on meta as q is, got {HERE}"),
    "more queries than keys": (
        {"q": torch.ones(2, 8, 3)},
        ValueError,
        "causal needs no more queries than keys, S <= T, got S = 8 and T = 7",
    ),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps must be a positive number, got 0"),
    "negative eps": ({"eps": -1e-6}, ValueError, "eps must be a positive number, got -1e-06"),
    "eps that is none": ({"eps": math.nan}, ValueError, "eps must be a positive number, got nan"),
    "infinite eps": ({"eps": math.inf}, ValueError, "eps must be a positive number, got inf"),
    "eps that float32 makes 0": ({"eps": 1e-60}, ValueError, "eps must be a normal number of float32, got 1e-60"),
    "eps that float32 makes infinite": (
        {"eps": 1e60},
        ValueError,
        r"eps must be a normal number of float32, got 1e\+60",
    ),
    "no q": ({"q": None}, TypeError, "q must be a tensor, got None"),
    "no v": ({"v": None}, TypeError, "v must be a tensor, got None"),
    # The dispatcher raises these three before the operator is called.
    "a list": ({"q": [1.0]}, TypeError, "q must be a tensor, got a list of length 1"),
    "a word for eps": ({"eps": "small"}, RuntimeError, "Expected a value of type 'float' for argument 'eps'"),
    "sparse": ({"q": torch.ones(2, 5, 3).to_sparse()}, TypeError, "must be a dense tensor, got a sparse_coo one"),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("wrong", RAISES)
def test_wrong_input(wrong: str, requires_grad: bool) -> None:
    changed, kind, message = RAISES[wrong]
    (q, k, v), _ = make_inputs(2, 5, 7, 3)
    if requires_grad and "v" not in changed:
        v.requires_grad_()
    arguments = {"q": q, "k": k, "v": v, **changed}
    with pytest.raises(kind, match=f"softplus_attention.*{message}"):
        softplus_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


STEP_RAISES = {
    "state of another shape": (
        {"z": torch.ones(2, 4)},
        ValueError,
        r"z must be \(B,R\) = \[2, 3\] to match q, got \[2, 4\]",
    ),
    "state of another rank": (
        {"a": torch.ones(2, 1, 3)},
        ValueError,
        r"a must be \(B,R\) = \[2, 3\] to match q, got \[2, 1, 3\]",
    ),
    "state of another dtype": (
        {"z": torch.ones(2, 3).double()},
        TypeError,
        "z must be float32 to match the accumulation type of q, got float64",
    ),
    "state elsewhere": ({"a": torch.ones(2, 3, device="meta")}, ValueError, f"a must be on {HERE} as q is, got meta"),
    "no state": ({"z": None}, TypeError, "z must be a tensor, got None"),
    "another T": ({"v": torch.ones(2, 3, 6)}, ValueError, "v must be .* to match k"),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps must be a positive number, got 0"),
}


@pytest.mark.parametrize("wrong", STEP_RAISES)
def test_wrong_step(wrong: str) -> None:
    changed, kind, message = STEP_RAISES[wrong]
    (q, k, v), _ = make_inputs(2, 1, 7, 3)
    arguments = {"q": q, "k": k, "v": v, "z": torch.ones(2, 3), "a": torch.ones(2, 3), "eps": 1e-6, **changed}
    q, k, v, z, a = (arguments[name] for name in "qkvza")
    with pytest.raises(kind, match=f"softplus_attention_step: {message}"):
        softplus_attention_step(q, k, v, (z, a), eps=arguments["eps"])


BACKWARD_RAISES = {
    "too many carries": (
        {"carries": torch.ones(2, 1, 2, 3)},
        ValueError,
        r"carries must be \(B,C,2,R\) = \[2, 0, 2, 3\] to match q and k, got \[2, 1, 2, 3\]",
    ),
    "carries of another dtype": (
        {"carries": torch.ones(2, 0, 2, 3).double()},
        TypeError,
        "carries must be float32 to match the accumulation type of q, got float64",
    ),
    "carries elsewhere": (
        {"carries": torch.ones(2, 0, 2, 3, device="meta")},
        ValueError,
        f"carries must be on {HERE} as q is, got meta",
    ),
    "no carries": ({"carries": None}, TypeError, "carries must be a tensor, got None"),
    "another shape of grad_y": (
        {"grad_y": torch.ones(2, 4, 3)},
        ValueError,
        r"grad_y must be \(B,S,R\) = \[2, 5, 3\] to match q, got \[2, 4, 3\]",
    ),
    "rank of grad_y": ({"grad_y": torch.ones(())}, ValueError, r"grad_y must be \(B,S,R\), of 3 dimensions, got \[\]"),
    "dtype of grad_y": (
        {"grad_y": torch.ones(2, 5, 3).half()},
        TypeError,
        "grad_y must be float32 to match q, got float16",
    ),
    "grad_y elsewhere": (
        {"grad_y": torch.ones(2, 5, 3, device="meta")},
        ValueError,
        f"grad_y must be on {HERE} as q is, got meta",
    ),
    "no grad_y": ({"grad_y": None}, TypeError, "grad_y must be a tensor, got None"),
    "no q": ({"q": None}, TypeError, "q must be a tensor, got None"),
    "no v": ({"v": None}, TypeError, "v must be a tensor, got None"),
    "more queries than keys": (
        {"q": torch.ones(2, 8, 3), "grad_y": torch.ones(2, 8, 3)},
        ValueError,
        "causal needs no more queries than keys, S <= T, got S = 8 and T = 7",
    ),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps must be a positive number, got 0"),
}


@pytest.mark.parametrize("wrong", BACKWARD_RAISES)
def test_wrong_backward(wrong: str) -> None:
    changed, kind, message = BACKWARD_RAISES[wrong]
    (q, k, v), grad_y = make_inputs(2, 5, 7, 3)
    arguments = {"grad_y": grad_y, "q": q, "k": k, "v": v, "carries": torch.ones(2, 0, 2, 3), "eps": 1e-6, **changed}
    tensors = [arguments.pop(name) for name in ("grad_y", "q", "k", "v", "carries")]
    with pytest.raises(kind, match=f"softplus_attention_backward: {message}"):
        backward_op(*tensors, causal=True, output_mask=[True] * 5, **arguments)


def test_queries_that_see_nothing() -> None:
    """Without causal and without keys, A = Z = 0, so y = 0."""
    (q, k, v), grad_y = make_inputs(2, 5, 0, 3)
    y, grad_q, *_ = run(contract(causal=False).function, [q, k, v], grad_y)
    assert same_bits([y, grad_q], [torch.zeros(2, 5, 3)] * 2)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_first_step_refuses_other_arguments(name: str) -> None:
    (q, k, v), _ = make_inputs(2, 1, 7, 3)
    letters = {"q": "(B,1,R)", "k": "(B,R,n)", "v": "(B,R,n)"}[name]
    for wrong, kind, message in (
        (None, TypeError, "a tensor, got None"),
        ([1.0], TypeError, "a tensor, got a list of length 1"),
        (torch.ones(2), ValueError, f"{letters}, of 3 dimensions, got [2]"),
    ):
        arguments = {"q": q, "k": k, "v": v, name: wrong}
        with pytest.raises(kind, match=re.escape(f"softplus_attention_step: {name} must be {message}")):
            softplus_attention_step(*arguments.values())


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ((), "a tuple of length 0"),
        (torch.ones(2, 2, 3), "a tensor of shape [2, 2, 3]"),
        ([torch.ones(2, 3)] * 3, "a list of length 3"),
        (1.5, "1.5"),
    ],
    ids=str,
)
def test_a_state_of_another_type_is_refused(state: object, got: str) -> None:
    (q, k, v), _ = make_inputs(2, 1, 7, 3)
    message = f"softplus_attention_step: state must be a pair of tensors (z, a) or None, got {got}"
    with pytest.raises(TypeError, match=re.escape(message)):
        softplus_attention_step(q, k, v, state)
    with pytest.raises(TypeError, match=r"softplus_attention_step: a must be a tensor, got 2\.0"):
        softplus_attention_step(q, k, v, (torch.ones(2, 3), 2.0))

"""Linear attention: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import math

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    LAYOUTS,
    ON_HOST,
    Bound,
    Contract,
    assert_contract,
    assert_strides,
    assert_within,
    doubles,
    laid_out,
    run,
    run_subset,
    run_truth,
    same_bits,
    subsets,
)
from ops.operators import LINEAR
from ops.operators import LINEAR_SPLIT as SPLIT
from torch import Tensor

from memcheck import linear_attention, linear_attention_step, measure_memory
from memcheck.ops.reference import linear_attention as reference

SMALL, make_inputs = LINEAR.small, LINEAR.make
MIDDLE = (2, 4, 2, 70, 130, 40, 24) if ON_HOST else (2, 8, 4, 70, 300, 40, 24)  # some chunks, and a rest
TENSOR = (1, 4, 2, 70, 130, 40, 33)  # on tensor cores in 16 bits
SEGMENTS = (1, 2, 1, 600, 600, 40, 33)  # the same, cut into segments on CUDA
# B, H, Hkv, S, T, D, Dv, causal: so many heads that a CUDA block has all query heads of a key head in 16 bits.
GROUPED = [
    (1, 531, 177, 33, 33, 20, 17, True),
    pytest.param(1, 531, 177, 20, 33, 20, 17, False, marks=pytest.mark.ci),
    pytest.param(1, 398, 199, 20, 40, 130, 33, True, marks=pytest.mark.slow),
    pytest.param(1, 134, 67, 512, 512, 70, 100, True, marks=pytest.mark.slow),  # this and the next have segments
    pytest.param(1, 134, 67, 513, 513, 40, 33, False, marks=pytest.mark.slow),
]


def contract(causal: bool = True, feature_map: str = "elu+1", eps: float = 1e-6) -> Contract:
    return LINEAR.contract(causal=causal, feature_map=feature_map, eps=eps)


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [SMALL, MIDDLE, SPLIT])
def test_identity_features(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    """Positive inputs, so that no denominator cancels."""
    (q, k, v), grad_y = make_inputs(*shape, dtype)
    assert_contract(contract(causal, "identity"), [q.abs(), k.abs(), v], grad_y, against_plain=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [SMALL, MIDDLE, SPLIT])
def test_identity_features_of_both_signs(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    """A large eps keeps denominators away from 0."""
    (q, k, v), grad_y = make_inputs(*shape, dtype)
    assert_contract(contract(causal, "identity", eps=1e4), [q, k, v], grad_y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("eps", "shift"), [(0.5, 0.0), (1e-6, -14.0), (1e3, 0.0)])
def test_eps_that_matters(eps: float, shift: float, causal: bool, dtype: torch.dtype) -> None:
    (q, k, v), grad_y = make_inputs(*MIDDLE, dtype)
    assert_contract(contract(causal, eps=eps), [q, k + shift, v], grad_y, against_plain=True)


@pytest.mark.parametrize("causal", [True, False])
def test_bounds_are_the_formulas_without_cancellation(causal: bool) -> None:
    """With positive v and g, the bounds of y and dv are their values; in dq and dk a minus becomes a plus."""
    (q, k, v), grad_y = make_inputs(*SMALL, torch.float64)
    inputs, grad_y = [q, k, v.abs()], grad_y.abs()
    y, grad_q, grad_k, grad_v = run(contract(causal).reference, inputs, grad_y)
    of_y, of_q, of_k, of_v = (bound.values for bound in contract(causal).bounds(grad_y, *inputs))
    torch.testing.assert_close(y, of_y)
    torch.testing.assert_close(grad_v, of_v)
    assert (of_q >= grad_q.abs()).all()
    assert (of_k >= grad_k.abs()).all()
    # With one key the two terms of dq differ by eps only and cancel; the bound is twice one of them.
    (q, k, v), grad_y = make_inputs(1, 1, 1, 1, 1, 4, 3, torch.float64)
    slope = reference.features(q).clamp(max=1)
    phi_q, phi_k = reference.features(q), reference.features(k)
    one = slope * phi_k * (grad_y.abs() * v.abs()).sum() / ((phi_q * phi_k).sum() + 1e-6)
    torch.testing.assert_close(contract(causal).bounds(grad_y, q, k, v)[1].values, 2 * one, rtol=1e-5, atol=0)


def test_the_reference_implementations_agree() -> None:
    (q, k, v), grad_y = make_inputs(2, 3, 3, 150, 150, 5, 7, torch.float64)
    truth = run(contract().reference, [q, k, v], grad_y)
    for other in (reference.linear_attention_cumsum, reference.linear_attention_chunked):
        for ours, theirs in zip(truth, run(other, [q, k, v], grad_y), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("B", "H", "Hkv", "S", "T", "D", "Dv", "causal"), GROUPED)
def test_many_groups_of_query_heads(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, causal: bool, dtype: torch.dtype
) -> None:
    """The first group, one in the middle and the last one are compared with the formula."""
    it = contract(causal)
    inputs, grad_y = make_inputs(B, H, Hkv, S, T, D, Dv, dtype)
    results = run(it.function, inputs, grad_y)
    for head in (0, Hkv // 2, Hkv - 1):

        def of_group(x: Tensor, head: int = head) -> Tensor:
            heads = x.shape[1] // Hkv
            return x[:, heads * head : heads * (head + 1)]

        some, grad = [of_group(x) for x in inputs], of_group(grad_y)
        bounds = it.bounds(*(x.cpu() for x in doubles([grad, *some])))
        for result, truth, bound in zip(results, run_truth(it.reference, some, grad), bounds, strict=True):
            assert_within(of_group(result), truth, bound)


@pytest.mark.cpu
def test_results_do_not_depend_on_the_batch() -> None:
    """Segments depend on neither B nor Hkv."""
    inputs, grad_y = make_inputs(9, 2, 2, 1100, 1100, 8, 9)
    for causal in (True, False):
        whole = run(contract(causal).function, inputs, grad_y)
        alone = run(contract(causal).function, [x[3:4, 1:] for x in inputs], grad_y[3:4, 1:])
        assert same_bits(alone, [x[3:4, 1:] for x in whole])


# ---- strides


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(TENSOR, torch.bfloat16), (SEGMENTS, torch.bfloat16)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_on_tensor_cores(layout: str, shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(*shape, dtype)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        before = [x.clone() for x in (*inputs, grad)]
        results = assert_contract(contract(causal), inputs, grad)
        assert_strides(results, inputs)
        assert same_bits(before, [*inputs, grad])


# ---- autograd


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [SMALL, TENSOR, SEGMENTS, (1, 2, 1, 600, 600, 9, 12)])
def test_frozen_inputs_change_no_bit_of_other_gradients(shape: tuple[int, ...], causal: bool) -> None:
    inputs, grad_y = make_inputs(*shape, torch.bfloat16)
    function = contract(causal).function
    all_gradients = run(function, inputs, grad_y)[1:]
    for mask in subsets(3):
        gradients = run_subset(function, inputs, mask, grad_y)
        expected = [gradient if wanted else None for gradient, wanted in zip(all_gradients, mask, strict=True)]
        assert same_bits(gradients, expected)


@pytest.mark.host_cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [TENSOR, SEGMENTS, (1, 1, 1, 100, 520, 128, 72)])
def test_tensor_cores_in_any_order_of_threads(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    from host_cuda import library

    inputs, grad_y = make_inputs(*shape, dtype)
    results = []
    try:
        for order in library.ORDERS:
            library.set_order(order)
            results.append(run(contract(causal).function, inputs, grad_y))
    finally:
        library.set_order("ascending")
    assert all(same_bits(result, results[0]) for result in results)
    names = {f"linear_attention_{name}_tensor" for name in ("forward", "backward_q", "backward_kv")}
    assert names <= set(library.launches())


@pytest.mark.host_cuda
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [TENSOR, SEGMENTS, (1, 4, 2, 70, 90, 128, 100)])
def test_float32_on_tensor_cores(shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In three parts of bfloat16, if that is asked for, within the bound of float32. Wide heads need the shared memory
    of an H100 for the gradients."""
    from host_cuda import library

    monkeypatch.setenv("MEMCHECK_FLOAT32_TENSOR_CORES", "1")
    try:
        for gpu, names in (("9.0", ["forward", "backward_q", "backward_kv"]), ("8.6", ["forward"])):
            library.stand_for(gpu)
            library.forget_launches()
            (q, k, v), grad_y = make_inputs(*shape)
            for layout in ("dense", "every second column"):
                *_, (*inputs, grad) = laid_out([q, k, v, grad_y], layout)
                assert_contract(contract(causal), inputs, grad)
            assert {f"linear_attention_{name}_tensor" for name in names} <= set(library.launches())
    finally:
        library.stand_for(library.this_gpu())


@pytest.mark.host_cuda
@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (False, False, True)])
@pytest.mark.parametrize(("dtype", "D"), [(torch.float32, 64), (torch.float32, 65), (torch.float64, 32)])
def test_grad_q_finds_denominators_if_a_block_has_all_columns(
    dtype: torch.dtype, D: int, wanted: tuple[bool, ...]
) -> None:
    from host_cuda import library

    inputs, grad_y = make_inputs(1, 2, 1, 70, 90, D, 3, dtype)
    library.forget_launches()
    run_subset(contract(True).function, inputs, wanted, grad_y)
    assert ("linear_attention_backward_rows" in library.launches()) == (D == 65)
    assert ("linear_attention_backward_q" in library.launches()) == (wanted[0] or D != 65)


# ---- torch's own checks


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_sum_of_keys_in_16_bits_is_exact(dtype: torch.dtype) -> None:
    """The state is float32, so that it does not stop growing, as a sum in 16 bits does."""
    one, key, state = torch.ones(1, 1, 1, 1, dtype=dtype), torch.full((1, 1, 1, 1), 0.01, dtype=dtype), None
    for _ in range(1000):
        _, state = linear_attention_step(one, key, one, state, feature_map="identity")
    assert state[1].item() == torch.tensor(1000 * key.double().item()).item()


# ---- decoding


def assert_step_is_right(
    dtype: torch.dtype, prompt: int, feature_map: str = "elu+1", eps: float = 1e-6, shape: tuple[int, ...] = (3, 4, 2)
) -> None:
    """Asserts that after a prompt, the y of each step is the last row of a forward over all keys so far."""
    T, options = prompt + 4, {"feature_map": feature_map, "eps": eps}
    (q, k, v), _ = make_inputs(*shape, T, T, 35, 20, dtype)
    if feature_map == "identity":
        q, k = q.abs(), k.abs()
    truth = reference.linear_attention(*doubles([q, k, v]), causal=True, **options)
    bound = error_bounds.linear_attention_bound(*doubles([q, k, v]), causal=True, **options)
    state, done = None, 0
    for now in range(max(prompt, 1), T + 1):
        new, last = slice(done, now), slice(now - 1, now)
        y, state = linear_attention_step(q[:, :, last], k[:, :, new], v[:, :, new], state, **options)
        done = now
        assert_within(y, truth[:, :, last], Bound(bound[:, :, last], terms=now), "y")
    phi_k, v = reference.features(k.double(), feature_map), v.double()
    sums = (("M", state[0], phi_k.mT @ v, phi_k.mT @ v.abs()), ("z", state[1], phi_k.sum(2), phi_k.sum(2)))
    for name, x, sum_truth, sum_bound in sums:
        assert x.dtype == torch.promote_types(dtype, torch.float32)
        # The state is not rounded to the dtype of q.
        assert_within(x, sum_truth, Bound(sum_bound, terms=T), name)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 6, 1), (2, 5, 5)])
def test_step_of_any_group(shape: tuple[int, ...]) -> None:
    assert_step_is_right(torch.float32, prompt=5, shape=shape)


def test_step_with_other_options() -> None:
    assert_step_is_right(torch.float32, prompt=5, feature_map="identity", eps=0.5)


# ---- extremes


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_right_where_the_features_bend(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, -math.inf, -30.0, 30.0], dtype=dtype, requires_grad=True)
    values = reference.features(x)
    values.sum().backward()
    tail = math.exp(-30)
    torch.testing.assert_close(values, torch.tensor([1, 1, 0, tail, 31], dtype=dtype))
    torch.testing.assert_close(x.grad, torch.tensor([1, 1, 0, tail, 1], dtype=dtype))


def test_features_are_accurate() -> None:
    """With one key, z of a step is phi(k), also for k where elu(k) + 1 cancels."""
    k = torch.linspace(-87, 88, 350_001, device=DEVICE).view(1, 1, 1, -1)
    _, (_, z) = linear_attention_step(torch.ones_like(k), k, torch.ones_like(k[..., :1]))
    truth = reference.features(k.double()).view_as(z)
    assert ((z.double() - truth).abs() / truth).max() <= 4 * 2.0**-24


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key", [-math.inf, -100.0, -20.0, 100.0, 1e4])
@pytest.mark.parametrize("role", ["q", "k"])
def test_extreme_features(role: str, key: float, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(*MIDDLE)
    (q if role == "q" else k)[:, ::2, ::3, ::2] = key
    assert_contract(contract(causal), [q, k, v], grad_y)


def finite_in_plain_pytorch(inputs: list[Tensor], grad_y: Tensor, causal: bool) -> bool:
    return all(x.isfinite().all() for x in run(contract(causal).reference, inputs, grad_y))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "value", "grad", "dtype"),
    [
        ((1, 1, 1, 4, 4, 2, 8), 2e12, 1.0, torch.float32),
        ((1, 2, 1, 40, 70, 3, 2), 3e11, 1e3, torch.float32),
        ((1, 1, 1, 4, 4, 2, 2), 1e10, 1e12, torch.float32),
        ((1, 2, 1, 40, 70, 32, 32), 2e11, 1.0, torch.bfloat16),  # on tensor cores
    ],
)
def test_gradients_are_finite_where_those_of_plain_pytorch_are(
    shape: tuple[int, ...], value: float, grad: float, dtype: torch.dtype, causal: bool
) -> None:
    """phi(q).(M g) overflows, but phi(q).(M g) / den = g.y does not."""
    inputs, grad_y = make_inputs(*shape, dtype)
    inputs, grad_y = [value * (1 + x.abs() / 4) for x in inputs], torch.full_like(grad_y, grad)
    assert finite_in_plain_pytorch([x.float() for x in inputs], grad_y.float(), causal)
    assert_contract(contract(causal), inputs, grad_y)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 9])
def test_a_sum_that_overflows_is_infinite(heads: int, causal: bool) -> None:
    """As in plain PyTorch, it is not NaN, although sums keep a compensation term."""
    (q, k, v), _ = make_inputs(1, heads, heads, 1100, 1100, 3, 2)
    v = torch.full_like(v, 3e38)
    y = linear_attention(q, k, v, causal=causal)[:, :, 200:]
    assert reference.linear_attention(q, k, v, causal=causal)[:, :, 200:].isposinf().all()
    assert y.isposinf().all()
    y, (m, _) = linear_attention_step(q[:, :, :1], k, v)
    assert y.isposinf().all()
    assert m.isposinf().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("B", "T"), [(1, 256), (8, 256), *(pytest.param(*it, marks=pytest.mark.slow) for it in ((1, 5000), (8, 1500)))]
)
def test_equal_terms_add_up(B: int, T: int, causal: bool) -> None:
    """Padding consists of equal terms. Their rounding errors have the same sign and do not cancel."""
    (q, k, v), grad_y = make_inputs(B, 1, 1, T, T, 3, 2)
    inputs = [x[:, :, :1].expand_as(x) for x in (q, k, v)]
    assert_contract(contract(causal), inputs, grad_y[:, :, :1].expand_as(grad_y))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("B", "H", "S", "T"),
    [
        # One head is cut into segments for several threads, and eight are not.
        *(pytest.param(*it, marks=pytest.mark.cpu) for it in ((1, 1, 4, 60_000), (8, 1, 4, 60_000))),
        pytest.param(1, 132, 1, 100_000, marks=pytest.mark.slow),  # on the host's CUDA
    ],
)
def test_equal_terms_add_up_however_many(B: int, H: int, S: int, T: int, causal: bool) -> None:
    """A state has 1,875 chunks or more, and an error of each would show. CUDA cuts 132 heads only because they are
    long."""
    (q, k, v), grad_y = make_inputs(B, H, 1, S, T, 3, 2)
    k, v = (x[:, :, :1].expand_as(x) for x in (k, v))
    assert_contract(contract(causal), [q, k, v], grad_y)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 9])
def test_a_long_sequence_keeps_its_accuracy(heads: int) -> None:
    S, T = (2500, 8000) if heads == 1 else (700, 4000)
    assert_contract(contract(), *make_inputs(1, heads, heads, S, T, 20, 9))


# ---- memory


@pytest.mark.slow
@pytest.mark.isolated
def test_a_state_for_every_position_is_never_held() -> None:
    """One tensor is 128 MiB; the states of all positions would be 64 times that."""
    q, k, v = (torch.randn(1, 8, 65536, 64, requires_grad=True) for _ in range(3))
    record = measure_memory(linear_attention, q, k, v, causal=True, dense_grad=True)
    assert q.nbytes == 128 * 2**20
    assert record.forward_peak_bytes < 4.1 * q.nbytes
    assert record.backward_peak_bytes < 8.2 * q.nbytes

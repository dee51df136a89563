"""Linear attention: values, gradients, strides, saved tensors, memory and errors."""

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
    HALF_DTYPES,
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
    run_subset,
    run_truth,
    same_bits,
    saved_for_backward,
    subsets,
)
from torch import Tensor
from torch.autograd import forward_ad

from memcheck import linear_attention, linear_attention_step, measure_memory, track
from memcheck._extension import _C
from memcheck.core.record import Record
from memcheck.ops.reference import linear_attention as reference

forward_op = torch.ops.memcheck.linear_attention.default
backward_op = torch.ops.memcheck.linear_attention_backward.default
step_op = torch.ops.memcheck.linear_attention_step.default

# B, H, Hkv, S, T, D, Dv
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (3, 4, 4, 1, 129, 63, 64),
    (2, 6, 2, 63, 63, 127, 33),
    (2, 4, 1, 127, 129, 63, 129),
    (2, 8, 8, 129, 257, 1, 63),
    (5, 2, 2, 257, 257, 33, 1),
    (3, 3, 3, 33, 300, 64, 64),
    (1, 2, 2, 257, 513, 63, 9),  # few heads and many positions: each segment is a task
    (1, 6, 3, 513, 513, 17, 5),
    (1, 5, 1, 300, 1100, 9, 15),
    (1, 4, 2, 129, 201, 64, 40),  # this and the next six run on tensor cores in 16 bits
    (2, 3, 1, 65, 70, 128, 72),
    (3, 2, 2, 3, 3, 33, 47),
    (1, 4, 2, 33, 65, 17, 16),
    (1, 4, 2, 65, 70, 129, 200),
    (1, 2, 1, 40, 40, 256, 31),
    (1, 2, 1, 600, 700, 40, 64),
    (1, 2, 1, 600, 600, 70, 33),  # states of segments lie in results on CUDA
    (1, 2, 1, 70, 130, 260, 9),  # the state of a CUDA block exceeds shared memory
]
NOT_CAUSAL_SHAPES = [(2, 4, 2, 129, 63, 127, 31), (1, 1, 1, 513, 1, 63, 5), (1, 4, 2, 1030, 300, 33, 9)]
EMPTY_SHAPES = [
    (0, 2, 1, 5, 7, 3, 2),
    (2, 0, 0, 5, 7, 3, 2),
    (2, 0, 3, 5, 7, 3, 2),
    (2, 2, 1, 0, 7, 3, 2),
    (2, 2, 1, 0, 0, 3, 2),
    (2, 2, 1, 5, 7, 0, 2),
    (2, 2, 1, 5, 7, 3, 0),
]
CASES = [
    *(pytest.param(*shape, causal, id=f"{shape} {causal=}") for shape in SHAPES for causal in (True, False)),
    *(pytest.param(*shape, False, id=f"{shape} causal=False") for shape in NOT_CAUSAL_SHAPES),
    *(pytest.param(*shape, causal, id=f"{shape} {causal=}") for shape in EMPTY_SHAPES for causal in (True, False)),
    pytest.param(2, 4, 2, 5, 0, 3, 2, False, id="(2, 4, 2, 5, 0, 3, 2) causal=False"),
]
SMALL, SPLIT = (2, 4, 2, 5, 7, 3, 2), (1, 2, 1, 700, 1300, 20, 9)
MIDDLE = (2, 4, 2, 70, 130, 40, 24) if ON_HOST else (2, 8, 4, 70, 300, 40, 24)  # some chunks, and a rest
TENSOR = (1, 4, 2, 70, 130, 40, 33)  # on tensor cores in 16 bits
IN_RESULTS = (1, 2, 1, 600, 600, 40, 33)  # the same, and states of segments lie in results on CUDA
# B, H, Hkv, S, T, D, Dv, causal: so many heads that a CUDA block has all query heads of a key head in 16 bits.
GROUPED = [
    (1, 531, 177, 33, 33, 20, 17, True),
    pytest.param(1, 531, 177, 20, 33, 20, 17, False, marks=pytest.mark.ci),
    pytest.param(1, 398, 199, 20, 40, 130, 33, True, marks=pytest.mark.slow),
    pytest.param(1, 134, 67, 512, 512, 70, 100, True, marks=pytest.mark.slow),  # this and the next have segments
    pytest.param(1, 134, 67, 513, 513, 40, 33, False, marks=pytest.mark.slow),
]


def contract(causal: bool = True, feature_map: str = "elu+1", eps: float = 1e-6) -> Contract:
    options = {"causal": causal, "feature_map": feature_map, "eps": eps}

    def bounds(grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
        of_y = error_bounds.linear_attention_bound(q, k, v, **options)
        of_gradients = error_bounds.linear_attention_gradient_bounds(grad_y, q, k, v, **options)
        return [Bound(bound, terms=k.shape[2]) for bound in (of_y, *of_gradients)]

    return Contract(
        functools.partial(linear_attention, **options), functools.partial(reference.linear_attention, **options), bounds
    )


def make_inputs(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[list[Tensor], Tensor]:
    """[q (B,H,S,D), k (B,Hkv,T,D), v (B,Hkv,T,Dv)] and grad_y (B,H,S,Dv)"""
    random = generator()
    shapes = [(B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv), (B, H, S, Dv)]
    q, k, v, grad_y = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
    return [q, k, v], grad_y


def plan_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int | None = None) -> dict[str, int]:
    """The plan for so many threads; by default those there are."""
    (B, H, S, D), (_, Hkv, T, Dv) = q.shape, v.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "T": T, "D": D, "Dv": Dv}
    dtype = str(q.dtype).removeprefix("torch.")
    threads = torch.get_num_threads() if threads is None else threads
    return _C.linear_attention_plan(**sizes, causal=causal, dtype=dtype, threads=threads, device=KERNELS)


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "H", "Hkv", "S", "T", "D", "Dv", "causal"), CASES)
def test_values_and_gradients(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, causal: bool, dtype: torch.dtype
) -> None:
    inputs, grad_y = make_inputs(B, H, Hkv, S, T, D, Dv, dtype)
    assert_contract(contract(causal), inputs, grad_y, against_plain=True)


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
def test_few_heads_are_split() -> None:
    """There are six segments of at least 512 queries, each with a state (20,9) and a sum (20), in padded rows.

    Causal queries never start from the sum of all. One thread goes along the sequence without states in memory.
    """
    (q, k, v), _ = make_inputs(*SPLIT)
    state = (20 * 32 + 32) * 4
    for causal, slots in ((True, 5), (False, 6)):
        alone, shared = (plan_of(q, k, v, causal, threads) for threads in (1, 2))
        assert alone["forward_states"] == alone["backward_states"] == 0
        assert shared["forward_states"] == slots * state
        assert shared["backward_states"] == (slots if causal else slots + 3) * (9 * 32 + 32) * 4
        for scratch, states in (("forward_scratch", "forward_states"), ("backward_scratch", "backward_states")):
            rows = shared["backward_rows"] if scratch == "backward_scratch" else 0
            assert shared[scratch] - rows - shared[states] == 2 * (alone[scratch] - rows)


def test_few_heads_are_split_on_cuda() -> None:
    """Five segments of at least 256 positions, each with a state (20,9) and a sum (20); many heads are not split.

    The first 600 positions have no query, so that states of segments cannot lie in y.
    """
    plan = functools.partial(_C.linear_attention_plan, S=700, T=1300, D=20, Dv=9, causal=True, dtype="float32")
    assert plan(B=1, H=2, Hkv=1, threads=1, device="cuda")["forward_scratch"] == 5 * (20 * 9 + 20) * 4
    assert plan(B=66, H=2, Hkv=1, threads=1, device="cuda")["forward_scratch"] == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_states_lie_in_results_on_cuda(causal: bool, dtype: str) -> None:
    """Segments take no scratch: of few heads, and where they are cut because they are long."""
    plan = functools.partial(
        _C.linear_attention_plan, D=64, Dv=64, causal=causal, dtype=dtype, threads=1, device="cuda"
    )
    for B, H, length in ((4, 8, 4096), (1, 1, 1300), (4, 64, 100_000)):
        sizes = plan(B=B, H=H, Hkv=H, S=length, T=length)
        assert sizes["forward_scratch"] == sizes["backward_states"] == 0
        assert sizes["backward_scratch"] == sizes["backward_rows"]


@pytest.mark.parametrize(("dtype", "longest"), [("float64", 4096), ("float32", 16384), ("bfloat16", 16384)])
@pytest.mark.parametrize("causal", [True, False])
def test_segments_on_cuda_are_not_too_long(causal: bool, dtype: str, longest: int) -> None:
    """Sums within a segment are plain and have one rounding error per 64 positions (float64: 32)."""
    sizes = {"B": 66, "H": 2, "Hkv": 2, "S": 1, "D": 64, "Dv": 64, "threads": 1, "device": "cuda"}
    plan = functools.partial(_C.linear_attention_plan, **sizes, causal=causal, dtype=dtype)
    state = 66 * 2 * (64 * 64 + 64) * (8 if dtype == "float64" else 4)
    assert plan(T=longest)["forward_scratch"] == 0
    assert plan(T=longest + 1)["forward_scratch"] == 2 * state
    assert plan(T=10 * longest)["forward_scratch"] == 10 * state


def test_an_unknown_device_is_refused() -> None:
    sizes = dict.fromkeys(("B", "H", "Hkv", "S", "T", "D", "Dv", "threads"), 1)
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        _C.linear_attention_plan(**sizes, causal=True, dtype="float32", device="tpu")


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_and_only_the_planned_bytes() -> None:
    """Two heads of nine segments are split for three threads or more, one head for two."""
    for shape in (SPLIT, (1, 4, 2, 1500, 2100, 33, 20), (1, 1, 1, 2100, 2100, 9, 70), (5, 4, 2, 300, 300, 33, 20)):
        for causal in (True, False):
            inputs, grad_y = make_inputs(*shape)
            results, states = [], []
            for threads in (1, 2, 3, 7, 16):
                torch.set_num_threads(threads)
                results.append(run(contract(causal).function, inputs, grad_y))
                states.append(plan_of(*inputs, causal)["forward_states"])
                assert same_bits(results[0], results[-1])
                assert_memory_is_planned(*inputs, causal=causal)
            assert states[0] == 0
            assert states[-1] > 0


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_in_16_and_64_bits() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        inputs, grad_y = make_inputs(1, 4, 2, 1500, 2100, 33, 20, dtype)
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
        (q, k, v), _ = make_inputs(4, 8, 4, 1, 900, 40, 24)
        y, state = linear_attention_step(q, k, v)
        results.append([y, *state])
        assert same_bits(results[0], results[-1])


@pytest.mark.cpu
def test_results_do_not_depend_on_the_batch() -> None:
    """Segments depend on neither B nor Hkv."""
    inputs, grad_y = make_inputs(9, 2, 2, 1100, 1100, 8, 9)
    for causal in (True, False):
        whole = run(contract(causal).function, inputs, grad_y)
        alone = run(contract(causal).function, [x[3:4, 1:] for x in inputs], grad_y[3:4, 1:])
        assert same_bits(alone, [x[3:4, 1:] for x in whole])


@CPU_LEVELS
def test_every_cpu_level(level: str) -> None:
    assert _C.cpu_level() == level
    for causal in (True, False):
        for dtype in DTYPES:
            for shape in (MIDDLE, (1, 2, 1, 257, 300, 33, 65)):
                assert_contract(contract(causal), *make_inputs(*shape, dtype))
    assert_step_is_right(torch.float32, prompt=300)


# ---- strides


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(MIDDLE, torch.float32), (MIDDLE, torch.bfloat16), (TENSOR, torch.bfloat16), (IN_RESULTS, torch.bfloat16)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    (q, k, v), grad_y = make_inputs(*shape, dtype)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        before = [x.clone() for x in (*inputs, grad)]
        results = assert_contract(contract(causal), inputs, grad)
        assert_strides(results, inputs)
        assert same_bits(before, [*inputs, grad])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_cost_no_byte(layout: str, causal: bool) -> None:
    """The operator makes no contiguous copy."""
    (q, k, v), grad_y = make_inputs(*MIDDLE)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        leaves = [x.detach().requires_grad_() for x in inputs]
        plan = plan_of(q, k, v, causal)
        with track(device=DEVICE) as memory:
            y = linear_attention(*leaves, causal=causal)
            assert memory.peak_bytes == y.nbytes + plan["forward_scratch"]
            memory.reset_peak()
            y.backward(grad)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            assert memory.peak_bytes == y.nbytes + gradients + plan["backward_scratch"]
            del y
            assert memory.current_bytes == gradients


# ---- autograd


@pytest.mark.parametrize("mask", subsets(3))
def test_only_what_backward_reads_is_kept(mask: tuple[bool, ...]) -> None:
    inputs, _ = make_inputs(*MIDDLE)
    q, k, v = leaves = [x.requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    kept = saved_for_backward(lambda: linear_attention(*leaves))
    # grad_v is N^T phi(k), which does not need v.
    expected = [q, k, v] if mask[0] or mask[1] else [q, k]
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in expected]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [SMALL, TENSOR, IN_RESULTS, (1, 2, 1, 600, 600, 9, 12)])
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
@pytest.mark.parametrize("shape", [TENSOR, IN_RESULTS, (1, 1, 1, 100, 520, 128, 72), (1, 2, 1, 520, 520, 129, 72)])
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
    rows = ["backward_rows"] if max(inputs[1].shape[3], inputs[2].shape[3]) > 128 else []
    names = {f"linear_attention_{name}_tensor" for name in ["forward", "backward_q", "backward_k", "backward_v", *rows]}
    assert names <= set(library.launches())


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


def opcheck_inputs(requires_grad: bool) -> list[list[Tensor]]:
    dense, _ = make_inputs(*SMALL)
    long, _ = make_inputs(1, 2, 1, 257, 300, 3, 5)
    strided = [LAYOUTS["transposed"](x) for x in dense]
    return [[x.detach().requires_grad_(requires_grad) for x in inputs] for inputs in (dense, long, strided)]


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_forward(causal: bool, requires_grad: bool) -> None:
    for inputs in opcheck_inputs(requires_grad):
        torch.library.opcheck(forward_op, inputs, {"causal": causal})


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_backward(causal: bool, requires_grad: bool) -> None:
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # Tracing differentiates the backward, which raises by contract.
    if not requires_grad:
        utilities.append("test_aot_dispatch_dynamic")
    for q, k, v in opcheck_inputs(requires_grad):
        grad_y = torch.randn(*q.shape[:3], v.shape[3])
        for mask in ([True, True, True], [False, True, False], [False, False, True]):
            options = {"causal": causal, "feature_map": "elu+1", "eps": 1e-6, "output_mask": [*mask, *[False] * 3]}
            torch.library.opcheck(backward_op, (grad_y, None, None, q, k, v), options, test_utils=utilities)
        torch.library.opcheck(backward_op, (grad_y, None, None, q, k, None), options, test_utils=utilities)


@pytest.mark.glue
def test_opcheck_step() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 5, 3, 2)
    torch.library.opcheck(step_op, (q, k, v, torch.rand(2, 2, 3, 2), torch.rand(2, 2, 3)))


@pytest.mark.glue
def test_autocast_of_a_step_leaves_the_state() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 5, 3, 2)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, state = linear_attention_step(q, k, v)
        y, state = linear_attention_step(q, k, v, state)
    assert [x.dtype for x in (y, *state)] == [torch.bfloat16, torch.float32, torch.float32]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [0, 1, 63, 300, 513])
def test_step(prompt: int, dtype: torch.dtype) -> None:
    assert_step_is_right(dtype, prompt)


def test_a_state_drifts_by_a_rounding_a_step() -> None:
    """As documented: rounding errors of a sum of equal terms have one sign. Keys of one step have smaller errors."""
    steps, before = 3000, 200_000
    q = k = torch.linspace(-3, 3, 8).view(1, 1, 1, 8)
    v = torch.linspace(0.5, 1.9, 8).view(1, 1, 1, 8)
    phi_k = reference.features(k.double())
    terms = [phi_k.mT @ v.double(), phi_k[:, :, 0]]
    start = [(before * x).float() for x in terms]
    truths = [x.double() + steps * term for x, term in zip(start, terms, strict=True)]
    state = (start[0], start[1])
    for _ in range(steps):
        _, state = linear_attention_step(q, k, v, state)
    drifts = [(x.double() - truth).abs() / truth for x, truth in zip(state, truths, strict=True)]
    assert all((drift <= steps * 2.0**-24).all() for drift in drifts)
    assert min(drift.max() for drift in drifts) > 100 * 2.0**-24
    keys, values = (x.expand(1, 1, steps, 8) for x in (k, v))
    roundings = 4 + (steps // 64 if KERNELS == "cuda" else 0)
    for x, truth in zip(linear_attention_step(q, keys, values, (start[0], start[1]))[1], truths, strict=True):
        assert ((x.double() - truth).abs() / truth).max() <= roundings * 2.0**-24


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 6, 1), (2, 5, 5)])
def test_step_of_any_group(shape: tuple[int, ...]) -> None:
    assert_step_is_right(torch.float32, prompt=5, shape=shape)


def test_step_with_other_options() -> None:
    assert_step_is_right(torch.float32, prompt=5, feature_map="identity", eps=0.5)


@pytest.mark.parametrize("layout", ["transposed", "every second column", "every second row", "at an offset"])
def test_step_takes_any_strides(layout: str) -> None:
    (q, k, v), _ = make_inputs(3, 4, 2, 1, 5, 35, 20)
    state = (torch.randn(3, 2, 35, 20), torch.rand(3, 2, 35))
    expected = linear_attention_step(q, k, v, state)
    change = LAYOUTS[layout]
    y, new_state = linear_attention_step(change(q), change(k), change(v), (change(state[0]), change(state[1])))
    assert same_bits([y, *new_state], [expected[0], *expected[1]])
    assert all(x.is_contiguous() for x in (y, *new_state))


def test_step_leaves_the_old_state_alone() -> None:
    (q, k, v), _ = make_inputs(3, 4, 2, 1, 5, 35, 20)
    _, state = linear_attention_step(q, k, v)
    before = [x.clone() for x in state]
    linear_attention_step(q, k, v, state)
    assert same_bits(state, before)


@pytest.mark.parametrize(("B", "T", "D", "Dv"), [(0, 5, 3, 2), (2, 5, 0, 2), (2, 5, 3, 0), (2, 0, 3, 2)])
def test_step_of_nothing(B: int, T: int, D: int, Dv: int) -> None:
    """Without new keys the query reads the unchanged state."""
    (q, k, v), _ = make_inputs(B, 4, 2, 1, T, D, Dv)
    state = (torch.randn(B, 2, D, Dv), torch.rand(B, 2, D) + 1)
    y, (m, z) = linear_attention_step(q, k, v, state)
    assert (y.shape, m.shape, z.shape) == ((B, 4, 1, Dv), (B, 2, D, Dv), (B, 2, D))
    if T == 0:
        assert same_bits([m, z], state)


@pytest.mark.parametrize("wanted", range(5))
def test_step_has_no_gradient_and_says_so(wanted: int) -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 5, 3, 2)
    tensors = [q, k, v, torch.rand(2, 2, 3, 2), torch.rand(2, 2, 3)]
    tensors[wanted].requires_grad_()
    q, k, v, *state = tensors
    with pytest.raises(NotImplementedError, match="linear_attention_step: has no gradient"):
        linear_attention_step(q, k, v, (state[0], state[1]))
    with torch.no_grad():
        linear_attention_step(q, k, v, (state[0], state[1]))


@pytest.mark.parametrize("dual", [0, 1, 2])
def test_forward_mode_through_a_step_raises(dual: int) -> None:
    inputs = list(make_inputs(2, 4, 2, 1, 7, 3, 2)[0])
    with forward_ad.dual_level():
        inputs[dual] = forward_ad.make_dual(inputs[dual], torch.ones_like(inputs[dual]))
        with pytest.raises(NotImplementedError, match="linear_attention_step: forward-mode differentiation"):
            linear_attention_step(*inputs)


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
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("poisoned", [1, 2])
def test_nan_and_inf_stay_in_their_head_and_the_future(poisoned: int, poison: float, causal: bool) -> None:
    B, H, Hkv, S, T, D, Dv = 2, 4, 2, 300, 700, 35, 20
    inputs, grad_y = make_inputs(B, H, Hkv, S, T, D, Dv)
    clean = run(contract(causal).function, inputs, grad_y)
    inputs[poisoned][1, 1, 500] = poison
    y, *gradients = run(contract(causal).function, inputs, grad_y)
    spoilt = torch.zeros_like(y, dtype=torch.bool)
    # All positions of a chunk (32 or 64) are in one product, and 0 x NaN is NaN, so its earlier queries may be NaN too.
    spoilt[1, 2:, 500 - (T - S) if causal else 0 :] = True
    assert not y[spoilt].isfinite().any()
    reached = spoilt.clone()
    reached[1, 2:, 448 - (T - S) : 500 - (T - S)] |= causal
    assert torch.equal(y[~reached], clean[0][~reached])
    for gradient, other in zip(gradients, clean[1:], strict=True):
        assert torch.equal(gradient[0], other[0])
        assert torch.equal(gradient[1, 0], other[1, 0])


def test_nan_in_a_query_stays_in_its_position() -> None:
    (q, k, v), _ = make_inputs(*MIDDLE)
    q[1, 3, 7, 2] = math.nan
    for causal in (True, False):
        spoilt = linear_attention(q, k, v, causal=causal).isnan().any(-1)
        assert spoilt.nonzero().tolist() == [[1, 3, 7]]


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
        pytest.param(1, 1, 4, 60_000, marks=pytest.mark.cpu),
        # slow on the host's CUDA
        *(pytest.param(*it, marks=pytest.mark.slow) for it in ((8, 1, 4, 60_000), (1, 132, 1, 100_000))),
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


def assert_memory_is_planned(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[Record]:
    """Asserts to the byte that peaks are inputs, output, gradients and the plan's scratch.

    Returns the records for an expanded and for a dense gradient of y.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    plan = plan_of(q, k, v, causal)
    records = [measure_memory(linear_attention, *leaves, causal=causal, dense_grad=dense) for dense in (False, True)]
    for record, dense in zip(records, (False, True), strict=True):
        held = record.input_bytes + record.output_bytes
        assert record.saved_bytes == 0
        assert record.forward_peak_bytes == held + plan["forward_scratch"]
        assert record.gradient_bytes == q.nbytes + k.nbytes + v.nbytes
        grad_y_bytes = record.output_bytes if dense else q.itemsize
        assert record.backward_peak_bytes == held + grad_y_bytes + record.gradient_bytes + plan["backward_scratch"]
    record = measure_memory(linear_attention, *leaves, causal=causal, backward=False)
    assert record.forward_peak_bytes == record.input_bytes + record.output_bytes + plan["forward_scratch"]
    return records


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, SPLIT, (1, 2, 1, 70, 600, 260, 40), (1, 2, 1, 600, 600, 40, 40)])
def test_memory_to_the_byte(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    assert_memory_is_planned(*make_inputs(*shape, dtype)[0], causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("B", "H", "length", "D"), [(8, 8, 512, 64), (1, 8, 4096, 64), (1, 2, 4096, 128), (8, 8, 512, 128)]
)
def test_memory_to_the_byte_and_within_the_targets(
    B: int, H: int, length: int, D: int, dtype: torch.dtype, causal: bool
) -> None:
    (q, k, v), _ = make_inputs(B, H, H, length, length, D, D, dtype)
    for record, backward in zip(assert_memory_is_planned(q, k, v, causal=causal), (7, 8), strict=True):
        assert record.forward_peak_bytes <= 1.03 * 4 * q.nbytes + 2**20
        assert record.backward_peak_bytes <= 1.03 * backward * q.nbytes + 2**20


@pytest.mark.slow
@pytest.mark.isolated
def test_a_state_for_every_position_is_never_held() -> None:
    """One tensor is 128 MiB; the states of all positions would be 64 times that."""
    q, k, v = (torch.randn(1, 8, 65536, 64, requires_grad=True) for _ in range(3))
    record = measure_memory(linear_attention, q, k, v, causal=True, dense_grad=True)
    assert q.nbytes == 128 * 2**20
    assert record.forward_peak_bytes < 4.1 * q.nbytes
    assert record.backward_peak_bytes < 8.2 * q.nbytes


# ---- what is refused

RAISES = {
    "q of rank 3": ({"q": torch.ones(2, 5, 3)}, ValueError, r"q must be \(B,H,S,D\), of 4 dimensions, got \[2, 5, 3\]"),
    "k of rank 2": ({"k": torch.ones(7, 3)}, ValueError, r"k must be \(B,Hkv,T,D\), of 4 dimensions, got \[7, 3\]"),
    "v of rank 1": ({"v": torch.ones(7)}, ValueError, r"v must be \(B,Hkv,T,Dv\), of 4 dimensions, got \[7\]"),
    "another D": (
        {"k": torch.ones(2, 2, 7, 4)},
        ValueError,
        r"k must be \(B,Hkv,T,D\) = \[2, 2, 7, 3\] to match q, got \[2, 2, 7, 4\]",
    ),
    "another B": (
        {"k": torch.ones(1, 2, 7, 3)},
        ValueError,
        r"k must be \(B,Hkv,T,D\) = \[2, 2, 7, 3\] to match q, got \[1, 2, 7, 3\]",
    ),
    "another T": (
        {"v": torch.ones(2, 2, 6, 2)},
        ValueError,
        r"v must be \(B,Hkv,T,Dv\) = \[2, 2, 7, 2\] to match k, got \[2, 2, 6, 2\]",
    ),
    "heads that do not divide": (
        {"k": torch.ones(2, 3, 7, 3), "v": torch.ones(2, 3, 7, 2)},
        ValueError,
        "H, the heads of q, must be a multiple of Hkv, the heads of k, got H = 4 and Hkv = 3",
    ),
    "no key heads": (
        {"k": torch.ones(2, 0, 7, 3), "v": torch.ones(2, 0, 7, 2)},
        ValueError,
        "H, the heads of q, must be a multiple of Hkv, the heads of k, got H = 4 and Hkv = 0",
    ),
    "float64 k": ({"k": torch.ones(2, 2, 7, 3).double()}, TypeError, "k must be float32 to match q, got float64"),
    "bfloat16 v": ({"v": torch.ones(2, 2, 7, 2).bfloat16()}, TypeError, "v must be float32 to match q, got bfloat16"),
    "integers": ({"q": torch.ones(2, 4, 5, 3).int()}, TypeError, "q must be float64, .* or bfloat16, got int32"),
    "complex": ({"q": torch.ones(2, 4, 5, 3).cfloat()}, TypeError, "q must be float64, .* or bfloat16, got complex64"),
    "k elsewhere": ({"k": torch.ones(2, 2, 7, 3, device="meta")}, ValueError, f"k must be on {HERE} as q is, got meta"),
    "v elsewhere": ({"v": torch.ones(2, 2, 7, 2, device="meta")}, ValueError, f"v must be on {HERE} as q is, got meta"),
    "more queries than keys": (
        {"q": torch.ones(2, 4, 8, 3)},
        ValueError,
        "causal needs no more queries than keys, S <= T, got S = 8 and T = 7",
    ),
    "an unknown feature map": (
        {"feature_map": "relu"},
        ValueError,
        r"feature_map must be 'elu\+1' or 'identity', got 'relu'",
    ),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps must be a positive number, got 0"),
    "eps that is none": ({"eps": math.nan}, ValueError, "eps must be a positive number, got nan"),
    "eps that float32 makes 0": ({"eps": 1e-60}, ValueError, "eps must be a normal number of float32, got 1e-60"),
    "no q": ({"q": None}, TypeError, "q must be a tensor, got None"),
    "no v": ({"v": None}, TypeError, "v must be a tensor, got None"),
    # The dispatcher raises these before the operator is called.
    "a list": ({"q": [1.0]}, TypeError, "q must be a tensor, got a list of length 1"),
    "a number for the map": ({"feature_map": 1}, RuntimeError, "Expected a value of type 'str' for argument"),
    "sparse": ({"q": torch.ones(2, 4, 5, 3).to_sparse()}, TypeError, "must be a dense tensor, got a sparse_coo one"),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("wrong", RAISES)
def test_wrong_input(wrong: str, requires_grad: bool) -> None:
    changed, kind, message = RAISES[wrong]
    (q, k, v), _ = make_inputs(*SMALL)
    if requires_grad and "v" not in changed:
        v.requires_grad_()
    arguments = {"q": q, "k": k, "v": v, "causal": True, **changed}
    with pytest.raises(kind, match=f"linear_attention.*{message}"):
        linear_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


STEP_RAISES = {
    "two positions": (
        {"q": torch.ones(2, 4, 2, 3)},
        ValueError,
        r"q must be one position, \(B,H,1,D\), got \[2, 4, 2, 3\]",
    ),
    "M of another shape": (
        {"m": torch.ones(2, 2, 4, 2)},
        ValueError,
        r"m must be \(B,Hkv,D,Dv\) = \[2, 2, 3, 2\] to match k and v, got \[2, 2, 4, 2\]",
    ),
    "z of another rank": (
        {"z": torch.ones(2, 2, 1, 3)},
        ValueError,
        r"z must be \(B,Hkv,D\) = \[2, 2, 3\] to match k, got \[2, 2, 1, 3\]",
    ),
    "state of another dtype": (
        {"z": torch.ones(2, 2, 3).double()},
        TypeError,
        "z must be float32 to match the accumulation type of q, got float64",
    ),
    "state elsewhere": (
        {"m": torch.ones(2, 2, 3, 2, device="meta")},
        ValueError,
        f"m must be on {HERE} as q is, got meta",
    ),
    "no state": ({"z": None}, TypeError, "z must be a tensor, got None"),
    "another T": ({"v": torch.ones(2, 2, 6, 2)}, ValueError, "v must be .* to match k"),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps must be a positive number, got 0"),
}


@pytest.mark.parametrize("wrong", STEP_RAISES)
def test_wrong_step(wrong: str) -> None:
    changed, kind, message = STEP_RAISES[wrong]
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 7, 3, 2)
    arguments = {"q": q, "k": k, "v": v, "m": torch.ones(2, 2, 3, 2), "z": torch.ones(2, 2, 3), "eps": 1e-6, **changed}
    q, k, v, m, z = (arguments[name] for name in "qkvmz")
    with pytest.raises(kind, match=f"linear_attention_step: {message}"):
        linear_attention_step(q, k, v, (m, z), eps=arguments["eps"])


@pytest.mark.parametrize("wrong", ["q", "k", "v"])
def test_a_first_step_without_tensors(wrong: str) -> None:
    arguments = dict(zip("qkv", make_inputs(2, 4, 2, 1, 7, 3, 2)[0], strict=True))
    arguments[wrong] = arguments[wrong][0]
    with pytest.raises(ValueError, match=f"linear_attention_step: {wrong} must be .*, of 4 dimensions, got"):
        linear_attention_step(**arguments)
    arguments[wrong] = None
    with pytest.raises(TypeError, match=f"linear_attention_step: {wrong} must be a tensor, got None"):
        linear_attention_step(**arguments)


BACKWARD_RAISES = {
    "another shape of grad_y": (
        {"grad_y": torch.ones(2, 4, 4, 2)},
        ValueError,
        r"grad_y must be \(B,H,S,Dv\) = \[2, 4, 5, 2\] to match q and v, got \[2, 4, 4, 2\]",
    ),
    "rank of grad_y": (
        {"grad_y": torch.ones(())},
        ValueError,
        r"grad_y must be \(B,H,S,Dv\), of 4 dimensions, got \[\]",
    ),
    "dtype of grad_y": (
        {"grad_y": torch.ones(2, 4, 5, 2).half()},
        TypeError,
        "grad_y must be float32 to match q, got float16",
    ),
    "no q": ({"q": None}, TypeError, "q must be a tensor, got None"),
    "no v": ({"v": None}, TypeError, "v must be a tensor, got None"),
    "more queries than keys": (
        {"q": torch.ones(2, 4, 8, 3), "grad_y": torch.ones(2, 4, 8, 2)},
        ValueError,
        "causal needs no more queries than keys, S <= T, got S = 8 and T = 7",
    ),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps must be a positive number, got 0"),
}


@pytest.mark.parametrize("wrong", BACKWARD_RAISES)
def test_wrong_backward(wrong: str) -> None:
    changed, kind, message = BACKWARD_RAISES[wrong]
    (q, k, v), grad_y = make_inputs(*SMALL)
    arguments = {"grad_y": grad_y, "q": q, "k": k, "v": v, "eps": 1e-6, **changed}
    grad_y, *tensors = (arguments.pop(name) for name in ("grad_y", "q", "k", "v"))
    mask = [True] * 3 + [False] * 3
    with pytest.raises(kind, match=f"linear_attention_backward: {message}"):
        backward_op(grad_y, None, None, *tensors, causal=True, feature_map="elu+1", output_mask=mask, **arguments)


def test_queries_that_see_nothing() -> None:
    """Without causal and without keys, M = z = 0, so y = 0."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 5, 0, 3, 2)
    y, grad_q, *_ = run(contract(causal=False).function, [q, k, v], grad_y)
    assert same_bits([y, grad_q], [torch.zeros(2, 4, 5, 2), torch.zeros(2, 4, 5, 3)])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_first_step_refuses_other_arguments(name: str) -> None:
    x = torch.ones(2, 4, 1, 3)
    letters = {"q": "(B,H,S,D)", "k": "(B,Hkv,T,D)", "v": "(B,Hkv,T,Dv)"}[name]
    for wrong, kind, message in (
        (None, TypeError, "a tensor, got None"),
        ("x", TypeError, "a tensor, got 'x'"),
        (torch.ones(2), ValueError, f"{letters}, of 4 dimensions, got [2]"),
    ):
        arguments = {"q": x, "k": x, "v": x, name: wrong}
        with pytest.raises(kind, match=re.escape(f"linear_attention_step: {name} must be {message}")):
            linear_attention_step(*arguments.values())


@pytest.mark.parametrize("state", [(), torch.ones(2, 4, 3, 3), [torch.ones(2, 4, 3)] * 3, 1.5], ids=str)
def test_a_state_of_another_type_is_refused(state: object) -> None:
    x = torch.ones(2, 4, 1, 3)
    with pytest.raises(
        TypeError, match=r"linear_attention_step: state must be a pair of tensors \(m, z\) or None, got"
    ):
        linear_attention_step(x, x, x, state)
    with pytest.raises(TypeError, match=r"linear_attention_step: z must be a tensor, got 2\.0"):
        linear_attention_step(x, x, x, (torch.ones(2, 4, 3, 3), 2.0))

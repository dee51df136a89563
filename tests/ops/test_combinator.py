"""The combinator: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    KERNELS,
    LAYOUTS,
    assert_contract,
    assert_strides,
    laid_out,
    run,
    same_bits,
    same_where_not_finite,
)
from ops.operators import COMBINATOR, MIB, assert_memory_is_planned
from ops.operators import combinator_contract as contract
from ops.operators import combinator_plan as plan_of
from ops.operators import is_matrix as reads_in_place
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from memcheck import combinator, track
from memcheck._extension import _C

low_memory_combinator = functools.partial(combinator, low_memory=True)
make_inputs = COMBINATOR.inputs
MODES = pytest.mark.parametrize("low_memory", [False, True])


# ---- values and gradients


def test_bounds_are_the_formulas_without_cancellation() -> None:
    """With positive values and a large gate, y = a b, and each bound is the sum of the parts due to a and to b.

    The gradient of a, grad_y b, has that of b and its own.
    """
    (x, weight), grad_y = make_inputs((5, 7), torch.float64)
    x, weight, grad_y = 20 * x.abs(), 20 * weight.abs(), grad_y.abs()
    a, b = x @ weight[0].T, x @ weight[1].T
    grad_a, grad_b = 2 * grad_y * b, 2 * grad_y * a
    expected = (
        2 * a * b,
        grad_a @ weight[0] + grad_b @ weight[1],
        torch.stack([grad_a.T @ x, grad_b.T @ x]),
    )
    torch.testing.assert_close(error_bounds.combinator_bounds(grad_y, x, weight), expected)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_chunks(dtype: torch.dtype, low_memory: bool) -> None:
    inputs, grad_y = make_inputs((30_000, 60), dtype)
    assert plan_of(inputs[0])["rows"] < 30_000
    assert_contract(contract(low_memory), inputs, grad_y)
    assert_contract(contract(low_memory), inputs, grad_y[:1].expand_as(grad_y))


@pytest.mark.skipif(KERNELS == "cpu", reason="on the CPU chunks stay in the cache")
def test_products_on_cuda_are_of_many_rows() -> None:
    """All rows at once if the pre-activations are kept; else, and in the backward, a quarter of them."""
    (x, weight), grad_y = make_inputs((80_000, 60))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = combinator(*leaves)
    assert products(lambda: combinator(*leaves)) == 1
    assert products(lambda: combinator(x.detach(), weight.detach())) == 4
    assert products(lambda: y.backward(grad_y)) == 2 * 4


def products(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return sum(event.name in ("aten::mm", "aten::addmm_", "aten::addmm") for event in profiled.events())


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3000, 65), (1024, 32), (2, 40, 256), (30_000, 60)], ids=str)
def test_both_modes_give_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, grad_y = make_inputs(shape, dtype)
    assert same_bits(run(combinator, inputs, grad_y), run(low_memory_combinator, inputs, grad_y))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_many_chunks_do_not_lose_grad_weight(dtype: torch.dtype) -> None:
    """A 16-bit sum of equal terms would stop growing at 256 terms; the sum over all rows is formed in float32."""
    x, weight = torch.ones(20_000, 30, dtype=dtype), torch.zeros(2, 30, 30, dtype=dtype)
    assert KERNELS == "cuda" or plan_of(x)["rows"] < 20_000
    grad_y = torch.full((), 2.0**-6, dtype=dtype).expand(x.shape)
    *_, grad_weight = run(combinator, [x, weight], grad_y)
    of_b = torch.tensor(math.log(2) * 2.0**-6).to(dtype).double() * 20_000
    assert torch.equal(grad_weight[1], of_b.to(dtype).expand(30, 30))
    assert torch.equal(grad_weight[0], torch.zeros(30, 30, dtype=dtype))


# ---- strides


@MODES
def test_many_leading_dimensions_in_any_order(low_memory: bool) -> None:
    """Several chunks of rows that are not adjacent in memory."""
    (x, weight), grad_y = make_inputs((7, 5, 6, 11, 9, 33))
    x, grad_y = x.permute(4, 0, 3, 5, 2, 1), grad_y.permute(3, 4, 1, 5, 2, 0)
    x, grad_y = x.contiguous().permute(1, 5, 4, 2, 0, 3), grad_y.contiguous().permute(5, 2, 4, 0, 1, 3)
    results = assert_contract(contract(low_memory), [x, weight], grad_y)
    assert_strides(results, [x, weight])


def test_x_has_any_number_of_leading_dimensions() -> None:
    (x, weight), _ = make_inputs((30,))
    x, weight = x.as_strided([2] * 18 + [3], [0, 3] * 9 + [1]), weight[:, :3, :3]
    assert same_bits([combinator(x, weight)], [combinator(x.contiguous(), weight)])


@MODES
def test_chunks_of_strided_rows(low_memory: bool) -> None:
    (x, weight), grad_y = make_inputs((2, 12_000, 65))
    x, grad_y = LAYOUTS["first dimension inside"](x), LAYOUTS["transposed"](grad_y)
    assert plan_of(x)["rows"] < 12_000
    assert_contract(contract(low_memory), [x, weight], grad_y)


@MODES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_cost_only_what_is_planned(layout: str, low_memory: bool) -> None:
    """What is no matrix (N,E) is copied, and GEMM copies the rows of a chunk or the weight if columns lie apart."""
    (x, weight), grad_y = make_inputs((3, 7000, 40))
    for x_, weight_, grad in laid_out([x, weight, grad_y], layout):
        plan = plan_of(x_)
        if DEVICE == "cuda":
            run(contract(low_memory).function, [x_, weight_], grad)  # cuBLAS takes its workspaces
        leaves = [x_.detach().requires_grad_(), weight_.detach().requires_grad_()]
        row, of_weight = x.nbytes // 21_000, copied(weight_)
        with track(device=DEVICE) as memory:
            y = combinator(*leaves, low_memory=low_memory)
            kept = 0 if low_memory else plan["preactivations"]
            of_chunk = copied(x_, plan["rows" if low_memory else "kept_rows"] * row)
            assert memory.peak_bytes == y.nbytes + (kept or plan["chunk"]) + of_chunk + of_weight
            memory.reset_peak()
            y.backward(grad)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            of_grad = 0 if is_view(grad) else grad.nbytes
            of_sum = 0 if is_view(leaves[1].grad) else weight.nbytes
            of_x = copied(x_, plan["rows"] * row)
            # Without pre-activations one product has both; else they have one each, and a copy of all rows stays.
            at_once = low_memory or not (is_view(x_) and is_view(weight_))
            of_both = of_x + of_weight if at_once else max(of_x, of_weight)
            assert memory.peak_bytes == y.nbytes + kept + gradients + plan["chunk"] + of_both + of_grad + of_sum
            del y
            assert memory.current_bytes == gradients


def is_view(x: Tensor) -> bool:
    """Whether (...,E) is a matrix (N,E) without a copy."""
    try:
        return x.view(-1, x.shape[-1]) is not None
    except RuntimeError:
        return False


def copied(x: Tensor, of_some_rows: int | None = None) -> int:
    """The bytes of the copy that a product of (...,E) takes, which has the bytes of some rows where GEMM makes it."""
    if reads_in_place(x):
        return 0
    return of_some_rows if is_view(x) and of_some_rows is not None else x.nbytes


# ---- extremes


@pytest.mark.parametrize("value", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_gates(value: float) -> None:
    (x, weight), grad_y = make_inputs((70, 40))
    weight[0] = torch.eye(40)
    x[::3, ::2] = value
    assert_contract(contract(), [x, weight], grad_y)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["x", "weight", "grad_y"])
def test_results_are_not_finite_where_those_of_plain_pytorch_are_not(poisoned: str, value: float) -> None:
    (x, weight), grad_y = make_inputs((7, 5))
    {"x": x, "weight": weight[0], "grad_y": grad_y}[poisoned][2, 3] = value
    ours, plain = (run(f, [x, weight], grad_y) for f in (contract().function, contract().reference))
    assert same_where_not_finite(ours, plain)


# ---- memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "E"), [(1, 1), (100, 127), (8192, 512), (262_144, 64), (512, 4096), (3, 600_000)])
def test_chunks_keep_to_their_share(N: int, E: int, dtype: torch.dtype, device: str) -> None:
    """A chunk's buffers take a sixteenth of x, on CUDA half of it, or 4 MiB if that is more, or one row."""
    plan = _C.combinator_plan(N=N, E=E, dtype=str(dtype).removeprefix("torch."), device=device)
    assert 1 <= plan["rows"] <= N
    share = 16 if device == "cpu" else 2
    assert plan["rows"] == 1 or plan["chunk"] + plan["wide"] <= max(N * E * dtype.itemsize // share, 4 * MIB)
    assert plan["kept_rows"] == (plan["rows"] if device == "cpu" else N)
    assert plan["preactivations"] == 2 * N * E * dtype.itemsize
    assert plan["sums"] == (2 * E * E * 4 if dtype in HALF_DTYPES else 0)
    # GEMM on CUDA has float32 products of 16-bit matrices.
    assert (plan["wide"] > 0) == (dtype in HALF_DTYPES and device == "cpu")
    in_float = device == "cpu" and not _C.cpu_multiplies(dtype=str(dtype).removeprefix("torch."), rows=N)
    assert plan["weight"] == (2 * E * E * 4 if in_float else 0)


def test_a_plan_is_of_a_device() -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        _C.combinator_plan(N=1, E=1, dtype="float32", device="tpu")


TARGETS = [
    *((shape, torch.float32) for shape in ((16, 512, 512), (2, 4096, 512), (8, 512, 1024), (3, 1000, 129))),
    *((shape, torch.bfloat16) for shape in ((16, 512, 512), (3, 1000, 129))),
]


@pytest.mark.slow
@MODES
@pytest.mark.parametrize(("shape", "dtype"), TARGETS, ids=str)
def test_memory_to_the_byte_and_within_the_targets(
    shape: tuple[int, ...], dtype: torch.dtype, low_memory: bool
) -> None:
    (x, weight), _ = make_inputs(shape, dtype)
    chunk = max(x.nbytes // (16 if KERNELS == "cpu" else 2), 4 * MIB)
    wide_weight = weight.numel() * 4 if dtype == torch.bfloat16 else 0
    converts = plan_of(x)["weight"] > 0
    forward, kept, backward = (2, 0, 3) if low_memory else (4, 2, 5)
    for dense, record in enumerate(assert_memory_is_planned(COMBINATOR, [x, weight], low_memory=low_memory)):
        for measured, units, more in (
            (
                record.forward_peak_bytes,
                forward,
                weight.nbytes + (chunk if low_memory or converts else 0) + converts * wide_weight,
            ),
            (record.saved_bytes, kept, 0),
            (record.backward_peak_bytes, backward + dense, 2 * weight.nbytes + (1 + converts) * wide_weight + chunk),
        ):
            assert measured <= 1.03 * units * x.nbytes + more + MIB

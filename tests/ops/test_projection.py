"""The projections: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import functools

import pytest
import torch
from ops.checks import (
    DEVICE,
    HALF_DTYPES,
    KERNELS,
    LAYOUTS,
    ON_HOST,
    Function,
    assert_contract,
    assert_threads_change_no_bit,
    every_second,
    run,
    same_bits,
    transposed,
)
from ops.operators import LINEAR_L, LINEAR_R, MIB
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from memcheck import linear_l, linear_r, measure_memory
from memcheck._extension import _C
from memcheck.ops.reference import projection as reference
from memcheck.predict.operators import scratch_of
from memcheck.predict.operators.products import products_are_plain
from memcheck.predict.scratch import OperatorCall, Scratch, Target

FUNCTIONS = [linear_r, linear_l]
OPERATORS = {linear_r: LINEAR_R, linear_l: LINEAR_L}
BACKWARD = {
    linear_r: torch.ops.memcheck.linear_r_backward.default,
    linear_l: torch.ops.memcheck.linear_l_backward.default,
}


# ---- values and gradients


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_many_pieces_do_not_lose_grad_w(function: Function, dtype: torch.dtype) -> None:
    """A 16-bit sum of 400 equal products would stop growing at 256 products; the sum is formed in float32."""
    x = torch.ones(400, 2, 3, dtype=dtype)
    w = torch.ones(3, 5, dtype=dtype)
    grad_y = torch.ones((), dtype=dtype).expand(400, 2, 5) if function is linear_r else torch.ones(400, 5, 2).to(dtype)
    _, _, grad_w = run(function, [x, w], grad_y)
    assert torch.equal(grad_w, torch.full_like(grad_w, 800))


def rms_error(actual: Tensor, truth: Tensor) -> float:
    return (actual.double() - truth).square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("layout", ["dense", "first dimension inside", "expanded along the first"])
@pytest.mark.parametrize("shape", [(40, 64, 48, 56), (5, 300, 33, 70)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_grad_w_is_rounded_once(
    function: Function, shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype
) -> None:
    """grad_w is not rounded after every product that it sums: its error is at most that of plain PyTorch."""
    (x, w), grad_y = OPERATORS[function].make(*shape, dtype)
    grad_y = LAYOUTS[layout](grad_y)
    plain = getattr(reference, function.__name__)
    _, _, truth = run(plain, [x.double(), w.double()], grad_y.double())
    ours, eager = (rms_error(run(f, [x, w], grad_y)[2], truth) for f in (function, plain))
    # Both round once; the order of summation in float32 sometimes changes the last bit.
    assert ours <= 1.001 * eager


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_grad_w_of_many_rows(dtype: torch.dtype) -> None:
    """Rows of float32 sums follow each other in steps, of which the last is shorter."""
    assert_contract(LINEAR_L.contract(), *LINEAR_L.make(2, 2500, 33, 65, dtype))


def packs_rows() -> bool:
    return _C.cpu_level() == "avx512" and _C.cpu_multiplies(dtype="bfloat16", rows=100)


@pytest.mark.cpu
@pytest.mark.isolated
@pytest.mark.skipif(not packs_rows(), reason="the CPU has no AVX512-BF16")
@pytest.mark.parametrize("shape", [(2, 700, 129, 63), (2, 64, 300, 200)], ids=str)
def test_threads_change_no_bit_of_grad_w(shape: tuple[int, int, int, int]) -> None:
    inputs, grad_y = LINEAR_L.make(*shape, torch.bfloat16)
    function = functools.partial(BACKWARD[linear_l], output_mask=[False, True])
    [*assert_threads_change_no_bit((1, 2, 3), lambda: function(grad_y, *inputs)[1:])]


@pytest.mark.cpu
@pytest.mark.skipif(not packs_rows(), reason="the CPU has no AVX512-BF16")
def test_no_row_is_converted_where_the_cpu_has_products() -> None:
    inputs, grad_y = LINEAR_L.make(3, 200, 64, 70, torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        BACKWARD[linear_l](grad_y, *inputs, output_mask=[False, True])
    # The sum, rounded, is the one copy.
    assert [event.count for event in trace.key_averages() if event.key == "aten::copy_"] == [1]


@pytest.mark.cpu
@pytest.mark.isolated
@pytest.mark.skipif(not _C.cpu_prefers_onednn(), reason="the library multiplies float32 matrices here")
@pytest.mark.parametrize("shape", [(2, 330, 129, 65), (1, 1500, 300, 64), (1, 129, 64, 511)], ids=str)
def test_float32_products_by_onednn(shape: tuple[int, int, int, int]) -> None:
    """Of linear_r's products of many rows, those for y and grad_x. The number of threads and rows changes no bit."""
    (x, w), grad_y = LINEAR_R.make(*shape, torch.float32)
    assert_contract(LINEAR_R.contract(), (x, w), grad_y)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y = linear_r(x, w)
        grad_x = BACKWARD[linear_r](grad_y, None, w, output_mask=[True, False])[0]
    assert "aten::mm" not in {event.key for event in trace.key_averages()}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert same_bits(linear_r(x, w), y)
        assert same_bits(linear_r(x[:, :129], w), y[:, :129])
        assert same_bits(BACKWARD[linear_r](grad_y, None, w, output_mask=[True, False])[0], grad_x)


ROWS = {
    "apart": lambda x: every_second(x, 1),
    "the same": lambda x: x[:, :1].expand_as(x),
    "overlapping": lambda x: x.flatten().unfold(0, x.size(2), 1)[None, : x.size(1)],
}


@pytest.mark.parametrize("rows", ROWS)
def test_many_rows(rows: str) -> None:
    """Rows of x that are a matrix for GEMM, and rows that are none, though they are one tensor of two dimensions."""
    (x, w), grad_y = LINEAR_R.make(1, 200, 65, 70)
    assert_contract(LINEAR_R.contract(), (ROWS[rows](x), transposed(w)), grad_y)


# ---- autograd


# ---- torch's own checks


# ---- memory


def piece_rows(B: int, S: int, R: int, item: int) -> int:
    """Returns the rows that are copied at a time if GEMM cannot read a gradient: a sixteenth of it, or 1 MiB."""
    return min(max(max(B * S * R * item // 16, MIB) // (R * item), 1), S)


def wide_rows(B: int, S: int, E: int, R: int, item: int) -> int:
    """Returns the rows of x and the gradient that are converted to float32 at a time, in as many bytes."""
    return min(max(max(B * S * R * item // 16, MIB) // (4 * (E + R)), 1), S)


def products_of(function: Function, B: int, S: int, rows: int | None) -> int:
    """Returns the number of products that grad_w sums: one if all rows form a matrix, else one per piece or batch."""
    if rows is not None:
        return B * -(-S // rows)
    return 1 if function is linear_r else B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("shape", [(1, 4096, 256, 512), (3, 2000, 128, 700), (2, 50, 64, 30)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_to_the_byte(
    function: Function, shape: tuple[int, int, int, int], dense: bool, dtype: torch.dtype
) -> None:
    """An expanded gradient is copied in pieces. 16-bit sums of products take a float32 grad_w, and on the CPU some
    float32 rows of both factors. If the CPU has no 16-bit products, all of them take such rows, and w in float32."""
    B, S, E, R = shape
    (x, w), _ = OPERATORS[function].make(*shape, dtype)
    record = measure_memory(function, x.requires_grad_(), w.requires_grad_(), dense_grad=dense)
    held = record.input_bytes + record.output_bytes
    assert record.saved_bytes == 0
    assert record.gradient_bytes == x.nbytes + w.nbytes
    grad_y = record.output_bytes if dense else x.itemsize
    rows = None if dense else piece_rows(B, S, R, x.itemsize)
    piece = (rows or 0) * R * x.itemsize
    is_sum = dtype == torch.bfloat16 and products_of(function, B, S, rows) > 1
    wide = wide_rows(B, S, E, R, x.itemsize) * (E + R) if KERNELS == "cpu" else 0
    sums = (E * R + wide) * 4 if is_sum else 0
    # oneDNN takes an unknown amount of scratch from torch's allocator for 16-bit products; cuBLAS reports its own.
    # CUDA on the host converts a part of both factors to float32.
    widened = 2**18 if is_sum and ON_HOST else 0
    library = record.library_workspace_bytes if DEVICE == "cuda" else 0 if dtype == torch.float32 else MIB + widened
    forward = 0
    if KERNELS == "cpu" and not _C.cpu_multiplies(dtype=str(dtype).removeprefix("torch."), rows=B * S):
        # The rows of all batch entries merge where y is token-major, and its gradient token-major or expanded.
        forward = (E * R + wide_rows(*((1, B * S) if function is linear_r else (B, S)), E, R, x.itemsize) * (E + R)) * 4
        merged = (1, B * S) if function is linear_r or not dense else (B, S)
        sums = (2 * E * R + wide_rows(*merged, E, R, x.itemsize) * (E + R)) * 4
        piece = library = 0
    assert 0 <= record.forward_peak_bytes - (held + forward) <= library
    assert 0 <= record.backward_peak_bytes - (held + grad_y + record.gradient_bytes + piece + sums) <= library


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("shape", [(3, 200, 64, 70), (3, 4000, 64, 100), (2, 50, 64, 30)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_predicted_scratch_is_what_is_taken(
    function: Function, shape: tuple[int, int, int, int], dense: bool, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    if _C.cpu_multiplies(dtype=name, rows=10) and not products_are_plain(name):
        pytest.skip("oneDNN takes scratch of its own")
    inputs, grad_y = OPERATORS[function].make(*shape, dtype)
    record = measure_memory(function, *(x.detach().requires_grad_() for x in inputs), dense_grad=dense)
    held = record.input_bytes + record.output_bytes
    parts = scratch_of(
        OperatorCall(
            f"memcheck::{function.__name__}", dict(zip("xw", inputs, strict=True)), (function(*inputs),), Target("cpu")
        )
    )
    assert sum(part.bytes for part in parts if isinstance(part, Scratch)) == record.forward_peak_bytes - held
    held += record.gradient_bytes
    held += record.output_bytes if dense else grad_y.itemsize
    arguments = {"grad_y": grad_y if dense else grad_y[:1, :1, :1].expand_as(grad_y), "output_mask": [True, True]}
    arguments |= dict(zip("xw", inputs, strict=True))
    name = BACKWARD[function].name().removesuffix(".default")
    parts = scratch_of(OperatorCall(name, arguments, tuple(inputs), Target("cpu")))
    assert sum(part.bytes for part in parts if isinstance(part, Scratch)) == record.backward_peak_bytes - held


# ---- what is refused

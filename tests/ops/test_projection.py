"""The projections: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import pytest
import torch
from ops.checks import (
    DEVICE,
    HALF_DTYPES,
    LAYOUTS,
    Function,
    assert_contract,
    every_second,
    run,
    transposed,
)
from ops.operators import LINEAR_L, LINEAR_R, MIB, ONEDNN_BYTES
from torch import Tensor

from memcheck import linear_l, linear_r, measure_memory
from memcheck.ops.reference import projection as reference
from memcheck.simulated.facts import scratch_of
from memcheck.simulated.facts.products import products_are_plain
from memcheck.simulated.scratch import OperatorCall, Scratch, Target

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


# ---- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("shape", [(1, 4096, 256, 512), (3, 2000, 128, 700), (2, 50, 64, 30)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_to_the_byte(
    function: Function, shape: tuple[int, int, int, int], dense: bool, dtype: torch.dtype
) -> None:
    """GEMM copies an expanded gradient. A sum of several 16-bit products takes a float32 grad_w, and on the CPU rows of
    both factors in float32: a sixteenth of the gradient, or 1 MiB."""
    B, S, E, R = shape
    (x, w), _ = OPERATORS[function].make(*shape, dtype)
    record = measure_memory(function, x.requires_grad_(), w.requires_grad_(), dense_grad=dense)
    held = record.input_bytes + record.output_bytes
    assert record.saved_bytes == 0
    assert record.gradient_bytes == x.nbytes + w.nbytes
    grad_y = record.output_bytes if dense else x.itemsize
    copy = 0 if dense else record.output_bytes
    # The rows of an expanded gradient merge, as those of a token-major one do.
    sums = 0
    if dtype == torch.bfloat16 and function is linear_l and dense and B > 1:
        row = (E + R) * 4
        wide = min(max(record.output_bytes // 16, MIB) // row, S) * row
        sums = E * R * 4 + (wide if DEVICE == "cpu" else 0)
    # cuBLAS reports its own scratch.
    library = record.library_workspace_bytes if DEVICE == "cuda" else 0 if dtype == torch.float32 else ONEDNN_BYTES
    assert 0 <= record.forward_peak_bytes - held <= library
    assert 0 <= record.backward_peak_bytes - (held + grad_y + record.gradient_bytes + copy + sums) <= library


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("shape", [(3, 200, 64, 70), (3, 4000, 64, 100), (2, 50, 64, 30)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_predicted_scratch_is_what_is_taken(
    function: Function, shape: tuple[int, int, int, int], dense: bool, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    if not products_are_plain(name):
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

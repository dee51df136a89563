"""The combinator: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

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
    RESULT_UNIT,
    SUM_UNIT,
    Bound,
    Contract,
    assert_contract,
    assert_strides,
    generator,
    is_dense,
    laid_out,
    run,
    same_bits,
    same_where_not_finite,
    saved_for_backward,
    subsets,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from memcheck import combinator, measure_memory, track
from memcheck._extension import _C
from memcheck.core.record import Record
from memcheck.ops.reference import combinator as reference
from memcheck.ops.reference.softplus_attention import softplus

forward_op = torch.ops.memcheck.combinator.default
backward_op = torch.ops.memcheck.combinator_backward.default
low_memory_combinator = functools.partial(combinator, low_memory=True)
MODES = pytest.mark.parametrize("low_memory", [False, True])
MIB = 2**20

# The shape of x, (...,E).
SHAPES = [
    (1,),
    (127,),
    (1, 1, 1),
    (63, 127),
    (2, 129, 63),
    (3, 1, 129),
    (300, 1),
    (2, 3, 5, 7, 11),
    (5000, 63),  # several chunks
    (3, 513, 300),
]
EMPTY_SHAPES = [(0,), (0, 7), (2, 0, 7), (2, 5, 0), (0, 0)]


class Stored(torch.autograd.Function):
    """The identity, but a number or gradient that a dtype cannot hold becomes infinite."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return Stored.held(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return Stored.held(grad, ctx.dtype), None

    @staticmethod
    def held(x: Tensor, dtype: torch.dtype) -> Tensor:
        """A margin of 1 % has all that rounding may make infinite."""
        return torch.where(x.abs() * 1.01 > torch.finfo(dtype).max, x * math.inf, x)


def stored_reference(x: Tensor, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The reference, whose pre-activations and their gradients are stored in a dtype, and may overflow there."""
    a, b = (Stored.apply(x @ matrix.mT, dtype) for matrix in weight)
    return softplus(a) * b


def contract(low_memory: bool = False, dtype: torch.dtype | None = None) -> Contract:
    """dtype: of the pre-activations, if these may overflow or be subnormal, or their errors large."""
    smallest = torch.finfo(dtype or torch.float32).smallest_normal

    def bounds(grad_y: Tensor, x: Tensor, weight: Tensor) -> list[Bound]:
        E = x.shape[-1]
        rows = x.numel() // max(E, 1)
        unit = RESULT_UNIT[dtype] + (32 + math.sqrt(E)) * SUM_UNIT[dtype] if dtype else 0.0
        of_each = error_bounds.combinator_bounds(grad_y, x, weight, smallest=smallest, unit=unit)
        # The pre-activations and their gradients are stored in the dtype of x.
        return [Bound(values, n, stored=True) for values, n in zip(of_each, (E, 3 * E, E + rows), strict=True)]

    truth = functools.partial(stored_reference, dtype=dtype) if dtype else reference.combinator
    return Contract(functools.partial(combinator, low_memory=low_memory), truth, bounds)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """[x (...,E), weight (2,E,E)] and grad_y (...,E)"""
    random = generator()
    E = shape[-1]
    x, weight, grad_y = (torch.randn(size, generator=random) for size in (shape, (2, E, E), shape))
    return [x.to(dtype), (weight / max(E, 1) ** 0.5).to(dtype)], grad_y.to(dtype)


def plan_of(x: Tensor) -> dict[str, int]:
    E = x.shape[-1]
    dtype = str(x.dtype).removeprefix("torch.")
    return _C.combinator_plan(N=x.numel() // E, E=E, dtype=dtype, copies=not reads_in_place(x), device=KERNELS)


# ---- values and gradients


@MODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY_SHAPES], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, low_memory: bool) -> None:
    if DEVICE == "cpu" and dtype == torch.float16 and math.prod(shape) > 200_000:
        pytest.skip("torch's float16 product takes seconds")
    assert_contract(contract(low_memory), *make_inputs(shape, dtype), against_plain=True)


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
def test_a_result_serves_as_scratch_if_there_are_many_rows(dtype: torch.dtype, low_memory: bool) -> None:
    """Concerns CUDA, where a third of the remaining rows exceeds a chunk. Chunks on the CPU have far fewer rows."""
    rows = 30_000 if KERNELS == "cpu" else 80_000
    inputs, grad_y = make_inputs((rows, 60), dtype)
    assert plan_of(inputs[0])["rows"] + 256 < rows // 3
    assert_contract(contract(low_memory), inputs, grad_y)
    assert_contract(contract(low_memory), inputs, grad_y[:1].expand_as(grad_y))


@pytest.mark.skipif(KERNELS == "cpu", reason="on the CPU chunks stay in the cache")
def test_products_on_cuda_are_of_many_rows() -> None:
    """All rows at once if the pre-activations are kept; else, and in the backward, a third of the remaining rows."""
    (x, weight), grad_y = make_inputs((80_000, 60))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    rows, left, chunks = plan_of(x)["rows"], 80_000, 0
    while left > 0:
        left -= max(min(left, rows), left // 3 // 256 * 256)
        chunks += 1
    assert chunks < 80_000 // rows
    y = combinator(*leaves)
    assert products(lambda: combinator(*leaves)) == 1
    assert products(lambda: combinator(x.detach(), weight.detach())) == chunks
    assert products(lambda: y.backward(grad_y)) == 2 * chunks


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


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit() -> None:
    for shape in ((700, 63), (4000, 128), (5, 7)):
        for dtype in (torch.float32, torch.bfloat16):
            for low_memory in (False, True):
                inputs, grad_y = make_inputs(shape, dtype)
                results = []
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    results.append(run(contract(low_memory).function, inputs, grad_y))
                    assert same_bits(results[0], results[-1])


@CPU_LEVELS
def test_every_cpu_level(level: str) -> None:
    assert _C.cpu_level() == level
    for dtype in DTYPES:
        for shape in ((2, 63, 65), (40, 128), (7, 3)):
            assert_contract(contract(), *make_inputs(shape, dtype))


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, dtype: torch.dtype, low_memory: bool) -> None:
    (x, weight), grad_y = make_inputs((3, 70, 40), dtype)
    for *inputs, grad in laid_out([x, weight, grad_y], layout):
        before = [tensor.clone() for tensor in (*inputs, grad)]
        assert_strides(assert_contract(contract(low_memory), inputs, grad), inputs)
        assert same_bits(before, [*inputs, grad])


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
    """If GEMM cannot use them in place, x and its gradient take a chunk, and weight and its gradient a copy."""
    (x, weight), grad_y = make_inputs((3, 7000, 40))
    for x_, weight_, grad in laid_out([x, weight, grad_y], layout):
        plan = plan_of(x_)
        if DEVICE == "cuda":
            run(contract(low_memory).function, [x_, weight_], grad)  # cuBLAS takes its workspaces
        weight_copy = 0 if reads_in_place(weight_) else weight.nbytes
        sums = 0 if reads_in_place(weight_) or not is_dense(weight_) else weight.nbytes
        leaves = [x_.detach().requires_grad_(), weight_.detach().requires_grad_()]
        with track(device=DEVICE) as memory:
            y = combinator(*leaves, low_memory=low_memory)
            kept = 0 if low_memory else plan["preactivations"]
            assert memory.peak_bytes == y.nbytes + (kept or plan["chunk"]) + plan["copy"] + weight_copy
            memory.reset_peak()
            y.backward(grad)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            assert memory.peak_bytes == y.nbytes + kept + gradients + plan["chunk"] + plan["copy"] + weight_copy + sums
            del y
            assert memory.current_bytes == gradients


def reads_in_place(x: Tensor) -> bool:
    """Returns whether the rows form one matrix with stride 1 along one dimension."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]


# ---- autograd


def saved_bytes_beside(inputs: list[Tensor], mask: tuple[bool, bool], low_memory: bool) -> tuple[list[bool], int]:
    """Returns the inputs that are saved for backward, and the bytes of all other saved tensors."""
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    saved = saved_for_backward(lambda: combinator(*leaves, low_memory=low_memory))
    pointers = [x.data_ptr() for x in saved]
    kept = [x.data_ptr() in pointers for x in inputs]
    return kept, sum(x.nbytes for x in saved if x.data_ptr() not in [y.data_ptr() for y in inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_backward_reads_is_kept(dtype: torch.dtype) -> None:
    """By default, a frozen weight saves no x and a frozen x no weight. Low memory saves both and nothing else."""
    inputs, _ = make_inputs((3, 70, 40), dtype)
    twice = 2 * inputs[0].nbytes
    assert saved_bytes_beside(inputs, (True, True), low_memory=False) == ([True, True], twice)
    assert saved_bytes_beside(inputs, (True, False), low_memory=False) == ([False, True], twice)
    assert saved_bytes_beside(inputs, (False, True), low_memory=False) == ([True, False], twice)
    for mask in subsets(2):
        assert saved_bytes_beside(inputs, mask, low_memory=True) == ([True, True], 0)


# ---- torch's own checks


@pytest.mark.glue
@MODES
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("layout", ["dense", "transposed", "every second column"])
def test_opcheck_forward(layout: str, requires_grad: bool, low_memory: bool) -> None:
    inputs = [LAYOUTS[layout](x).requires_grad_(requires_grad) for x in make_inputs((2, 5, 7))[0]]
    torch.library.opcheck(forward_op, inputs, {"low_memory": low_memory})
    if not requires_grad:
        torch.library.opcheck(forward_op, inputs, {"low_memory": low_memory, "keep_preactivations": True})


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("layout", ["dense", "transposed", "every second column"])
def test_opcheck_backward(layout: str, requires_grad: bool) -> None:
    (x, weight), grad_y = make_inputs((2, 5, 7))
    _, kept = forward_op(x, weight, keep_preactivations=True)
    x, weight = (LAYOUTS[layout](tensor).requires_grad_(requires_grad) for tensor in (x, weight))
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # Tracing differentiates the backward, which raises by contract.
    if not requires_grad:
        utilities.append("test_aot_dispatch_dynamic")
    for given, mask in (
        ((x, weight, kept), [True, True]),
        ((x, weight, None), [True, True]),
        ((x, weight, None), [True, False]),
        ((None, weight, kept), [True, False]),
        ((x, None, kept), [False, True]),
    ):
        arguments = (grad_y, *given)
        torch.library.opcheck(backward_op, arguments, {"output_mask": mask}, test_utils=utilities)


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


def test_nan_stays_in_its_row() -> None:
    inputs, grad_y = make_inputs((70, 40))
    y, grad_x, _ = run(combinator, inputs, grad_y)
    inputs[0][7, 3] = math.nan
    spoilt_y, spoilt_x, grad_weight = run(combinator, inputs, grad_y)
    for clean, spoilt in ((y, spoilt_y), (grad_x, spoilt_x)):
        assert spoilt[7].isnan().all()
        spoilt[7] = clean[7]
        torch.testing.assert_close(spoilt, clean)
    assert grad_weight.isnan().all()


# ---- memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "E"), [(1, 1), (100, 127), (8192, 512), (262_144, 64), (512, 4096), (3, 600_000)])
def test_chunks_keep_to_their_share(N: int, E: int, dtype: torch.dtype, copies: bool, device: str) -> None:
    """A chunk's buffers take a sixteenth of x, or 4 MiB if that is more, or one row if that is more."""
    plan = _C.combinator_plan(N=N, E=E, dtype=str(dtype).removeprefix("torch."), copies=copies, device=device)
    assert bool(plan["copy"]) == copies
    assert 1 <= plan["rows"] <= N
    chunk = plan["chunk"] + plan["copy"] + plan["wide"]
    assert plan["rows"] == 1 or chunk <= max(N * E * dtype.itemsize // 16, 4 * MIB)
    assert plan["preactivations"] == 2 * N * E * dtype.itemsize
    assert plan["sums"] == (2 * E * E * 4 if dtype in HALF_DTYPES else 0)
    # GEMM on CUDA has float32 products of 16-bit matrices.
    assert (plan["wide"] > 0) == (dtype in HALF_DTYPES and device == "cpu")
    in_float = device == "cpu" and not _C.cpu_multiplies(dtype=str(dtype).removeprefix("torch."), rows=N)
    assert plan["weight"] == (2 * E * E * 4 if in_float else 0)


def test_a_plan_is_of_a_device() -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        _C.combinator_plan(N=1, E=1, dtype="float32", copies=False, device="tpu")


def library_bytes(x: Tensor, record: Record) -> int:
    """Returns the scratch of GEMM. oneDNN takes an unknown amount for 16-bit products; cuBLAS reports its own."""
    if DEVICE == "cuda":
        return record.library_workspace_bytes
    return 0 if x.dtype in (torch.float32, torch.float64) or plan_of(x)["weight"] else MIB


def assert_memory_is_planned(x: Tensor, weight: Tensor, low_memory: bool) -> list[Record]:
    """Asserts that peaks are inputs, output, saved tensors, gradients and the plan's chunks.

    Returns the records for an expanded and for a dense gradient of y.
    """
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    plan = plan_of(x)
    kept = 0 if low_memory else plan["preactivations"]
    in_float = plan["weight"] and plan["wide"] + plan["weight"]
    records = [measure_memory(combinator, *leaves, low_memory=low_memory, dense_grad=dense) for dense in (False, True)]
    for record, dense in zip(records, (False, True), strict=True):
        held = record.input_bytes + record.output_bytes
        assert record.saved_bytes == kept
        assert record.gradient_bytes == x.nbytes + weight.nbytes
        forward_peak = held + (kept or plan["chunk"]) + in_float
        assert 0 <= record.forward_peak_bytes - forward_peak <= library_bytes(x, record)
        grad_y = record.output_bytes if dense else x.itemsize
        scratch = plan["chunk"] + plan["wide"] + plan["sums"] + plan["weight"]
        backward_peak = held + kept + grad_y + record.gradient_bytes + scratch
        assert 0 <= record.backward_peak_bytes - backward_peak <= library_bytes(x, record)
    record = measure_memory(combinator, *leaves, low_memory=low_memory, backward=False)
    alone = record.input_bytes + record.output_bytes + plan["chunk"] + in_float
    assert 0 <= record.forward_peak_bytes - alone <= library_bytes(x, record)
    assert record.saved_bytes == 0
    return records


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
    chunk = max(x.nbytes // 16, 4 * MIB)
    wide_weight = weight.numel() * 4 if dtype == torch.bfloat16 else 0
    converts = plan_of(x)["weight"] > 0
    forward, kept, backward = (2, 0, 3) if low_memory else (4, 2, 5)
    for dense, record in enumerate(assert_memory_is_planned(x, weight, low_memory)):
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


# ---- what is refused

RAISES = {
    "x of rank 0": ({"x": torch.ones(())}, ValueError, r"x must be \(...,E\), of 1 dimension or more, got \[\]"),
    "weight of rank 2": (
        {"weight": torch.ones(7, 7)},
        ValueError,
        r"weight must be \(2,E,E\), of 3 dimensions, got \[7, 7\]",
    ),
    "another E": (
        {"weight": torch.ones(2, 6, 7)},
        ValueError,
        r"weight must be \(2,E,E\) = \[2, 7, 7\] to match x, got \[2, 6, 7\]",
    ),
    "one weight": (
        {"weight": torch.ones(1, 7, 7)},
        ValueError,
        r"weight must be \(2,E,E\) = \[2, 7, 7\] to match x, got \[1, 7, 7\]",
    ),
    "float64 weight": (
        {"weight": torch.ones(2, 7, 7).double()},
        TypeError,
        "weight must be float32 to match x, got float64",
    ),
    "integers": ({"x": torch.ones(5, 7).int()}, TypeError, "x must be float64, .* or bfloat16, got int32"),
    "booleans": ({"x": torch.ones(5, 7).bool()}, TypeError, "x must be float64, .* or bfloat16, got bool"),
    "complex": ({"x": torch.ones(5, 7).cfloat()}, TypeError, "x must be float64, .* or bfloat16, got complex64"),
    "weight elsewhere": (
        {"weight": torch.ones(2, 7, 7, device="meta")},
        ValueError,
        f"weight must be on {HERE} as x is, got meta",
    ),
    "x elsewhere": ({"x": torch.ones(5, 7, device="meta")}, ValueError, f"weight must be on meta as x is, got {HERE}"),
    "no x": ({"x": None}, TypeError, "x must be a tensor, got None"),
    "no weight": ({"weight": None}, TypeError, "weight must be a tensor, got None"),
    # The dispatcher raises these two before the operator is called.
    "a list": ({"x": [1.0]}, TypeError, "x must be a tensor, got a list of length 1"),
    "sparse": ({"weight": torch.ones(2, 7, 7).to_sparse()}, TypeError, "must be a dense tensor, got a sparse_coo one"),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("wrong", RAISES)
def test_wrong_input(wrong: str, requires_grad: bool) -> None:
    changed, kind, message = RAISES[wrong]
    (x, weight), _ = make_inputs((2, 5, 7))
    if requires_grad and "weight" not in changed:
        weight.requires_grad_()
    arguments = {"x": x, "weight": weight, **changed}
    with pytest.raises(kind, match=f"combinator.*{message}"):
        combinator(arguments["x"], arguments["weight"])


# No two leading dimensions lie one behind the other.
MANY_DIMENSIONS = torch.ones(10).as_strided([2] * 18 + [7], [0, 1] * 9 + [0])
BACKWARD_RAISES = {
    "rank of grad_y": ({"grad_y": torch.ones(())}, ValueError, r"grad_y must be \(...,E\), of 1 dimension or more"),
    "shape of grad_y": (
        {"grad_y": torch.ones(2, 4, 7)},
        ValueError,
        r"x must be \(...,E\) = \[2, 4, 7\] to match grad_y, got \[2, 5, 7\]",
    ),
    "rank of x": (
        {"x": torch.ones(10, 7)},
        ValueError,
        r"x must be \(...,E\) = \[2, 5, 7\] to match grad_y, got \[10, 7\]",
    ),
    "shape of weight": (
        {"weight": torch.ones(2, 7, 6)},
        ValueError,
        r"weight must be \(2,E,E\) = \[2, 7, 7\] to match grad_y, got \[2, 7, 6\]",
    ),
    "shape of preactivations": (
        {"preactivations": torch.ones(2, 5, 7)},
        ValueError,
        r"preactivations must be \(...,2E\) = \[2, 5, 14\] to match grad_y, got \[2, 5, 7\]",
    ),
    "dtype of preactivations": (
        {"preactivations": torch.ones(2, 5, 14).double()},
        TypeError,
        "preactivations must be float32 to match grad_y, got float64",
    ),
    "dtype of x": ({"x": torch.ones(2, 5, 7).half()}, TypeError, "x must be float32 to match grad_y, got float16"),
    "preactivations elsewhere": (
        {"preactivations": torch.ones(2, 5, 14, device="meta")},
        ValueError,
        f"preactivations must be on {HERE} as grad_y is, got meta",
    ),
    "too many leading dimensions": (
        {"grad_y": MANY_DIMENSIONS, "x": MANY_DIMENSIONS, "preactivations": None},
        ValueError,
        "grad_y must have at most 16 leading dimensions that do not lie one behind the other",
    ),
    "integer grad_y": ({"grad_y": torch.ones(2, 5, 7).int()}, TypeError, "grad_y must be float64, .* got int32"),
    "no grad_y": ({"grad_y": None}, TypeError, "grad_y must be a tensor, got None"),
    "no x": ({"x": None}, ValueError, "x is needed for the gradient of weight, and without preactivations"),
    "no weight": ({"weight": None}, ValueError, "weight is needed for the gradient of x, and without preactivations"),
    "neither x nor preactivations": (
        {"x": None, "preactivations": None, "output_mask": [True, False]},
        ValueError,
        "x is needed for the gradient of weight, and without preactivations",
    ),
    "neither weight nor preactivations": (
        {"weight": None, "preactivations": None, "output_mask": [False, True]},
        ValueError,
        "weight is needed for the gradient of x, and without preactivations",
    ),
}


@pytest.mark.parametrize("wrong", BACKWARD_RAISES)
def test_wrong_backward(wrong: str) -> None:
    changed, kind, message = BACKWARD_RAISES[wrong]
    (x, weight), grad_y = make_inputs((2, 5, 7))
    given = {"grad_y": grad_y, "x": x, "weight": weight, "preactivations": torch.ones(2, 5, 14)}
    arguments = {**given, "output_mask": [True, True], **changed}
    mask = arguments.pop("output_mask")
    with pytest.raises(kind, match=f"combinator_backward: {message}"):
        backward_op(*arguments.values(), output_mask=mask)

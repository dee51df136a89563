"""Compressed attention and its pooled variant: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from typing import Any

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
    RESULT_UNIT,
    SUM_UNIT,
    Bound,
    Contract,
    assert_contract,
    assert_strides,
    assert_within,
    doubles,
    generator,
    laid_out,
    largest_error,
    run,
    same_bits,
    saved_for_backward,
    subsets,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree

from memcheck import (
    CompressedAttentionState,
    compressed_attention,
    compressed_attention_pooled,
    compressed_attention_state,
    compressed_attention_step,
    measure_memory,
    track,
)
from memcheck._extension import _C
from memcheck.core.record import Record
from memcheck.ops.reference import compressed_attention as reference

forward_op = torch.ops.memcheck.compressed_attention.default
backward_op = torch.ops.memcheck.compressed_attention_backward.default
pooled_op = torch.ops.memcheck.compressed_attention_pooled.default
pooled_backward_op = torch.ops.memcheck.compressed_attention_pooled_backward.default

# B, H, Hkv, S, T, D
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 9, 9, 3),
    (1, 6, 2, 63, 129, 33),
    (2, 2, 1, 127, 127, 64),
    (1, 2, 2, 129, 300, 40),
    (1, 12, 1, 3, 40, 16),  # a tile of queries has several heads
    (3, 8, 2, 1, 257, 65),  # decoding
    (2, 1, 1, 1, 129, 127),
    (1, 1, 1, 700, 700, 32),
]
NOT_CAUSAL_SHAPES = [(1, 2, 1, 129, 63, 20), (2, 3, 3, 300, 1, 5), (1, 1, 1, 700, 129, 33)]
EMPTY_SHAPES = [(0, 2, 1, 5, 7, 3), (2, 0, 0, 5, 7, 3), (2, 2, 1, 0, 7, 3), (2, 2, 1, 0, 0, 3), (2, 2, 1, 5, 7, 0)]
FACTORS = [1, 2, 3, 8, 63, 64, 1000]
MODES = {"causal": {}, "strict": {"strict": True}, "not causal": {"causal": False}}
CASES = [
    *(pytest.param(shape, mode, id=f"{shape} {mode}") for shape in SHAPES + EMPTY_SHAPES for mode in MODES),
    *(pytest.param(shape, "not causal", id=f"{shape} not causal") for shape in NOT_CAUSAL_SHAPES),
    pytest.param((2, 2, 1, 5, 0, 3), "not causal", id="no key"),
]


def contract(factor: int = 8, mode: str = "causal", dtype: torch.dtype | None = None, **more: Any) -> Contract:
    """dtype: of the inputs, if errors of scores may be large."""
    options = {"factor": factor, **MODES[mode], **more}

    def bounds(grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
        unit = RESULT_UNIT[dtype] + (32 + math.sqrt(k.shape[2])) * SUM_UNIT[dtype] if dtype else 0.0
        smallest = torch.finfo(dtype).smallest_normal if dtype else 0.0
        of_all = error_bounds.compressed_attention_bounds(grad_y, q, k, v, **options, unit=unit, smallest=smallest)
        return [Bound(bound, terms=k.shape[2], stored=True) for bound in of_all]

    return Contract(
        functools.partial(compressed_attention, **options),
        functools.partial(reference.compressed_attention, **options),
        bounds,
    )


def pooled_contract(kv_len: int, factor: int = 8, mode: str = "causal", **more: Any) -> Contract:
    options = {"factor": factor, "kv_len": kv_len, **MODES[mode], **more}

    def bounds(grad_y: Tensor, q: Tensor, kc: Tensor, vc: Tensor) -> list[Bound]:
        of_all = error_bounds.compressed_attention_pooled_bounds(grad_y, q, kc, vc, **options)
        return [Bound(bound, terms=kv_len, stored=True) for bound in of_all]

    return Contract(
        functools.partial(compressed_attention_pooled, **options),
        functools.partial(reference.compressed_attention_pooled, **options),
        bounds,
    )


def make_inputs(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, dtype: torch.dtype = torch.float32, *, seed: int = 1
) -> tuple[list[Tensor], Tensor]:
    """[q (B,H,S,D), k (B,Hkv,T,D), v (B,Hkv,T,D)] and grad_y (B,H,S,D)"""
    random = generator(seed)
    shapes = [(B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D), (B, H, S, D)]
    q, k, v, grad_y = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return [q, k, v], grad_y


def plan_of(q: Tensor, k: Tensor, factor: int = 8, causal: bool = True) -> dict[str, int]:
    (B, H, S, D), (_, Hkv, T, _) = q.shape, k.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "T": T, "D": D, "factor": factor}
    dtype = str(q.dtype).removeprefix("torch.")
    more = {"causal": causal, "dtype": dtype, "threads": torch.get_num_threads(), "device": KERNELS}
    return _C.compressed_attention_plan(**sizes, **more)


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "mode"), CASES)
def test_values_and_gradients(shape: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    for factor in FACTORS:
        assert_contract(contract(factor, mode), *make_inputs(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "mode"), CASES)
def test_values_and_gradients_of_pooled_keys(shape: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    B, H, Hkv, S, T, D = shape
    for factor in (1, 3, 8):
        for blocks in {-(-T // factor), T // factor if mode != "not causal" else -(-T // factor)}:
            inputs, grad_y = make_inputs(B, H, Hkv, S, blocks, D, dtype)
            assert_contract(pooled_contract(T, factor, mode), inputs, grad_y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 2, 1, 70, 150, 200), (1, 1, 1, 9, 70, 300), (1, 300, 1, 2, 20, 8)])
def test_wide_heads_and_many_heads_of_a_key_head(shape: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    assert_contract(contract(2, mode), *make_inputs(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["causal", "not causal"])
@pytest.mark.parametrize(("T", "D", "layout"), [(320, 64, "dense"), (300, 65, "transposed"), (300, 130, "dense")])
def test_gradients_of_long_blocks(T: int, D: int, layout: str, mode: str, dtype: torch.dtype) -> None:
    """Thread blocks of a GPU share a tile of keys, and leave their parts in the gradients of keys and values; of a
    shorter last block, in scratch."""
    tensors, grad_y = make_inputs(1, 8, 8, 270, T, D, dtype)
    *inputs, grad = [LAYOUTS[layout](x) for x in (*tensors, grad_y)]
    assert_strides(assert_contract(contract(64, mode), inputs, grad), inputs)


def test_sums_of_16_bit_products_have_no_bias() -> None:
    """Tensor cores cut sums towards zero: relative errors of sums of positive terms would grow with their number.
    Weights rounded to nearest have errors with a mean of 0, and their standard deviation over all S T weights, whose
    mean square is e times their squared mean, bounds the mean error of the results."""
    S, T, D = 700, 1024, 200
    (q, k, v), grad_y = make_inputs(1, 1, 1, S, T, D, torch.float16)
    inputs = [q, k, v.abs() + 1, grad_y.abs() + 1]
    one = contract(1, "not causal")
    y, _, _, grad_v = run(one.function, inputs[:3], inputs[3])
    expected = run(one.reference, [x.double() for x in inputs[:3]], inputs[3].double())
    deviation = RESULT_UNIT[torch.float16] / math.sqrt(3) * math.sqrt(math.e / (S * T))
    for actual, exact in ((y, expected[0]), (grad_v, expected[3])):
        assert abs(((actual.double() - exact) / exact).mean().item()) < 5 * deviation


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [1, 2, 8, 64])
@pytest.mark.parametrize("shape", [(2, 4, 2, 63, 129, 33), (1, 1, 1, 300, 300, 64)])
def test_16_bits_are_as_accurate_as_plain_pytorch(
    shape: tuple[int, ...], factor: int, mode: str, dtype: torch.dtype
) -> None:
    """At most twice the error of plain PyTorch, as a mean over 8 seeds: both round the blocks, so one seed varies."""
    for one, keys in ((contract(factor, mode), shape[4]), (pooled_contract(shape[4], factor, mode), None)):
        ours, plain = torch.zeros(4), torch.zeros(4)
        for seed in range(8):
            sizes = (*shape[:4], -(-shape[4] // factor) if keys is None else keys, shape[5])
            inputs, grad_y = make_inputs(*sizes, dtype, seed=seed)
            truths = run(one.reference, doubles(inputs), grad_y.double())
            for errors, function in ((ours, one.function), (plain, one.reference)):
                results = run(function, inputs, grad_y)
                errors += torch.tensor([largest_error(x, truth) for x, truth in zip(results, truths, strict=True)])
        assert (ours <= 2 * plain).all()


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 20.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(scale: float, dtype: torch.dtype) -> None:
    inputs, grad_y = make_inputs(2, 4, 2, 40, 70, 33, dtype)
    for mode in MODES:
        assert_contract(contract(3, mode, scale=scale), inputs, grad_y)
        assert_contract(pooled_contract(70, 1, mode, scale=scale), inputs, grad_y)


@pytest.mark.parametrize("causal", [True, False])
def test_factor_1_is_softmax_attention(causal: bool) -> None:
    inputs, grad_y = make_inputs(2, 4, 4, 70, 70, 20, torch.float64)
    ours = run(contract(1, "causal" if causal else "not causal").function, inputs, grad_y)
    theirs = run(functools.partial(scaled_dot_product_attention, is_causal=causal), inputs, grad_y)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_pooling_and_then_attending_is_the_same(mode: str) -> None:
    """Both functions run the same kernel: in float32 the blocks are not rounded in between."""
    inputs, grad_y = make_inputs(2, 4, 2, 100, 130, 40)
    q, k, _ = inputs
    whole = run(contract(8, mode).function, inputs, grad_y)
    _, _, kc, vc = forward_op(*inputs, factor=8, causal=False, keep=True)
    torch.testing.assert_close(kc, reference.compress(k, 8))
    y, grad_q, grad_kc, grad_vc = run(pooled_contract(130, 8, mode).function, [q, kc, vc], grad_y)
    lengths = reference.block_lengths(130, 8, k)
    spread = [(x / lengths[:, None]).repeat_interleave(lengths.long(), 2) for x in (grad_kc, grad_vc)]
    assert same_bits(whole, [y, grad_q, *spread])


@pytest.mark.parametrize("factor", [1, 5, 8])
@pytest.mark.parametrize("strict", [False, True])
def test_what_a_query_sees(factor: int, strict: bool) -> None:
    """A query sees a block from the block's last position on; with strict, from the next position on."""
    (q, k, v), _ = make_inputs(1, 1, 1, 30, 50, 8, torch.float64)
    before = compressed_attention(q, k, v, factor=factor, strict=strict)
    for j in range(50 // factor):
        v_changed = v.clone()
        v_changed[:, :, j * factor] += 100
        changed = (compressed_attention(q, k, v_changed, factor=factor, strict=strict) != before).any(3)[0, 0]
        first = (j + 1) * factor - 1 + strict - (50 - 30)
        assert changed.tolist() == [s >= first for s in range(30)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["causal", "strict"])
def test_queries_that_see_no_block_give_0(mode: str, dtype: torch.dtype) -> None:
    """y and the gradient are exactly 0 and lse is -inf; keys that no query sees have gradient 0 too."""
    inputs, grad_y = make_inputs(2, 4, 2, 40, 50, 20, dtype)
    for factor in (17, 64):
        blind = sum(1 for t in range(10, 50) if (t + (mode == "causal")) // factor == 0)
        _, lse, _, _ = forward_op(*inputs, factor=factor, **MODES[mode], keep=True)
        y, grad_q, grad_k, grad_v = run(contract(factor, mode).function, inputs, grad_y)
        for x, nothing in ((y, 0), (grad_q, 0), (lse, -math.inf)):
            assert (x[:, :, :blind] == nothing).all()
            assert x.isfinite()[:, :, blind:].all()
        unseen = (50 - (mode == "strict")) // factor * factor
        assert not grad_k[:, :, unseen:].any()
        assert not grad_v[:, :, unseen:].any()


def test_lse_is_the_logsumexp_of_the_scores() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 40, 50, 20, torch.float64)
    _, lse, kc, _ = forward_op(q, k, v, factor=8, causal=False, keep=True)
    torch.testing.assert_close(lse, (q @ reference.over_heads(kc, q).mT / 20**0.5).logsumexp(3))


def test_bounds_are_the_formulas_without_cancellation() -> None:
    """With small scores and positive v and g, the bounds of y and dv are their values."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 5, 9, 3, torch.float64)
    inputs, grad_y = [q * 1e-9, k, v.abs()], grad_y.abs()
    y, _, _, grad_v = run(contract(2).reference, inputs, grad_y)
    of_y, _, _, of_v = (bound.values for bound in contract(2).bounds(grad_y, *inputs))
    torch.testing.assert_close((y, grad_v), (of_y, of_v))


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit_and_only_the_planned_bytes() -> None:
    for shape in ((1, 2, 1, 300, 700, 70), (3, 4, 2, 1, 300, 33), (1, 1, 1, 700, 700, 64)):
        for mode in MODES:
            inputs, grad_y = make_inputs(*shape)
            results = []
            for threads in (1, 2, 3, 7, 16):
                torch.set_num_threads(threads)
                results.append(run(contract(8, mode).function, inputs, grad_y))
                assert same_bits(results[0], results[-1])
                assert_memory_is_planned(*inputs, factor=8, causal=mode != "not causal")


@CPU_LEVELS
def test_every_cpu_level(level: str) -> None:
    assert _C.cpu_level() == level
    for mode in MODES:
        for dtype in DTYPES:
            for shape in ((2, 4, 2, 63, 129, 35), (1, 2, 1, 200, 600, 64), (1, 8, 2, 1, 300, 64)):
                assert_contract(contract(3, mode), *make_inputs(*shape, dtype))
    assert_steps_are_right(torch.float32, prompt=30, factor=8)


@CPU_LEVELS
def test_strides_threads_and_nan_change_no_other_bit_at_every_cpu_level(level: str) -> None:
    """The highest levels have products of bfloat16 of their own."""
    assert _C.cpu_level() == level
    inputs, grad_y = make_inputs(1, 2, 1, 150, 300, 64, torch.bfloat16)
    function = contract(2).function
    results = run(function, inputs, grad_y)
    assert same_bits(results, run(function, [x.mT.contiguous().mT for x in inputs], grad_y.mT.contiguous().mT))
    torch.set_num_threads(3)
    assert same_bits(results, run(function, inputs, grad_y))
    test_nan_in_a_block_reaches_who_sees_it(NAN_SHAPES[0], "causal", torch.bfloat16)
    test_nan_in_a_query_reaches_the_blocks_it_sees(NAN_SHAPES[0], "causal", torch.bfloat16)
    for padded in ((0, 30), (0, 100)):
        test_keys_of_minus_infinity_hide_their_blocks(padded, "causal", torch.bfloat16)


# ---- strides


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, dtype: torch.dtype, mode: str) -> None:
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 100, 40, dtype)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        before = [x.clone() for x in (*inputs, grad)]
        for one in (contract(3, mode), pooled_contract(300, 3, mode)):
            results = assert_contract(one, inputs, grad)
            assert_strides(results, inputs)
        assert same_bits(before, [*inputs, grad])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_rows_that_are_read_in_place(layout: str) -> None:
    """If D is a multiple of 32, float32 rows are not copied."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 100, 64)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        for one in (contract(3), pooled_contract(300, 3)):
            assert_strides(assert_contract(one, inputs, grad), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_cost_no_byte(layout: str, causal: bool) -> None:
    """The operator makes no contiguous copy."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 300, 40)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        leaves = [x.detach().requires_grad_() for x in inputs]
        plan = plan_of(q, k, 8, causal)
        kept = plan["lse"] + plan["compressed"]
        with track(device=DEVICE) as memory:
            y = compressed_attention(*leaves, factor=8, causal=causal)
            assert memory.peak_bytes == y.nbytes + kept + plan["forward_scratch"]
            memory.reset_peak()
            y.backward(grad)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            assert memory.peak_bytes == y.nbytes + kept + gradients + plan["delta"] + plan["backward_scratch"]
            del y
            assert memory.current_bytes == gradients


# ---- autograd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", subsets(3))
def test_only_what_backward_reads_is_kept(mask: tuple[bool, ...], dtype: torch.dtype) -> None:
    """Saves the blocks, not k and v. The gradient of v reads neither v's blocks nor y; a 16-bit y is never saved."""
    inputs, _ = make_inputs(2, 4, 2, 70, 100, 40, dtype)
    q, k, v = leaves = [x.requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    outputs: list[Tensor] = []
    kept = saved_for_backward(lambda: outputs.append(compressed_attention(*leaves, factor=8)))
    y, lse, kc, vc = forward_op(q.detach(), k.detach(), v.detach(), factor=8, keep=True)
    if not (mask[0] or mask[1]):
        assert same_bits(kept, [q, kc, lse])
    elif dtype == torch.float32:
        assert same_bits(kept, [q, kc, vc, y, lse])
        assert kept[3].data_ptr() == outputs[0].data_ptr()
    else:
        assert same_bits(kept, [q, kc, vc, lse])
    assert kept[0].data_ptr() == q.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", subsets(3))
def test_only_what_backward_reads_is_kept_of_pooled_keys(mask: tuple[bool, ...], dtype: torch.dtype) -> None:
    inputs, _ = make_inputs(2, 4, 2, 70, 100, 40, dtype)
    q, kc, vc = leaves = [x.requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
    outputs: list[Tensor] = []
    function = pooled_contract(300, 3).function
    *kept, lse = saved_for_backward(lambda: outputs.append(function(*leaves)))
    values = [vc, *([outputs[0]] if dtype == torch.float32 else [])] if mask[0] or mask[1] else []
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (q, kc, *values)]
    assert lse.shape == (2, 4, 70)


def test_y_changed_in_place_is_an_error() -> None:
    """Applies to float32, in which y is saved."""
    for one in (contract(3), pooled_contract(21, 3)):
        y = one.function(*(x.requires_grad_() for x in make_inputs(2, 4, 2, 5, 7, 3)[0]))
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# ---- torch's own checks


def opcheck_inputs(mode: str, requires_grad: bool) -> list[list[Tensor]]:
    """Inputs of opcheck: several sizes and strides for one mode, as neither depends on the other."""
    dense, _ = make_inputs(2, 4, 2, 5, 7, 3)
    long, _ = make_inputs(1, 2, 1, 70, 90, 3)
    strided = [LAYOUTS["heads inside"](x) for x in dense]
    cases = (dense, long, strided) if mode == "causal" else (dense,)
    return [[x.detach().requires_grad_(requires_grad) for x in inputs] for inputs in cases]


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_opcheck_forward(mode: str, requires_grad: bool) -> None:
    for inputs in opcheck_inputs(mode, requires_grad):
        options = {"factor": 3, **MODES[mode]}
        torch.library.opcheck(forward_op, inputs, options)
        pooled_options = {**options, "kv_len": 3 * inputs[1].shape[2]}
        torch.library.opcheck(pooled_op, inputs, pooled_options)
        if not requires_grad:
            torch.library.opcheck(forward_op, inputs, {**options, "keep": True})
            torch.library.opcheck(pooled_op, inputs, {**pooled_options, "keep": True})


@pytest.mark.glue
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_opcheck_backward(mode: str, requires_grad: bool) -> None:
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # Tracing differentiates the backward, which raises by contract.
    if not requires_grad:
        utilities.append("test_aot_dispatch_dynamic")
    options = {"factor": 3, "causal": mode != "not causal", "strict": mode == "strict", "scale": None}
    for q, k, v in opcheck_inputs(mode, requires_grad):
        given = {"factor": 3, **MODES[mode], "keep": True}
        y, lse, kc, vc = forward_op(q.detach(), k.detach(), v.detach(), **given)
        kc, vc = (x.requires_grad_(requires_grad) for x in (kc, vc))
        for mask in ([True, True, True, False], [False, True, False, False], [True, False, True, False]):
            arguments = (torch.randn_like(q), q, kc, vc, y, lse)
            more = {**options, "kv_len": k.shape[2]}
            of_pooled = more | {"output_mask": [*mask, False, False]}
            torch.library.opcheck(pooled_backward_op, arguments, of_pooled, test_utils=utilities)
            more |= {"grad_k_stride": k.stride(), "grad_v_stride": v.stride(), "output_mask": mask}
            torch.library.opcheck(backward_op, arguments, more, test_utils=utilities)


# ---- decoding


def assert_steps_are_right(dtype: torch.dtype, prompt: int, factor: int, n: int = 1, strict: bool = False) -> None:
    """Asserts that steps of n positions after a prompt give the y of a causal forward over all keys."""
    T = prompt + 3 * factor + n
    options = {"factor": factor, "strict": strict}
    (q, k, v), grad_y = make_inputs(2, 4, 2, T, T, 35, dtype)
    truth = reference.compressed_attention(*doubles([q, k, v]), **options)
    bound = error_bounds.compressed_attention_bounds(*doubles([grad_y, q, k, v]), **options)[0]
    state = compressed_attention_state(k[:, :, :prompt], v[:, :, :prompt], factor=factor) if prompt else None
    for begin in range(prompt, T, n):
        new = slice(begin, min(begin + n, T))
        y, state = compressed_attention_step(q[:, :, new], k[:, :, new], v[:, :, new], state, **options)
        assert_within(y, truth[:, :, new], Bound(bound[:, :, new], terms=T, stored=True), "y")
    complete = T // factor * factor
    assert state.positions == T - complete
    for x, blocks, total in ((k, state.kc, state.k_sum), (v, state.vc, state.v_sum)):
        means = reference.compress(x[:, :, :complete].double(), factor)
        of_means = reference.compress(x[:, :, :complete].double().abs(), factor)
        assert blocks.dtype == dtype
        assert_within(blocks, means, Bound(of_means, terms=factor, stored=True), "means")
        assert total.dtype == torch.promote_types(dtype, torch.float32)
        rest = x[:, :, complete:].double()
        assert_within(total, rest.sum(2), Bound(rest.abs().sum(2), terms=factor), "sums")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("factor", [1, 4, 9])
@pytest.mark.parametrize("prompt", [0, 1, 9, 63])
def test_step(prompt: int, factor: int, strict: bool, dtype: torch.dtype) -> None:
    for n in (1, 3, 2 * factor + 1):
        assert_steps_are_right(dtype, prompt, factor, n, strict)


def test_a_state_of_an_empty_prompt() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 1, 5)
    state = compressed_attention_state(k[:, :, :0], v[:, :, :0], factor=4)
    assert [tuple(x.shape) for x in state[:4]] == [(2, 2, 0, 5)] * 2 + [(2, 2, 5)] * 2
    assert state.positions == 0
    y, new = compressed_attention_step(q, k, v, state, factor=4)
    assert same_bits([y, *new[:4]], [torch.zeros_like(y), state.kc, state.vc, k[:, :, 0], v[:, :, 0]])


def test_step_leaves_the_old_state_alone() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 8, 5)
    state = compressed_attention_state(k[:, :, :7], v[:, :, :7], factor=4)
    before = [x.clone() for x in state[:4]]
    _, new = compressed_attention_step(q, k[:, :, 7:], v[:, :, 7:], state, factor=4)
    assert same_bits(state[:4], before)
    assert (state.positions, new.positions, new.kc.shape[2]) == (3, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3])
def test_states_of_steps_share_memory(n: int, dtype: torch.dtype) -> None:
    """Blocks are copied where their memory is full, which grows by halves; a state never changes."""
    (q, k, v), _ = make_inputs(1, 4, 2, 300, 300, 20, dtype)
    state, states, memories = None, [], set()
    for t in range(0, 300, n):
        new = [x[:, :, t : t + n] for x in (q, k, v)]
        before, (y, state) = state, compressed_attention_step(*new, state, factor=2)
        alone = None if before is None else before._replace(kc=before.kc.clone(), vc=before.vc.clone())
        its_y, its_state = compressed_attention_step(*new, alone, factor=2)
        assert same_bits([y, *state[:4]], [its_y, *its_state[:4]])
        states.append((state, its_state))
        memories.add(state.kc.untyped_storage().data_ptr())
        held = state.kc.untyped_storage().nbytes() // (2 * 20 * dtype.itemsize)
        assert state.kc.shape[2] <= held <= state.kc.shape[2] * 3 // 2 + 8
    assert len(memories) <= 8
    assert all(same_bits(a[:4], b[:4]) for a, b in states)


def test_forked_states() -> None:
    """Several steps from one state, as in a search with beams: each has blocks of its own."""
    (q, k, v), _ = make_inputs(1, 4, 2, 12, 12, 20)
    state = compressed_attention_state(k[:, :, :7], v[:, :, :7], factor=2)
    for t in (7, 9, 11):
        new = [x[:, :, t : t + 1] for x in (q, k, v)]
        others = [compressed_attention_step(*(c * x for x in new), state, factor=2) for c in (1, 2, 3)]
        for c, (y, other) in zip((1, 2, 3), others, strict=True):
            alone = state._replace(kc=state.kc.clone(), vc=state.vc.clone())
            its_y, its_state = compressed_attention_step(*(c * x for x in new), alone, factor=2)
            assert same_bits([y, *other[:4]], [its_y, *its_state[:4]])
        state = others[0][1]
        if t < 11:
            _, state = compressed_attention_step(*(x[:, :, t + 1 : t + 2] for x in (q, k, v)), state, factor=2)


def test_states_of_steps_outlive_inference_mode() -> None:
    (q, k, v), _ = make_inputs(1, 4, 2, 12, 12, 20)
    results = []
    for modes in (itertools.repeat(False), itertools.cycle([True, False, False, True])):
        state = None
        for t, mode in zip(range(12), modes, strict=False):
            with torch.inference_mode(mode):
                y, state = compressed_attention_step(*(x[:, :, t : t + 1] for x in (q, k, v)), state, factor=2)
        results.append([y, *state[:4]])
    assert same_bits(*results)


@pytest.mark.glue
def test_autocast_of_steps() -> None:
    """The state holds blocks in the autocast dtype; they are not converted in every step."""
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 9, 5)
    with torch.autocast(DEVICE, torch.bfloat16):
        state = compressed_attention_state(k[:, :, 1:], v[:, :, 1:], factor=4)
        y, state = compressed_attention_step(q, k[:, :, :1], v[:, :, :1], state, factor=4)
    assert [x.dtype for x in (y, *state[:4])] == [torch.bfloat16] * 3 + [torch.float32] * 2


@pytest.mark.parametrize("wanted", range(7))
def test_step_has_no_gradient_and_says_so(wanted: int) -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 9, 5)
    state = compressed_attention_state(k, v, factor=4)
    tensors = [q, k[:, :, :1], v[:, :, :1], *(x.clone() for x in state[:4])]
    tensors[wanted].requires_grad_()
    q, k, v, *held = tensors
    old = CompressedAttentionState(*held, state.positions, state.factor)
    with pytest.raises(NotImplementedError, match="compressed_attention_step: has no gradient"):
        compressed_attention_step(q, k, v, old, factor=4)
    with torch.no_grad():
        compressed_attention_step(q, k, v, old, factor=4)


def test_a_state_has_no_gradient_and_says_so() -> None:
    (_, k, v), _ = make_inputs(2, 4, 2, 1, 9, 5)
    with pytest.raises(NotImplementedError, match="compressed_attention_state: has no gradient"):
        compressed_attention_state(k.requires_grad_(), v, factor=4)


# ---- extremes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1e4, 1e6])
def test_big_scores_do_not_overflow(size: float, mode: str) -> None:
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 100, 40)
    for one in (contract(3, mode, scale=size), pooled_contract(300, 3, mode, scale=size)):
        results = assert_contract(one, [q, k, v], grad_y)
        assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("mode", MODES)
def test_one_visible_block_has_all_the_weight(mode: str) -> None:
    """The weight is 1 for any score: backward rounds the score as lse does, so the gradient of v is a plain sum."""
    factor, T = 8, 8 if mode == "not causal" else 15
    (q, k, v), grad_y = make_inputs(2, 4, 2, T, T, 40)
    *_, grad_v = run(contract(factor, mode).function, [100 * q, 100 * k, v], grad_y)
    first = {"causal": factor - 1, "strict": factor, "not causal": 0}[mode]
    terms = grad_y[:, :, first:].double().unflatten(1, (2, 2)) / factor
    truth, size = (x.sum((2, 3))[:, :, None].expand(2, 2, factor, 40) for x in (terms, terms.abs()))
    assert_within(grad_v[:, :, :factor], truth, Bound(size, terms=2 * T, stored=True), "grad_v")
    assert not grad_v[:, :, factor:].any()


@pytest.mark.parametrize("mode", MODES)
def test_equal_scores_and_shifted_scores(mode: str) -> None:
    """A constant added to all scores changes nothing."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 100, 40)
    for keys in (torch.zeros_like(k), k + 30 * q[:, :2, :1]):
        assert_contract(contract(3, mode), [q, keys, v], grad_y)


def assert_as_clean(actual: Tensor, clean: Tensor) -> None:
    """Asserts the same bits on the CPU. A GPU computes rows of a tile that has NaN again, in another order."""
    if KERNELS == "cpu":
        assert torch.equal(actual, clean)
    else:
        assert_equal_up_to_rounding(actual, clean)


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=32 * SUM_UNIT[actual.dtype] * largest + 8 * RESULT_UNIT[actual.dtype] * largest
    )


# B, H, Hkv, S, T, D, factor. With the second, thread blocks of a GPU share a tile of queries, with the third one of
# keys, and leave their parts in gradients.
NAN_SHAPES = [(2, 4, 2, 70, 100, 40, 3), (1, 2, 1, 5, 700, 8, 2), (1, 8, 8, 270, 300, 65, 64)]


NAN_CASES = [
    *((NAN_SHAPES[0], mode, dtype) for mode in MODES for dtype in (torch.float32, torch.bfloat16)),
    (NAN_SHAPES[0], "causal", torch.float64),
    (NAN_SHAPES[1], "causal", torch.float32),
    (NAN_SHAPES[1], "not causal", torch.float16),
    (NAN_SHAPES[2], "causal", torch.bfloat16),
    pytest.param(NAN_SHAPES[2], "not causal", torch.float32, marks=pytest.mark.ci),
]


def visible_blocks(q: Tensor, T: int, factor: int, mode: str) -> Tensor:
    """Returns which query sees which block, (S,C)."""
    blocks = torch.empty(1, 1, -(-T // factor), 1)
    return ~reference.hidden_from(q, blocks, factor, T, mode != "not causal", mode == "strict")


@pytest.mark.parametrize(("sizes", "mode", "dtype"), NAN_CASES)
def test_nan_in_a_block_reaches_who_sees_it(sizes: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    """NaN reaches no other output or gradient. A block that no query sees gets a gradient of zeros."""
    *shape, factor = sizes
    B, H, Hkv, S, T, D = shape
    inputs, grad_y = make_inputs(*shape, dtype)
    clean = run(contract(factor, mode).function, inputs, grad_y)
    visible = visible_blocks(inputs[0], T, factor, mode)
    unseen = ~visible.any(0).repeat_interleave(factor)[:T]
    b, head, group = B - 1, Hkv - 1, slice(H - H // Hkv, H)
    for j, (poisoned, value) in itertools.product(
        {0, (T - S) // factor + 2, visible.shape[1] - 1}, [(1, math.nan), (2, math.nan), (2, math.inf)]
    ):
        changed = [x.clone() for x in inputs]
        changed[poisoned][b, head, j * factor, D // 2] = value
        results = y, grad_q, *of_keys = run(contract(factor, mode).function, changed, grad_y)
        sees = visible[:, j]
        assert not y[b, group, sees][..., slice(None) if poisoned == 1 else D // 2].isfinite().any()
        assert not grad_q[b, group, sees].isfinite().all(-1).any()
        assert_as_clean(y[b, group, ~sees], clean[0][b, group, ~sees])
        assert_as_clean(grad_q[b, group, ~sees], clean[1][b, group, ~sees])
        assert not any(x[:, :, unseen].any() for x in of_keys)
        for x, other in zip(results, clean, strict=True):
            others = slice(0, x.shape[1] * head // Hkv)
            assert_as_clean(x[:b], other[:b])
            assert_as_clean(x[b, others], other[b, others])
        if poisoned == 2 or not sees.any():
            assert_as_clean(of_keys[1], clean[3])


@pytest.mark.parametrize(("sizes", "mode", "dtype"), NAN_CASES)
def test_nan_in_a_query_reaches_the_blocks_it_sees(sizes: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    """So does a NaN in the query's row of grad_y. Other queries are not affected."""
    *shape, factor = sizes
    B, H, Hkv, S, T, D = shape
    (q, k, v), grad_y = make_inputs(*shape, dtype)
    clean = run(contract(factor, mode).function, [q, k, v], grad_y)
    visible = visible_blocks(q, T, factor, mode)
    for s in (0, S // 2, S - 1):
        positions = visible[s].repeat_interleave(factor)[:T]
        others = torch.arange(S) != s
        for changes in ("q", "grad_y"):
            given = {"q": q.clone(), "grad_y": grad_y.clone()}
            given[changes][B - 1, H - 1, s, D // 2] = math.nan
            y, grad_q, *of_keys = run(contract(factor, mode).function, [given["q"], k, v], given["grad_y"])
            assert_as_clean(y[:, :, others], clean[0][:, :, others])
            assert_as_clean(grad_q[:, :, others], clean[1][:, :, others])
            if visible[s].any():
                assert y[B - 1, H - 1, s].isnan().all() == (changes == "q")
                assert grad_q[B - 1, H - 1, s].isnan().all()
            else:
                assert not y[:, :, s].any()
                assert not grad_q[:, :, s].any()
            for x, other in zip(of_keys, clean[2:], strict=True):
                assert_as_clean(x[:, :, ~positions], other[:, :, ~positions])
                assert_as_clean(x[: B - 1], other[: B - 1])
                assert_as_clean(x[:, : Hkv - 1], other[:, : Hkv - 1])
                assert x[B - 1, Hkv - 1, positions].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_in_grad_y_reach_the_values_that_their_queries_see(dtype: torch.dtype) -> None:
    """One query has infinity, and a later one minus infinity: blocks that both see get NaN."""
    B, H, Hkv, S, T, D, factor = 2, 4, 2, 150, 200, 40, 3
    inputs, grad_y = make_inputs(B, H, Hkv, S, T, D, dtype)
    clean = run(contract(factor).function, inputs, grad_y)[3]
    visible = visible_blocks(inputs[0], T, factor, "causal")
    first, second = (visible[s].repeat_interleave(factor)[:T] for s in (80, 120))
    grad_y[B - 1, H - 1, 80, 7], grad_y[B - 1, H - 1, 120, 7] = math.inf, -math.inf
    grad_v = run(contract(factor).function, inputs, grad_y)[3]
    column = grad_v[B - 1, Hkv - 1, :, 7]
    assert column[first].isnan().all()
    assert (column[second & ~first] == -math.inf).all()
    for x in (grad_v, clean):
        x[B - 1, Hkv - 1, second, 7] = 0
    assert_as_clean(grad_v, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [(0, 30), (31, 32), (0, 100)])
def test_keys_of_minus_infinity_hide_their_blocks(padded: tuple[int, int], mode: str, dtype: torch.dtype) -> None:
    """A key of -inf hides its whole block for any signs of q: the block's values do not matter and its gradients are 0.

    If a query has no other block, y is 0.
    """
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 100, 40, dtype)
    k[:, :, slice(*padded)] = -math.inf
    results = _, _, grad_k, grad_v = assert_contract(contract(3, mode), [q, k, v], grad_y)
    assert all(x.isfinite().all() for x in results)
    hidden = slice(padded[0] // 3 * 3, -(-padded[1] // 3) * 3)
    assert not grad_k[:, :, hidden].any()
    assert not grad_v[:, :, hidden].any()
    v[:, :, hidden] = math.nan
    for x, other in zip(run(contract(3, mode).function, [q, k, v], grad_y), results, strict=True):
        assert_as_clean(x, other)
    if padded == (0, 100):
        _, lse, _, _ = forward_op(q, k, v, factor=3, **MODES[mode], keep=True)
        assert (lse == -math.inf).all()
        assert not any(x.any() for x in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scored", ["some", "all"])
def test_scores_of_minus_infinity_weigh_nothing(scored: str, dtype: torch.dtype) -> None:
    """Masks can be put into one column of the keys: results are as without the masked blocks."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 50, 40, dtype)
    q[..., 0] = 1
    left = slice(20, 20 if scored == "all" else None)
    there = [q, k[:, :, left], v[:, :, left]]
    masked = k.clone()
    masked[:, :, : None if scored == "all" else 20, 0] = -math.inf
    one, other = (pooled_contract(n, 1, "not causal").function for n in (50, there[1].shape[2]))
    y, grad_q, *of_keys = run(one, [q, masked, v], grad_y)
    expected = run(other, there, grad_y)
    for x, truth in zip([y, grad_q, *(x[:, :, left] for x in of_keys)], expected, strict=True):
        assert_equal_up_to_rounding(x, truth)
    for x in of_keys:
        assert x[:, :, left].shape[2] + (x == 0).all(-1).all(1).all(0).sum() == 50
    _, lse = pooled_op(q, masked, v, factor=1, kv_len=50, causal=False, keep=True)
    assert (lse == -math.inf).all() == (scored == "all")


def test_infinite_scores_give_nan() -> None:
    """exp(inf - inf) is NaN, as in torch's softmax."""
    (q, k, v), grad_y = make_inputs(1, 1, 1, 70, 70, 40)
    k[:, :, 0] = math.inf
    y = run(contract(2).function, [q.abs(), k, v], grad_y)[0]
    assert y[:, :, 1:].isnan().all()
    assert not y[:, :, 0].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("T", "factor"),
    [(256, 1), (20_000, 20_000), *(pytest.param(*it, marks=pytest.mark.slow) for it in ((3000, 1), (20_000, 1000)))],
)
def test_equal_terms_add_up(T: int, factor: int, mode: str) -> None:
    """Rounding errors of equal terms have the same sign and do not cancel."""
    (q, k, v), grad_y = make_inputs(1, 2, 1, min(T, 3000), T, 2)
    inputs = [x[:, :, :1].expand_as(x) for x in (q, k, v)]
    assert_contract(contract(factor, mode), inputs, grad_y[:, :, :1].expand_as(grad_y))


LONG = [20_000, pytest.param(100_000, marks=pytest.mark.ci)] if ON_HOST else [100_000]


@pytest.mark.parametrize("T", LONG)
@pytest.mark.parametrize("mode", ["causal", "not causal"])
def test_a_long_sequence_keeps_its_accuracy(mode: str, T: int) -> None:
    (q, k, v), grad_y = make_inputs(1, 1, 1, 40, T, 3)
    assert_contract(contract(1, mode), [q, k, v], grad_y)
    equal = [x[:, :, :1].expand_as(x) for x in (q, k, v)]
    assert_contract(contract(1, mode), equal, grad_y)


# ---- memory


def assert_memory_is_planned(q: Tensor, k: Tensor, v: Tensor, *, factor: int, causal: bool) -> list[Record]:
    """Asserts to the byte that peaks are inputs, output, saved tensors, gradients and the plan's scratch.

    Returns the records for an expanded and for a dense gradient of y.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {"factor": factor, "causal": causal}
    plan = plan_of(q, k, factor, causal)
    kept = plan["lse"] + plan["compressed"]
    records = [measure_memory(compressed_attention, *leaves, **options, dense_grad=dense) for dense in (False, True)]
    for record, dense in zip(records, (False, True), strict=True):
        held = record.input_bytes + record.output_bytes
        assert record.saved_bytes == kept
        assert record.forward_peak_bytes == held + kept + plan["forward_scratch"]
        assert record.gradient_bytes == q.nbytes + k.nbytes + v.nbytes
        grad_y_bytes = record.output_bytes if dense else q.itemsize
        working = kept + grad_y_bytes + record.gradient_bytes + plan["delta"] + plan["backward_scratch"]
        assert record.backward_peak_bytes == held + working
    record = measure_memory(compressed_attention, *leaves, **options, backward=False)
    held = record.input_bytes + record.output_bytes
    assert record.forward_peak_bytes == held + plan["compressed"] + plan["forward_scratch"]
    assert record.saved_bytes == 0
    return records


def test_memory_of_pooled_keys_to_the_byte() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 300, 800, 40)
    leaves = [q.requires_grad_(), *(x[:, :, :100].clone().requires_grad_() for x in (k, v))]
    plan = plan_of(q, k)
    record = measure_memory(compressed_attention_pooled, *leaves, factor=8, kv_len=800)
    held = record.input_bytes + record.output_bytes
    assert record.saved_bytes == plan["lse"]
    assert record.forward_peak_bytes == held + plan["lse"] + plan["pooled_forward_scratch"]
    working = plan["lse"] + q.itemsize + record.gradient_bytes + plan["delta"] + plan["backward_scratch"]
    assert record.backward_peak_bytes == held + working


def assert_memory_is_within_targets(q: Tensor, k: Tensor, v: Tensor, *, factor: int, causal: bool) -> None:
    records = assert_memory_is_planned(q, k, v, factor=factor, causal=causal)
    # lse is one float32 number per query.
    per_query = 4 / q.itemsize / q.shape[3]
    kept = 2 / factor + per_query
    for record, backward in zip(records, (7, 8), strict=True):
        for measured, units in (
            (record.forward_peak_bytes, 4 + kept),
            (record.saved_bytes, kept),
            (record.backward_peak_bytes, backward + kept + per_query),
        ):
            assert measured <= 1.03 * units * q.nbytes + 2**20


@pytest.mark.slow
@pytest.mark.isolated
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_memory_to_the_byte_and_within_the_targets(threads: int) -> None:
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        for B, H, length, D in ((1, 8, 512, 64), (4, 8, 512, 64), (1, 8, 4096, 64), (1, 2, 4096, 128)):
            (q, k, v), _ = make_inputs(B, H, H, length, length, D, dtype)
            for factor, causal in ((8, True), (8, False), (16, True)):
                assert_memory_is_within_targets(q, k, v, factor=factor, causal=causal)


# ---- what is refused

RAISES = {
    "q of rank 3": ({"q": torch.ones(4, 5, 3)}, ValueError, r"q must be \(B,H,S,D\), of 4 dimensions, got \[4, 5, 3\]"),
    "k of rank 3": (
        {"k": torch.ones(2, 7, 3)},
        ValueError,
        r"k must be \(B,Hkv,T,D\), of 4 dimensions, got \[2, 7, 3\]",
    ),
    "v of rank 1": ({"v": torch.ones(7)}, ValueError, r"v must be \(B,Hkv,T,D\), of 4 dimensions, got \[7\]"),
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
        {"v": torch.ones(2, 2, 6, 3)},
        ValueError,
        r"v must be \(B,Hkv,T,D\) = \[2, 2, 7, 3\] to match k, got \[2, 2, 6, 3\]",
    ),
    "heads that do not divide": (
        {"k": torch.ones(2, 3, 7, 3)},
        ValueError,
        "H, the heads of q, must be a multiple of Hkv, the heads of k, got H = 4 and Hkv = 3",
    ),
    "no heads of k": ({"k": torch.ones(2, 0, 7, 3)}, ValueError, "must be a multiple of Hkv.* got H = 4 and Hkv = 0"),
    "float64 k": ({"k": torch.ones(2, 2, 7, 3).double()}, TypeError, "k must be float32 to match q, got float64"),
    "bfloat16 v": ({"v": torch.ones(2, 2, 7, 3).bfloat16()}, TypeError, "v must be float32 to match q, got bfloat16"),
    "integers": ({"q": torch.ones(2, 4, 5, 3).int()}, TypeError, "q must be float64, .* or bfloat16, got int32"),
    "complex": ({"q": torch.ones(2, 4, 5, 3).cfloat()}, TypeError, "q must be float64, .* or bfloat16, got complex64"),
    "k elsewhere": ({"k": torch.ones(2, 2, 7, 3, device="meta")}, ValueError, f"k must be on {HERE} as q is, got meta"),
    "v elsewhere": ({"v": torch.ones(2, 2, 7, 3, device="meta")}, ValueError, f"v must be on {HERE} as q is, got meta"),
    "more queries than keys": (
        {"q": torch.ones(2, 4, 8, 3)},
        ValueError,
        "causal needs no more queries than keys, S <= T, got S = 8 and T = 7",
    ),
    "factor 0": ({"factor": 0}, ValueError, "factor must be from 1 to 2147483648, got 0"),
    "factor -1": ({"factor": -1}, ValueError, "factor must be from 1 to 2147483648, got -1"),
    "a factor beyond reason": ({"factor": 2**40}, ValueError, "factor must be from 1 to 2147483648, got 1099511627776"),
    "strict without causal": (
        {"strict": True, "causal": False},
        ValueError,
        "strict needs causal.*, got strict=True and causal=False",
    ),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale must be a finite number, got inf"),
    "scale that is none": ({"scale": math.nan}, ValueError, "scale must be a finite number, got nan"),
    "scale beyond float32": ({"scale": -1e39}, ValueError, r"scale must be a finite number of float32, got -1e\+39"),
    "no q": ({"q": None}, TypeError, "q must be a tensor, got None"),
    "no v": ({"v": None}, TypeError, "v must be a tensor, got None"),
    "a list": ({"q": [1.0]}, TypeError, "q must be a tensor, got a list of length 1"),
    "no k": ({"k": None}, TypeError, "k must be a tensor, got None"),
    "half a factor": ({"factor": 1.5}, TypeError, "factor must be an int, got 1.5"),
    "a tensor as factor": ({"factor": torch.tensor(2)}, TypeError, r"factor must be an int, got tensor\(2"),
    "a factor beyond int64": ({"factor": 2**63}, ValueError, f"factor must be from 1 to 2147483648, got {2**63}"),
    "a scale in words": ({"scale": "x"}, TypeError, "scale must be a number or None, got 'x'"),
    "a tensor as scale": ({"scale": torch.tensor(2.0)}, TypeError, r"scale must be a number or None, got tensor\(2."),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("wrong", RAISES)
def test_wrong_input(wrong: str, requires_grad: bool) -> None:
    changed, kind, message = RAISES[wrong]
    (q, k, v), _ = make_inputs(2, 4, 2, 5, 7, 3)
    if requires_grad and "v" not in changed:
        v.requires_grad_()
    arguments = {"q": q, "k": k, "v": v, "factor": 2, **changed}
    with pytest.raises(kind, match=f"compressed_attention.*{message}"):
        compressed_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


POOLED_RAISES = {
    "too few blocks": (
        {"kc": torch.ones(2, 2, 2, 3), "vc": torch.ones(2, 2, 2, 3)},
        ValueError,
        r"kc must be .* C = ceil\(kv_len / factor\) = 4, or floor when causal, for kv_len = 7 .* = 2, got C = 2",
    ),
    "floor when not causal": (
        {"kc": torch.ones(2, 2, 3, 3), "vc": torch.ones(2, 2, 3, 3), "causal": False},
        ValueError,
        r"kc must be .* = 4 for kv_len = 7 and factor = 2, got C = 3",
    ),
    "another vc": (
        {"vc": torch.ones(2, 2, 3, 3)},
        ValueError,
        r"vc must be \(B,Hkv,C,D\) = \[2, 2, 4, 3\] to match kc, got \[2, 2, 3, 3\]",
    ),
    "a length below 0": ({"kv_len": -1}, ValueError, "kv_len must be from 0 to 4611686018427387904, got -1"),
    "a length beyond reason": (
        {"kv_len": 2**63 - 1},
        ValueError,
        "kv_len must be from 0 to 4611686018427387904, got 9223372036854775807",
    ),
    "scale beyond float32": ({"scale": 1e39}, ValueError, r"scale must be a finite number of float32, got 1e\+39"),
    "more queries than keys": (
        {"kv_len": 4, "factor": 1},
        ValueError,
        "causal needs no more queries than keys, S <= kv_len, got S = 5 and kv_len = 4",
    ),
    "another D": (
        {"kc": torch.ones(2, 2, 4, 5)},
        ValueError,
        r"kc must be \(B,Hkv,C,D\) = \[2, 2, 4, 3\] to match q, got \[2, 2, 4, 5\]",
    ),
    "float64 vc": ({"vc": torch.ones(2, 2, 4, 3).double()}, TypeError, "vc must be float32 to match q, got float64"),
    "factor 0": ({"factor": 0}, ValueError, "factor must be from 1 to 2147483648, got 0"),
    "no kc": ({"kc": None}, TypeError, "kc must be a tensor, got None"),
    "vc of words": ({"vc": "x"}, TypeError, "vc must be a tensor, got 'x'"),
    "a tensor as factor": ({"factor": torch.tensor(2)}, TypeError, r"factor must be an int, got tensor\(2"),
    "a factor beyond int64": ({"factor": 2**63}, ValueError, f"factor must be from 1 to 2147483648, got {2**63}"),
    "a length beyond int64": (
        {"kv_len": 2**70},
        ValueError,
        f"kv_len must be from 0 to 4611686018427387904, got {2**70}",
    ),
    "half a length": ({"kv_len": 7.5}, TypeError, "kv_len must be an int, got 7.5"),
    "a tensor as length": ({"kv_len": torch.tensor(7)}, TypeError, r"kv_len must be an int, got tensor\(7"),
    "a scale in words": ({"scale": "x"}, TypeError, "scale must be a number or None, got 'x'"),
}


@pytest.mark.parametrize("wrong", POOLED_RAISES)
def test_wrong_pooled_input(wrong: str) -> None:
    changed, kind, message = POOLED_RAISES[wrong]
    (q, kc, vc), _ = make_inputs(2, 4, 2, 5, 4, 3)
    arguments = {"q": q, "kc": kc, "vc": vc, "factor": 2, "kv_len": 7, **changed}
    with pytest.raises(kind, match=f"compressed_attention_pooled: {message}"):
        compressed_attention_pooled(arguments.pop("q"), arguments.pop("kc"), arguments.pop("vc"), **arguments)


STEP_RAISES = {
    "k of rank 3": (
        {"k": torch.ones(2, 1, 3)},
        ValueError,
        r"k must be \(B,Hkv,n,D\), of 4 dimensions, got \[2, 1, 3\]",
    ),
    "another v": ({"v": torch.ones(2, 2, 2, 3)}, ValueError, r"v must be .* = \[2, 2, 1, 3\] to match k"),
    "float64 v": ({"v": torch.ones(2, 2, 1, 3).double()}, TypeError, "v must be float32 to match k, got float64"),
    "no k": ({"k": None}, TypeError, "k must be a tensor, got None"),
    "factor 0": ({"factor": 0}, ValueError, "factor must be from 1 to 2147483648, got 0"),
    "half a factor": ({"factor": 4.5}, TypeError, "factor must be an int, got 4.5"),
    "a tensor as factor": ({"factor": torch.tensor(4)}, TypeError, r"factor must be an int, got tensor\(4"),
    "a factor beyond int64": ({"factor": 2**63}, ValueError, f"factor must be from 1 to 2147483648, got {2**63}"),
    "another factor": ({"factor": 3}, ValueError, "factor must be 4, as that of the state, got 3"),
    "a state without factor": ({"of_state": {"factor": None}}, TypeError, "state.factor must be an int, got None"),
    "a scale in words": ({"scale": "x"}, TypeError, "scale must be a number or None, got 'x'"),
    "a scale beyond float64": ({"scale": 10**400}, ValueError, "scale must be a finite number of float64, got 1000"),
    "v of words": ({"v": "x"}, TypeError, "v must be a tensor, got 'x'"),
    "no q": ({"q": None}, TypeError, "q must be a tensor, got None"),
    "q of rank 3": ({"q": torch.ones(2, 1, 3)}, ValueError, r"q must be \(B,H,S,D\), of 4 dimensions, got \[2, 1, 3\]"),
    "float64 q": ({"q": torch.ones(2, 4, 1, 3).double()}, TypeError, "q must be float32 to match k, got float64"),
    "q elsewhere": ({"q": torch.ones(2, 4, 1, 3, device="meta")}, ValueError, f"q must be on {HERE} as k is, got meta"),
    "another D": ({"q": torch.ones(2, 4, 1, 5)}, ValueError, r"q must be .* = \[2, 4, 1, 3\] to match k"),
    "heads that do not divide": ({"q": torch.ones(2, 3, 1, 3)}, ValueError, "H, .* got H = 3 and Hkv = 2"),
    "more queries than keys": (
        {"q": torch.ones(2, 4, 11, 3)},
        ValueError,
        "q must be of no more positions than k so far, S <= T, got S = 11 and T = 10",
    ),
    "integers": (
        {"k": torch.ones(2, 2, 1, 3).int(), "v": torch.ones(2, 2, 1, 3).int()},
        TypeError,
        "k must be float64, .* or bfloat16, got int32",
    ),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale must be a finite number, got inf"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, r"scale must be a finite number of float32, got 1e\+39"),
    "no sums": ({"k_sum": None}, TypeError, "state.k_sum must be a tensor, got None"),
    "blocks of rank 2": ({"kc": torch.ones(2, 2)}, ValueError, r"state.kc must be \(B,Hkv,C,D\), of 4 dimensions"),
    "half a position": ({"positions": 1.5}, TypeError, "state.positions must be an int, got 1.5"),
    "a full open block": ({"positions": 4}, ValueError, r"state.positions must be from 0 to factor - 1 = 3, got 4"),
    "sums of another shape": (
        {"k_sum": torch.ones(2, 2, 4)},
        ValueError,
        r"state.k_sum must be \(B,Hkv,D\) = \[2, 2, 3\] to match k, got \[2, 2, 4\]",
    ),
    "sums of another dtype": (
        {"v_sum": torch.ones(2, 2, 3).double()},
        TypeError,
        "state.v_sum must be float32 to match k, got float64",
    ),
    "blocks of another dtype": (
        {"vc": torch.ones(2, 2, 2, 3).bfloat16()},
        TypeError,
        "state.vc must be float32 to match k, got bfloat16",
    ),
    "other blocks": ({"vc": torch.ones(2, 2, 1, 3)}, ValueError, r"state.vc must be .* = \[2, 2, 2, 3\] to match k"),
}


@pytest.mark.parametrize("wrong", STEP_RAISES)
def test_wrong_step(wrong: str) -> None:
    changed, kind, message = STEP_RAISES[wrong]
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 9, 3)
    state = compressed_attention_state(k, v, factor=4)
    arguments = {"q": q, "k": k[:, :, :1], "v": v[:, :, :1], "factor": 4, "scale": None, **changed}
    of_state = {name: x for name, x in arguments.items() if name in state._fields and name != "factor"}
    state = state._replace(**of_state, **arguments.pop("of_state", {}))
    q, k, v, factor, scale = (arguments[name] for name in ("q", "k", "v", "factor", "scale"))
    with pytest.raises(kind, match=f"compressed_attention_step: {message}"):
        compressed_attention_step(q, k, v, state, factor=factor, scale=scale)


def test_a_first_step_of_more_queries_than_keys() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 5, 4, 3)
    with pytest.raises(ValueError, match=r"compressed_attention_step: q must be .* got S = 5 and T = 4"):
        compressed_attention_step(q, k, v, factor=2)


def test_a_state_of_another_type_is_refused() -> None:
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 1, 3)
    state = compressed_attention_state(k, v, factor=4)
    for wrong, name in ((tuple(state), "tuple"), (q, "Tensor")):
        with pytest.raises(TypeError, match=f"_step: state must be a CompressedAttentionState or None, got {name}"):
            compressed_attention_step(q, k, v, wrong, factor=4)


def test_a_state_survives_pickle_and_pytree() -> None:
    (_, k, v), _ = make_inputs(2, 4, 2, 1, 9, 3)
    state = compressed_attention_state(k, v, factor=4)
    leaves, spec = pytree.tree_flatten(state)
    for copy in (pickle.loads(pickle.dumps(state)), pytree.tree_unflatten(leaves, spec)):
        assert isinstance(copy, CompressedAttentionState)
        assert same_bits(copy[:4], state[:4])
        assert copy[4:] == state[4:] == (1, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        *("k of rank 3", "another v", "float64 v", "v of words", "integers", "factor 0", "half a factor"),
        *("a tensor as factor", "a factor beyond int64"),
    ],
)
def test_wrong_prompt(wrong: str) -> None:
    changed, kind, message = STEP_RAISES[wrong]
    arguments = {"k": torch.ones(2, 2, 1, 3), "v": torch.ones(2, 2, 1, 3), "factor": 4, **changed}
    with pytest.raises(kind, match=f"compressed_attention_state: {message}"):
        compressed_attention_state(arguments["k"], arguments["v"], factor=arguments["factor"])


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_prompt_without_tensors(name: str) -> None:
    arguments = {"k": torch.ones(2, 2, 1, 3), "v": torch.ones(2, 2, 1, 3), name: None}
    with pytest.raises(TypeError, match=f"compressed_attention_state: {name} must be a tensor, got None"):
        compressed_attention_state(**arguments, factor=4)

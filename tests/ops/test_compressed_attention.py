"""Compressed attention and its pooled variant: values, gradients, strides, saved tensors, memory and errors."""

from __future__ import annotations

import functools
import itertools
import math
import pickle

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
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
    laid_out,
    largest_error,
    run,
    same_bits,
)
from ops.operators import COMPRESSED, MODES, pooled_contract
from ops.operators import compressed_contract as contract
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree

from memcheck import (
    CompressedAttentionState,
    compressed_attention,
    compressed_attention_state,
    compressed_attention_step,
)
from memcheck.ops.reference import compressed_attention as reference

forward_op = torch.ops.memcheck.compressed_attention.default
pooled_op = torch.ops.memcheck.compressed_attention_pooled.default
make_inputs = COMPRESSED.make


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["causal", "not causal"])
@pytest.mark.parametrize(("T", "D", "layout"), [(320, 64, "dense"), (300, 65, "transposed"), (300, 130, "dense")])
def test_gradients_of_long_blocks(T: int, D: int, layout: str, mode: str, dtype: torch.dtype) -> None:
    """Thread blocks of a GPU share a tile of keys, and leave their parts in the gradients of keys and values; of a
    shorter last block, in scratch."""
    tensors, grad_y = make_inputs(1, 8, 8, 270, T, D, dtype)
    *inputs, grad = [LAYOUTS[layout](x) for x in (*tensors, grad_y)]
    assert_strides(assert_contract(contract(64, mode), inputs, grad), inputs)


@pytest.mark.host_cuda
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize(
    ("shape", "factor", "mode", "more"),
    [
        ((1, 4, 2, 70, 200, 64), 4, "causal", {}),
        ((2, 2, 1, 90, 130, 100), 3, "not causal", {}),
        ((1, 2, 2, 300, 300, 130), 2, "causal", {"window": 40}),
        ((1, 2, 1, 65, 70, 5), 1, "strict", {}),
        ((1, 8, 8, 270, 300, 64), 64, "causal", {}),
    ],
)
def test_float32_on_tensor_cores(
    shape: tuple[int, ...], factor: int, mode: str, more: dict, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three parts of bfloat16, if that is asked for, within the bound of float32; on every GPU."""
    from host_cuda import library

    monkeypatch.setenv("MEMCHECK_FLOAT32_TENSOR_CORES", "1")
    tensors, grad_y = make_inputs(*shape)
    try:
        library.stand_for("8.6")
        library.forget_launches()
        for layout in ("dense", "every second column"):
            *_, (*inputs, grad) = laid_out([x + mean for x in tensors] + [grad_y], layout)
            assert_contract(contract(factor, mode, **more), inputs, grad)
        names = {f"compressed_attention_{name}_parts" for name in ("forward", "backward_queries", "backward_keys")}
        assert names <= set(library.launches())
    finally:
        library.stand_for(library.this_gpu())


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


def as_accurate_as_plain(one: Contract, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Asserts at most twice the error of plain PyTorch, as a mean over 8 seeds: both round the blocks, so one seed
    varies."""
    ours, plain = torch.zeros(4), torch.zeros(4)
    for seed in range(8):
        inputs, grad_y = make_inputs(*sizes, dtype, seed=seed)
        truths = run(one.reference, doubles(inputs), grad_y.double())
        for errors, function in ((ours, one.function), (plain, one.reference)):
            results = run(function, inputs, grad_y)
            errors += torch.tensor([largest_error(x, truth) for x, truth in zip(results, truths, strict=True)])
    assert (ours <= 2 * plain).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [1, 2, 8, 64])
@pytest.mark.parametrize("shape", [(2, 4, 2, 63, 129, 33), (1, 1, 1, 300, 300, 64)])
def test_16_bits_are_as_accurate_as_plain_pytorch(
    shape: tuple[int, ...], factor: int, mode: str, dtype: torch.dtype
) -> None:
    as_accurate_as_plain(contract(factor, mode), shape, dtype)
    blocks = *shape[:4], -(-shape[4] // factor), shape[5]
    as_accurate_as_plain(pooled_contract(shape[4], factor, mode), blocks, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("factor", "window"), [(2, 3), (8, 20), (64, 1)])
def test_16_bits_of_a_window_are_as_accurate_as_plain_pytorch(factor: int, window: int, dtype: torch.dtype) -> None:
    as_accurate_as_plain(contract(factor, window=window), (2, 4, 2, 63, 129, 33), dtype)


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


# ---- strides


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_rows_that_are_read_in_place(layout: str) -> None:
    """If D is a multiple of 32, float32 rows are not copied."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 100, 64)
    for *inputs, grad in laid_out([q, k, v, grad_y], layout):
        for one in (contract(3), pooled_contract(300, 3)):
            assert_strides(assert_contract(one, inputs, grad), inputs)


# ---- autograd


def test_y_changed_in_place_is_an_error() -> None:
    """Applies to float32, in which y is saved."""
    for one in (contract(3), pooled_contract(21, 3)):
        y = one.function(*(x.requires_grad_() for x in make_inputs(2, 4, 2, 5, 7, 3)[0]))
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


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


WINDOWS = pytest.mark.parametrize("window", [None, 20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3])
@WINDOWS
def test_states_of_steps_share_memory_and_fork(window: int | None, n: int, dtype: torch.dtype) -> None:
    """Blocks and positions are written behind the others, and copied where their memory is full: that of blocks grows
    by halves, and positions are copied once for half a window of steps. A state never changes, and several steps from
    one state, as in a search with beams, have memory of their own."""
    (q, k, v), _ = make_inputs(1, 4, 2, 150, 150, 20, dtype)
    options = {"factor": 2, "window": window}
    state, states, memories = None, [], [set(), set()]
    for t in range(0, 150, n):
        new = [x[:, :, t : t + n] for x in (q, k, v)]
        alone = None if state is None else state._replace(**{x: getattr(state, x).clone() for x in state._fields[:4]})
        forks = [compressed_attention_step(*(c * x for x in new), state, **options) for c in (1, 2, 3)[: 3 - t % 3]]
        for c, (y, after) in enumerate(forks, 1):
            its_y, its_state = compressed_attention_step(*(c * x for x in new), alone, **options)
            assert same_bits([y, *after[:4]], [its_y, *its_state[:4]])
            states.append((after, [x.clone() for x in its_state[:4]]))
        state = forks[0][1]
        for found, x in zip(memories, (state.kc, state[2]), strict=True):
            found.add(x.untyped_storage().data_ptr())
        held = state.kc.untyped_storage().nbytes() // (2 * 20 * dtype.itemsize)
        assert state.kc.shape[2] <= held <= state.kc.shape[2] * 3 // 2 + 8
    assert len(memories[0]) <= 8
    assert window is None or len(memories[1]) <= 150 * 2 // window + 2
    assert all(same_bits(a[:4], b) for a, b in states)


@WINDOWS
def test_states_of_steps_outlive_inference_mode(window: int | None) -> None:
    (q, k, v), _ = make_inputs(1, 4, 2, 12, 12, 20)
    results = []
    for modes in (itertools.repeat(False), itertools.cycle([True, False, False, True])):
        state = None
        for t, mode in zip(range(12), modes, strict=False):
            new = [x[:, :, t : t + 1] for x in (q, k, v)]
            with torch.inference_mode(mode):
                y, state = compressed_attention_step(*new, state, factor=2, window=window)
            assert (state.kc if window is None else state.k).is_inference() == mode
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
@WINDOWS
def test_step_has_no_gradient_and_says_so(window: int | None, wanted: int) -> None:
    """Nor has one from a state that shares its memory with others."""
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 9, 5)
    options = {"factor": 4, "window": window}
    state = compressed_attention_state(k, v, **options)
    _, sharing = compressed_attention_step(q, k[:, :, :1], v[:, :, :1], state, **options)
    for old in (state._make([x.clone() for x in state[:4]] + [*state[4:]]), sharing):
        tensors = [q, k[:, :, :1], v[:, :, :1], *old[:4]]
        tensors[wanted].requires_grad_()
        with pytest.raises(NotImplementedError, match="compressed_attention_step: has no gradient"):
            compressed_attention_step(*tensors[:3], old, **options)
        with torch.no_grad():
            compressed_attention_step(*tensors[:3], old, **options)


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


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=32 * SUM_UNIT[actual.dtype] * largest + 8 * RESULT_UNIT[actual.dtype] * largest
    )


# B, H, Hkv, S, T, D, factor. With the second, thread blocks of a GPU share a tile of queries, with the third one of
# keys, and leave their parts in gradients.
NAN_SHAPES = [(2, 4, 2, 70, 100, 40, 3), (1, 2, 1, 5, 700, 8, 2), (1, 8, 8, 270, 300, 65, 64)]


NAN_CASES = [
    *((NAN_SHAPES[0], mode, None, dtype) for mode in MODES for dtype in (torch.float32, torch.bfloat16)),
    (NAN_SHAPES[0], "causal", None, torch.float64),
    (NAN_SHAPES[1], "causal", None, torch.float32),
    (NAN_SHAPES[1], "not causal", None, torch.float16),
    (NAN_SHAPES[2], "causal", None, torch.bfloat16),
    pytest.param(NAN_SHAPES[2], "not causal", None, torch.float32, marks=pytest.mark.ci),
    *((NAN_SHAPES[0], mode, 17, dtype) for mode in ("causal", "strict") for dtype in (torch.float32, torch.bfloat16)),
    (NAN_SHAPES[0], "causal", 17, torch.float64),
]


def visible(q: Tensor, k: Tensor, factor: int, mode: str, window: int | None) -> Tensor:
    """Returns which query sees which position, itself or in a mean, (S,T)."""
    T, blocks, strict = k.shape[2], torch.empty(1, 1, -(-k.shape[2] // factor), 1), mode == "strict"
    if window is None:
        return ~reference.hidden_from(q, blocks, factor, T, mode != "not causal", strict).repeat_interleave(factor, 1)[
            :, :T
        ]
    hidden = reference.hidden_from_window(q, blocks, k, factor, T, strict, window)
    in_means, alone = hidden.split([blocks.shape[2], T], 1)
    return ~(in_means.repeat_interleave(factor, 1)[:, :T] & alone)


@pytest.mark.parametrize(("sizes", "mode", "window", "dtype"), NAN_CASES)
def test_nan_reaches_who_sees_it_and_no_other_row(
    sizes: tuple[int, ...], mode: str, window: int | None, dtype: torch.dtype
) -> None:
    """A NaN in a key, a value, a query or its row of grad_y. Other rows of the batch keep their bits."""
    *shape, factor = sizes
    B, H, Hkv, S, _, D = shape
    inputs, grad_y = make_inputs(*shape, dtype)
    function = contract(factor, mode, window=window).function
    clean = run(function, inputs, grad_y)
    sees = visible(*inputs[:2], factor, mode, window)
    group = slice(H - H // Hkv, H)
    for poisoned, at in itertools.product(range(4), (0, S // 2, S - 1)):
        changed = [x.clone() for x in (*inputs, grad_y)]
        changed[poisoned][B - 1, -1, at, D // 2] = math.nan
        y, grad_q, *of_keys = run(function, changed[:3], changed[3])
        for x, other in zip((y, grad_q, *of_keys), clean, strict=True):
            assert torch.equal(x[: B - 1], other[: B - 1])
        if poisoned in (1, 2):
            assert y[B - 1, group, sees[:, at]][..., D // 2].isnan().all()
            assert grad_q[B - 1, group, sees[:, at]].isnan().any(-1).all()
        elif sees[at].any():
            assert y[B - 1, H - 1, at].isnan().all() == (poisoned == 0)
            assert grad_q[B - 1, H - 1, at].isnan().all()
            assert all(x[B - 1, Hkv - 1, sees[at]].isnan().any(-1).all() for x in of_keys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scored", ["some", "all"])
def test_scores_of_minus_infinity_weigh_nothing(scored: str, dtype: torch.dtype) -> None:
    """Masks can be put into one column of the keys: y and gradients of keys are as without the masked blocks."""
    (q, k, v), grad_y = make_inputs(2, 4, 2, 70, 50, 40, dtype)
    q[..., 0] = 1
    left = slice(20, 20 if scored == "all" else None)
    there = [q, k[:, :, left], v[:, :, left]]
    masked = k.clone()
    masked[:, :, : None if scored == "all" else 20, 0] = -math.inf
    one, other = (pooled_contract(n, 1, "not causal").function for n in (50, there[1].shape[2]))
    y, _, *of_keys = run(one, [q, masked, v], grad_y)
    expected, _, *expected_of_keys = run(other, there, grad_y)
    for x, truth in zip([y, *(x[:, :, left] for x in of_keys)], [expected, *expected_of_keys], strict=True):
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


# ---- what is refused


def test_a_state_survives_pickle_and_pytree() -> None:
    (_, k, v), _ = make_inputs(2, 4, 2, 1, 9, 3)
    state = compressed_attention_state(k, v, factor=4)
    leaves, spec = pytree.tree_flatten(state)
    for copy in (pickle.loads(pickle.dumps(state)), pytree.tree_unflatten(leaves, spec)):
        assert isinstance(copy, CompressedAttentionState)
        assert same_bits(copy[:4], state[:4])
        assert copy[4:] == state[4:] == (1, 4)

"""Compressed attention that goes on from a state: values, gradients through the state, memory and errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    Bound,
    Contract,
    assert_contract,
    assert_within,
    doubles,
    generator,
    heads_inside,
    largest_error,
    run,
    same_bits,
    same_numbers,
    same_where_not_finite,
    saved_for_backward,
)
from ops.operators import compressed_contract as contract
from ops.operators import compressed_plan as plan_of
from ops.test_compressed_attention import make_inputs
from torch import Tensor

from memcheck import (
    CompressedAttentionState,
    compressed_attention,
    compressed_attention_state,
    compressed_attention_step,
    track,
)
from memcheck.ops.reference import compressed_attention as reference

# B, H, Hkv, T, D
SHAPE = (2, 4, 2, 50, 20)


def in_pieces(q: Tensor, k: Tensor, v: Tensor, cuts: tuple[int, ...], **options: Any) -> Tensor:
    """y of one call per piece of the sequence, with the state between."""
    state, results = None, []
    for begin, end in zip((0, *cuts), (*cuts, k.shape[2]), strict=True):
        piece = (x[:, :, begin:end] for x in (q, k, v))
        y, state = compressed_attention(*piece, initial_state=state, return_state=True, **options)
        results.append(y)
    return torch.cat(results, 2)


def inputs_of(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    B, H, Hkv, T, D = SHAPE
    return make_inputs(B, H, Hkv, T, T, D, dtype)


CUTS = [(1,), (24, 25), (7, 14, 40), (50,), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("factor", [1, 7, 8])
@pytest.mark.parametrize("cuts", CUTS)
def test_calls_with_a_state_between_equal_one_call(
    cuts: tuple[int, ...], factor: int, strict: bool, dtype: torch.dtype
) -> None:
    """So do all gradients, which flow through the state."""
    options = {"factor": factor, "strict": strict}
    one = contract(factor, "strict" if strict else "causal")
    assert_contract(
        Contract(functools.partial(in_pieces, cuts=cuts, **options), one.reference, one.bounds), *inputs_of(dtype)
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("cuts", CUTS)
def test_16_bits_are_as_accurate_as_plain_pytorch(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """At most twice the error of plain PyTorch; y is within the tolerance."""
    inputs, grad_y = inputs_of(dtype)
    ours = run(functools.partial(in_pieces, cuts=cuts, factor=7), inputs, grad_y)
    plain, truths = (
        run(contract(7).reference, inputs, grad_y),
        run(contract(7).reference, doubles(inputs), grad_y.double()),
    )
    for one, other, truth in zip(ours, plain, truths, strict=True):
        assert largest_error(one, truth) <= 2 * largest_error(other, truth)
    of_y = error_bounds.compressed_attention_bounds(*doubles([grad_y, *inputs]), factor=7)[0]
    assert_within(ours[0], truths[0], Bound(of_y, terms=50, stored=True), "y")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
def test_the_same_bits_if_cut_where_a_block_ends(strict: bool, dtype: torch.dtype) -> None:
    inputs, _ = inputs_of(dtype)
    options = {"factor": 7, "strict": strict}
    whole = compressed_attention(*inputs, **options)
    for cuts in ((7,), (14, 42), (7, 14, 21, 28)):
        assert same_bits([in_pieces(*inputs, cuts=cuts, **options)], [whole])


def random_call(number: int) -> tuple[list[Tensor], dict[str, Any], int]:
    """q, k and v, options, and where a block ends. In some calls D is that of a tile, whose rows are read where they
    lie."""
    random = Random(number)
    dtype, factor = random.choice(DTYPES), random.choice((1, 1, 2, 3, 8, 10))
    Hkv, group = random.choice((1, 1, 2, 3)), random.choice((1, 1, 2, 5))
    D = random.choice((1, 5, 16, 32, 33, 64, 65, 130))
    long = number % 60 == 0
    T = random.randint(factor, 2100 if long else 140)
    B = 1 if long else random.choice((1, 2))
    (q, k, v), _ = make_inputs(B, Hkv * group, Hkv, T, T, D, dtype, seed=number)
    has_sink, accumulation = random.random() < 0.3, torch.promote_types(dtype, torch.float32)
    sink = torch.randn(Hkv * group, generator=generator(number)).to(accumulation) if has_sink else None
    options = {"factor": factor, "strict": random.random() < 0.3, "sink": sink, "return_lse": True}
    last_block = (T - 1) // factor
    return [q, k, v], options, factor * random.choice((last_block, random.randint(0, last_block)))


def same_bits_or_nan(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return same_where_not_finite(some, others) and same_bits(*([x.nan_to_num() for x in xs] for xs in (some, others)))


def assert_bits_of_a_query_do_not_depend_on_its_call() -> None:
    """y and lse are those of one call: in two pieces cut where a block ends, for the last queries alone, for a head
    alone, in a packed batch, and for any number of threads."""
    for number in range(240):
        inputs, options, cut = random_call(number)
        (q, k, v), queries = inputs, (1, 3, 4, 5, 33, 36, 68)[number % 7]
        torch.set_num_threads(2 if number % 8 == 0 else 1)
        whole = compressed_attention(*inputs, **options)
        torch.set_num_threads(1)
        first = compressed_attention(*(x[:, :, :cut] for x in inputs), return_state=True, **options)
        second = compressed_attention(*(x[:, :, cut:] for x in inputs), initial_state=first[2], **options)
        pieces = [torch.cat(parts, 2) for parts in zip(first[:2], second, strict=True)]
        assert same_bits_or_nan(pieces, whole), f"{number}: cut at {cut}"
        last = compressed_attention(q[:, :, -queries:], k, v, **options)
        assert same_bits_or_nan(last, [x[:, :, -queries:] for x in whole]), f"{number}: {queries} queries"
        of_head = {**options, "sink": None if options["sink"] is None else options["sink"][-1:]}
        alone = compressed_attention(q[:, -1:], k[:, -1:], v[:, -1:], **of_head)
        assert same_bits_or_nan(alone, [x[:, -1:] for x in whole]), f"{number}: a head"
        both = [torch.cat([x[:1, :, :cut], x[:1]], 2) for x in inputs]
        packed = compressed_attention(*both, cu_seqlens=torch.tensor([0, cut, cut + q.shape[2]]), **options)
        assert same_bits_or_nan([x[:, :, cut:] for x in packed], [x[:1] for x in whole]), f"{number}: packed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_is_that_of_a_prompt(dtype: torch.dtype) -> None:
    (q, k, v), _ = inputs_of(dtype)
    _, state = compressed_attention(q, k, v, factor=7, return_state=True)
    of_prompt = compressed_attention_state(k, v, factor=7)
    assert same_bits(state[:4], of_prompt[:4])
    assert state[4:] == of_prompt[4:] == (1, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factor", "window"), [(1, None), (7, None), (3, 1), (3, 6)])
@pytest.mark.parametrize("layout", ["dense", "heads inside"])
def test_a_call_for_one_position_is_a_step(layout: str, factor: int, window: int | None, dtype: torch.dtype) -> None:
    """The call is several operators, and the step is one, with the same bits on the CPU."""
    (q, k, v), _ = inputs_of(dtype)
    if layout == "heads inside":
        q, k, v = map(heads_inside, (q, k, v))
    k[:, :, 9], v[:, :, 12] = -0.0, torch.inf
    options = {"factor": factor, "window": window}
    state = stepped = compressed_attention_state(k[:, :, :5], v[:, :, :5], **options)
    options |= {"strict": layout == "dense", "scale": 0.3}
    pieces, steps = [[x[:, :, t : t + 1] for x in (q, k, v)] for t in range(5, 40)], []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for new in pieces:
            y, stepped = compressed_attention_step(*new, stepped, **options)
            steps.append((y, stepped))
    ours = [event.name for event in profile.events() if event.name.startswith("memcheck::")]
    assert len(ours) == len(pieces)
    assert window is None or set(ours) == {"memcheck::compressed_attention_window_step"}
    for new, (step, stepped) in zip(pieces, steps, strict=True):
        y, state = compressed_attention(*new, initial_state=state, return_state=True, **options)
        assert same_numbers([y, *state[:4]], [step, *stepped[:4]])
        assert state[4:] == stepped[4:]
        assert window or [x.stride() for x in state[2:4]] == [x.stride() for x in stepped[2:4]]


@pytest.mark.glue
@pytest.mark.cpu
def test_opcheck_of_a_step() -> None:
    """The last position of a block has an operator that writes the block."""
    (q, k, v), _ = make_inputs(2, 4, 2, 1, 9, 5)
    kc, vc, k_sum, v_sum, _, factor = compressed_attention_state(k, v, factor=4)
    ops = torch.ops.memcheck
    for new in (k[:, :, :1], heads_inside(k)[:, :, :1]):
        torch.library.opcheck(ops.compressed_attention_step, (q, new, new, kc, vc, k_sum, v_sum, 2), {"factor": factor})
        arguments = (q, new, new, kc, vc, k_sum, v_sum, 1)
        torch.library.opcheck(ops.compressed_attention_last_step, arguments, {"factor": factor})
    for op, last, message in (("step", 3, "positions must be less"), ("last_step", 2, "kc must have a place behind 2")):
        with pytest.raises(ValueError, match=f"compressed_attention_{op}: {message}"):
            getattr(ops, f"compressed_attention_{op}")(q, new, new, kc, vc, k_sum, v_sum, last, factor=4)


def test_what_is_returned() -> None:
    (q, k, v), _ = inputs_of()
    whole, lse = compressed_attention(q, k, v, factor=7, return_lse=True)
    y, of_y, state = compressed_attention(q, k, v, factor=7, return_lse=True, return_state=True)
    assert same_bits([y, of_y], [whole, lse])
    assert isinstance(state, CompressedAttentionState)
    before = compressed_attention_state(k[:, :, :7], v[:, :, :7], factor=7)
    later = [x[:, :, 7:] for x in (q, k, v)]
    assert same_bits([compressed_attention(*later, factor=7, initial_state=before)], [whole[:, :, 7:]])
    y, of_y = compressed_attention(*later, factor=7, initial_state=before, return_lse=True)
    assert same_bits([y, of_y], [whole[:, :, 7:], lse[:, :, 7:]])


def test_a_sink_counts_once_per_query() -> None:
    (q, k, v), _ = inputs_of(torch.float64)
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    whole = compressed_attention(q, k, v, factor=7, sink=sink)
    torch.testing.assert_close(in_pieces(q, k, v, cuts=(9,), factor=7, sink=sink), whole)
    torch.testing.assert_close(whole, reference.compressed_attention(q, k, v, factor=7, sink=sink))


# ---- packed and padded

KINDS = ["packed", "right", "left"]


def sequences_of(kind: str, lengths: list[int]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Options of a packed batch, or of one padded to T + 3, and where (B,heads,positions,...) has each sequence."""
    if kind == "packed":
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        places = [(slice(None), slice(None), slice(*ends[n : n + 2])) for n in range(len(lengths))]
        return {"cu_seqlens": torch.tensor(ends)}, places
    T = max(lengths) + 3
    parts = [slice(T - n, T) if kind == "left" else slice(n) for n in lengths]
    options = {"lengths": torch.tensor(lengths), "padding": kind}
    return options, [(slice(n, n + 1), slice(None), part) for n, part in enumerate(parts)]


def spoilt_inputs(kind: str, lengths: list[int], places: list[tuple[Any, ...]]) -> list[Tensor]:
    """[q, k, v] with NaN in padding."""
    B, T = (1, sum(lengths)) if kind == "packed" else (len(lengths), max(lengths) + 3)
    inputs, _ = make_inputs(B, 4, 2, T, T, 20)
    results = [torch.full_like(x, torch.nan) for x in inputs]
    for here in places:
        for x, result in zip(inputs, results, strict=True):
            result[here] = x[here]
    return results


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_sequences(kind: str, window: int | None) -> None:
    """Each sequence has its own state, and the bits that it has alone; the gradient flows through the state."""
    sink = torch.linspace(-1, 2, 4)
    options = {"factor": 7, "window": window, "strict": kind == "left", "return_state": True, "return_lse": True}
    leaves, results, alone = [], [], []
    states, its_states = None, [None] * 4
    for lengths in ([16, 0, 5, 7], [9, 10, 1, 0]):
        sequences, places = sequences_of(kind, lengths)
        inputs = [x.requires_grad_() for x in spoilt_inputs(kind, lengths, places)]
        y, lse, states = compressed_attention(*inputs, sink=sink, initial_state=states, **sequences, **options)
        inside = torch.zeros_like(lse, dtype=torch.bool)
        for n, here in enumerate(places):
            inside[here] = True
            one = [x[here] for x in inputs]
            its_y, its_lse, state = compressed_attention(*one, sink=sink, initial_state=its_states[n], **options)
            assert same_bits([y[here], lse[here], *states[n][:4]], [its_y, its_lse, *state[:4]])
            assert states[n][4:] == state[4:]
            its_states[n] = state
            alone += [its_y, its_lse]
        assert not y[~inside].any()
        assert (lse[~inside] == -torch.inf).all()
        leaves += inputs
        results += [y, lse[inside]]
    sums = [sum(x.sum() for x in outputs) for outputs in (results, alone)]
    gradients, expected = (torch.autograd.grad(x, leaves, retain_graph=True) for x in sums)
    assert same_bits(gradients, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["packed", "right", "left"])
def test_pooled_sequences(kind: str, causal: bool) -> None:
    """Each sequence has the bits that it has alone, whatever its places without blocks have."""
    factor, keys, queries = 3, [7, 0, 1, 12], [5, 0, 1, 2]
    pooled = torch.ops.memcheck.compressed_attention_pooled
    if kind == "packed":
        starts = [torch.tensor([0, *itertools.accumulate(x)]) for x in (queries, keys)]
        B, S, T, C = 1, sum(queries), sum(keys), sum(keys) // factor + 4
        sequences = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        places = [
            (0, s, t // factor + n) for n, (s, t) in enumerate(zip(*(x.tolist()[:-1] for x in starts), strict=True))
        ]
    else:
        B, S, T, C = 4, 12, 12, 4
        queries = keys
        sequences = {"lengths": torch.tensor(keys), "left_padded": kind == "left"}
        places = [(n, S - count if kind == "left" else 0, 0) for n, count in enumerate(keys)]
    (q, _, _), grad_y = make_inputs(B, 4, 2, S, S, 20)
    kc, vc = torch.full((2, B, 2, C, 20), torch.nan)
    for (row, _, first), length in zip(places, keys, strict=True):
        for x in (kc, vc):
            x[row, :, first : first - (-length // factor)] = torch.randn(2, -(-length // factor), 20)
    leaves = [x.requires_grad_() for x in (q, kc, vc)]
    options = {"factor": factor, "causal": causal, "return_lse": True}
    y, lse = pooled(*leaves, kv_len=T, **options, **sequences)
    gradients = torch.autograd.grad(y, leaves, grad_y)
    rest = [torch.ones_like(x, dtype=torch.bool) for x in gradients]
    for (row, s, first), count, length in zip(places, queries, keys, strict=True):
        of_q = (slice(row, row + 1), slice(None), slice(s, s + count))
        of_blocks = (slice(row, row + 1), slice(None), slice(first, first - (-length // factor)))
        one = [x.detach()[here].requires_grad_() for x, here in zip(leaves, (of_q, of_blocks, of_blocks), strict=True)]
        alone = pooled(*one, kv_len=length, **options)
        assert same_bits([y[of_q], lse[of_q]], alone)
        here = [x[place] for x, place in zip(gradients, (of_q, of_blocks, of_blocks), strict=True)]
        assert same_bits(here, torch.autograd.grad(alone[0], one, grad_y[of_q]))
        for x, place in zip(rest, (of_q, of_blocks, of_blocks), strict=True):
            x[place] = False
    assert not any(gradient[where].any() for gradient, where in zip(gradients, rest, strict=True))


@pytest.mark.glue
@pytest.mark.parametrize("kind", ["whole", "packed", "padded"])
def test_opcheck_of_new_positions(kind: str) -> None:
    B, counts = {"whole": (2, []), "packed": (1, [4, 0, 5]), "padded": (3, [4, 0, 5])}[kind]
    (_, k, v), _ = make_inputs(B, 4, 2, 9, 9, 3)
    N = len(counts) or B
    sums = [torch.randn(N, 2, 3) for _ in range(2)]
    where = {"packed": kind == "packed", "begins": [0, 4, 4], "counts": counts, "places": [1, 3, 5, 9]}
    where = where if counts else {}
    extend = torch.ops.memcheck.compressed_attention_extend.default
    for requires_grad in (False, True):
        given = [x.requires_grad_(requires_grad) for x in (k, v, *sums)]
        for positions in (0, 2):
            options = {"positions": [positions] * (N if counts else 1), "factor": 4, **where}
            torch.library.opcheck(extend, given, options)
    grads = [torch.randn_like(x) for x in extend(*given, **options)]
    options |= {"sizes": k.shape, "k_stride": k.stride(), "v_stride": v.stride()}
    backward = torch.ops.memcheck.compressed_attention_extend_backward.default
    for mask in ([True] * 4, [False, True, True, False]):
        torch.library.opcheck(backward, (*grads, k.detach().new_empty(0)), {**options, "output_mask": mask})
        torch.library.opcheck(
            backward, (grads[0], None, None, None, sums[0].new_empty(0)), {**options, "output_mask": mask}
        )
    with pytest.raises(ValueError, match="places one more, got" if counts else "positions one, got"):
        extend(k, v, *sums, positions=[0] * 4, factor=4, **where)
    with pytest.raises(ValueError, match="k_sum must be"):
        extend(k, v, sums[0][1:], sums[1], positions=options["positions"], factor=4, **where)


@pytest.mark.isolated
def test_new_positions_that_are_elsewhere() -> None:
    """A call of torch.ops may say anything about places in memory."""
    (_, k, v), _ = make_inputs(1, 4, 2, 9, 9, 3)
    most, least = 2**63 - 1, -(2**63)
    sound = {"begins": [0], "counts": [9], "places": [0, 3], "positions": [0], "packed": True, "factor": 4}
    for wrong, message in (
        ({"places": []}, "without places begins and counts must be empty and positions one, got 1, 1 and 1"),
        ({"places": [], "begins": []}, "without places begins and counts must be empty"),
        ({"places": [], "begins": [], "counts": [], "positions": []}, "without places .* got 0, 0 and 0"),
        ({"begins": [most], "counts": [1]}, "begins and counts must be of the 9 positions of k, got"),
        ({"begins": [1], "counts": [most]}, "begins and counts must be of the 9 positions of k, got"),
        ({"begins": [1]}, "begins and counts must be of the 9 positions of k, got 1 and 9"),
        ({"places": [0, least]}, "places must leave room for all blocks, got 0 and"),
        ({"places": [3, 2]}, "places must leave room for all blocks, got 3 and 2"),
        ({"positions": [most]}, "positions must be from 0 to factor - 1 = 3, got"),
    ):
        options = sound | wrong
        sums = [torch.zeros(1, 2, 3)] * 2
        with pytest.raises(ValueError, match=f"compressed_attention_extend: {message}"):
            torch.ops.memcheck.compressed_attention_extend(k, v, *sums, **options)
        options |= {"sizes": k.shape, "k_stride": k.stride(), "v_stride": v.stride(), "output_mask": [True] * 4}
        grads = [torch.zeros(1, 2, 3, 3)] * 2
        with pytest.raises(ValueError, match=f"compressed_attention_extend: {message}"):
            torch.ops.memcheck.compressed_attention_extend_backward(*grads, *sums, k.new_empty(0), **options)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["packed", "right", "left"])
def test_states_of_no_sequences(kind: str, window: int | None) -> None:
    (q, k, v), _ = make_inputs(1, 4, 2, 0, 0, 20) if kind == "packed" else make_inputs(0, 4, 2, 5, 9, 20)
    none = torch.zeros(0, dtype=torch.int64)
    sequences = {"cu_seqlens": torch.tensor([0])} if kind == "packed" else {"lengths": none, "padding": kind}
    options = {"factor": 7, "window": window, "return_state": True, "return_lse": True, **sequences}
    sink = torch.zeros(4, requires_grad=True)
    y, lse, states = compressed_attention(q.requires_grad_(), k, v, sink=sink, **options)
    assert (y.shape, lse.shape, states) == (q.shape, q.shape[:3], ())
    for create_graph in (False, True):
        gradients = torch.autograd.grad(lse.sum(), [q, sink], retain_graph=True, create_graph=create_graph)
        assert same_bits(gradients, [torch.zeros_like(q), torch.zeros_like(sink)])


# ---- torch.compile


@pytest.mark.glue
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("dynamic", "window"), [pytest.param(True, None, marks=pytest.mark.slow), (False, None), (False, 11)]
)
def test_compile(dynamic: bool, window: int | None) -> None:
    """Calls with a state between, and their gradients, in one graph."""
    torch._dynamo.reset()
    compiled = torch.compile(in_pieces, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs, grad_y = inputs_of()
    for cuts in ((9,), (20,)):
        how = {"cuts": cuts, "factor": 7, "window": window}
        results = [run(functools.partial(f, **how), inputs, grad_y) for f in (compiled, in_pieces)]
        assert same_bits(*results)


@pytest.mark.cpu
def test_a_step_is_compiled_for_any_position_of_a_block() -> None:
    """Not once for each: as often for long blocks as for short ones, and not again after the third block."""
    from torch._dynamo.testing import CompileCounter

    counts = []
    (q, k, v), _ = make_inputs(1, 1, 1, 60, 60, 3)
    for factor in (4, 12):
        torch._dynamo.reset()
        counter = CompileCounter()
        step = torch.compile(
            functools.partial(compressed_attention_step, factor=factor), fullgraph=True, backend=counter
        )
        state, after_three = None, 0
        for t in range(5 * factor):
            y, state = step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
            after_three = counter.frame_count if t + 1 == 3 * factor else after_three
        whole = compressed_attention(*(x[:, :, : 5 * factor] for x in (q, k, v)), factor=factor)
        torch.testing.assert_close(y, whole[:, :, -1:])
        assert counter.frame_count == after_three
        counts.append(after_three)
    assert counts[0] == counts[1]


@pytest.mark.cpu
def test_sequences_leave_the_graph_at_one_place() -> None:
    """However many they are."""
    breaks = []
    for lengths in ([16, 12], [16, 0, 5, 7]):
        sequences, places = sequences_of("packed", lengths)
        inputs = spoilt_inputs("packed", lengths, places)

        def scaled(q: Tensor, k: Tensor, v: Tensor, sequences: dict[str, Any] = sequences) -> Tensor:
            return compressed_attention(q + 1, k, v, factor=7, return_state=True, **sequences)[0] * 2

        torch._dynamo.reset()
        breaks += [{str(reason.user_stack[-1]) for reason in torch._dynamo.explain(scaled)(*inputs).break_reasons}]
        assert same_bits([torch.compile(scaled, backend="aot_eager")(*inputs)], [scaled(*inputs)])
    assert breaks[0] == breaks[1]
    assert len(breaks[0]) == 1


# ---- autograd and memory


def state_bytes(states: Sequence[CompressedAttentionState]) -> int:
    """Of all memory in which the states are."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for state in states for x in state[:4]}
    return sum(storages.values())


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("cut", [0, 160, 203])
def test_memory_to_the_byte(cut: int, requires_grad: bool) -> None:
    """A call takes y, the new state and scratch, and lse for a gradient; the backward the gradients of blocks, too."""
    inputs, grad_y = make_inputs(2, 4, 2, 300, 300, 40)
    before = compressed_attention_state(*(x[:, :, :cut] for x in inputs[1:]), factor=8) if cut else None
    leaves = [x[:, :, cut:].clone().requires_grad_(requires_grad) for x in inputs]
    grad_y = grad_y[:, :, cut:].contiguous()
    plan = plan_of(leaves[0], inputs[1])
    extension_scratch = plan_of(leaves[0][:, :2, :0], leaves[1])["extension_scratch"]
    with track(device=DEVICE) as memory:
        y, state = compressed_attention(*leaves, factor=8, initial_state=before, return_state=True)
        kept = y.nbytes + state_bytes([state]) + requires_grad * plan["lse"]
        sums = state.k_sum.nbytes + state.v_sum.nbytes
        # The sums of the empty state before the first position.
        assert memory.peak_bytes == kept + plan["pooled_forward_scratch"] + (0 if cut else sums)
        assert memory.current_bytes == kept
        if not requires_grad:
            return
        memory.reset_peak()
        y.backward(grad_y)
        of_q, *of_keys = (leaf.grad.nbytes for leaf in leaves)
        of_blocks = state.kc.nbytes + state.vc.nbytes
        attending = of_q + of_blocks + plan["delta"] + plan["backward_scratch"]
        spreading = of_q + sum(of_keys) + of_blocks + extension_scratch
        # lse is freed between the two.
        assert memory.peak_bytes == kept + max(attending, spreading - plan["lse"])


@pytest.mark.cpu
@pytest.mark.isolated
def test_memory_of_sequences_to_the_byte() -> None:
    torch.set_num_threads(1)
    for requires_grad in (False, True):
        assert_memory_of_sequences(requires_grad)


def assert_memory_of_sequences(requires_grad: bool) -> None:
    """As much as a dense call: the blocks are those of the states. The backward takes the gradients of blocks, too."""
    lengths = [300, 280, 290]
    sequences, places = sequences_of("packed", lengths)
    inputs = [x.requires_grad_(requires_grad) for x in spoilt_inputs("packed", lengths, places)]
    plans = [plan_of(*(x[here] for x in inputs[:2])) for here in places]
    forward_scratch, backward_scratch = (
        -(-max(plan[name] for plan in plans) // 64) * 64 for name in ("pooled_forward_scratch", "backward_scratch")
    )
    with track(device=DEVICE) as memory:
        y, states = compressed_attention(*inputs, factor=8, return_state=True, **sequences)
        of_blocks = 2 * 2 * (sum(lengths) // 8 + 3) * 20 * 4
        sums = sum(x.nbytes for state in states for x in state[2:4])  # as those of the states before
        assert state_bytes(states) == of_blocks + sums
        numbers = y[..., 0].numel() * 4 * requires_grad  # lse, or delta
        positions = 2 * 4 * 8  # the first ones of sequences
        kept = y.nbytes + state_bytes(states) + (numbers + positions) * requires_grad
        assert memory.peak_bytes == kept + sums + forward_scratch + positions * (not requires_grad)
        assert memory.current_bytes == kept
        if not requires_grad:
            return
        grad_y = torch.ones_like(y)
        memory.reset_peak()
        y.backward(grad_y)
        of_q, *of_keys = (leaf.grad.nbytes for leaf in inputs)
        attending = of_q + of_blocks + numbers + backward_scratch
        # What was kept is free.
        extension_scratch = plans[0]["extension_scratch"]
        spreading = of_q + sum(of_keys) + of_blocks + extension_scratch - numbers - positions
        assert memory.peak_bytes == kept + grad_y.nbytes + max(attending, spreading)


def test_keys_and_values_are_not_kept() -> None:
    inputs, _ = inputs_of()
    q, k, v = leaves = [x.requires_grad_() for x in inputs]
    kept = saved_for_backward(lambda: compressed_attention(*leaves, factor=7, return_state=True)[0])
    blocks = 50 // 7 * q.shape[3] * 4
    assert sum(x.numel() for x in kept) == 2 * q.numel() + 2 * blocks + q.numel() // q.shape[3]
    assert {k.data_ptr(), v.data_ptr()}.isdisjoint(x.data_ptr() for x in kept)


@pytest.mark.parametrize("wanted", ["q", "sink"])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_pieces_whose_keys_and_values_want_no_gradient(window: int | None, wanted: str) -> None:
    """Pieces and steps write their blocks and positions behind those that the backward of earlier pieces reads."""
    (q, k, v), grad_y = make_inputs(1, 4, 2, 24, 24, 20)
    sink = torch.randn(4)
    leaf = (q if wanted == "q" else sink).requires_grad_()
    options = {"factor": 2, "window": window}
    expected = torch.autograd.grad(compressed_attention(q, k, v, sink=sink, **options), leaf, grad_y)
    state, pieces, memories = None, [], set()
    for begin, end in itertools.pairwise((0, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18, 20, 24)):
        new = [x[:, :, begin:end] for x in (q, k, v)]
        y, state = compressed_attention(*new, sink=sink, initial_state=state, return_state=True, **options)
        pieces.append(y)
        memories.add(state.kc.untyped_storage().data_ptr())
    with torch.no_grad():
        for t in range(4):
            _, state = compressed_attention_step(*(x[:, :, t : t + 1] for x in (q, k, v)), state, **options)
    assert len(memories) <= 4
    torch.testing.assert_close(torch.autograd.grad(torch.cat(pieces, 2), leaf, grad_y), expected)

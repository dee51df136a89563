"""Predictions for packed, padded, continued and decayed sequences equal measurements to the byte on the CPU."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from predict.compared import compare
from torch import Tensor

import memcheck
from memcheck import predict_memory
from memcheck.simulated.facts import scratch_of
from memcheck.simulated.scratch import Scratch, Target, Unknown, call_of

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

SEQUENCES: dict[str, dict[str, Any]] = {
    "packed": {"cu_seqlens": torch.tensor([0, 300, 300, 1000, 1037])},
    "left": {"lengths": torch.tensor([600, 3]), "padding": "left"},
    "right": {"lengths": torch.tensor([300, 600])},
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softplus": memcheck.softplus_attention,
    "linear": memcheck.linear_attention,
    "compressed": functools.partial(memcheck.compressed_attention, factor=8),
}


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def inputs(name: str, layout: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k and v, packed or padded, for SEQUENCES."""
    B, S = (1, 1037) if layout == "packed" else (2, 600)
    if name == "softplus":
        return leaves((B, S, 35), (B, 35, S), (B, 35, S), dtype=dtype)
    return leaves((B, 4, S, 20), (B, 2, S, 20), (B, 2, S, 20), dtype=dtype)


def assert_same(function: Callable[..., Any], *given: Tensor, dense: bool = False, **how: Any) -> None:
    """Compares the prediction with the measurement."""
    compare(function, *given, dense_grad=dense, **how)


@pytest.mark.parametrize("layout", SEQUENCES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_packed_and_padded_batches_are_predicted(name: str, layout: str) -> None:
    for dtype, causal in ((torch.float32, True), (torch.bfloat16, True), (torch.float64, False)):
        function = functools.partial(FUNCTIONS[name], causal=causal, **SEQUENCES[layout])
        given = inputs(name, layout, dtype)
        assert_same(function, *given)
        assert_same(function, *given, dense=True)
        assert_same(function, *given, backward=False)


@pytest.mark.parametrize("threads", [1, 3])
def test_scratch_follows_the_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, function in FUNCTIONS.items():
            assert_same(functools.partial(function, causal=True, **SEQUENCES["packed"]), *inputs(name, "packed"))
    finally:
        torch.set_num_threads(before)


def test_lengths_may_be_inputs() -> None:
    """Contents of small integer tensors are sent."""

    def function(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return memcheck.softplus_attention(q, k, v, cu_seqlens=starts)

    given = inputs("softplus", "packed")
    assert_same(function, *given, SEQUENCES["packed"]["cu_seqlens"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scratch_on_a_gpu_needs_the_number_of_sequences_alone(name: str) -> None:
    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        y: Tensor = FUNCTIONS[name](q, k, v, causal=True, cu_seqlens=starts)
        return y

    def padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        y: Tensor = FUNCTIONS[name](q, k, v, causal=True, lengths=lengths)
        return y

    for function, layout, argument in ((packed, "packed", "cu_seqlens"), (padded, "left", "lengths")):
        given = (*inputs(name, layout), SEQUENCES[layout][argument])
        on_meta = [x.to("meta") for x in given]
        known, unknown = (
            predict_memory(function, *tensors, device="A100-40GB", probes=False) for tensors in (given, on_meta)
        )
        assert [words for words in unknown.unknown if "was not compared" not in words] == []
        assert unknown.record == known.record


@pytest.mark.parametrize("rest", [False, True])
def test_states_of_softplus_attention_are_predicted(rest: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor) -> Any:
        return memcheck.softplus_attention(q, k, v, initial_state=(z, a), return_state=True, state_rest=rest)

    assert_same(function, *inputs("softplus", "left"), *leaves((2, 35), (2, 35)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [(2,), (2, 2, 600)])
def test_decays_and_states_of_linear_attention_are_predicted(shape: tuple[int, ...], normalize: bool) -> None:
    decay = torch.rand(shape).mul_(0.5).add_(0.4).requires_grad_()
    how: dict[str, Any] = {"causal": True, "normalize": normalize}

    def decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, **more: Any) -> Any:
        return memcheck.linear_attention(q, k, v, decay=decay, **how, **more)

    def continued(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, m: Tensor, z: Tensor) -> Any:
        state = (m, z if normalize else None)
        return memcheck.linear_attention(q, k, v, decay=decay, initial_state=state, return_state=True, **how)

    def last_state(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return memcheck.linear_attention(q, k, v, return_state=True, **how)[1][0]

    given = inputs("linear", "left")
    assert_same(decayed, *given, decay)
    assert_same(functools.partial(decayed, **SEQUENCES["right"]), *given, decay)
    assert_same(continued, *given, decay, *leaves((2, 2, 20, 20), (2, 2, 20)))
    assert_same(last_state, *given)


def test_a_copy_of_decays_counts_where_it_is_the_most() -> None:
    q, k, v = leaves((1, 2, 600, 1), (1, 2, 600, 1), (1, 2, 600, 1), dtype=torch.float16)
    decay = torch.rand(1, 600, 2).mul_(0.5).add_(0.4).transpose(1, 2)
    assert_same(lambda *x: memcheck.linear_attention(*x[:3], causal=True, decay=x[3]), q, k, v, decay)


def test_lse_and_sinks_of_compressed_attention_are_predicted() -> None:
    given = inputs("compressed", "left")
    sink = leaves((4,))
    how: dict[str, Any] = {"factor": 8, "return_lse": True}
    assert_same(functools.partial(memcheck.compressed_attention, **how), *given)
    for more in ({}, SEQUENCES["right"]):
        assert_same(
            lambda q, k, v, s, m=more: memcheck.compressed_attention(q, k, v, sink=s, **how, **m), *given, *sink
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_of_compressed_attention_are_predicted(dtype: torch.dtype) -> None:
    given, sink = inputs("compressed", "left", dtype), leaves((4,))
    for window, more in itertools.product((1, 50, 10**6), ({}, SEQUENCES["right"])):
        how: dict[str, Any] = {"factor": 8, "window": window, "return_lse": True, **more}
        assert_same(functools.partial(memcheck.compressed_attention, **how), *given)
    assert_same(lambda q, k, v, s: memcheck.compressed_attention(q, k, v, sink=s, factor=8, window=50), *given, *sink)
    assert_same(functools.partial(memcheck.compressed_attention, factor=8, window=50), *given, backward=False)

    def in_two_pieces(q: Tensor, k: Tensor, v: Tensor) -> Any:
        first, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(303), slice(303, None)))
        y, state = memcheck.compressed_attention(*first, factor=8, window=50, return_state=True)
        return y, memcheck.compressed_attention(*rest, factor=8, window=50, initial_state=state)

    def in_steps(q: Tensor, k: Tensor, v: Tensor) -> Any:
        how: dict[str, Any] = {"factor": 8, "window": 50}
        state, ys = memcheck.compressed_attention_state(k[:, :, :300], v[:, :, :300], **how), []
        for t in range(300, 340):
            y, state = memcheck.compressed_attention_step(*(x[:, :, t : t + 1] for x in (q, k, v)), state, **how)
            ys.append(y)
        return ys, state

    assert_same(in_two_pieces, *given)
    assert_same(torch.inference_mode()(in_two_pieces), *given, backward=False)
    assert_same(torch.inference_mode()(in_steps), *given, backward=False)


def test_states_of_compressed_attention_are_predicted() -> None:
    def in_two_pieces(q: Tensor, k: Tensor, v: Tensor) -> Any:
        first, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(303), slice(303, None)))
        y, state = memcheck.compressed_attention(*first, factor=8, return_state=True)
        return y, memcheck.compressed_attention(*rest, factor=8, initial_state=state)

    given = inputs("compressed", "left")
    assert_same(in_two_pieces, *given)
    assert_same(torch.inference_mode()(in_two_pieces), *given, backward=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merged_attention_and_compressed_states_are_predicted(dtype: torch.dtype) -> None:
    def continued(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return memcheck.compressed_attention(q, k, v, factor=8, return_state=True)

    given = inputs("compressed", "left", dtype)
    assert_same(merged, *given)
    assert_same(lambda *x: merged(*x)[0], *given, dense=True)
    assert_same(merged, *given, backward=False)
    assert_same(continued, *given)


def cuda_scratch(name: str, **arguments: Any) -> list[Scratch | Unknown]:
    q, k, v = (x.detach().to("meta") for x in inputs(name, "packed"))
    operator = getattr(torch.ops.memcheck, f"{name}_attention").default
    starts = SEQUENCES["packed"]["cu_seqlens"]
    arguments = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True, **arguments}
    return scratch_of(call_of(operator, (q, k, v), arguments, operator(q, k, v, **arguments), Target("cuda")))


def test_scratch_on_cuda_depends_on_the_number_of_sequences() -> None:
    """A table of sequences, and the C++ plan for the shape of the batch."""
    from memcheck._extension import _C

    sizes: dict[str, Any] = {"B": 1, "S": 1037, "T": 1037, "dtype": "float32", "device": "cuda", "threads": 1}
    plan = _C.softplus_attention_plan(R=35, causal=True, sequences=[(0, 0)] * 4, packed=True, **sizes)
    table, sums = cuda_scratch("softplus")
    assert isinstance(table, Scratch)
    assert isinstance(sums, Scratch)
    assert (table.bytes, sums.bytes) == (4 * 40, plan["forward_scratch"])


def heads(S: int = 40, D: int = 20, H: int = 4) -> tuple[int, ...]:
    return (2, H, S, D)


SHAPES = [heads(), heads(H=2), heads(H=2)]
CHANNELS = [(2, 40, 35), (2, 35, 40), (2, 35, 40)]


def merged(q: Tensor, k: Tensor, v: Tensor) -> Any:
    parts = [memcheck.compressed_attention(q, k, v, factor=factor, return_lse=True) for factor in (4, 8, 16)]
    return memcheck.merge_attention([y for y, _ in parts], [lse for _, lse in parts])


def compressed_step(q: Tensor, k: Tensor, v: Tensor, *new: Tensor) -> Any:
    state = memcheck.compressed_attention_state(k[:, :, :30], v[:, :, :30], factor=8)
    return memcheck.compressed_attention_step(*new, state, factor=8)


# The functions of docs/operators.md, with the shapes of their tensors. A step has no backward.
FORMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "softplus_attention": (memcheck.softplus_attention, CHANNELS),
    "softplus_attention_step": (
        lambda q, k, v, z, a: memcheck.softplus_attention_step(q, k, v, (z, a)),
        [(2, 3, 35), (2, 35, 3), (2, 35, 3), (2, 35), (2, 35)],
    ),
    "linear_attention": (functools.partial(memcheck.linear_attention, causal=True), SHAPES),
    "linear_attention_step": (
        lambda q, k, v, m, z: memcheck.linear_attention_step(q, k, v, (m, z)),
        [heads(1), heads(1, H=2), heads(1, H=2), heads(20, H=2), (2, 2, 20)],
    ),
    "combinator": (memcheck.combinator, [(2, 40, 24), (2, 24, 24)]),
    "compressed_attention": (functools.partial(memcheck.compressed_attention, factor=8), SHAPES),
    "compressed_attention_pooled": (
        functools.partial(memcheck.compressed_attention_pooled, factor=8, kv_len=40),
        [heads(), heads(5, H=2), heads(5, H=2)],
    ),
    "compressed_attention_state": (
        lambda k, v: memcheck.compressed_attention_state(k, v, factor=8),
        [heads(30, H=2), heads(30, H=2)],
    ),
    "compressed_attention_step": (compressed_step, [*SHAPES, heads(3), heads(3, H=2), heads(3, H=2)]),
    "merge_attention": (merged, SHAPES),
    "linear_r": (memcheck.linear_r, [(2, 40, 24), (24, 35)]),
    "linear_l": (memcheck.linear_l, [(2, 40, 24), (24, 35)]),
}
# The libraries' products in 16 bits take scratch that shapes do not determine.
PRODUCTS = ("combinator", "linear_r", "linear_l")


def test_the_forms_are_those_of_the_documentation() -> None:
    table = (Path(__file__).parents[2] / "docs/operators.md").read_text().partition("\n\n|")[2].partition("\n\n")[0]
    assert set(re.findall(r"memcheck\.([a-z]\w*)\(", table)) == set(FORMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_predicted(name: str, dtype: torch.dtype) -> None:
    """On the CPU as measured; for a GPU by the plans of the kernels, with nothing unknown."""
    function, shapes = FORMS[name]
    given = leaves(*shapes, dtype=dtype)
    if name.endswith(("_step", "_state")):
        given = tuple(x.detach() for x in given)
        if name.endswith("_step"):  # States are in the accumulation type.
            given = tuple(x if name.startswith("compressed") or n < 3 else x.float() for n, x in enumerate(given))
    backward = given[0].requires_grad
    if name not in PRODUCTS or dtype == torch.float32:
        assert_same(function, *given, backward=backward)
    prediction = predict_memory(function, *given, device="A100-40GB", backward=backward, probes=False)
    assert [words for words in prediction.unknown if "was not compared" not in words] == []


@pytest.mark.parametrize("opened", [0, 7])
def test_one_position_of_compressed_attention_is_predicted(opened: int) -> None:
    """Also where it completes a block."""

    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, *sums: Tensor) -> Any:
        state = memcheck.CompressedAttentionState(kc, vc, *sums, opened, 8)
        return memcheck.compressed_attention_step(q, k, v, state, factor=8)

    shapes = [heads(1), *[heads(1, H=2)] * 2, *[heads(5, H=2)] * 2, *[(2, 2, 20)] * 2]
    assert_same(step, *(torch.randn(shape) for shape in shapes), backward=False)

"""Operators on a GPU, beyond what tests/ops asks of them with --device cuda: streams, CUDA graphs, memory, a second
GPU, and tensors so large that offsets need 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from host_cuda.test_sequences import TAKE_TABLES
from ops.checks import DTYPES, Contract, assert_contract, run, same_bits
from ops.operators import COMPRESSED, LINEAR, OPERATORS, SOFTPLUS, Operator
from ops.test_sequences import ATTENTIONS, Attention
from torch import Tensor

import memcheck
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.profile import known_terms
from memcheck.measure.measurement import measure_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EVERY = pytest.mark.parametrize("it", OPERATORS.values(), ids=OPERATORS)
GIB = 2**30
BEYOND_32_BITS = 2**31 + 64


def inputs_of(it: Operator, sizes: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cuda") -> list:
    """The inputs, and last a gradient of y."""
    inputs, grad_y = it.inputs(tuple(sizes), dtype)
    return [x.to(device) for x in (*inputs, grad_y)]


def results_of(it: Operator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """y and all gradients."""
    *inputs, grad_y = tensors
    return run(it.function, inputs, grad_y)


def assert_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """For products by different algorithms: whoever read a wrong number is further off."""
    for one, other in zip(some, others, strict=True):
        size = other.float().abs().max().item() if other.numel() else 0.0
        tolerance = (2e-2 if one.dtype.itemsize == 2 else 1e-4) * (size + 1e-6)
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def needs_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free memory")


# ---- streams and graphs


@EVERY
def test_work_goes_to_the_current_stream(it: Operator) -> None:
    """There the inputs arrive late; on any other stream they would be NaN still."""
    tensors = inputs_of(it, it.middle)
    expected = results_of(it, tensors)
    late = [torch.full_like(x, math.nan) for x in tensors]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results_of(it, late)  # so that nothing is loaded or allocated for the first time below: that may wait for all
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for to, x in zip(late, tensors, strict=True):
            to.copy_(x)
        results = results_of(it, late)
    stream.synchronize()
    assert_close(results, expected)


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the step, after three steps on another stream, and the tensors that a replay fills."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize("with_backward", [False, True])
@EVERY
def test_a_graph_is_captured_and_replayed(it: Operator, with_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCHECK_CHECK", "0")  # A stream that is captured cannot wait for a check of lengths.
    given = inputs_of(it, it.middle)
    *leaves, grad_y = static = [x.clone() for x in given]
    for leaf in leaves:
        leaf.requires_grad_(with_backward)

    def step() -> list[Tensor]:
        y = it.function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)] if with_backward else [y]

    graph, results = captured(step)
    for scale in (1.0, -0.5):
        with torch.no_grad():
            for to, x in zip(static, given, strict=True):
                to.copy_(x * scale)
        graph.replay()
        replayed = [x.clone() for x in results]
        graph.replay()
        assert same_bits(results, replayed)
        assert_close(replayed, results_of(it, [x * scale for x in given])[: len(results)])


def test_a_captured_stream_says_that_it_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCHECK_CHECK", "1")
    it = ATTENTIONS["softplus"]
    given, _ = it.inputs(1, 40, 40)
    inputs, cu_seqlens = [x.cuda() for x in given], torch.tensor([0, 40], device="cuda")
    it.function(*inputs, cu_seqlens=cu_seqlens)
    torch.cuda.synchronize()
    said = pytest.raises(RuntimeError, match="MEMCHECK_CHECK=1 waits for values on the GPU, which a CUDA graph does")
    with said, torch.cuda.graph(torch.cuda.CUDAGraph()):
        it.function(*inputs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("it", [pytest.param(ATTENTIONS[name], id=name) for name in TAKE_TABLES])
def test_a_graph_of_a_packed_call_follows_its_lengths(it: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it waits, or depends on the lengths that it had when it was captured."""
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    given, grad = it.inputs(1, 700, 700)
    leaves, grad_y = [x.cuda().requires_grad_() for x in given], grad.cuda()
    cu_seqlens = torch.tensor([0, 100, 100, 700], device="cuda")

    def step() -> list[Tensor]:
        y = it.function(*leaves, cu_seqlens=cu_seqlens)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]

    graph, results = captured(step)
    for starts in ([0, 100, 100, 700], [0, 0, 513, 700], [0, 350, 699, 700]):
        cu_seqlens.copy_(torch.tensor(starts))
        graph.replay()
        replayed = [x.clone() for x in results]
        assert same_bits(replayed, step())


def test_a_graph_goes_on_from_a_state() -> None:
    """The table of new positions is no copy from the CPU's memory, which a graph could not hold."""
    given, grad = ATTENTIONS["compressed"].inputs(1, 700, 700)
    leaves, grad_y = [x.cuda().requires_grad_() for x in given], grad.cuda()
    with torch.no_grad():
        _, before = memcheck.compressed_attention(*leaves, factor=16, return_state=True)

    def step() -> list[Tensor]:
        y, _ = memcheck.compressed_attention(*leaves, factor=16, initial_state=before, return_state=True)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]

    graph, results = captured(step)
    graph.replay()
    assert same_bits(results, step())


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_whatever_else_runs(it: Operator, dtype: torch.dtype) -> None:
    tensors = inputs_of(it, it.large, dtype)
    first = results_of(it, tensors)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(other):
            for _ in range(4):
                noise = (noise @ noise).clamp(-1, 1)
        assert same_bits(results_of(it, tensors), first)
    torch.cuda.synchronize()


# ---- memory


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("length", [129, 2000])
@pytest.mark.parametrize(
    "operator", ["softplus", "linear", "linear-causal", "compressed", "combinator", "combinator-low-memory"]
)
def test_peaks_are_those_planned(operator: str, length: int, dtype: str, mode: str) -> None:
    """In requested bytes, but for the workspace of cuBLAS."""
    make = make_combinator_case if operator.startswith("combinator") else make_case
    sizes: dict[str, Any] = {"bsz": 3, "query_len": length, "dim": 256}
    if make is make_case:
        sizes |= {"kv_len": length, "heads": 4, "core_dim": None, "factor": None}
    case = make(operator, **sizes, dtype=dtype, mode=mode, device="cuda:0")
    record = measure_memory(case.step())
    planned = {field: sum(terms.values()) for field, terms in (known_terms(case) or {}).items()}
    assert {"forward_peak_bytes", *(("saved_bytes", "backward_peak_bytes") if mode == "train" else ())} <= set(planned)
    for field, expected in planned.items():
        library = 0 if field == "saved_bytes" else record.library_workspace_bytes
        assert 0 <= getattr(record, field) - expected <= library, field


# ---- devices


def test_tensors_on_two_devices_are_refused() -> None:
    q, k, v = (torch.randn(1, 4, 4) for _ in range(3))
    with pytest.raises(ValueError, match="softplus_attention: k must be on cpu as q is, got cuda:0"):
        memcheck.softplus_attention(q, k.cuda(), v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY
def test_a_device_that_is_not_the_current_one(it: Operator) -> None:
    expected = results_of(it, inputs_of(it, it.middle))
    with torch.cuda.device(0):
        results = results_of(it, inputs_of(it, it.middle, device="cuda:1"))
    assert {x.device.index for x in results} == {1}
    assert_close([x.to("cuda:0") for x in results], expected)


# ---- long and large


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("contract", "shapes"),
    [
        *(
            pytest.param(
                SOFTPLUS.contract(causal=causal),
                [(1, S, 8), (1, 8, 40_000), (1, 8, 40_000)],
                id=f"softplus {name}",
            )
            for name, causal, S in (("causal", True, 40_000), ("last queries", True, 70), ("not causal", False, 300))
        ),
        *(
            pytest.param(
                LINEAR.contract(causal=causal),
                [(1, 2, 64, 16), (1, 1, T, 16), (1, 1, T, 24)],
                id=f"linear {causal}",
            )
            for causal, T in ((True, 40_000), (False, 40_000))
        ),
        *(
            pytest.param(
                COMPRESSED.contract(factor=16, mode=mode, window=window),
                [(1, 2, 64, 32), (1, 1, 40_000, 32), (1, 1, 40_000, 32)],
                id=f"compressed {mode} {window}",
            )
            for mode, window in (("causal", None), ("not causal", None), ("causal", 512))
        ),
    ],
)
def test_long_sequences(contract: Contract, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Split among many blocks, whose sums are put together."""
    random = torch.Generator().manual_seed(1)
    *inputs, grad_y = (torch.randn(shape, generator=random).to("cuda", dtype) for shape in (*shapes, shapes[0]))
    grad_y = (
        grad_y if contract.function(*inputs).shape == grad_y.shape else torch.randn_like(contract.function(*inputs))
    )
    assert_contract(contract, inputs, grad_y)


def far_apart(x: Tensor) -> Tensor:
    """The same values, but from one index of the first dimension to the next are more than 2^31 elements."""
    if x.dim() < 3 or x.shape[0] > 3:
        return x
    strides = (BEYOND_32_BITS, *x[0].contiguous().stride())
    far = x.new_empty((x.shape[0] - 1) * BEYOND_32_BITS + x[0].numel()).as_strided(x.shape, strides)
    return far.copy_(x)


@EVERY
def test_strides_that_need_64_bits(it: Operator) -> None:
    needs_memory(60)
    tensors = inputs_of(it, it.middle, torch.bfloat16)
    expected = results_of(it, tensors)
    assert_close(results_of(it, [far_apart(x) for x in tensors]), expected)


# Sizes of which every tensor of the first rank has more than 2^31 elements.
LARGE = {
    "softplus_attention": (4100, 512, 512, 1024),
    "linear_attention": (520, 16, 16, 4096, 4096, 64, 64),
    "compressed_attention": (520, 16, 16, 4096, 4096, 64),
    "compressed_attention_pooled": (520, 16, 16, 4096, 4096, 64),
    "combinator": (4100, 512, 1024),
    "linear_r": (4100, 512, 1024, 1024),
    "linear_l": (4100, 512, 1024, 1024),
}


@EVERY
def test_tensors_of_more_than_2_to_the_31_elements(it: Operator) -> None:
    """The last of the batch comes out as it does alone."""
    needs_memory(90)
    *shapes, of_y = it.shapes(*LARGE[it.name])
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    batch = shapes[0][0]
    assert inputs[0].numel() > 2**31
    inputs[1:] = [x if x.shape[0] == batch else x / math.sqrt(x.shape[-1]) for x in inputs[1:]]
    last = [x[-1:].clone() if x.shape[0] == batch else x for x in inputs]
    grad_y = torch.randn(of_y, device="cuda", dtype=torch.bfloat16)
    expected = run(it.function, last, grad_y[-1:].clone())
    results = run(it.function, inputs, grad_y)
    of_last = [(x[-1:], other) for x, other in zip(results, expected, strict=True) if x.shape[0] == batch]
    assert_close(*zip(*of_last, strict=True))
    assert all(x.isfinite().all() for x in results if x.shape[0] != batch)

"""Packed and padded batches, as all attentions take them: values, bits, memory, errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ops.calls import CALLS, TIMES, flat, longer, narrow
from ops.checks import (
    DEVICE,
    DTYPES,
    KERNELS,
    LAYOUTS,
    Function,
    assert_threads_change_no_bit,
    generator,
    run,
    run_truth,
    same_bits,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import memcheck
from memcheck import track
from memcheck.ops.gradcheck import Configuration
from memcheck.ops.reference import compressed_attention as compressed_reference
from memcheck.ops.reference import linear_attention as linear_reference
from memcheck.ops.reference import softplus_attention as softplus_reference
from memcheck.simulated.facts import scratch_of
from memcheck.simulated.scratch import Scratch, Target, call_of


@dataclass(frozen=True)
class Attention:
    """An operator, and where its inputs and y have their positions."""

    function: Function
    reference: Function
    shapes: Callable[..., tuple[tuple[int, ...], ...]]  # B, S, T -> q, k, v, y
    queries: int  # the dimension of positions of q and y
    keys: int  # of k and v
    step: int  # positions after which something begins anew within a sequence
    # On CUDA a dense call of so many positions is cut by the size of the batch, and packed and padded ones are not.
    cut: float = math.inf

    def inputs(self, B: int, S: int, T: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
        random = generator()
        q, k, v, grad_y = (torch.randn(x, generator=random).to(dtype) for x in self.shapes(B, S, T))
        return [q, k, v], grad_y

    def part(self, tensors: list[Tensor], row: slice, queries: slice, keys: slice) -> list[Tensor]:
        """One sequence of [q, k, v], of [y, grad_q, grad_k, grad_v], or of [grad_y]."""
        of_queries, of_keys = (self.queries, *place(queries)), (self.keys, *place(keys))
        places = [of_keys if i > 0 and i >= len(tensors) - 2 else of_queries for i in range(len(tensors))]
        return [x[row].narrow(*where) for x, where in zip(tensors, places, strict=True)]


def place(part: slice) -> tuple[int, int]:
    return part.start, part.stop - part.start


SOFTPLUS = Attention(
    memcheck.softplus_attention,
    softplus_reference.softplus_attention,
    lambda B, S, T: ((B, S, 35), (B, 35, T), (B, 35, T), (B, S, 35)),
    queries=1,
    keys=2,
    step=256,
)
LINEAR = Attention(
    functools.partial(memcheck.linear_attention, causal=True),
    functools.partial(linear_reference.linear_attention, causal=True),
    lambda B, S, T: ((B, 4, S, 35), (B, 2, T, 35), (B, 2, T, 20), (B, 4, S, 20)),
    queries=2,
    keys=2,
    step=256,
    cut=512,
)
COMPRESSED = Attention(
    functools.partial(memcheck.compressed_attention, factor=7),
    functools.partial(compressed_reference.compressed_attention, factor=7),
    lambda B, S, T: ((B, 4, S, 20), (B, 2, T, 20), (B, 2, T, 20), (B, 4, S, 20)),
    queries=2,
    keys=2,
    step=7,
    cut=0,
)
ATTENTIONS = {"softplus": SOFTPLUS, "linear": LINEAR, "compressed": COMPRESSED}
EVERY = pytest.mark.parametrize("it", ATTENTIONS.values(), ids=ATTENTIONS)
CAUSAL = pytest.mark.parametrize("causal", [True, False])


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@dataclass(frozen=True)
class Case:
    """A batch: the numbers of queries and keys of its sequences; padded to S and T, or packed."""

    queries: list[int]
    keys: list[int]
    padding: str = ""  # "right" or "left"; packed if ""
    more: int = 0  # positions of padding beyond the longest sequence

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, S, T"""
        if not self.padding:
            return 1, sum(self.queries), sum(self.keys)
        return len(self.keys), max(self.queries) + self.more, max(self.keys) + self.more

    @property
    def options(self) -> dict[str, Any]:
        if self.padding:
            return {"lengths": torch.tensor(self.keys), "padding": self.padding}
        if self.queries == self.keys:
            return {"cu_seqlens": cumulative(self.keys)}
        return {"cu_seqlens_q": cumulative(self.queries), "cu_seqlens_k": cumulative(self.keys, torch.int64)}

    def sequences(self, causal: bool) -> list[tuple[slice, slice, slice]]:
        """(row, positions of queries, positions of keys) of each."""
        _, S, T = self.sizes
        found, first_query, first_key = [], 0, 0
        all_count = bool(self.padding) and not causal and S != T
        for n, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            if all_count:
                queries = S
            if self.padding:
                first_query, first_key = (S - queries, T - keys) if self.padding == "left" else (0, 0)
            row = slice(n, n + 1) if self.padding else slice(0, 1)
            found.append((row, slice(first_query, first_query + queries), slice(first_key, first_key + keys)))
            first_query, first_key = first_query + queries, first_key + keys
        return found


LENGTHS = [63, 0, 300, 1, 513, 7, 129]
FEWER_QUERIES = [60, 0, 1, 1, 300, 0, 127]
CASES = {
    "packed": Case(LENGTHS, LENGTHS),
    "packed, fewer queries": Case(FEWER_QUERIES, LENGTHS),
    "one": Case([300], [300]),
    "right": Case(LENGTHS, LENGTHS, "right", more=3),
    "left": Case(LENGTHS, LENGTHS, "left", more=3),
    # Queries are the last 40 positions of T.
    "right, fewer queries": Case([36, 0, 40, 5], [296, 200, 300, 265], "right"),
    "left, fewer queries": Case([40, 0, 40, 5], [296, 0, 300, 5], "left"),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def spoilt(tensors: list[Tensor], it: Attention, case: Case, causal: bool) -> list[Tensor]:
    """The tensors with NaN in all positions of padding."""
    found = [torch.full_like(x, math.nan) for x in tensors]
    for sequence in case.sequences(causal):
        for to, x in zip(it.part(found, *sequence), it.part(tensors, *sequence), strict=True):
            to.copy_(x)
    return found


def options_alone(it: Attention, queries: slice, keys: slice) -> dict[str, Any]:
    """Options of a call for one sequence alone: of a packed batch of one where a GPU would cut a dense call."""
    lengths = [part.stop - part.start for part in (queries, keys)]
    if KERNELS == "cpu" or max(lengths) < it.cut:
        return {}
    return {f"cu_seqlens_{name}": cumulative([length]) for name, length in zip("qk", lengths, strict=True)}


def assert_as_alone(it: Attention, case: Case, causal: bool, inputs: list[Tensor], grad_y: Tensor) -> list[Tensor]:
    """Asserts that each sequence has the bits that it has alone, and that results of padding are 0. Returns y and the
    gradients."""
    results = run(functools.partial(it.function, causal=causal, **case.options), inputs, grad_y)
    padding = [torch.ones_like(x, dtype=torch.bool) for x in results]
    for sequence in case.sequences(causal):
        (its_grad_y,) = it.part([grad_y], *sequence)
        function = functools.partial(it.function, causal=causal, **options_alone(it, *sequence[1:]))
        alone = run(function, it.part(inputs, *sequence), its_grad_y)
        assert same_bits(it.part(results, *sequence), alone)
        for x in it.part(padding, *sequence):
            x.fill_(False)
    assert all((x[outside] == 0).all() for x, outside in zip(results, padding, strict=True))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@CAUSAL
@EVERY_CASE
@EVERY
def test_a_sequence_has_the_bits_that_it_has_alone(it: Attention, case: Case, causal: bool, dtype: torch.dtype) -> None:
    """NaN in padding changes nothing."""
    inputs, grad_y = it.inputs(*case.sizes, dtype)
    assert_as_alone(it, case, causal, spoilt(inputs, it, case, causal), *spoilt([grad_y], it, case, causal))


@CAUSAL
@EVERY_CASE
@EVERY
def test_the_reference_agrees(it: Attention, case: Case, causal: bool) -> None:
    inputs, grad_y = it.inputs(*case.sizes, torch.float64)
    options = {"causal": causal, **case.options}
    results = run(functools.partial(it.function, **options), inputs, grad_y)
    truths = run_truth(functools.partial(it.reference, **options), inputs, grad_y)
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result.cpu(), truth)


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_any_strides(it: Attention, layout: str) -> None:
    for case in (CASES["packed, fewer queries"], CASES["left, fewer queries"]):
        inputs, grad_y = it.inputs(*case.sizes)
        change = LAYOUTS[layout]
        assert_as_alone(it, case, True, [change(x) for x in inputs], change(grad_y))


@pytest.mark.cpu
@pytest.mark.isolated
@EVERY
def test_threads_change_no_bit(it: Attention) -> None:
    """A long sequence has all threads, short ones one each."""
    for case in (Case([2000, 30, 500, 0, 300], [2000, 30, 500, 0, 300]), CASES["right"], CASES["one"]):
        for causal in (True, False):
            function = functools.partial(it.function, causal=causal, **case.options)
            [*assert_threads_change_no_bit((1, 2, 3, 7, 16), run, function, *it.inputs(*case.sizes))]


@EVERY
def test_no_sequences(it: Attention) -> None:
    inputs, grad_y = it.inputs(1, 0, 0)
    y, *gradients = run(functools.partial(it.function, cu_seqlens=torch.tensor([0])), inputs, grad_y)
    assert y.shape == grad_y.shape
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    inputs, grad_y = it.inputs(0, 5, 5)
    run(functools.partial(it.function, lengths=torch.tensor([], dtype=torch.int64)), inputs, grad_y)


@CAUSAL
@EVERY
def test_forward_memory_is_y(it: Attention, causal: bool) -> None:
    """Nothing beside y and what calls take that run at the same time: on the CPU one in each thread, on CUDA all."""
    case = Case([512] * 6, [512] * 6)
    inputs, _ = it.inputs(*case.sizes)
    longest = it.part(inputs, slice(0, 1), slice(0, 512), slice(0, 512))

    def peak(inputs: list[Tensor], **options: Any) -> int:
        with track(device=DEVICE) as memory:
            y = it.function(*inputs, causal=causal, **options)
            return memory.peak_bytes - y.nbytes

    together = (
        torch.get_num_threads() if KERNELS == "cpu" else 2 * len(case.keys)
    )  # A sequence may begin within a tile.
    assert peak(inputs, **case.options) <= together * (peak(longest) + 64)


class Scratches(TorchDispatchMode):
    """Measures what each operator on sequences takes beside its outputs, and predicts it for these kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: dict[str, int] = {}
        self.predicted: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "memcheck":
            return func(*args, **(kwargs or {}))
        with track(device=DEVICE, saved=False) as memory:
            outputs = func(*args, **kwargs)
            peak = memory.peak_bytes
        call = call_of(func, args, kwargs, outputs, Target(KERNELS, threads=torch.get_num_threads()))
        self.measured[call.name] = peak - sum(x.nbytes for x in call.outputs)
        self.predicted[call.name] = sum(part.bytes for part in scratch_of(call) if isinstance(part, Scratch))
        return outputs


@CAUSAL
@EVERY
def test_scratch_is_predicted(it: Attention, causal: bool) -> None:
    for name in ("packed", "left"):
        inputs, grad_y = it.inputs(*CASES[name].sizes)
        with Scratches() as scratches:
            it.function(*inputs, causal=causal, **CASES[name].options)
            run(functools.partial(it.function, causal=causal, **CASES[name].options), inputs, grad_y)
        assert len(scratches.measured) == 2
        assert scratches.predicted == scratches.measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_scratch_of_calls_is_predicted(call: Configuration, dtype: torch.dtype) -> None:
    """With states, decays, sinks and windows."""
    longer_call = longer(call, 2 * TIMES)
    leaves = [
        x.detach().to(dtype if is_narrow else torch.float32).requires_grad_() for x, is_narrow in narrow(longer_call)
    ]
    with Scratches() as scratches:
        outputs = [x for x in flat(longer_call(*leaves)) if x.requires_grad]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
    assert scratches.measured
    assert scratches.predicted == scratches.measured


# ---- torch's own checks


@pytest.mark.glue
@CAUSAL
@EVERY
def test_compile(it: Attention, causal: bool) -> None:
    """One graph serves any number of sequences of any lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return it.function(q, k, v, causal=causal, cu_seqlens=cu_seqlens)

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend=backend)
    frames = []
    for lengths in ([700, 13], [3, 0, 800, 5], [520] * 3):
        inputs, grad_y = it.inputs(1, sum(lengths), sum(lengths))
        cu_seqlens = cumulative(lengths)
        results = [
            run(functools.partial(function, cu_seqlens=cu_seqlens), inputs, grad_y) for function in (compiled, packed)
        ]
        assert same_bits(*results)
        frames.append(backend.frame_count)
    assert len(set(frames)) == 1


# ---- errors


@EVERY
def test_a_packed_batch_has_one_row(it: Attention) -> None:
    inputs, _ = it.inputs(2, 7, 7)
    with pytest.raises(ValueError, match="packed sequences need a batch of one, B = 1, got B = 2"):
        it.function(*inputs, cu_seqlens=torch.tensor([0, 3, 7]))


@EVERY
def test_lengths_changed_before_the_backward_are_an_error(it: Attention) -> None:
    inputs, _ = it.inputs(1, 7, 7)
    lengths = torch.tensor([5])
    y = it.function(*(x.requires_grad_() for x in inputs), lengths=lengths)
    lengths.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

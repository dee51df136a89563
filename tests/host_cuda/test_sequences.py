"""Packed and padded batches on CUDA: launches, waits, lengths that break a rule, and sums over many chunks."""

import atexit
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_cuda import library
from ops.checks import generator, run, same_bits
from ops.test_sequences import ATTENTIONS, CAUSAL, Attention, Case, cumulative
from torch import Tensor

import memcheck

pytestmark = pytest.mark.host_cuda
# Those whose kernels take a table of sequences.
TAKE_TABLES = ("softplus", "compressed")
EVERY = pytest.mark.parametrize("it", [pytest.param(ATTENTIONS[name], id=name) for name in TAKE_TABLES])
MESSAGE = "cu_seqlens must ascend, got 10 at index 2 after 30"
NOT_ASCENDING = torch.tensor([0, 30, 10, 40])


def launches_of(function: Callable[[], object]) -> Counter[str]:
    before = Counter({name: of.count for name, of in library.launches().items()})
    function()
    return Counter({name: of.count for name, of in library.launches().items()}) - before


@CAUSAL
@pytest.mark.parametrize("padding", ["", "right"])
@EVERY
def test_launches_do_not_depend_on_the_number_of_sequences(it: Attention, padding: str, causal: bool) -> None:
    counts = []
    for number in (2, 50):
        case = Case([300 // number] * number, [300 // number] * number, padding, more=300 - 300 // number)
        inputs, grad_y = it.inputs(*case.sizes)
        call = functools.partial(it.function, causal=causal, **case.options)
        counts.append(launches_of(functools.partial(run, call, inputs, grad_y)))
    assert counts[0] == counts[1] != Counter()


@pytest.mark.parametrize("padding", ["", "right"])
def test_launches_with_states_do_not_depend_on_the_number_of_sequences(padding: str) -> None:
    counts = []
    for number in (2, 50):
        case = Case([300 // number] * number, [300 // number] * number, padding, more=300 - 300 // number)
        inputs, grad_y = ATTENTIONS["compressed"].inputs(*case.sizes)

        def twice(*inputs: Tensor, options: dict[str, Any] = case.options) -> Tensor:
            _, states = memcheck.compressed_attention(*inputs, factor=4, return_state=True, **options)
            return memcheck.compressed_attention(*inputs, factor=4, initial_state=states, **options)

        counts.append(launches_of(functools.partial(run, twice, inputs, grad_y)))
    assert counts[0] == counts[1] != Counter()


@EVERY
def test_no_call_waits_for_the_gpu(it: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host would wait."""
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    for case in (Case([100, 0, 200], [100, 0, 200]), Case([100, 0, 200], [100, 0, 200], "left")):
        (q, k, v), grad_y = it.inputs(*case.sizes)
        leaves, options = [x.requires_grad_() for x in (q, k, v)], case.options
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(it.function(*leaves, **options), leaves, grad_y)
        ran = {event.name for event in profile.events()}
        assert any(name.startswith("memcheck::") for name in ran)
        assert not ran & {"aten::item", "aten::_local_scalar_dense", "aten::copy_", "aten::_to_copy"}


@EVERY
def test_lengths_that_break_a_rule_are_raised_by_the_next_call(it: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever operator that calls. Kernels take all sequences for empty."""
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    (q, k, v), grad_y = it.inputs(1, 40, 40)
    it.function(q, k, v, cu_seqlens=NOT_ASCENDING)
    with pytest.raises(ValueError, match=MESSAGE):
        memcheck.combinator(torch.ones(2, 4), torch.ones(2, 4, 4))
    run(it.function, [q, k, v], grad_y)


@pytest.mark.isolated
def test_what_kernels_find_is_raised_on_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next call on it, by check_findings, or when Python exits; not by a call on another GPU."""
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    softplus, linear = ATTENTIONS["softplus"], ATTENTIONS["linear"]
    (q, k, v), _ = softplus.inputs(1, 40, 40)
    rows, _ = linear.inputs(1, 40, 40)
    for raise_findings in (memcheck.check_findings, functools.partial(memcheck.softplus_attention, q, k, v)):
        for wrong, message in (
            ({"cu_seqlens": NOT_ASCENDING}, MESSAGE),
            ({"decay": torch.full((2,), 2.0)}, "decay must"),
        ):
            of_rows = "decay" in wrong
            library.set_device(1)
            memcheck.linear_attention(*rows, causal=True, **wrong) if of_rows else softplus.function(q, k, v, **wrong)
            library.set_device(0)
            raise_findings()
            library.set_device(1)
            with pytest.raises(ValueError, match=message):
                raise_findings()
            raise_findings()
    softplus.function(q, k, v, cu_seqlens=NOT_ASCENDING)
    printed = []
    monkeypatch.setattr("sys.unraisablehook", printed.append)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    atexit._run_exitfuncs()
    assert MESSAGE in str(printed[0].exc_value)


@pytest.mark.isolated
def test_a_table_without_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched for it, but the check that finds the packed length wrong."""
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    none = torch.tensor([0])
    for it in ATTENTIONS.values():
        for causal in (True, False):
            (q, k, v), grad_y = it.inputs(1, 600, 600)
            for wants_gradient in (False, True):
                leaves = [x.requires_grad_(wants_gradient) for x in (q, k, v)]
                y = it.function(*leaves, causal=causal, cu_seqlens=none)
                with pytest.raises(ValueError, match="cu_seqlens must end with the packed length S = 600, got 0"):
                    memcheck.check_findings()
                if not wants_gradient:
                    continue
                y.backward(grad_y)
                with pytest.raises(ValueError, match="must end with the packed length S = 600, got 0"):
                    memcheck.check_findings()


@EVERY
def test_lengths_that_break_a_rule_are_raised_at_once_if_that_is_asked_for(it: Attention) -> None:
    (q, k, v), _ = it.inputs(1, 40, 40)
    with pytest.raises(ValueError, match=MESSAGE):
        it.function(q, k, v, cu_seqlens=NOT_ASCENDING)


def test_sums_over_many_chunks_have_the_same_bits_packed_and_alone() -> None:
    """Of softplus attention, whose blocks pass sums on in hops of 32 chunks, 8,192 positions."""
    lengths = [300, 9000, 17_000]
    T = sum(lengths)
    random = generator()
    inputs = [torch.randn(shape, generator=random) for shape in ((1, T, 1), (1, 1, T), (1, 1, T))]
    grad_y = torch.randn(1, T, 1, generator=random)
    packed = run(functools.partial(memcheck.softplus_attention, cu_seqlens=cumulative(lengths)), inputs, grad_y)
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = run(
            memcheck.softplus_attention, [inputs[0][:, part], *(x[..., part] for x in inputs[1:])], grad_y[:, part]
        )
        dims = (1, 1, 2, 2)
        assert same_bits([x.narrow(dim, first, length) for x, dim in zip(packed, dims, strict=True)], alone)
        first += length

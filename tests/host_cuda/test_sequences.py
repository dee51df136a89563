"""Packed and padded batches on CUDA: launches, waits, values that break a rule, and sums over many chunks."""

import functools
import re
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
from memcheck.ops.reference import compressed_attention as reference

pytestmark = pytest.mark.host_cuda
# Those whose kernels take a table of sequences.
TAKE_TABLES = ("softplus", "compressed")
EVERY = pytest.mark.parametrize("it", [pytest.param(ATTENTIONS[name], id=name) for name in TAKE_TABLES])
# Values that break a rule for 300 positions (padded: 3 rows), and the error.
HUGE = 2**62
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "begins behind 0": ({"cu_seqlens": [3, 20, 300]}, "cu_seqlens must begin with 0, got 3"),
    "begins before 0": ({"cu_seqlens": [-3, 20, 300]}, "cu_seqlens must begin with 0, got -3"),
    "ends too early": ({"cu_seqlens": [0, 20, 299]}, "cu_seqlens must end with the packed length S = 300, got 299"),
    "ends too late": ({"cu_seqlens": [0, 20, 301]}, "cu_seqlens must end with the packed length S = 300, got 301"),
    "ends far behind": ({"cu_seqlens": [0, HUGE]}, f"cu_seqlens must end with the packed length S = 300, got {HUGE}"),
    "has no sequence": ({"cu_seqlens": [0]}, "cu_seqlens must end with the packed length S = 300, got 0"),
    "descends": ({"cu_seqlens": [0, 30, 10, 300]}, "cu_seqlens must ascend, got 10 at index 2 after 30"),
    "descends below 0": ({"cu_seqlens": [0, -9, 300]}, "cu_seqlens must ascend, got -9 at index 1 after 0"),
    "exceeds the length": ({"cu_seqlens": [0, 900, 300]}, "cu_seqlens must ascend, got 300 at index 2 after 900"),
    "wraps around": (
        {"cu_seqlens": [0, 2**63 - 1, -2, 300]},
        f"cu_seqlens must ascend, got -2 at index 2 after {2**63 - 1}",
    ),
    "keys begin behind 0": (
        {"cu_seqlens_q": [0, 20, 300], "cu_seqlens_k": [1, 20, 300]},
        "cu_seqlens_k must begin with 0, got 1",
    ),
    "keys end too late": (
        {"cu_seqlens_q": [0, 20, 300], "cu_seqlens_k": [0, 20, 310]},
        "cu_seqlens_k must end with the packed length T = 300, got 310",
    ),
    "more queries than keys": (
        {"cu_seqlens_q": [0, 20, 300], "cu_seqlens_k": [0, 19, 300], "causal": True},
        "causal needs no more queries than keys, got 20 queries and 19 keys of sequence 0",
    ),
    "too long": ({"lengths": [300, 301, 3]}, "lengths must be from 0 to T = 300, got 301 at index 1"),
    "far too long": (
        {"lengths": [HUGE, 4, 3], "padding": "left"},
        f"lengths must be from 0 to T = 300, got {HUGE} at index 0",
    ),
    "negative": ({"lengths": [300, 4, -1]}, "lengths must be from 0 to T = 300, got -1 at index 2"),
}


def wrong_call(it: Attention, wrong: dict[str, Any]) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    options = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in wrong.items()}
    inputs, grad_y = it.inputs(3 if "lengths" in wrong else 1, 300, 300)
    return functools.partial(it.function, **options), inputs, grad_y


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


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("it", ATTENTIONS.values(), ids=ATTENTIONS)
def test_memory_is_kept_to_where_values_break_a_rule(it: Attention, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences count as empty, so rows of a padded batch are 0. With a sanitizer, detects access outside tensors."""
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    wrong, _ = WRONG[name]
    for causal in (True, False):
        call, inputs, grad_y = wrong_call(it, {"causal": causal} | wrong)
        results = run(call, inputs, grad_y)
        assert "lengths" not in wrong or not any(x.any() for x in results)


@pytest.mark.parametrize("name", WRONG)
@EVERY
def test_values_that_break_a_rule_are_raised_if_that_is_asked_for(it: Attention, name: str) -> None:
    wrong, message = WRONG[name]
    call, inputs, _ = wrong_call(it, wrong)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*inputs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decay": torch.tensor([1.0, 2.0])}, "decay must be in (0, 1], got 2"),
        ({"decay": torch.tensor([0.0, 1.0])}, "decay must be in (0, 1], got 0"),
        ({"log_decay": torch.tensor([0.0, 0.5])}, "log_decay must be at most 0, got 0.5"),
        ({"log_decay": torch.full((3, 2, 40), torch.nan)}, "log_decay must be at most 0, got nan"),
    ],
)
def test_decays_that_break_a_rule_are_raised_if_that_is_asked_for(
    wrong: dict[str, Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of padding are not read."""
    inputs, _ = ATTENTIONS["linear"].inputs(3, 40, 40)
    call = functools.partial(memcheck.linear_attention, *inputs, causal=True, lengths=torch.tensor([40, 0, 7]))
    with pytest.raises(ValueError, match=re.escape(f"linear_attention: {message}")):
        call(**wrong)
    of_padding = torch.full((3, 2, 40), 0.5)
    of_padding[1], of_padding[2, :, 7:] = 2, torch.nan
    call(decay=of_padding)
    monkeypatch.setenv("MEMCHECK_CHECK", "0")
    call(**wrong)


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


@pytest.mark.parametrize("packed", [True, False])
def test_new_blocks_of_more_sequences_than_a_launch_takes(packed: bool) -> None:
    """Compressed attention's table of new positions is a parameter of the kernel, which takes 60 sequences."""
    N, factor = 130, 4
    counts = [i % 7 for i in range(N)]
    positions = [i % factor for i in range(N)]
    begins = [sum(counts[:i]) if packed else i % 3 for i in range(N)]
    rooms = [(positions[i] + counts[i]) // factor + i % 2 for i in range(N)]
    places = cumulative(rooms).tolist()
    random = generator()
    shapes = [(1, 2, sum(counts), 3) if packed else (N, 2, 10, 3)] * 2 + [(N, 2, 3)] * 2
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    options = {
        "positions": positions, "factor": factor, "begins": begins, "counts": counts, "places": places, "packed": packed
    }  # fmt: skip
    results = []
    for extend in (torch.ops.memcheck.compressed_attention_extend, reference.compressed_attention_extend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = extend(*leaves, **options)
        grads = [torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape) for x in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    torch.testing.assert_close(*results)
    launches = launches_of(lambda: torch.ops.memcheck.compressed_attention_extend(*inputs, **options))
    assert launches["compressed_attention_extend"] == 3

"""CUDA kernels on the host: they are launched, and the order in which threads run changes no bit."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from host_cuda import library, widest
from ops.checks import DTYPES, LAYOUTS, assert_contract, run, same_bits
from ops.operators import OPERATORS, SOFTPLUS, Operator
from ops.test_compressed_merging import make_more, run_both
from torch import Tensor

import memcheck

pytestmark = pytest.mark.host_cuda
# The projections have no kernels of their own.
WITH_KERNELS = {name: operator for name, operator in OPERATORS.items() if not operator.name.startswith("linear_")} | {
    name: operator for name, operator in OPERATORS.items() if operator.name == "linear_attention"
}
EVERY = pytest.mark.parametrize("it", WITH_KERNELS.values(), ids=WITH_KERNELS)


@EVERY
def test_kernels_of_cuda_run(it: Operator) -> None:
    inputs, grad_y = it.inputs(it.small)
    before = library.launches()
    run(it.function, inputs, grad_y)
    ran = {name for name, of in library.launches().items() if name not in before or of.count > before[name].count}
    stem = it.name.removesuffix("_pooled")
    assert any(name.startswith(f"{stem}_forward") for name in ran)
    assert any(name.startswith(f"{stem}_backward") for name in ran)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_of_threads_changes_no_bit(it: Operator, dtype: torch.dtype) -> None:
    inputs, grad_y = it.inputs(it.middle, dtype)
    results = []
    try:
        for order in library.ORDERS:
            library.set_order(order)
            results.append(run(it.function, inputs, grad_y))
    finally:
        library.set_order("ascending")
    assert all(same_bits(result, results[0]) for result in results)
    assert not any(result.isnan().any() for result in results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_threads_changes_no_bit_of_a_sink_and_its_gradient(dtype: torch.dtype) -> None:
    inputs, grads = make_more(2, 4, 2, 40, 50, 20, dtype=dtype)
    results = []
    try:
        for order in library.ORDERS:
            library.set_order(order)
            results.append(run_both(functools.partial(memcheck.compressed_attention, factor=7), inputs, grads))
    finally:
        library.set_order("ascending")
    assert all(same_bits(result, results[0]) for result in results)


def test_a_sink_takes_one_launch_more() -> None:
    inputs, grads = make_more(2, 4, 2, 40, 50, 20)
    before = {name: of.count for name, of in library.launches().items()}
    for sink in (None, inputs[3]):
        run_both(functools.partial(memcheck.compressed_attention, factor=7), [*inputs[:3], sink], grads)
    more = {name: of.count - before.get(name, 0) for name, of in library.launches().items()}
    odd = [name for name, count in more.items() if count % 2]
    assert odd == ["compressed_attention_backward_sinks"]


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "every second column", "at an offset", "transposed"])
def test_memory_is_kept_to(it: Operator, dtype: torch.dtype, layout: str) -> None:
    """With a sanitizer, detects access outside tensors and shared memory, and misaligned access."""
    for sizes in (it.small, it.middle) if layout == "dense" else (it.small,):
        *inputs, grad_y = [LAYOUTS[layout](x) for x in it.inputs(sizes, dtype)[0] + [it.inputs(sizes, dtype)[1]]]
        assert not any(result.isnan().any() for result in run(it.function, inputs, grad_y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_kept_to_at_the_end_of_a_row(dtype: torch.dtype) -> None:
    """The last tile of 32 keys begins at a multiple of 16 bytes, and less than a pack of the row is behind it."""
    of_pack = 16 // dtype.itemsize
    length, channels = 64 + of_pack - 1, of_pack + 1
    inputs, grad_y = SOFTPLUS.make(1, length, length, channels, dtype)
    assert not any(result.isnan().any() for result in run(SOFTPLUS.function, inputs, grad_y))


# ---- what GPUs allow


@pytest.fixture
def stand_for() -> Iterator[Callable[[str], None]]:
    yield library.stand_for
    library.stand_for(library.this_gpu())


@pytest.mark.parametrize("it", [pytest.param(it, id=it.name) for it in widest.passes()])
def test_kernels_run_where_shared_memory_is_least_and_most(it: widest.Widest, stand_for: Callable[[str], None]) -> None:
    """99 KiB for a block, and 227 KiB."""
    inputs, grad_y = it.make_inputs()
    stand_for("8.6")
    least = assert_contract(it.contract, inputs, grad_y)
    stand_for("9.0")
    most = run(it.contract.function, inputs, grad_y)
    assert same_bits(most, least) if it.same_everywhere else not any(result.isnan().any() for result in most)


def test_decoding_runs_where_shared_memory_is_least_and_most(stand_for: Callable[[str], None]) -> None:
    results: dict[str, list[Tensor]] = {}
    for gpu in ("8.6", "9.0"):
        stand_for(gpu)
        results[gpu] = [step() for _, step in widest.steps()]
    assert same_bits(results["8.6"], results["9.0"])
    assert not any(y.isnan().any() for y in results["8.6"])


def test_sinks_run_where_shared_memory_is_least_and_most(stand_for: Callable[[str], None]) -> None:
    results: dict[str, list[Tensor]] = {}
    for gpu in ("8.6", "9.0"):
        stand_for(gpu)
        results[gpu] = [result for _, both in widest.sinks() for result in both()]
    assert same_bits(results["8.6"], results["9.0"])
    assert not any(result.isnan().any() for result in results["8.6"])


def test_a_gpu_that_is_too_old_is_named_once(stand_for: Callable[[str], None]) -> None:
    """The operator raises the error and leaves no pending CUDA error."""
    x = torch.randn(1, 2, 3)
    stand_for("7.5")
    words = r"softplus_attention\S*: memcheck's CUDA kernels need a GPU of compute capability 8\.0 or later, got 7\.5"
    with pytest.raises(RuntimeError, match=words):
        memcheck.softplus_attention(x, x.mT, x.mT)
    assert library.last_error() == 0
    with pytest.raises(RuntimeError, match=words.replace("softplus", "linear")):
        memcheck.linear_attention(x[None], x[None], x[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_of_linear_attention_do_not_depend_on_the_number_of_sequences(dtype: torch.dtype) -> None:
    """Nor on whether a sequence is cut into segments."""
    x, decay = torch.randn(1, 2, 1200, 16, dtype=dtype), torch.rand(1, 2, 1200).clamp(min=0.5)
    counts = []
    for ends in ([0, 1200], [0, 0, 1, 700, 800, 800, 1150, 1200]):
        library.forget_launches()
        leaves = [y.clone().requires_grad_() for y in (x, x, x, decay)]
        cu_seqlens = torch.tensor(ends)
        q, k, v, a = leaves
        memcheck.linear_attention(q, k, v, causal=True, decay=a, cu_seqlens=cu_seqlens).sum().backward()
        counts.append({name: of.count for name, of in library.launches().items()})
    assert counts[0] == counts[1]
    assert counts[0]["linear_attention_add_up"] >= 3

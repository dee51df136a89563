"""CUDA kernels under the stand-in: it is they that run, and the order in which threads take turns changes no bit."""

import pytest
import torch
from host_cuda import library
from ops.checks import DTYPES, LAYOUTS, run, same_bits
from ops.test_all_operators import OPERATORS, Operator

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
@pytest.mark.parametrize("dtype", DTYPES)
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


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "every second column", "at an offset", "transposed"])
def test_memory_is_kept_to(it: Operator, dtype: torch.dtype, layout: str) -> None:
    """Under a sanitizer: neither beside a tensor nor beside shared memory, nor at an address a GPU would refuse."""
    for sizes in (it.small, it.middle) if layout == "dense" else (it.small,):
        *inputs, grad_y = [LAYOUTS[layout](x) for x in it.inputs(sizes, dtype)[0] + [it.inputs(sizes, dtype)[1]]]
        assert not any(result.isnan().any() for result in run(it.function, inputs, grad_y))

"""`memcheck.track` on a GPU counts the bytes asked for, not the blocks the caching allocator rounds them to."""

import pytest
import torch

import memcheck

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("side", [63, 1024])
def test_one_result(side: int) -> None:
    x = torch.ones(side, side, device="cuda")  # [side, side]
    y = x @ x  # cuBLAS takes its workspace at the first product
    del y
    with memcheck.track(x) as m:
        y = x @ x
    assert m.current_bytes == y.numel() * y.element_size()
    assert m.peak_bytes == m.current_bytes


def test_a_temporary_counts_in_the_peak_alone() -> None:
    x = torch.ones(1000, device="cuda")  # [1000]
    with memcheck.track(x) as m:
        y = (x + 1) * 2
    assert m.current_bytes == y.nbytes
    assert m.peak_bytes == 2 * y.nbytes

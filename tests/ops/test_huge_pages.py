"""Large results ask for huge pages, as the flags of their mappings in /proc/self/smaps show."""

import mmap
import platform
import sys
from pathlib import Path

import pytest
import torch
from forked import run_python

import memcheck

SMAPS = Path("/proc/self/smaps")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages here"
    ),
]


def flags_of_memory_at(address: int) -> set[str]:
    """Returns the kernel's flags of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(bound, 16) for bound in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[0] == "VmFlags:":
            return set(words[1:])
    raise AssertionError(f"{address:#x} lies in no mapping")


def test_large_results_and_gradients_ask_for_huge_pages() -> None:
    q, k, v = (torch.randn(1024, 1, 256, 64, requires_grad=True) for _ in range(3))
    y = memcheck.linear_attention(q, k, v)
    y.sum().backward()
    for x in (y, q.grad, k.grad, v.grad):
        assert x.nbytes == 64 * 2**20
        for byte in (0, x.nbytes // 2, x.nbytes - 1):
            assert "hg" in flags_of_memory_at(x.data_ptr() + byte)


@pytest.mark.isolated
def test_pages_of_neighbours_stay_as_they_are() -> None:
    """A result of 4 to 32 MiB lies among other tensors, and shares its first and its last page with them."""
    y = memcheck.linear_attention(*torch.randn(3, 1, 8, 4096, 64))
    assert y.nbytes == 8 * 2**20
    first, last = y.data_ptr(), y.data_ptr() + y.nbytes - 1
    assert first % mmap.PAGESIZE != 0
    assert "hg" not in flags_of_memory_at(first)
    assert "hg" in flags_of_memory_at(first + mmap.PAGESIZE)
    assert "hg" in flags_of_memory_at(last - mmap.PAGESIZE)
    assert "hg" not in flags_of_memory_at(last)


# Prints how many of several results begin one page below a multiple of 2 MiB.
RESULTS_ON_A_BORDER = """
import torch, memcheck

x = torch.randn(1, 1, 4096, 64)
inputs = [[x.expand(size, 8, 4096, 64)] * 3 for size in (4, 5, 4, 6, 4, 7, 4, 4)]
results = [memcheck.linear_attention(*qkv) for qkv in inputs]
print(sum((y.data_ptr() // 4096 + 1) % 512 == 0 for y in results))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or mmap.PAGESIZE != 4096, reason="another malloc or page")
def test_results_with_their_own_mapping_begin_at_a_huge_page() -> None:
    done = run_python("-c", RESULTS_ON_A_BORDER, timeout=120)
    # By chance it would be one in 512. It need not be all: the allocator tries a limited number of places.
    assert int(done.stdout) >= 6

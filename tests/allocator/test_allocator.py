"""The CUDA caching allocator as Python calls it, against the known behaviour of the allocator."""

from __future__ import annotations

import itertools
import random

import pytest

from memcheck.allocator import MIB, AllocatorSettings, Block, CachingAllocator, OutOfMemory

EXPANDABLE = AllocatorSettings("expandable_segments:True")
SMALL, LARGE = "segments of 2 MiB, small pool", "segments of 20 MiB"


def figures(allocator: CachingAllocator) -> tuple[int, int, int]:
    return allocator.requested.current, allocator.allocated.current, allocator.reserved.current


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # From 10 MiB on, a block has its own segment, which is split only if more than 1 MiB is left.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        # The sizes of cuBLAS workspaces.
        (8_519_680, 8_519_680, 20 * MIB),
        (32 * MIB, 32 * MIB, 32 * MIB),
    ],
)
def test_a_request_in_an_empty_cache(requested: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert figures(allocator) == (requested, allocated, reserved)


def test_a_request_of_0_bytes_is_no_block() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(0)
    allocator.free(block)
    assert (block, figures(allocator)) == (None, (0, 0, 0))


def test_small_requests_share_segments() -> None:
    allocator = CachingAllocator()
    for _ in range(5):
        allocator.malloc(MIB // 2)
    assert allocator.segments() == {SMALL: 4 * MIB}
    allocator.malloc(5 * MIB)
    allocator.malloc(5 * MIB)
    assert allocator.segments() == {SMALL: 4 * MIB, LARGE: 20 * MIB}


def test_a_large_block_is_split_only_for_more_than_a_mib() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    snug = allocator.malloc(19 * MIB)
    assert snug is not None
    assert (snug.bytes, figures(allocator)) == (20 * MIB, (19 * MIB, 20 * MIB, 20 * MIB))
    allocator.free(snug)
    loose = allocator.malloc(19 * MIB - 512)
    assert loose is not None
    assert loose.bytes == 19 * MIB - 512


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, middle, small = (allocator.malloc(size * MIB) for size in (40, 30, 20))
    assert middle is not None
    address = middle.address
    for block in (large, middle, small):
        allocator.free(block)
    taken = allocator.malloc(25 * MIB)
    assert taken is not None
    assert taken.address == address
    assert allocator.reserved.current == 90 * MIB


def test_neighbours_become_one_block_again() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB))
    parts = [allocator.malloc(10 * MIB) for _ in range(4)]
    assert allocator.reserved.current == 40 * MIB
    for index in (1, 3, 2, 0):  # in the middle, at the end, between free blocks, at the beginning
        allocator.free(parts[index])
    whole = allocator.malloc(40 * MIB)
    assert whole is not None
    assert (whole.bytes, allocator.reserved.current, len(allocator.pieces())) == (40 * MIB, 40 * MIB, 1)


def test_cached_segments_are_released_before_memory_runs_out() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    assert (allocator.reserved.current, allocator.reserved.peak) == (70 * MIB, 70 * MIB)
    with pytest.raises(OutOfMemory) as refused:
        allocator.malloc(31 * MIB)
    assert (refused.value.requested_bytes, refused.value.in_use_bytes) == (32 * MIB, 70 * MIB)
    allocator.malloc(30 * MIB)


def test_a_segment_that_is_partly_in_use_stays() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    whole = allocator.malloc(40 * MIB)
    allocator.free(whole)
    kept = allocator.malloc(4 * MIB)  # part of the 40
    with pytest.raises(OutOfMemory):
        allocator.malloc(50 * MIB)
    assert allocator.reserved.current == 40 * MIB
    allocator.free(kept)
    allocator.malloc(50 * MIB)
    assert allocator.reserved.current == 50 * MIB


def test_a_small_request_may_be_out_of_memory_beside_a_large_free_block() -> None:
    allocator = CachingAllocator(limit_bytes=41 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(2 * MIB)  # part of the 40
    with pytest.raises(OutOfMemory):
        allocator.malloc(512)


def test_empty_cache_keeps_what_is_in_use() -> None:
    allocator = CachingAllocator()
    kept, freed = allocator.malloc(30 * MIB), allocator.malloc(50 * MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved.current == 30 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert (figures(allocator), allocator.segments()) == ((0, 0, 0), {})


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = CachingAllocator(settings=EXPANDABLE)
    first = allocator.malloc(30 * MIB)
    assert first is not None
    assert (first.bytes, allocator.reserved.current) == (30 * MIB, 40 * MIB)
    allocator.malloc(25 * MIB)  # 10 of the 25 are there already
    assert allocator.reserved.current == 60 * MIB
    allocator.malloc(512)
    assert allocator.segments() == {"pages of 20 MiB": 60 * MIB, "pages of 2 MiB, small pool": 2 * MIB}
    allocator.free(first)
    allocator.malloc(26 * MIB)  # splits a block; segments that are not expandable would not be split
    assert figures(allocator)[1:] == (51 * MIB + 512, 62 * MIB)


def test_expandable_segments_give_back_whole_pages_and_fill_the_gap() -> None:
    allocator = CachingAllocator(limit_bytes=120 * MIB, settings=EXPANDABLE)
    first, second = allocator.malloc(50 * MIB), allocator.malloc(50 * MIB)
    assert first is not None
    assert second is not None
    address = first.address
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved.current == 60 * MIB  # 10 MiB of the first block lie on a page of the second
    again = allocator.malloc(45 * MIB)
    assert again is not None
    assert (again.address, allocator.reserved.current) == (address, 100 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit_bytes", [None, 200 * MIB])
def test_the_counters_agree_after_any_requests(expandable: bool, limit_bytes: int | None) -> None:
    chance = random.Random(0)
    allocator = CachingAllocator(limit_bytes, EXPANDABLE if expandable else None)
    alive: list[Block] = []
    refused = 0
    for _ in range(3000):
        if chance.random() < 0.55 or not alive:
            try:
                block = allocator.malloc(int(2 ** chance.uniform(0, 26)))
            except OutOfMemory:
                refused += 1
                allocator.free(alive.pop(0))
            else:
                assert block is not None
                alive.append(block)
        else:
            allocator.free(alive.pop(chance.randrange(len(alive))))
        spans = sorted((block.address, block.address + block.bytes) for block in alive)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert allocator.requested.current == sum(block.requested for block in alive)
        assert allocator.allocated.current == sum(block.bytes for block in alive)
        assert allocator.allocated.current <= allocator.reserved.current == sum(allocator.segments().values())
        assert limit_bytes is None or allocator.reserved.current <= limit_bytes
    assert (refused > 0) is (limit_bytes is not None)
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert figures(allocator) == (0, 0, 0)


def test_blocks_are_listed_by_segment() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(3 * MIB), allocator.malloc(1000)
    assert large is not None
    assert small is not None
    assert allocator.pieces() == [
        (small.address, small.address, 1024, 1000, True, True, False),
        (small.address, small.address + 1024, 2 * MIB - 1024, 0, False, True, False),
        (large.address, large.address, 3 * MIB, 3 * MIB, True, False, False),
        (large.address, large.address + 3 * MIB, 17 * MIB, 0, False, False, False),
    ]


def test_events_are_read_from_any_on() -> None:
    allocator = CachingAllocator(40 * MIB)
    block = allocator.malloc(30 * MIB)
    assert block is not None
    assert allocator.events() == [
        ("segment_alloc", 30 * MIB, block.address, 0),
        ("alloc", 30 * MIB, block.address, 0),
    ]
    with pytest.raises(OutOfMemory):
        allocator.malloc(20 * MIB)
    assert allocator.events(2) == [("oom", 20 * MIB, 10 * MIB, 0)]
    assert allocator.events(3) == []

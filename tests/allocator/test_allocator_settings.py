"""The model of the CUDA caching allocator with settings, streams, private pools, and the orders of torch's versions."""

from __future__ import annotations

from typing import Any

import pytest

from memcheck.allocator import MIB, AllocatorSettings, Block, CachingAllocator, Order, OutOfMemory

parse = AllocatorSettings.parse


def block_of(allocator: CachingAllocator, size: int, **how: Any) -> Block:
    block = allocator.malloc(size, **how)
    assert block is not None
    return block


def test_settings_are_read_as_torch_reads_them() -> None:
    assert parse("") == AllocatorSettings()
    text = (
        "expandable_segments:True, max_split_size_mb:256,garbage_collection_threshold:0.8,pinned_num_register_threads:2"
    )
    assert parse(text) == AllocatorSettings(True, 256 * MIB, garbage_collection_threshold=0.8)
    assert parse("backend:native,large_segment_size_mb:40").large_segment_size == 40 * MIB
    assert parse("max_non_split_rounding_mb:64,per_process_memory_fraction:0.5") == AllocatorSettings(
        max_non_split_rounding=64 * MIB, memory_fraction=0.5
    )
    assert parse("roundup_power2_divisions:8").roundup_divisions == (8,) * 16
    # The last one also replaces that of the interval from 1,024 MiB, as in torch.
    assert parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_divisions == (*(1,) * 9, 2, *(8,) * 6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb", "must look like 'expandable_segments:True,max_split_size_mb:256'"),
        ("max_split_size_mb:10", "must be an integer of at least 20, got '10'"),
        ("max_splitsize_mb:100", "max_splitsize_mb is unknown; known: expandable_segments,"),
        ("expandable_segments:yes", "must be True or False"),
        ("backend:cudaMallocAsync", "is another allocator, which has no model"),
        ("garbage_collection_threshold:2", "must be between 0 and 1"),
        ("roundup_power2_divisions:3", "must be powers of two"),
        ("roundup_power2_divisions:[300:2]", "must look like"),
    ],
)
def test_other_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1, 512),
        (1500, 1536),
        (1200 * MIB, 1280 * MIB),
        (1280 * MIB, 1280 * MIB),
        (1281 * MIB, 1536 * MIB),
        (2**30, 2**30),
    ],
)
def test_sizes_are_rounded_to_parts_of_a_power_of_two(size: int, rounded: int) -> None:
    assert parse("roundup_power2_divisions:4").rounded(size) == rounded


def test_large_blocks_are_not_split_and_serve_only_requests_of_about_their_size() -> None:
    allocator = CachingAllocator(limit_bytes=400 * MIB, settings=parse("max_split_size_mb:100"))
    allocator.free(block_of(allocator, 200 * MIB))
    small = block_of(allocator, 30 * MIB)
    assert allocator.reserved.current == 230 * MIB  # The 200 would have to be split.
    assert block_of(allocator, 185 * MIB).bytes == 200 * MIB  # They are not, but fit closely enough.
    allocator.free(small)
    with pytest.raises(OutOfMemory):
        allocator.malloc(240 * MIB)


def test_only_as_many_large_blocks_are_released_as_are_needed() -> None:
    allocator = CachingAllocator(limit_bytes=400 * MIB, settings=parse("max_split_size_mb:100"))
    for block in [block_of(allocator, size * MIB) for size in (20, 160, 150)]:
        allocator.free(block)
    block_of(allocator, 180 * MIB)  # The 160 alone are too few; with the 150 there is room.
    assert allocator.reserved.current == 200 * MIB  # The 20 stay.


def test_old_segments_are_collected_beyond_the_threshold() -> None:
    settings = parse("garbage_collection_threshold:0.5")
    allocator = CachingAllocator(settings=settings, allowed_bytes=200 * MIB)
    old, young, busy = (block_of(allocator, size * MIB) for size in (60, 50, 20))
    allocator.free(old)
    for _ in range(2):
        allocator.free(busy)
        busy = block_of(allocator, 20 * MIB)
    allocator.free(young)
    assert allocator.reserved.current == 130 * MIB
    allocator.malloc(70 * MIB)  # 30 MiB more than half of the limit: the segment that was free for longest goes.
    assert allocator.reserved.current == 140 * MIB
    unlimited = CachingAllocator(settings=settings)
    unlimited.free(block_of(unlimited, 60 * MIB))
    block_of(unlimited, 80 * MIB)
    assert unlimited.reserved.current == 140 * MIB


@pytest.mark.parametrize(
    ("version", "taken"), [((2, 11), "second segment"), ((2, 12), "first segment"), ((2, 15), "first segment")]
)
def test_the_version_decides_among_blocks_of_a_size(version: tuple[int, int], taken: str) -> None:
    """Later segments have lower addresses."""
    allocator = CachingAllocator(order=Order.of(version))
    first, second = block_of(allocator, 30 * MIB), block_of(allocator, 30 * MIB)
    addresses = {first.address: "first segment", second.address: "second segment"}
    allocator.free(second)
    allocator.free(first)
    assert addresses[block_of(allocator, 30 * MIB).address] == taken


def test_the_order_of_creation_counts_blocks_or_segments() -> None:
    """In 2.12 what is cut off is a new block, and the rest an old one; since 2.13 both are as old as their segment."""
    taken = {}
    for version in ((2, 12), (2, 13)):
        allocator = CachingAllocator(order=Order.of(version))
        segments = [block_of(allocator, 20 * MIB) for _ in range(2)]
        for segment in segments:
            allocator.free(segment)
        parts = [block_of(allocator, 5 * MIB) for _ in range(4)]  # The first segment, from its begin to its end.
        addresses = [part.address for part in parts]
        allocator.free(parts[0])
        allocator.free(parts[3])
        taken[version] = addresses.index(block_of(allocator, 5 * MIB).address)
    assert taken == {(2, 12): 3, (2, 13): 0}


def test_a_stream_does_not_use_the_blocks_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(block_of(allocator, 30 * MIB, stream=1))
    block_of(allocator, 30 * MIB)
    assert allocator.reserved.current == 60 * MIB
    block_of(allocator, 30 * MIB, stream=1)
    assert allocator.reserved.current == 60 * MIB


def test_a_block_that_another_stream_uses_is_free_only_when_that_has_finished() -> None:
    allocator = CachingAllocator(limit_bytes=70 * MIB)
    block = block_of(allocator, 30 * MIB)
    allocator.record_stream(block, 0)  # Its own.
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert (allocator.allocated.current, allocator.requested.current) == (0, 30 * MIB)
    other = block_of(allocator, 30 * MIB)
    assert allocator.reserved.current == 60 * MIB
    allocator.complete(block)
    assert (allocator.allocated.current, allocator.requested.current) == (30 * MIB, 30 * MIB)
    again = block_of(allocator, 30 * MIB)
    allocator.record_stream(again, 1)
    allocator.free(again)
    allocator.free(other)
    block_of(allocator, 40 * MIB)  # Before memory runs out, the allocator waits for all streams.
    assert allocator.reserved.current == 40 * MIB


def test_memory_of_private_pools_stays_until_the_last_graph_is_gone() -> None:
    allocator = CachingAllocator()
    allocator.free(block_of(allocator, 30 * MIB, private=1))
    block_of(allocator, 30 * MIB)
    allocator.empty_cache()
    assert allocator.reserved.current == 60 * MIB
    allocator.release_pool(1)
    allocator.empty_cache()
    assert allocator.reserved.current == 30 * MIB


def test_a_limit_of_the_process_counts_requests_and_not_pages() -> None:
    """130 MiB are 7 pages of 20 MiB: torch compares the limit with what is reserved and the request."""
    settings = AllocatorSettings(expandable_segments=True)
    allowed = CachingAllocator(settings=settings, allowed_bytes=130 * MIB)
    block_of(allowed, 130 * MIB)
    assert allowed.reserved.current == 140 * MIB
    with pytest.raises(OutOfMemory):
        CachingAllocator(limit_bytes=130 * MIB, settings=settings).malloc(130 * MIB)
    shared = CachingAllocator(settings=parse("per_process_memory_fraction:0.5"), total_bytes=200 * MIB)
    block_of(shared, 100 * MIB)
    with pytest.raises(OutOfMemory):
        shared.malloc(512)


def test_an_expandable_segment_has_nine_eighths_of_the_addresses_of_the_gpu() -> None:
    """Between blocks in use there may be room for no other; then another segment is made."""
    settings = AllocatorSettings(expandable_segments=True)
    allocator = CachingAllocator(settings=settings, total_bytes=160 * MIB)
    parts = [block_of(allocator, 20 * MIB) for _ in range(8)]
    base = parts[0].base
    for part in parts[::2]:
        allocator.free(part)
    allocator.empty_cache()
    assert block_of(allocator, 20 * MIB).base == base
    assert block_of(allocator, 60 * MIB).base != base
    assert allocator.reserved.current == 160 * MIB


def test_the_size_of_segments_and_pages_is_a_setting() -> None:
    allocator = CachingAllocator(settings=parse("large_segment_size_mb:40"))
    block_of(allocator, 5 * MIB)
    assert allocator.segments() == {"segments of 40 MiB": 40 * MIB}
    allocator = CachingAllocator(settings=parse("large_segment_size_mb:40,expandable_segments:True"))
    block_of(allocator, 41 * MIB)
    assert allocator.segments() == {"pages of 40 MiB": 80 * MIB}

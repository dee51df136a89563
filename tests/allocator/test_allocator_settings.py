"""Settings of the CUDA caching allocator as Python reads them, limits, and the orders of torch's versions.

What each setting does is tested in tests/simulated/test_caching_allocator.py.
"""

from __future__ import annotations

import pytest

from memcheck.allocator import MIB, AllocatorSettings, Block, CachingAllocator, Order, OutOfMemory

parse = AllocatorSettings.parse


def block_of(allocator: CachingAllocator, size: int, stream: int = 0) -> Block:
    block = allocator.malloc(size, stream)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("text", "equal"),
    [
        ("", ""),
        ("expandable_segments:False,backend:native,pinned_num_register_threads:2", ""),
        (" max_split_size_mb : 256 , expandable_segments:True,", "expandable_segments:True,max_split_size_mb:256"),
        ("garbage_collection_threshold:0.80", "garbage_collection_threshold:0.8"),
        # Segments of another size also change what a block that is not split may leave unused.
        ("large_segment_size_mb:40,max_non_split_rounding_mb:40", "large_segment_size_mb:40"),
        ("roundup_power2_divisions:[1:8,>:8]", "roundup_power2_divisions:8"),
        ("max_split_size_mb:64,max_split_size_mb:128", "max_split_size_mb:128"),
        ("per_process_memory_fraction:0.1234567891", "per_process_memory_fraction:0.1234567891"),
        ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom:True"),
    ],
)
def test_settings_are_read_as_torch_reads_them(text: str, equal: str) -> None:
    assert str(parse(text)) == equal
    assert parse(equal) == parse(text)


def test_options_of_a_text_change_settings() -> None:
    settings = parse("expandable_segments:True,max_split_size_mb:64")
    assert settings.changed_by("max_split_size_mb:128") == parse("expandable_segments:True,max_split_size_mb:128")
    assert settings.changed_by("expandable_segments:False") == parse("max_split_size_mb:64")
    assert (settings.value("max_split_size_mb"), settings.value("large_segment_size_mb")) == ("64", None)
    with pytest.raises(ValueError, match="max_split_size_mb must be an integer of at least 100, got '64'"):
        settings.changed_by("large_segment_size_mb:100")


def test_other_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown allocator setting 'max_splitsize_mb', got '100'"):
        parse("max_splitsize_mb:100")


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


def test_a_limit_of_the_process_counts_requests_and_not_pages() -> None:
    """130 MiB are 7 pages of 20 MiB: torch compares the limit with what is reserved and the request."""
    settings = parse("expandable_segments:True")
    allowed = CachingAllocator(settings=settings, allowed_bytes=130 * MIB)
    block_of(allowed, 130 * MIB)
    assert allowed.reserved.current == 140 * MIB
    with pytest.raises(OutOfMemory):
        CachingAllocator(limit_bytes=130 * MIB, settings=settings).malloc(130 * MIB)
    shared = CachingAllocator(settings=parse("per_process_memory_fraction:0.5"), total_bytes=200 * MIB)
    block_of(shared, 100 * MIB)
    with pytest.raises(OutOfMemory):
        shared.malloc(512)
    shared.allowed_bytes = 102 * MIB
    block_of(shared, 512)
    assert shared.room_bytes == 102 * MIB


def test_an_expandable_segment_has_nine_eighths_of_the_addresses_of_the_gpu() -> None:
    """Between blocks in use there may be room for no other; then another segment is made."""
    allocator = CachingAllocator(settings=parse("expandable_segments:True"), total_bytes=160 * MIB)
    parts = [block_of(allocator, 20 * MIB) for _ in range(8)]
    for part in parts[::2]:
        allocator.free(part)
    allocator.empty_cache()
    block_of(allocator, 20 * MIB)
    assert len({piece.segment for piece in allocator.pieces()}) == 1
    block_of(allocator, 60 * MIB)
    assert len({piece.segment for piece in allocator.pieces()}) == 2
    assert allocator.reserved.current == 160 * MIB


def test_the_size_of_segments_and_pages_is_a_setting() -> None:
    allocator = CachingAllocator(settings=parse("large_segment_size_mb:40"))
    block_of(allocator, 5 * MIB)
    assert allocator.segments() == {"segments of 40 MiB": 40 * MIB}
    allocator = CachingAllocator(settings=parse("large_segment_size_mb:40,expandable_segments:True"))
    block_of(allocator, 41 * MIB)
    assert allocator.segments() == {"pages of 40 MiB": 80 * MIB}

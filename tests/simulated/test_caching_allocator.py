"""The simulated GPU's caching allocator, against torch's and scenarios. tests/allocator has recorded histories."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest
from simulated.replay import Allocator, Program, build

from memcheck.allocator import MIB

POOL = (0, 1)
GIB = 1024 * MIB

# The digests of Program with seeds from 0, of the allocator in libc10_cuda.so of torch 2.13.0 for CUDA 13. It ran the
# same programs on a CUDA runtime and driver that give addresses alone.
OF_TORCH = {
    kind: digests.split()
    for kind, digests in {
        "streams": """
            c6da5ca70ee04d93 7912588f42ed341d f927d0606660c178 c74697360e7ddf2e ee0d560ce51b6d1f 23e1d61833888523
            fe7e734249b3561f fbfd1329095a56ce 76a9334ca20d76e1 73dd3c091fa8d81b 5c9bcf39279bec9a d5e2c947362976ac
        """,
        "captures": """
            0d0f57517c902bc4 273e2bc043ea1501 1425ca9ad898afaf 478a98e41b254fb5 f9efcf6bb5f8b231 3c0125255bfac9e5
            aa06631a748762ef 8f0a93a27683d563 5ddee875efb7bb90 eb46806451f0623e 08d973dbdafa7b6a 3be95275db4e4378
        """,
        "checkpoints": """
            6e999ec4d3497db2 2ae551ba51ea6974 8b0b8d8ee2131fb9 eff15ff879b4a479 b5cb333dd4eda76d dcf80324685b8f8f
            d557914c061f3d89 62bf0a4686f34dd1 fb2bbcc61d3ea993 cf1143d2feacdc16 aa2ae044e62ea934 56746e5bc66aae5f
        """,
    }.items()
}


@pytest.fixture(scope="session")
def library(require_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(require_tool("g++"), tmp_path_factory.mktemp("caching-allocator"))


@pytest.fixture
def new(library: ctypes.CDLL) -> Callable[..., Allocator]:
    return functools.partial(Allocator, library)


New = Callable[..., Allocator]


@pytest.mark.parametrize("kind", OF_TORCH)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_does_what_it_does_in_torch(new: New, kind: str, seed: int) -> None:
    program = Program(kind, seed)
    allocator = new(program.settings, total=program.total, driver=program.driver, allowed=program.allowed)
    assert program.run(allocator) == OF_TORCH[kind][seed]


# Scenarios.


def figures(allocator: Allocator, *kinds: str) -> tuple[int, ...]:
    return tuple(allocator.stat(kind) for kind in kinds)


BYTES = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
NUMBERS_OF = ("allocation", "active", "segment", "inactive_split")


def test_statistics_after_each_action(new: New) -> None:
    allocator = new()
    small = allocator.must(1000)
    assert figures(allocator, *BYTES) == (1000, 1024, 1024, 2 * MIB, 2 * MIB - 1024)
    assert figures(allocator, *NUMBERS_OF) == (1, 1, 1, 1)
    large = allocator.must(3 * MIB)  # Of a segment of 20 MiB.
    assert figures(allocator, *BYTES) == (
        *(1000 + 3 * MIB, 1024 + 3 * MIB, 1024 + 3 * MIB),
        *(22 * MIB, 2 * MIB - 1024 + 17 * MIB),
    )
    assert figures(allocator, *NUMBERS_OF) == (2, 2, 2, 2)
    own = allocator.must(12 * MIB)  # The rest of the 20 MiB has room for it.
    assert figures(allocator, *NUMBERS_OF) == (3, 3, 2, 2)
    assert figures(allocator, *BYTES)[3:] == (22 * MIB, 2 * MIB - 1024 + 5 * MIB)
    assert [allocator.stat("reserved_bytes", pool=pool) for pool in ("small_pool", "large_pool")] == [2 * MIB, 20 * MIB]

    allocator.free(large)  # Free blocks on both sides of the 12 MiB.
    assert figures(allocator, *NUMBERS_OF) == (2, 2, 2, 3)
    allocator.free(own)  # The segment is one free block, which is not split.
    assert figures(allocator, *NUMBERS_OF) == (1, 1, 2, 1)
    assert figures(allocator, *BYTES) == (1000, 1024, 1024, 22 * MIB, 2 * MIB - 1024)
    allocator.free(small)
    assert figures(allocator, *NUMBERS_OF, *BYTES) == (0, 0, 2, 0, 0, 0, 0, 22 * MIB, 0)
    allocator.empty_cache()
    assert figures(allocator, *NUMBERS_OF, *BYTES) == (0,) * 9

    numbers = [allocator.stat("reserved_bytes", number) for number in ("peak", "allocated", "freed")]
    assert numbers == [22 * MIB] * 3
    assert allocator.stat("allocated_bytes", "peak") == 15 * MIB + 1024
    counts = {"num_device_alloc": 2, "num_device_free": 2, "num_sync_all_streams": 1, "num_alloc_retries": 0}
    assert {name: allocator.count(name) for name in counts} == counts


def test_peaks_and_sums_are_reset(new: New) -> None:
    allocator = new()
    allocator.free(allocator.must(30 * MIB))
    allocator.must(512)
    allocator.reset_peaks()
    assert allocator.stat("allocated_bytes", "peak") == 512
    assert allocator.stat("reserved_bytes", "peak") == 32 * MIB
    assert allocator.stat("allocated_bytes", "allocated") == 30 * MIB + 512
    allocator.reset_accumulated()
    assert [allocator.stat("allocated_bytes", number) for number in ("current", "allocated", "freed")] == [512, 0, 0]
    assert allocator.count("num_device_alloc") == 0


def test_each_action_is_an_event(new: New) -> None:
    allocator = new(driver=64 * MIB)
    block = allocator.must(40 * MIB)
    allocator.free(block)
    assert allocator.malloc(60 * MIB) is not None
    assert allocator.malloc(5 * MIB) is None
    top, first, second = 2**48, 2**48 - 40 * MIB, 2**48 - 100 * MIB
    assert allocator.events() == [
        ("segment_alloc", 40 * MIB, first, 0),
        ("alloc", 40 * MIB, first, 0),
        ("free_requested", 40 * MIB, first, 0),
        ("free_completed", 40 * MIB, first, 0),
        ("segment_free", 40 * MIB, first, 0),
        ("segment_alloc", 60 * MIB, second, 0),
        ("alloc", 60 * MIB, second, 0),
        ("oom", 5 * MIB, 4 * MIB, 0),  # 4 MiB are free.
    ]
    assert top > first
    assert (allocator.count("num_ooms"), allocator.count("num_alloc_retries")) == (1, 2)


@pytest.mark.parametrize(
    ("divisions", "requested", "allocated"),
    [
        ("", 1200 * 1024, 1200 * 1024),
        ("4", 1200 * 1024, 1280 * 1024),  # 1024, 1280, 1536, 1792 KiB
        ("4", 1280 * 1024, 1280 * 1024),
        ("4", 2048 * 1024, 2048 * 1024),
        ("4", 1200, 1536),  # Up to 512 bytes of each division, sizes are multiples of 512.
        ("1", 1200 * 1024 + 1, 1200 * 1024 + 512),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", 50 * MIB, 52 * MIB),  # An eighth of 32 MiB; as for 64 MiB.
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", 130 * MIB, 192 * MIB),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", 257 * MIB, 320 * MIB),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", 513 * MIB, 768 * MIB),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", 1025 * MIB, 1280 * MIB),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", 3000 * MIB + 1, 3000 * MIB + 512),
        ("[256:0,512:2]", 300 * MIB + 1, 300 * MIB + 512),
    ],
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(
    new: New, divisions: str, requested: int, allocated: int
) -> None:
    allocator = new(f"roundup_power2_divisions:{divisions}" if divisions else "")
    allocator.must(requested)
    assert figures(allocator, "requested_bytes", "allocated_bytes") == (requested, allocated)


def test_blocks_above_max_split_size_are_not_split(new: New) -> None:
    allocator = new("max_split_size_mb:40")
    oversize = allocator.must(60 * MIB)
    assert figures(allocator, "oversize_allocations", "oversize_segments") == (1, 1)
    allocator.free(oversize)
    assert figures(allocator, "oversize_allocations", "oversize_segments") == (0, 1)
    assert allocator.must(30 * MIB).bytes == 30 * MIB  # Not of the 60 MiB.
    assert allocator.must(40 * MIB).bytes == 40 * MIB  # The 60 MiB are 20 more, which is too large.
    assert allocator.must(42 * MIB).bytes == 60 * MIB
    assert allocator.stat("reserved_bytes") == 130 * MIB


def test_oversize_blocks_are_released_before_the_whole_cache_is(new: New) -> None:
    allocator = new("max_split_size_mb:40", driver=200 * MIB)
    for block in [allocator.must(size * MIB) for size in (30, 50, 60)]:
        allocator.free(block)
    allocator.must(110 * MIB)  # The two oversize ones make room.
    assert [event[:2] for event in allocator.events()[-4:]] == [
        *[("segment_free", 60 * MIB), ("segment_free", 50 * MIB)],
        *[("segment_alloc", 110 * MIB), ("alloc", 110 * MIB)],
    ]
    assert allocator.count("num_sync_all_streams") == allocator.count("num_alloc_retries") == 0


def test_rounding_of_what_is_not_split(new: New) -> None:
    allocator = new("max_split_size_mb:40,max_non_split_rounding_mb:100")
    for block in [allocator.must(140 * MIB), allocator.must(138 * MIB)]:
        allocator.free(block)
        last = allocator.must(40 * MIB)
    assert last.bytes == 138 * MIB
    assert allocator.stat("reserved_bytes") == (140 + 138 + 40) * MIB


def test_garbage_collection_frees_what_was_free_for_long(new: New) -> None:
    allocator = new("garbage_collection_threshold:0.5", total=400 * MIB, allowed=200 * MIB)
    old, young = allocator.must(60 * MIB), allocator.must(30 * MIB)
    allocator.free(old)
    for _ in range(3):
        allocator.free(young)
        young = allocator.must(30 * MIB)
    allocator.free(young)
    # 90 MiB are less than half of what is allowed, when the next segment is made.
    allocator.must(70 * MIB)
    assert "segment_free" not in [action for action, *_ in allocator.events()]
    allocator.must(65 * MIB)  # 160 MiB are 60 too many.
    assert [event[:2] for event in allocator.events() if event[0] == "segment_free"] == [("segment_free", 60 * MIB)]


def test_the_share_of_the_process_limits_it(new: New) -> None:
    allocator = new(total=200 * MIB, driver=190 * MIB, allowed=100 * MIB)
    first = allocator.must(99 * MIB)
    assert allocator.malloc(MIB) is None  # A segment of 2 MiB.
    allocator.free(first)
    assert allocator.must(MIB // 2).bytes == MIB // 2
    assert allocator.stat("reserved_bytes") == 2 * MIB
    assert allocator.malloc(98 * MIB) is not None


def test_requests_above_the_share_fail_at_once_if_asked_for(new: New) -> None:
    allocator = new("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5", total=200 * MIB)
    allocator.free(allocator.must(60 * MIB))
    assert allocator.malloc(70 * MIB) is None  # The 60 MiB stay in the cache.
    assert allocator.stat("reserved_bytes") == 60 * MIB
    counts = {"num_oom_rejections": 1, "num_ooms": 0, "num_alloc_retries": 0}
    assert {name: allocator.count(name) for name in counts} == counts
    assert allocator.events()[-1][0] == "free_completed"


def test_expandable_segments_grow_by_pages(new: New) -> None:
    allocator = new("expandable_segments:True", total=GIB, driver=GIB)
    first = allocator.must(30 * MIB)  # Two pages.
    second = allocator.must(25 * MIB)  # 10 MiB are there already.
    small = allocator.must(512)  # Of another segment, with pages of 2 MiB.
    assert second.address == first.address + 30 * MIB
    assert figures(allocator, "reserved_bytes", "segment", "inactive_split") == (62 * MIB, 0, 0)
    assert allocator.count("num_device_alloc") == 3
    actions = [event[:2] for event in allocator.events()]
    assert actions == [
        *[("segment_map", 40 * MIB), ("alloc", 30 * MIB), ("segment_map", 20 * MIB), ("alloc", 25 * MIB)],
        *[("segment_map", 2 * MIB), ("alloc", 512)],
    ]
    allocator.free(first)
    allocator.free(small)
    allocator.empty_cache()  # The second page of the first block is also one of the second block.
    assert [event[:2] for event in allocator.events()[-2:]] == [
        ("segment_unmap", 20 * MIB),
        ("segment_unmap", 2 * MIB),
    ]
    assert allocator.must(28 * MIB).address == first.address  # Its page is mapped again.
    assert allocator.stat("reserved_bytes") == 60 * MIB


def test_pages_have_the_size_of_large_segments(new: New) -> None:
    allocator = new("expandable_segments:True,large_segment_size_mb:64", total=GIB)
    allocator.must(2 * MIB)
    assert allocator.stat("reserved_bytes") == 64 * MIB
    allocator.configure("large_segment_size_mb:32")  # The segment keeps its pages, and expandable segments stay on.
    allocator.must(63 * MIB)
    assert allocator.stat("reserved_bytes") == 128 * MIB


def test_a_request_that_has_no_room_takes_pages_of_another_stream(new: New) -> None:
    allocator = new("expandable_segments:True", total=200 * MIB, driver=100 * MIB)
    allocator.free(allocator.must(80 * MIB, 4096))
    assert allocator.must(60 * MIB).bytes == 60 * MIB
    assert allocator.stat("reserved_bytes") == 60 * MIB
    assert allocator.malloc(60 * MIB) is None


def test_streams_do_not_share_free_blocks(new: New) -> None:
    allocator = new()
    block = allocator.must(30 * MIB)
    allocator.free(block)
    assert allocator.must(30 * MIB, 4096).address != block.address
    assert allocator.must(30 * MIB).address == block.address


def test_a_block_that_another_stream_uses_is_released_later(new: New) -> None:
    allocator = new(completes_at_once=False)
    block = allocator.must(30 * MIB)
    allocator.record_stream(block, 0)  # Its own stream: no other one.
    allocator.record_stream(block, 4096)
    allocator.free(block)
    assert figures(allocator, "allocation", "active", "allocated_bytes") == (0, 1, 0)
    assert allocator.must(30 * MIB).address != block.address
    allocator.complete(block)
    assert allocator.stat("active") == 1
    assert allocator.must(30 * MIB).address == block.address


def test_other_streams_finish_before_the_next_request(new: New) -> None:
    allocator = new()
    block = allocator.must(30 * MIB)
    allocator.record_stream(block, 4096)
    allocator.free(block)
    assert allocator.stat("active") == 1
    assert allocator.must(30 * MIB).address == block.address


# Private pools.


def test_a_private_pool_serves_the_requests_of_its_stream(new: New) -> None:
    allocator = new()
    allocator.free(allocator.must(30 * MIB, 4096))
    allocator.begin_pool(POOL, 4096)
    inside, outside = allocator.must(30 * MIB, 4096), allocator.must(30 * MIB)
    assert allocator.reserved_by(POOL) == 30 * MIB
    assert allocator.stat("reserved_bytes") == 90 * MIB
    assert allocator.live(POOL) == [inside.address]
    allocator.free(inside)
    assert allocator.must(30 * MIB, 4096).address == inside.address
    allocator.end_pool(POOL)
    assert allocator.must(30 * MIB, 4096).address not in (inside.address, outside.address)
    assert allocator.reserved_by(POOL) == 30 * MIB


def test_the_memory_of_a_pool_goes_back_when_it_is_released_and_free(new: New) -> None:
    allocator = new()
    allocator.begin_pool(POOL)
    block = allocator.must(30 * MIB)
    allocator.must(512)
    allocator.free(allocator.must(50 * MIB))
    allocator.end_pool(POOL)
    allocator.empty_cache()
    allocator.empty_cache(POOL)  # It is in use.
    assert allocator.reserved_by(POOL) == 82 * MIB
    allocator.release_pool(POOL)
    assert allocator.reserved_by(POOL) == 82 * MIB
    allocator.empty_cache((0, 2))  # Another one.
    assert allocator.reserved_by(POOL) == 82 * MIB
    allocator.empty_cache(POOL)
    assert allocator.reserved_by(POOL) == 32 * MIB
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_by(POOL) == 2 * MIB


def test_a_request_without_room_takes_released_pools(new: New) -> None:
    allocator = new(driver=100 * MIB)
    allocator.begin_pool(POOL)
    allocator.free(allocator.must(60 * MIB))
    allocator.end_pool(POOL)
    assert allocator.malloc(60 * MIB) is None
    allocator.release_pool(POOL)
    assert allocator.malloc(60 * MIB) is not None


def test_a_pool_may_serve_requests_without_room(new: New) -> None:
    allocator = new(driver=100 * MIB)
    allocator.begin_pool(POOL)
    block = allocator.must(60 * MIB)
    allocator.free(block)
    allocator.end_pool(POOL)
    allocator.use_on_oom(POOL, use=True)
    served = allocator.must(50 * MIB)
    assert served.address == block.address
    assert allocator.count("num_alloc_retries") == 0
    allocator.free(served)
    allocator.use_on_oom(POOL, use=False)
    assert allocator.malloc(50 * MIB) is None


def test_a_pool_may_not_split_its_segments(new: New) -> None:
    allocator = new()
    allocator.begin_pool(POOL)
    allocator.no_split(POOL)
    assert allocator.must(3 * MIB).bytes == 20 * MIB
    assert allocator.must(512).bytes == 2 * MIB


def test_two_users_of_a_pool_each_release_it(new: New) -> None:
    allocator = new()
    for _ in range(2):
        allocator.begin_pool(POOL)
        allocator.free(allocator.must(30 * MIB))
        allocator.end_pool(POOL)
    assert allocator.reserved_by(POOL) == 30 * MIB
    allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert allocator.reserved_by(POOL) == 30 * MIB
    allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert allocator.reserved_by(POOL) == 0


def test_the_latest_pool_comes_first(new: New) -> None:
    allocator = new()
    allocator.begin_pool(POOL)
    allocator.begin_pool((3, 0))
    allocator.must(512)
    allocator.end_pool((3, 0))
    assert (allocator.reserved_by(POOL), allocator.reserved_by((3, 0))) == (0, 2 * MIB)
    allocator.must(512)
    assert allocator.reserved_by(POOL) == 2 * MIB


def test_releases_wait_for_the_end_of_a_capture(new: New) -> None:
    allocator = new(driver=99 * MIB)
    cached, used = allocator.must(30 * MIB), allocator.must(20 * MIB)
    allocator.free(cached)
    allocator.begin_pool(POOL)
    allocator.begin_capture()
    allocator.record_stream(used, 4096)
    allocator.free(used)
    assert allocator.must(20 * MIB).address != used.address
    assert allocator.malloc(50 * MIB) is None  # The cache is not emptied.
    allocator.empty_cache()
    assert allocator.stat("active") == 2
    allocator.end_capture()
    assert allocator.must(30 * MIB).bytes == 30 * MIB  # Of the pool, after the cache was emptied.
    assert allocator.stat("active") == 2
    assert allocator.reserved_by(POOL) == allocator.stat("reserved_bytes") == 50 * MIB


def test_only_streams_from_before_a_capture_are_waited_for(new: New) -> None:
    allocator = new(completes_at_once=False)
    before, during = allocator.must(30 * MIB), allocator.must(30 * MIB)
    allocator.record_stream(before, 8192)
    allocator.begin_capture()
    allocator.record_stream(before, 4096)
    allocator.record_stream(during, 4096)
    allocator.free(before)
    allocator.free(during)
    allocator.end_capture()
    assert allocator.must(30 * MIB).address == during.address
    assert allocator.must(30 * MIB).address not in (before.address, during.address)
    allocator.complete(before)
    assert allocator.must(30 * MIB).address == before.address


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_pool_returns_to_a_checkpoint(new: New, settings: str) -> None:
    allocator = new(settings, total=GIB)
    allocator.begin_pool(POOL)
    kept, dropped = allocator.must(4 * MIB), allocator.must(5 * MIB)
    small = allocator.must(1000)
    allocator.free(dropped)
    allocator.checkpoint(POOL)
    before = [*allocator.live(POOL)]
    allocator.free(kept)
    for size in (6 * MIB, 512, 40 * MIB, 7 * MIB):
        allocator.must(size)
    allocator.end_pool(POOL)

    allocator.restore(0)
    assert allocator.live(POOL) == before == sorted([kept.address, small.address])
    assert figures(allocator, "allocation", "allocated_bytes") == (2, 4 * MIB + 1024)
    assert allocator.stat("requested_bytes") == 4 * MIB + 1024  # That of a restored block is its size.
    allocator.begin_pool(POOL)
    reserved = allocator.stat("reserved_bytes")
    assert allocator.must(5 * MIB).address == dropped.address
    allocator.must(40 * MIB)
    assert allocator.stat("reserved_bytes") == reserved
    restored = allocator.allocated_at(kept.address)
    assert restored is not None
    allocator.free(restored)
    assert allocator.allocated_at(kept.address) is None


def test_what_cannot_be_done_to_pools(new: New) -> None:
    allocator = new()
    for call in (allocator.release_pool, allocator.checkpoint, allocator.no_split):
        with pytest.raises(ValueError, match="Could not find pool of id"):
            call(POOL)
    with pytest.raises(ValueError, match="not currently recording"):
        allocator.end_pool(POOL)
    allocator.begin_pool(POOL)
    with pytest.raises(ValueError, match="already recording"):
        allocator.begin_pool(POOL)
    allocator.must(512)
    allocator.end_pool(POOL)
    for _ in range(2):
        allocator.release_pool(POOL)
    for call in (allocator.release_pool, allocator.begin_pool):
        with pytest.raises(ValueError, match="was released"):
            call(POOL)
    with pytest.raises(ValueError, match="freeable"):
        allocator.checkpoint(POOL)


# Settings.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("expandable_segments:true", "expandable_segments must be True or False, got 'true'"),
        ("expandable_segments", "expandable_segments must be True or False, got ''"),
        ("max_split_size_mb:19", "max_split_size_mb must be an integer of at least 20, got '19'"),
        ("max_split_size_mb:large", "max_split_size_mb must be an integer of at least 20, got 'large'"),
        ("max_split_size_mb:-100", "at least 20, got '-100'"),
        ("max_split_size_mb:100,large_segment_size_mb:200", "max_split_size_mb must be an integer of at least 200"),
        ("max_non_split_rounding_mb:10", "max_non_split_rounding_mb must be an integer of at least 20, got '10'"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be an integer of at least 11, got '10'"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold must be above 0 and below 1, got '1'"),
        ("garbage_collection_threshold:half", "garbage_collection_threshold must be above 0 and at most 1, got 'half'"),
        ("per_process_memory_fraction:0", "per_process_memory_fraction must be above 0 and at most 1, got '0'"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions must be a power of two, .* got '3'"),
        ("roundup_power2_divisions:0", "roundup_power2_divisions must be a power of two"),
        (r"roundup_power2_divisions:[256:1,512:3]", r"got '\[256:1,512:3\]'"),
        ("roundup_power2_divisions:[255:1]", "roundup_power2_divisions must be a power of two"),
        ("roundup_power2_divisions:[256]", "roundup_power2_divisions must be a power of two"),
        ("roundup_power2_divisions:[256:1", "roundup_power2_divisions must be a power of two"),
        ("throw_on_cudamalloc_oom:1", "throw_on_cudamalloc_oom must be True or False, got '1'"),
        ("backend:cudaMallocAsync", "backend must be native, got 'cudaMallocAsync'"),
        ("max_split:100", "unknown allocator setting 'max_split', got '100'"),
    ],
)
def test_settings_that_are_refused(new: New, settings: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        new(settings)


@pytest.mark.parametrize(
    "settings",
    [
        " max_split_size_mb : 100 , expandable_segments:True,",
        "backend:native,pinned_use_background_threads:True,release_lock_on_cudamalloc:True",
        "roundup_power2_divisions:[],garbage_collection_threshold:0.99",
        "roundup_power2_divisions:[>:8]",
        "max_split_size_mb:99999999999999999",
    ],
)
def test_settings_that_are_taken(new: New, settings: str) -> None:
    new(settings).must(512)


def test_some_settings_stay_when_others_change(new: New) -> None:
    allocator = new("large_segment_size_mb:40,max_split_size_mb:40,roundup_power2_divisions:2")
    allocator.configure("garbage_collection_threshold:0.5")
    assert allocator.must(5 * MIB).bytes == 5 * MIB  # The divisions are gone.
    assert allocator.stat("reserved_bytes") == 40 * MIB  # The size of large segments is not.
    allocator.free(allocator.must(60 * MIB))
    assert allocator.must(45 * MIB).bytes == 45 * MIB  # Blocks of any size are split.

"""The model of the CUDA caching allocator, against histories that torch recorded on GPUs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from memcheck.allocator import MIB, AllocatorSettings, CachingAllocator
from memcheck.allocator.caching import Event
from memcheck.allocator.history import History, Segment, replay_history, reserved_by
from memcheck.snapshot.files import read_data
from memcheck.snapshot.recording import recordings_of

HISTORIES = sorted((Path(__file__).parents[1] / "data" / "histories").glob("*.json.gz"))
NAMES = [path.name.split(".")[0] for path in HISTORIES]


@functools.cache
def read(path: Path) -> History:
    (recording,) = recordings_of(read_data(path))
    return recording.history


def reserved_at(events: Iterable[Event], begin: int) -> list[int]:
    """The reserved bytes at each allocation."""
    events = list(events)
    sums = itertools.accumulate(map(reserved_by, events), initial=begin)
    return [size for size, event in zip(sums, events, strict=False) if event.action == "alloc"]


def test_there_are_28_histories() -> None:
    assert len(HISTORIES) == 28
    assert sum(event.action == "alloc" for path in HISTORIES for event in read(path).events) == 49_328


@pytest.mark.parametrize("path", HISTORIES, ids=NAMES)
def test_every_event_is_replayed_at_its_recorded_address(path: Path) -> None:
    """Allocations, releases, segments and pages, and requests without room, in the recorded order."""
    history = read(path)
    allocator = CachingAllocator(history.limit_bytes, history.settings, keeps_events=True)
    replayed = replay_history(history, allocator, at_recorded_addresses=True)
    assert replayed.equal_addresses == replayed.allocations
    assert replayed.events is not None
    assert [event[:4] for event in replayed.events] == [
        event[:4] for event in history.events if event.action != "snapshot"
    ]


@pytest.mark.parametrize("path", HISTORIES, ids=NAMES)
def test_reserved_bytes_are_exact_at_addresses_of_the_model(path: Path) -> None:
    history = read(path)
    allocator = CachingAllocator(history.limit_bytes, history.settings, keeps_events=True)
    events = replay_history(history, allocator).events
    begin = sum(segment.bytes for segment in history.at_begin)
    assert events is not None
    assert reserved_at(events, begin) == reserved_at(history.events, begin)


def test_a_recorded_request_without_room_has_none_in_the_model() -> None:
    (history,) = [history for path in HISTORIES if (history := read(path)).limit_bytes is not None]
    (refused,) = [index for index, event in enumerate(history.events) if event.action == "oom"]
    assert replay_history(history).refused == refused
    assert replay_history(history, CachingAllocator(None, history.settings)).refused is None


def test_requests_are_replayed_with_other_settings() -> None:
    """The same program would have reserved less with expandable segments, but for the last pages."""
    history = read(next(path for path in HISTORIES if "512_training" in path.name))
    expandable = CachingAllocator(None, AllocatorSettings(expandable_segments=True))
    before, after = replay_history(history), replay_history(history, expandable)
    assert (before.reserved.peak, after.reserved.peak) == (12_074 * MIB, 11_958 * MIB)
    assert after.allocations == before.allocations


def test_a_replay_ends_with_a_request_that_has_no_room() -> None:
    events = [Event("alloc", 30 * MIB, 0), Event("alloc", 20 * MIB, 1), Event("free_requested", 30 * MIB, 0)]
    replayed = replay_history(History(events), CachingAllocator(40 * MIB))
    assert (replayed.refused, replayed.allocations, replayed.reserved.peak) == (1, 2, 30 * MIB)


def test_the_program_empties_the_cache_and_the_allocator_does_by_itself() -> None:
    """A release belongs to the next request if that had no room without it."""
    events = [
        Event("segment_alloc", 30 * MIB, 0),
        Event("alloc", 30 * MIB, 0),
        Event("free_requested", 30 * MIB, 0),
        Event("free_completed", 30 * MIB, 0),
        Event("segment_free", 30 * MIB, 0),
        Event("segment_alloc", 40 * MIB, 64 * MIB),
        Event("alloc", 40 * MIB, 64 * MIB),
        Event("oom", 90 * MIB, None, 0, 20 * MIB),
    ]
    # 60 MiB are not enough for both segments, so the allocator made the release; 80 MiB are.
    for free, peak in ((20 * MIB, 70 * MIB), (40 * MIB, 40 * MIB)):
        history = History([*events[:-1], events[-1]._replace(free_bytes=free)])
        assert replay_history(history, CachingAllocator(80 * MIB)).reserved.peak == peak


def test_what_a_block_holds_beyond_its_request_is_found_from_later_requests() -> None:
    """A block of 5 MiB that 4.5 were requested of, alive at the begin, with a free one behind it."""
    size = 9 * MIB // 2
    events = [
        Event("alloc", 2 * MIB, 5 * MIB),
        Event("free_requested", size, 0),
        Event("free_completed", size, 0),
    ]
    at_end = [Segment(0, 20 * MIB, 0, False, False, {5 * MIB: (2 * MIB, 2 * MIB)})]
    assert History(events, at_end).at_begin == [Segment(0, 20 * MIB, 0, False, False, {0: (5 * MIB, size)})]
    with pytest.raises(ValueError, match="the history is incomplete: no segment has the block at 0"):
        _ = History(events).at_begin

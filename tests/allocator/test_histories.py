"""The CUDA caching allocator, against histories that torch recorded on GPUs."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from memcheck.allocator import MIB, AllocatorSettings, CachingAllocator
from memcheck.allocator.caching import ACTIONS
from memcheck.allocator.history import ALLOC, IGNORED, OOM, History, Segment, replay_history
from memcheck.snapshot.files import read_data
from memcheck.snapshot.recording import recordings_of

HISTORIES = sorted((Path(__file__).parents[1] / "data" / "histories").glob("*.json.gz"))
NAMES = [path.name.split(".")[0] for path in HISTORIES]


@functools.cache
def read(path: Path) -> History:
    (recording,) = recordings_of(read_data(path))
    return recording.history


def history_of(*events: tuple[str, int, int], free_bytes: int = 0, segments: Sequence[Segment] = ()) -> History:
    """Of actions, bytes and addresses. free_bytes: of the GPU, at all events."""
    rows = np.array([(ACTIONS.index(action), size, address, 0) for action, size, address in events])
    return History(rows, segments, free_bytes=dict.fromkeys(range(len(events)), free_bytes))


def reserved_at(history: History, begin: int) -> list[int]:
    """The reserved bytes at each allocation."""
    allocations = history.rows[:, 0] == ALLOC
    return (begin + np.cumsum(history.changes))[allocations].tolist()


def test_there_are_28_histories() -> None:
    assert len(HISTORIES) == 28
    assert sum(np.count_nonzero(read(path).rows[:, 0] == ALLOC) for path in HISTORIES) == 49_328


@pytest.mark.parametrize("path", HISTORIES, ids=NAMES)
def test_every_event_is_replayed_at_its_recorded_address(path: Path) -> None:
    """Allocations, releases, segments and pages, and requests without room, in the recorded order."""
    history = read(path)
    replayed = replay_history(history, at_recorded_addresses=True)
    assert replayed.equal_addresses == replayed.allocations
    made, recorded = replayed.rows(), history.rows[history.rows[:, 0] != IGNORED]
    recorded = recorded.copy()
    recorded[recorded[:, 0] == OOM, 2] = [*history.free_bytes.values()]
    assert np.array_equal(made, recorded)


@pytest.mark.parametrize("path", HISTORIES, ids=NAMES)
def test_reserved_bytes_are_exact_at_addresses_of_the_model(path: Path) -> None:
    history = read(path)
    begin = history.reserved_at_begin
    assert reserved_at(History(replay_history(history).rows()), begin) == reserved_at(history, begin)


def test_a_recorded_request_without_room_has_none_in_the_model() -> None:
    (history,) = [history for path in HISTORIES if (history := read(path)).limit_bytes is not None]
    (refused,) = np.flatnonzero(history.rows[:, 0] == OOM)
    assert replay_history(history).refused == refused
    assert replay_history(history, CachingAllocator(None, history.settings)).refused is None


def test_requests_are_replayed_with_other_settings() -> None:
    """The same program would have reserved less with expandable segments, but for the last pages."""
    history = read(next(path for path in HISTORIES if "512_training" in path.name))
    expandable = CachingAllocator(None, AllocatorSettings.parse("expandable_segments:True"))
    before, after = replay_history(history), replay_history(history, expandable)
    assert (before.peak_reserved_bytes, after.peak_reserved_bytes) == (12_074 * MIB, 11_958 * MIB)
    assert after.allocations == before.allocations


def test_a_replay_ends_with_a_request_that_has_no_room() -> None:
    history = history_of(("alloc", 30 * MIB, 0), ("alloc", 20 * MIB, 1), ("free_requested", 30 * MIB, 0))
    replayed = replay_history(history, CachingAllocator(40 * MIB))
    assert (replayed.refused, replayed.allocations, replayed.peak_reserved_bytes) == (1, 2, 30 * MIB)
    assert replayed.sizes.tolist() == [30 * MIB, 0]


def test_what_was_in_use_before_may_have_no_room() -> None:
    early = Segment(0, 60 * MIB, 0, False, False, {0: (60 * MIB, 60 * MIB)})
    history = history_of(("alloc", 2 * MIB, 80 * MIB), segments=[early])
    replayed = replay_history(history, CachingAllocator(40 * MIB))
    assert (replayed.refused, replayed.allocations, replayed.peak_reserved_bytes) == (-1, 0, 0)


def test_the_program_empties_the_cache_and_the_allocator_does_by_itself() -> None:
    """A release belongs to the next request if that had no room without it."""
    events = [
        ("segment_alloc", 30 * MIB, 0),
        ("alloc", 30 * MIB, 0),
        ("free_requested", 30 * MIB, 0),
        ("free_completed", 30 * MIB, 0),
        ("segment_free", 30 * MIB, 0),
        ("segment_alloc", 40 * MIB, 64 * MIB),
        ("alloc", 40 * MIB, 64 * MIB),
        ("oom", 90 * MIB, -1),
    ]
    # 60 MiB are not enough for both segments, so the allocator made the release; 80 MiB are.
    for free, peak in ((20 * MIB, 70 * MIB), (40 * MIB, 40 * MIB)):
        history = history_of(*events, free_bytes=free)
        assert replay_history(history, CachingAllocator(80 * MIB)).peak_reserved_bytes == peak


def test_what_a_block_holds_beyond_its_request_is_found_from_later_requests() -> None:
    """A block of 5 MiB that 4.5 were requested of, alive at the begin, with a free one behind it."""
    size = 9 * MIB // 2
    events = [("alloc", 2 * MIB, 5 * MIB), ("free_requested", size, 0), ("free_completed", size, 0)]
    at_end = [Segment(0, 20 * MIB, 0, False, False, {5 * MIB: (2 * MIB, 2 * MIB)})]
    history = history_of(*events, segments=at_end)
    assert history.at_begin == [Segment(0, 20 * MIB, 0, False, False, {0: (5 * MIB, size)})]
    with pytest.raises(ValueError, match="the history is incomplete: no segment has the block at 0"):
        _ = history_of(*events).at_begin


@pytest.mark.parametrize(
    ("blocks", "events"),
    [
        ({0: (20 * MIB, 512), 5 * MIB: (512, 512)}, []),
        ({0: (30 * MIB, 30 * MIB)}, []),
        ({0: (-512, 512)}, []),
        ({}, [("alloc", 2**60, 0)]),
        ({}, [("free_requested", -1, 0)]),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(
    blocks: dict[int, tuple[int, int]], events: list[tuple[str, int, int]]
) -> None:
    with pytest.raises(ValueError, match=r"blocks overlap, or lie in no segment|an event has an impossible size"):
        replay_history(
            history_of(*events or [("snapshot", 0, 0)], segments=[Segment(0, 20 * MIB, 0, False, False, blocks)])
        )


def test_events_in_any_order_end_a_replay_or_not() -> None:
    """Releases of what is free, allocations where one is, and pages that overlap."""
    chance = random.Random(0)
    for expandable in ["", "expandable_segments:True"]:
        for _ in range(100):
            rows = np.array(
                [
                    (
                        chance.randrange(9),
                        2 ** chance.randrange(8, 28),
                        chance.randrange(12) * 2 * MIB,
                        chance.choice([0, 7]),
                    )
                    for _ in range(300)
                ]
            )
            segments = [Segment(i * 20 * MIB, 20 * MIB, 0, False, bool(expandable), {}) for i in range(2)]
            history = History(rows, settings=AllocatorSettings(expandable))
            history.__dict__["at_begin"] = segments
            allocator = CachingAllocator(200 * MIB, history.settings)
            replayed = replay_history(history, allocator, at_recorded_addresses=True)
            assert replayed.peak_reserved_bytes <= 200 * MIB

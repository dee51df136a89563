"""Recorded histories of the allocator: their events, the state before the first of them, and their replay."""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from memcheck.allocator import caching
from memcheck.allocator.caching import AllocatorSettings, CachingAllocator, Ints, Order

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM, IGNORED = range(
    len(caching.ACTIONS)
)
NEW_MEMORY, RELEASES = (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP)
SMALL_REQUEST = caching.MIB  # The largest request served by the small pool.
BEFORE_THE_FIRST = -1
UNKNOWN = 0  # The size of a block of which only the request is recorded.
# Recorded addresses may begin at 0, and new segments get addresses below them: what is added to them meanwhile.
ABOVE = 2**60
IN_REPLAY = np.array([0, 0, ABOVE, 0])  # To rows.


class Segment(NamedTuple):
    """A segment, or a mapped part of an expandable one. blocks: those in use: address -> (bytes, requested)."""

    address: int
    bytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class History:
    """What torch.cuda.memory recorded: its events, and the segments after the last one.

    rows: of each event the index in ACTIONS, bytes, address and stream.
    free_bytes: of the GPU, at the events that had no room.
    order: which of equal free blocks torch took, as of the version that recorded, which no snapshot names.
    """

    rows: Ints
    segments: Sequence[Segment] = ()
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    free_bytes: Mapping[int, int] = field(default_factory=dict)
    order: Order = Order.ADDRESS

    @functools.cached_property
    def changes(self) -> Ints:
        """The bytes that came from the driver at each event, negative if they went back."""
        actions, sizes = self.rows[:, 0], self.rows[:, 1]
        return sizes * (np.isin(actions, NEW_MEMORY).astype(np.int64) - np.isin(actions, RELEASES))

    @functools.cached_property
    def limit_bytes(self) -> int | None:
        """The memory that the process could reserve, by its first request without room. None: all had room."""
        refused = np.flatnonzero(self.rows[:, 0] == OOM)
        if not len(refused):
            return None
        first = int(refused[0])
        return self.reserved_at_begin + int(self.changes[:first].sum()) + self.free_bytes.get(first, 0)

    @property
    def reserved_at_begin(self) -> int:
        return sum(segment.bytes for segment in self.at_begin)

    @functools.cached_property
    def at_begin(self) -> list[Segment]:
        """The segments before the first event, found from those after the last one.

        ValueError: a block that was released lies in no segment.
        """
        state = _Rewound(self.segments)
        for action, size, address, stream in _listed(self.rows[::-1]):
            state.undo(action, size, address, stream)
        found = state.segments()
        _find_sizes(found, self.rows, self.settings)
        return found

    @functools.cached_property
    def emptied(self) -> Ints:
        """The events before which the program called torch.cuda.empty_cache.

        Other releases were made by the allocator itself, because the next request had no room.
        """
        found, begin, released = list[int](), None, 0
        reserved = self.reserved_at_begin
        limit = self.limit_bytes
        for index, (action, change) in enumerate(zip(self.rows[:, 0].tolist(), self.changes.tolist(), strict=True)):
            if action in RELEASES:
                begin, released = index if begin is None else begin, released - change
            elif begin is not None and action != FREE_COMPLETED:
                needed = reserved + released + max(change, 0)
                if action != OOM and (limit is None or needed <= limit):
                    found.append(begin)
                begin, released = None, 0
            reserved += change
        return np.array(found if begin is None else [*found, begin], np.int64)


class _Rewound:
    """The state of the allocator, in which events are undone from the last to the first."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._ranges = {segment.address: segment for segment in segments}
        blocks = itertools.chain.from_iterable(segment.blocks.items() for segment in self._ranges.values())
        self._blocks = dict(blocks)

    def undo(self, action: int, size: int, address: int, stream: int) -> None:
        if action == ALLOC:
            self._blocks.pop(address, None)
        elif action == FREE_COMPLETED:
            self._blocks[address] = UNKNOWN, size
        elif action in RELEASES:
            is_small = size == caching.SMALL_SEGMENT
            self._ranges[address] = Segment(address, size, stream, is_small, action == SEGMENT_UNMAP, {})
        elif action == SEGMENT_ALLOC:
            self._ranges.pop(address, None)
        elif action == SEGMENT_MAP:
            self._remove(address, address + size)

    def segments(self) -> list[Segment]:
        """The segments, with the blocks that are in use."""
        found = [segment._replace(blocks={}) for _, segment in sorted(self._ranges.items())]
        rest = iter(found)
        segment = next(rest, None)
        for address, block in sorted(self._blocks.items()):
            while segment is not None and address >= segment.address + segment.bytes:
                segment = next(rest, None)
            if segment is None or address < segment.address:
                raise ValueError(f"the history is incomplete: no segment has the block at {address}")
            segment.blocks[address] = block
        return found

    def _remove(self, begin: int, end: int) -> None:
        """Takes a range out of the mapped ones."""
        for segment in list(self._ranges.values()):
            first, last = segment.address, segment.address + segment.bytes
            if first < end and begin < last:
                del self._ranges[first]
                for address, stop in ((first, min(begin, last)), (max(end, first), last)):
                    if address < stop:
                        self._ranges[address] = segment._replace(address=address, bytes=stop - address)


def _find_sizes(segments: Iterable[Segment], rows: Ints, settings: AllocatorSettings) -> None:
    """Fills in the sizes of blocks that were released later, which are at least the requested ones.

    A block keeps what is left of a larger one if it is too small to be split off. What follows it tells: the first
    request that is served there gets the first address of the free block.
    """
    gaps: dict[int, tuple[Segment, int, int]] = {}  # First address -> segment, block before it, end.
    for segment in segments:
        for address, boundary in itertools.pairwise([*segment.blocks, segment.address + segment.bytes]):
            known, requested = segment.blocks[address]
            size = settings.rounded(requested) if known == UNKNOWN else known
            segment.blocks[address] = size, requested
            if known != UNKNOWN or segment.small or segment.expandable:
                continue
            if boundary - address - size <= SMALL_REQUEST:
                segment.blocks[address] = boundary - address, requested
            else:
                gaps[address + size] = segment, address, boundary
    begins = sorted(gaps)
    before = {block: begin for begin, (_, block, _) in gaps.items()}
    for action, _, at, _ in _listed(rows) if gaps else ():
        if action == FREE_COMPLETED and at in before:
            gaps.pop(before[at], None)
        elif action == ALLOC:
            begin = begins[bisect.bisect_right(begins, at) - 1]
            if begin in gaps and begin <= at < gaps[begin][2]:
                segment, address, _ = gaps.pop(begin)
                if at - begin <= SMALL_REQUEST:
                    segment.blocks[address] = at - address, segment.blocks[address][1]
        if not gaps:
            break


@dataclass(frozen=True)
class Replayed:
    """What an allocator did with the requests of a history.

    refused: the index of the first request without room; None: all had room; -1: what was in use before them had none.
    equal_addresses: the requests that got the recorded address, of all that were allocations.
    sizes: of the blocks that the allocations got; 0: none.
    """

    allocator: CachingAllocator
    refused: int | None
    equal_addresses: int
    allocations: int
    sizes: Ints

    @property
    def peak_reserved_bytes(self) -> int:
        return self.allocator.reserved.peak

    def rows(self) -> Ints:
        """What torch would have recorded, as rows of a History. The address of an oom is the memory that was left."""
        rows = self.allocator.rows()
        return rows - IN_REPLAY * (rows[:, :1] != OOM)


class _Played(ctypes.Structure):
    """As in csrc/simulated/replay.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("refused", "allocations", "equal_addresses")]


def replay_history(
    history: History, allocator: CachingAllocator | None = None, *, at_recorded_addresses: bool = False
) -> Replayed:
    """Replays the requests of a history in an allocator, which must be new.

    The program's calls of empty_cache are replayed. So are its requests that had no room when they were recorded; one
    that had room then and has none here ends the replay. If the allocator has other settings than the history, what
    was in use before the first event is requested anew, in the order of its addresses; and if it has less room.

    allocator: default: one with the settings and the limit of the history.
    at_recorded_addresses: new segments get the addresses of the recorded ones.

    ValueError: the history contradicts itself.
    """
    if allocator is None:
        allocator = CachingAllocator(history.limit_bytes, history.settings, order=history.order)
    if (before := _begin(history, allocator)).refused is not None:
        return replace(before, refused=BEFORE_THE_FIRST, allocations=0, sizes=before.sizes[:0])
    return _play(allocator, history.rows, history.emptied, follows=at_recorded_addresses)


def _begin(history: History, allocator: CachingAllocator) -> Replayed:
    """Gives the allocator the blocks that were in use before the first event."""
    room, requests = allocator.room_bytes, list[tuple[int, int, int, int]]()
    adopts = allocator.settings == history.settings and (room is None or history.reserved_at_begin <= room)
    for segment in history.at_begin:
        if adopts:
            blocks = np.array([(address + ABOVE, *sizes) for address, sizes in segment.blocks.items()], np.int64)
            where = segment.address + ABOVE, segment.bytes, segment.stream, segment.small, segment.expandable
            caching.check(allocator.call("adopt", *where, blocks.ctypes.data, len(blocks)))
        else:
            requests += [(ALLOC, asked, address, segment.stream) for address, (_, asked) in segment.blocks.items()]
    return _play(allocator, np.array(requests, np.int64).reshape(-1, 4), np.zeros(0, np.int64))


def _play(allocator: CachingAllocator, rows: Ints, emptied: Ints, *, follows: bool = False) -> Replayed:
    """Plays rows of a History."""
    rows = rows + IN_REPLAY
    sizes, played = np.zeros(np.count_nonzero(rows[:, 0] == ALLOC), np.int64), _Played()
    where = rows.ctypes.data, len(rows), emptied.ctypes.data, len(emptied)
    caching.check(allocator.call("play", *where, follows, sizes.ctypes.data, ctypes.byref(played)))
    refused = None if played.refused < 0 else played.refused
    return Replayed(allocator, refused, played.equal_addresses, played.allocations, sizes[: played.allocations])


def _listed(rows: Ints) -> Iterator[list[int]]:
    """The rows as lists, a few at a time, as a large recording has millions."""
    for begin in range(0, len(rows), 2**16):
        yield from rows[begin : begin + 2**16].tolist()

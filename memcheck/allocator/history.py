"""Recorded histories of the allocator: their events, the state before the first of them, and their replay."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memcheck.allocator.blocks import SMALL_REQUEST, SMALL_SEGMENT, Block, Count, OutOfMemory, Pool
from memcheck.allocator.caching import CachingAllocator, Event
from memcheck.allocator.settings import AllocatorSettings

RELEASES = ("segment_free", "segment_unmap")
NEW_MEMORY = ("segment_alloc", "segment_map")
BEFORE_THE_FIRST = -1
UNKNOWN = 0  # The size of a block of which only the request is recorded.


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
    """What torch.cuda.memory recorded: its events, and the segments after the last one."""

    events: Sequence[Event]
    segments: Sequence[Segment] = ()
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)

    @functools.cached_property
    def limit_bytes(self) -> int | None:
        """The memory that the process could reserve, by its first request without room. None: all had room."""
        refused = next((index for index, event in enumerate(self.events) if event.action == "oom"), None)
        if refused is None:
            return None
        free = self.events[refused].free_bytes or 0
        return sum(segment.bytes for segment in self.at_begin) + sum(map(reserved_by, self.events[:refused])) + free

    @functools.cached_property
    def at_begin(self) -> list[Segment]:
        """The segments before the first event, found from those after the last one."""
        state = _Rewound(self.segments)
        for event in reversed(self.events):
            state.undo(event)
        found = state.segments()
        _find_sizes(found, self.events, self.settings)
        return found


def reserved_by(event: Event) -> int:
    """The bytes that came from the driver, negative if they went back."""
    if event.action in NEW_MEMORY:
        return event.bytes
    return -event.bytes if event.action in RELEASES else 0


class _Rewound:
    """The state of the allocator, in which events are undone from the last to the first."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._ranges = {segment.address: segment for segment in segments}
        blocks = itertools.chain.from_iterable(segment.blocks.items() for segment in self._ranges.values())
        self._blocks = dict(blocks)

    def undo(self, event: Event) -> None:
        if event.address is None:
            return
        if event.action == "alloc":
            self._blocks.pop(event.address, None)
        elif event.action == "free_completed":
            self._blocks[event.address] = UNKNOWN, event.bytes
        elif event.action in RELEASES:
            small, expandable = event.bytes == SMALL_SEGMENT, event.action == "segment_unmap"
            self._ranges[event.address] = Segment(event.address, event.bytes, event.stream, small, expandable, {})
        elif event.action == "segment_alloc":
            self._ranges.pop(event.address, None)
        elif event.action == "segment_map":
            self._remove(event.address, event.address + event.bytes)

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


def _find_sizes(segments: Iterable[Segment], events: Iterable[Event], settings: AllocatorSettings) -> None:
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
    for event in events:
        if event.action == "free_completed" and event.address in before:
            gaps.pop(before[event.address], None)
        elif event.action == "alloc" and gaps and event.address is not None:
            begin = begins[bisect.bisect_right(begins, event.address) - 1]
            if begin in gaps and begin <= event.address < gaps[begin][2]:
                segment, address, _ = gaps.pop(begin)
                if event.address - begin <= SMALL_REQUEST:
                    segment.blocks[address] = event.address - address, segment.blocks[address][1]


@dataclass(frozen=True)
class Replayed:
    """What the model's allocator did with the requests of a history.

    refused: the index of the first request without room; None: all had room; -1: what was in use before them had none.
    equal_addresses: the requests that got the recorded address, of all that were allocations.
    sizes: of the blocks that the allocations got.
    events: what torch would have recorded, if the allocator keeps its events.
    """

    reserved: Count
    allocated: Count
    refused: int | None
    equal_addresses: int
    allocations: int
    sizes: list[int]
    events: list[Event] | None


def replay_history(
    history: History, allocator: CachingAllocator | None = None, *, at_recorded_addresses: bool = False
) -> Replayed:
    """Replays the requests of a history in an allocator, which must be new.

    The program's calls of empty_cache are replayed. So are its requests that had no room when they were recorded; one
    that had room then and has none here ends the replay. If the allocator has other settings than the history, what
    was in use before the first event is requested anew, in the order of its addresses; and if it has less room.

    allocator: default: one with the settings and the limit of the history.
    at_recorded_addresses: new segments get the addresses of the recorded ones.
    """
    if allocator is None:
        allocator = CachingAllocator(history.limit_bytes, history.settings)
    return _Replay(history, allocator, at_recorded_addresses).run()


@dataclass
class _Replay:
    history: History
    allocator: CachingAllocator
    at_recorded_addresses: bool
    alive: dict[int, Block | None] = field(default_factory=dict)  # By their recorded address.
    recorded: deque[int] = field(default_factory=deque)  # Addresses of new memory for the next request.
    refused: int | None = None
    equal: int = 0
    allocations: int = 0
    sizes: list[int] = field(default_factory=list)

    def run(self) -> Replayed:
        allocator = self.allocator
        try:
            self._begin()
        except OutOfMemory:
            self.refused = BEFORE_THE_FIRST
        empties = self._empties()
        for index, event in enumerate(self.history.events if self.refused is None else ()):
            if index in empties:
                allocator.empty_cache()
            if not self._play(index, event):
                break
        counts = allocator.reserved, allocator.allocated, self.refused, self.equal, self.allocations
        return Replayed(*counts, self.sizes, allocator.events)

    def _play(self, index: int, event: Event) -> bool:
        """Whether the replay goes on."""
        action, address, allocator = event.action, event.address or 0, self.allocator
        if action == "alloc":
            self.allocations += 1
            if not self._request(index, event):
                return False
            block = self.alive[address]
            self.equal += block is not None and block.address == address
            self.sizes.append(0 if block is None else block.bytes)
            self.recorded.clear()
        elif action == "free_requested":
            allocator.free(self.alive.get(address), waits=True)
        elif action == "free_completed":
            allocator.complete(self.alive.pop(address, None))
        elif action in NEW_MEMORY:
            self.recorded.append(address)
        elif action == "oom" and self._request(index, event):
            allocator.free(self.alive.pop(address))
        return True

    def _request(self, index: int, event: Event) -> bool:
        """Whether there was room."""
        try:
            self.alive[event.address or 0] = self.allocator.malloc(event.bytes, event.stream)
        except OutOfMemory:
            self.refused = index if self.refused is None else self.refused
            return False
        return True

    def _empties(self) -> set[int]:
        """The indices of events before which the program called torch.cuda.empty_cache.

        Other releases were made by the allocator itself, because the next request had no room.
        """
        limit = self.history.limit_bytes
        found, begin, released = set[int](), None, 0
        reserved = sum(segment.bytes for segment in self.history.at_begin)
        for index, event in enumerate(self.history.events):
            change = reserved_by(event)
            if event.action in RELEASES:
                begin, released = index if begin is None else begin, released - change
            elif begin is not None and event.action != "free_completed":
                needed = reserved + released + max(change, 0)
                if event.action != "oom" and (limit is None or needed <= limit):
                    found.add(begin)
                begin, released = None, 0
            reserved += change
        return found if begin is None else {*found, begin}

    def _begin(self) -> None:
        """Gives the allocator the blocks that were in use before the first event."""
        allocator, segments = self.allocator, self.history.at_begin
        if self.at_recorded_addresses:
            allocator.next_address = self._recorded_address
        room, reserved = allocator.room_bytes, sum(segment.bytes for segment in segments)
        if allocator.settings == self.history.settings and (room is None or reserved <= room):
            self._adopt(segments)
        else:
            for segment in segments:
                for address, (_, requested) in segment.blocks.items():
                    self.alive[address] = allocator.malloc(requested, segment.stream)
        if allocator.events is not None:
            allocator.events.clear()

    def _adopt(self, segments: list[Segment]) -> None:
        """Builds the recorded segments."""
        allocator = self.allocator
        if segments:
            allocator.lowest_address = min(segment.address for segment in segments)
        ends: dict[Pool, Block] = {}  # The unmapped ends of expandable segments.
        for segment in segments:
            pool = allocator.pool(0, segment.small, segment.stream)
            if segment.expandable:
                block = allocator.expandable.mapped_at(segment.address, segment.bytes, pool, ends.get(pool))
                ends[pool] = block.after  # type: ignore[assignment]
            else:
                block = Block(segment.bytes, segment.address, pool, allocator.counter_of(None))
                allocator.reserve(block, segment.bytes)
            self._fill(block, segment)

    def _fill(self, rest: Block, segment: Segment) -> None:
        """Divides a segment into the blocks that were in use and the free ones between them."""
        allocator = self.allocator
        for address, (size, requested) in segment.blocks.items():
            if address > rest.address:
                allocator.add(rest.cut(address - rest.address, allocator.counter_of(rest)))
            block = rest if size == rest.bytes else rest.cut(size, allocator.counter_of(rest))
            block.in_use, block.requested = True, requested
            allocator.requested.add(requested)
            allocator.allocated.add(size)
            self.alive[address] = block
            if block is rest:
                return
        allocator.add(rest)

    def _recorded_address(self, size: int, pool: Pool) -> int:
        """The address of the segment that the recorded allocator made for this request."""
        if not self.recorded:  # It made none.
            self.allocator.lowest_address -= size
            return self.allocator.lowest_address
        return self.recorded.popleft()

"""Replays recorded histories in the model of the allocator: with their own settings, or with others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memcheck.predict.allocator.blocks import Block, Pool
from memcheck.predict.allocator.caching import CachingAllocator, Event
from memcheck.predict.allocator.history import NEW_MEMORY, RELEASES, History, Segment, reserved_by
from memcheck.predict.allocator.plain import Count, OutOfMemory

BEFORE_THE_FIRST = -1


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

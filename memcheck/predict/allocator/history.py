"""Recorded histories of the allocator: their events, and the state before the first of them."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memcheck.predict.allocator.blocks import SMALL_REQUEST, SMALL_SEGMENT
from memcheck.predict.allocator.caching import Event
from memcheck.predict.allocator.settings import AllocatorSettings

RELEASES = ("segment_free", "segment_unmap")
NEW_MEMORY = ("segment_alloc", "segment_map")
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

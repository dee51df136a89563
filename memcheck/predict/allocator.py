"""A model of PyTorch's CUDA caching allocator: its counters after the same requests in the same order.

It follows c10/cuda/CUDACachingAllocator.cpp with default settings, on one stream.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 2**20
BLOCK = 512  # Every block is a multiple of it.
SMALL_REQUEST = MIB  # The largest request served by the small pool.
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # For requests below 10 MiB.
LEAST_WITH_A_SEGMENT_OF_ITS_OWN = 10 * MIB
SEGMENT = 2 * MIB  # Larger segments are multiples of it.
PAGES = {True: "pages of 2 MiB, small pool", False: "pages of 20 MiB"}  # Page size of expandable segments.
ADDRESSES = 2**80  # Address space of an expandable segment, larger than any request.


class OutOfMemory(Exception):  # noqa: N818
    """There is no room for the request (on CUDA: for a segment), even after cached memory was released."""

    def __init__(self, requested_bytes: int, in_use_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes requested, {in_use_bytes} in use")
        self.requested_bytes, self.in_use_bytes = requested_bytes, in_use_bytes


@dataclass
class Count:
    """A statistic of torch.cuda.memory_stats: the current bytes, and their peak since its last reset."""

    current: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        self.peak = self.current


@dataclass(eq=False)
class Block:
    """A range of a segment, linked with its neighbours."""

    bytes: int
    address: int
    small: bool
    requested: int = 0
    in_use: bool = False
    mapped: bool = True  # In an expandable segment: whether memory is mapped to the addresses.
    before: Block | None = None
    after: Block | None = None

    def joins(self, other: Block | None) -> bool:
        return other is not None and not other.in_use and other.mapped == self.mapped


def rounded_up(size: int, unit: int) -> int:
    """The smallest multiple of the unit that is at least the size."""
    return -(-size // unit) * unit


def segment_size(size: int) -> int:
    """The size of the new segment if no free block has room for `size`."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < LEAST_WITH_A_SEGMENT_OF_ITS_OWN:
        return LARGE_SEGMENT
    return rounded_up(size, SEGMENT)


def kind_of(segment: int, small: bool) -> str:
    """How reports name a segment of that size."""
    if small:
        return "segments of 2 MiB, small pool"
    return "segments of 20 MiB" if segment == LARGE_SEGMENT else "larger segments"


class Pool:
    """Free blocks, ordered by size and then by address."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}  # Ordered by address.

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[address] for _, address in self._keys])

    def add(self, block: Block) -> None:
        bisect.insort(self._keys, (block.bytes, block.address))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        self._keys.remove((block.bytes, block.address))
        del self._blocks[block.address]

    def best_fit(self, size: int) -> Block | None:
        """The smallest block with room for the size, at the lowest address."""
        index = bisect.bisect_left(self._keys, (size, 0))
        return self._blocks[self._keys[index][1]] if index < len(self._keys) else None


class PlainAllocator:
    """Counts requested bytes against a budget, as memcheck's tracking allocator does on the CPU."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.requested = self.allocated = Count()

    def malloc(self, requested: int) -> Block | None:
        if self.limit_bytes is not None and self.requested.current + requested > self.limit_bytes:
            raise OutOfMemory(requested, self.requested.current)
        self.requested.add(requested)
        return Block(requested, 0, False, requested, in_use=True)

    def free(self, block: Block | None) -> None:
        if block is not None:
            self.requested.add(-block.requested)

    def empty_cache(self) -> None:
        pass

    def room_for(self, limit_bytes: int, held_bytes: int) -> int:
        """The limit_bytes that leaves this much for requests, of which held_bytes are already allocated."""
        return limit_bytes

    def segments(self) -> dict[str, int] | None:
        return None


class CachingAllocator:
    """The native CUDA allocator's malloc and free, and three of its counters.

    limit_bytes: the most bytes of all segments together: the GPU's memory, or a per-process fraction of it.
    expandable: as expandable_segments:True in PYTORCH_ALLOC_CONF: one segment per pool, which grows by pages.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.requested, self.allocated, self.reserved = Count(), Count(), Count()
        self._free = {True: Pool(), False: Pool()}  # The small pool and the large pool.
        self._growing = GrowingSegments(self) if expandable else None
        self._segments: dict[str, int] = {}
        self._next_address = 0

    def malloc(self, requested: int) -> Block | None:
        """Returns a block of at least that size, or None for zero bytes. Raises OutOfMemory."""
        if requested == 0:
            return None
        size = max(BLOCK, rounded_up(requested, BLOCK))
        small = size <= SMALL_REQUEST
        block = self._free[small].best_fit(size)
        if block is not None:
            self._free[small].remove(block)
        else:
            block = self._from_driver(size, small)
        left = block.bytes - size
        if left >= BLOCK if small or self._growing is not None else left > SMALL_REQUEST:
            self._free[small].add(split(block, size))
        block.in_use, block.requested = True, requested
        self.requested.add(requested)
        self.allocated.add(block.bytes)
        return block

    def free(self, block: Block | None) -> None:
        if block is None:
            return
        self.requested.add(-block.requested)
        self.allocated.add(-block.bytes)
        block.in_use = False
        self.add_free(block)

    def empty_cache(self) -> None:
        """Returns unused segments, or unused pages of expandable segments, to the driver."""
        for pool in self._free.values():
            for block in pool:
                if self._growing is not None:
                    pool.remove(block)
                    self._growing.unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserve(-block.bytes, kind_of(block.bytes, block.small))

    def room_for(self, limit_bytes: int, held_bytes: int) -> int:
        """The limit on segments that leaves limit_bytes for requests, of which held_bytes are already allocated."""
        return self.reserved.current + limit_bytes - held_bytes

    def segments(self) -> dict[str, int]:
        """Reserved bytes by kind of segment."""
        return {kind: size for kind, size in self._segments.items() if size}

    def reserve(self, size: int, kind: str) -> None:
        self.reserved.add(size)
        self._segments[kind] = self._segments.get(kind, 0) + size

    def add_free(self, block: Block) -> Block:
        """Adds the block to its pool, merged with its free neighbours."""
        pool = self._free[block.small]
        for neighbour in (block.before, block.after):
            if neighbour is not None and block.joins(neighbour):
                pool.remove(neighbour)
                block = joined(block, neighbour)
        pool.add(block)
        return block

    def take_free(self, block: Block) -> None:
        self._free[block.small].remove(block)

    def has_room(self, size: int) -> bool:
        return self.limit_bytes is None or self.reserved.current + size <= self.limit_bytes

    def _from_driver(self, size: int, small: bool) -> Block:
        if (block := self._new_block(size, small)) is not None:
            return block
        self.empty_cache()
        if (block := self._new_block(size, small)) is not None:
            return block
        raise OutOfMemory(segment_size(size), self.requested.current)

    def _new_block(self, size: int, small: bool) -> Block | None:
        if self._growing is not None:
            return self._growing.block(size, small)
        size = segment_size(size)
        if not self.has_room(size):
            return None
        self.reserve(size, kind_of(size, small))
        address, self._next_address = self._next_address, self._next_address + size
        return Block(size, address, small)


class GrowingSegments:
    """Expandable segments, one per pool: an unlimited address range with pages of memory mapped to parts of it."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._page = {True: SMALL_SEGMENT, False: LARGE_SEGMENT}
        self._unmapped = {
            True: [Block(ADDRESSES, 0, True, mapped=False)],
            False: [Block(ADDRESSES, ADDRESSES * LARGE_SEGMENT, False, mapped=False)],
        }

    def block(self, size: int, small: bool) -> Block | None:
        """Removes and returns the mapped block with the lowest address that has room. None if memory is exhausted."""
        candidate = next(filter(None, (self._with_room(block, size) for block in self._unmapped[small])))
        while not candidate.mapped or candidate.bytes < size:
            gap = candidate if not candidate.mapped else candidate.after
            if gap is None or gap.mapped:
                return None
            missing = size if gap is candidate else size - candidate.bytes
            mapped = self._map(gap, min(missing, gap.bytes))
            if mapped is None:
                return None
            candidate = mapped
        self._allocator.take_free(candidate)
        return candidate

    def unmap(self, block: Block) -> None:
        """Unmaps the whole pages inside a free block that is in no pool."""
        page = self._page[block.small]
        begin, end = rounded_up(block.address, page), (block.address + block.bytes) // page * page
        if begin >= end:
            self._allocator.add_free(block)
            return
        whole = split(block, begin - block.address) if begin > block.address else block
        rest = split(whole, end - begin) if end < whole.address + whole.bytes else None
        whole.mapped = False
        for part in (block, rest):
            if part is not None and part is not whole:
                self._allocator.add_free(part)
        self._allocator.reserve(-whole.bytes, PAGES[whole.small])
        self._keep_unmapped(whole)

    def _with_room(self, gap: Block, size: int) -> Block | None:
        """The first run of adjacent free blocks, mapped or not, with that many bytes."""
        first = gap.before if gap.before is not None and not gap.before.in_use else gap
        room, block = 0, first
        while room < size:
            room += block.bytes
            if room < size and (block.after is None or block.after.in_use):
                return None
            block = block.after or block
        return first

    def _map(self, gap: Block, size: int) -> Block | None:
        """Maps pages to the first bytes of the gap, and returns the free block in its pool that contains them."""
        size = rounded_up(size, self._page[gap.small])
        if not self._allocator.has_room(size):
            return None
        self._unmapped[gap.small].remove(gap)
        if size < gap.bytes:
            bisect.insort(self._unmapped[gap.small], split(gap, size), key=lambda block: block.address)
        self._allocator.reserve(size, PAGES[gap.small])
        gap.mapped = True
        return self._allocator.add_free(gap)

    def _keep_unmapped(self, block: Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and block.joins(neighbour):
                self._unmapped[block.small].remove(neighbour)
                block = joined(block, neighbour)
        bisect.insort(self._unmapped[block.small], block, key=lambda block: block.address)


def split(block: Block, size: int) -> Block:
    """Cuts the block to `size` and returns the remainder."""
    rest = Block(block.bytes - size, block.address + size, block.small, mapped=block.mapped)
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after, block.bytes = rest, size
    return rest


def joined(block: Block, neighbour: Block) -> Block:
    """Merges two adjacent blocks into the first one."""
    first, second = sorted((block, neighbour), key=lambda block: block.address)
    first.bytes += second.bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first

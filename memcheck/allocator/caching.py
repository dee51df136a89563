"""A model of PyTorch's CUDA caching allocator: its counters after the same requests in the same order.

It follows c10/cuda/CUDACachingAllocator.cpp: streams, private pools, frees that wait for other streams, and settings.
Docstrings give the function of DeviceCachingAllocator that a method mirrors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memcheck.allocator.blocks import BLOCK, MIB, SMALL_REQUEST, Block, Count, OutOfMemory, Pool, rounded_up
from memcheck.allocator.settings import AllocatorSettings, Order

# Drivers hand out descending addresses: 82 % of the successive segments in recorded histories.
TOP_ADDRESS = 2**48
ADDRESSES = 2**44  # Addresses of a segment if the memory of the GPU is unknown: larger than any request.


class Event(NamedTuple):
    """What torch records in the history of its allocator. free_bytes: of the GPU, when a request finds no room."""

    action: str
    bytes: int
    address: int | None
    stream: int = 0
    free_bytes: int | None = None


class CachingAllocator:
    """The native CUDA allocator's malloc and free, and three of its counters.

    limit_bytes: the most bytes that the driver can give.
    allowed_bytes: the most that the process may reserve: torch.cuda.set_per_process_memory_fraction.
    total_bytes: the memory of the GPU, which bounds the addresses of an expandable segment.
    order: which of several blocks of the same size is taken.
    events: what torch would have recorded, if keeps_events.
    next_address: returns the address of the next segment; None: the model chooses it.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        allowed_bytes: int | None = None,
        total_bytes: int | None = None,
        order: Order = Order.ADDRESS,
        keeps_events: bool = False,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.limit_bytes, self.allowed_bytes, self.total_bytes = limit_bytes, allowed_bytes, total_bytes
        if self.settings.memory_fraction is not None and total_bytes is not None:
            self.allowed_bytes = int(self.settings.memory_fraction * total_bytes)
        self.order = order
        self.events: list[Event] | None = [] if keeps_events else None
        self.next_address: Callable[[int, Pool], int] | None = None
        self.requested, self.allocated, self.reserved = Count(), Count(), Count()
        self.lowest_address = TOP_ADDRESS
        self.expandable = ExpandableSegments(self)
        self._pools: dict[tuple[int, bool, int], Pool] = {}
        self._released: set[int] = set()  # Private pools of which nothing will be requested.
        self._pending: dict[Block, None] = {}
        self._segments: dict[str, int] = {}
        self._counter = 0
        self._age = 0  # Requests of the large pool.

    def malloc(self, requested: int, stream: int = 0, private: int = 0) -> Block | None:
        """Returns a block of at least that size, or None for zero bytes. Raises OutOfMemory."""
        if requested == 0:
            return None
        size = self.settings.rounded(requested)
        small = size <= SMALL_REQUEST
        pool = self.pool(private, small, stream)
        self._age += not small and not private
        block = self._best_fit(pool, size) or self._from_driver(size, pool)
        if self._splits(block, size):
            rest, block = block, block.cut(size, self.counter_of(block))
            self.add(rest)
        block.in_use, block.requested = True, requested
        self.requested.add(requested)
        self.allocated.add(block.bytes)
        self.note("alloc", block, requested)
        return block

    def free(self, block: Block | None, *, waits: bool = False) -> None:
        """Requests the release. It waits for complete() if other streams use the block, or if asked for."""
        if block is None:
            return
        self.allocated.add(-block.bytes)
        self.note("free_requested", block, block.requested)
        if waits or block.streams:
            self._pending[block] = None
        else:
            self._release(block)

    def record_stream(self, block: Block | None, stream: int) -> None:
        """Another stream uses the block: after its release is requested, complete() must be called."""
        if block is not None and stream != block.pool.stream:
            block.streams.add(stream)

    def complete(self, block: Block | None) -> None:
        """All streams have finished with the block, whose release was requested."""
        if block is not None and block in self._pending:
            del self._pending[block]
            self._release(block)

    def synchronize(self) -> None:
        """Completes all releases."""
        for block in list(self._pending):
            self.complete(block)

    def empty_cache(self) -> None:
        """Returns unused segments, or unused pages of expandable segments, to the driver."""
        self.synchronize()
        for private in (0, *sorted(self._released)):
            for small in (False, True):
                for pool in self._pools_of(private, small):
                    self._release_unused(pool)

    def release_pool(self, private: int) -> None:
        """The last graph of a private pool is gone: empty_cache may return its memory."""
        self._released.add(private)

    @property
    def room_bytes(self) -> int | None:
        """The lower limit; None if there is none."""
        return min((room for room in (self.limit_bytes, self.allowed_bytes) if room is not None), default=None)

    def segments(self) -> dict[str, int]:
        """Reserved bytes by kind of segment."""
        return {kind: size for kind, size in self._segments.items() if size}

    def pool(self, private: int, small: bool, stream: int) -> Pool:
        key = private, small, stream
        if (pool := self._pools.get(key)) is None:
            pool = self._pools[key] = Pool(*key)
        return pool

    def add(self, block: Block) -> None:
        """Adds a free block to its pool."""
        block.born = self._age
        block.pool.add(block)

    def reserve(self, block: Block, size: int) -> None:
        """Counts memory that came from the driver, or went back to it if the size is negative."""
        unit = self.settings.page_size(block.pool.small)
        kind = f"{'segments' if block.base is None else 'pages'} of {unit // MIB} MiB"
        if block.pool.small:
            kind += ", small pool"
        elif block.base is None and abs(size) != unit:
            kind = "larger segments"
        self.reserved.add(size)
        self._segments[kind] = self._segments.get(kind, 0) + size
        names = ("segment_map", "segment_unmap") if block.base is not None else ("segment_alloc", "segment_free")
        self.note(names[size < 0], block, abs(size))

    def note(self, action: str, block: Block, size: int) -> None:
        """Keeps an event."""
        if self.events is not None:
            self.events.append(Event(action, size, block.address, block.pool.stream))

    def has_memory(self, size: int) -> bool:
        """Whether the driver has that much."""
        return self.limit_bytes is None or self.reserved.current + size <= self.limit_bytes

    def address_of(self, size: int, pool: Pool) -> int:
        """The address of a new segment."""
        if self.next_address is not None:
            return self.next_address(size, pool)
        self.lowest_address -= size
        return self.lowest_address

    def counter_of(self, parent: Block | None) -> int:
        """The counter of a new block: part of its parent, or a segment if that is None."""
        if self.order is Order.ADDRESS:
            return 0
        if self.order is Order.SEGMENT and parent is not None:
            return parent.counter
        self._counter += 1
        return self._counter

    def _pools_of(self, private: int, small: bool) -> list[Pool]:
        keys = sorted(key for key in self._pools if key[:2] == (private, small))
        return [self._pools[key] for key in keys]

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Takes the block that serves the request out of the pool. None: there is none (get_free_block)."""
        index = pool.index_for(size)
        if index == len(pool.free):
            return None
        block = pool.free[index][3]
        most = self.settings.max_split_size
        if most is not None:
            rounding = self.settings.max_non_split_rounding
            if block.bytes >= most if size < most else block.bytes >= size + rounding:
                return None
        del pool.free[index]
        return block

    def _splits(self, block: Block, size: int) -> bool:
        """Whether what the request leaves of the block becomes a block of its own (should_split)."""
        rest = block.bytes - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= BLOCK
        most = self.settings.max_split_size
        return rest > SMALL_REQUEST and (most is None or size < most)

    def _release(self, block: Block) -> None:
        """Gives the block back to its pool (free_block)."""
        self.requested.add(-block.requested)
        self.note("free_completed", block, block.requested)
        block.in_use = False
        block.streams.clear()
        block.join()
        self.add(block)

    def _from_driver(self, size: int, pool: Pool) -> Block:
        """A block of new memory, after unused segments are returned if there is too little. It is in no pool."""
        if self.allowed_bytes is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage(int(self.settings.garbage_collection_threshold * self.allowed_bytes))
        for _ in self._ways_to_make_room(size, pool):
            if (block := self._new_block(size, pool)) is not None:
                return block
        if self.events is not None:
            free = None if self.limit_bytes is None else self.limit_bytes - self.reserved.current
            self.events.append(Event("oom", size, None, pool.stream, free))
        raise OutOfMemory(self.settings.segment_size(size), self.requested.current)

    def _ways_to_make_room(self, size: int, pool: Pool) -> Iterator[None]:
        """Yields before each attempt to allocate; in between, unused memory goes back to the driver (malloc)."""
        yield
        if self.settings.max_split_size is not None and self._release_oversize(size, pool):
            yield
        self.empty_cache()
        yield

    def _new_block(self, size: int, pool: Pool) -> Block | None:
        """A new segment, or new pages of an expandable one. None: the driver has too little (alloc_block)."""
        segment = self.settings.segment_size(size)
        if self.allowed_bytes is not None and self.reserved.current + segment > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self.expandable.block(size, pool)
        if not self.has_memory(segment):
            return None
        block = Block(segment, self.address_of(segment, pool), pool, self.counter_of(None))
        self.reserve(block, segment)
        return block

    def _release_unused(self, pool: Pool) -> None:
        """Returns all that is unused of a pool to the driver (release_blocks)."""
        for block in pool.blocks():
            if block.base is not None:
                self.expandable.unmap(block)
            elif block.is_whole:
                self._release_segment(block)

    def _release_segment(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserve(block, -block.bytes)

    def _release_oversize(self, size: int, pool: Pool) -> bool:
        """Returns large blocks of the stream until there is room for the size (release_available_cached_blocks)."""
        size = max(size, self.settings.max_split_size or 0)
        index = pool.index_for(size)
        if index < len(pool.free):
            if pool.free[index][3].base is not None:
                return False
            self._release_segment(pool.free[index][3])
            return True
        released = 0
        for block in reversed(pool.blocks()):
            if released >= size or block.bytes < (self.settings.max_split_size or 0):
                break
            if block.base is None:
                released += block.bytes
                self._release_segment(block)
        return released >= size

    def _collect_garbage(self, threshold: int) -> None:
        """Returns the segments that were free for longest, if more than the threshold is reserved.

        It mirrors garbage_collect_cached_blocks.
        """
        target = self.reserved.current - threshold
        blocks = [block for pool in self._pools_of(0, False) for block in pool.blocks() if block.is_whole]
        blocks = [block for block in blocks if block.base is None]
        while target > 0 and blocks:
            ages = {block: self._age - block.born for block in blocks}
            old = [block for block in blocks if ages[block] >= sum(ages.values()) / len(ages)]
            for block in old:
                target -= block.bytes
                self._release_segment(block)
            blocks = [block for block in blocks if block not in old]


class ExpandableSegments:
    """Expandable segments of an allocator: ranges of addresses with pages of memory mapped to parts of them.

    Another one of a pool is made only when the addresses of one run out."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator

    def block(self, size: int, pool: Pool) -> Block | None:
        """Removes and returns the mapped block with the lowest address that has room. None if memory is exhausted.

        It mirrors try_allocate_expandable_block.
        """
        candidate = next(filter(None, (_with_room(gap, size) for _, gap in pool.unmapped)), None)
        if candidate is None:
            candidate = self._new_segment(pool)
        if not candidate.mapped and not self._map(candidate, min(size, candidate.bytes)):
            return None
        while candidate.bytes < size:
            gap = candidate.after
            if gap is None or not self._map(gap, min(size - candidate.bytes, gap.bytes)):
                return None
            candidate = gap
        pool.remove(candidate)
        return candidate

    def unmap(self, block: Block) -> None:
        """Unmaps the whole pages inside a free block (unmap_block)."""
        allocator, pool = self._allocator, block.pool
        page = allocator.settings.page_size(pool.small)
        base = block.base or 0
        begin = base + rounded_up(block.address - base, page)
        end = base + (block.address + block.bytes - base) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            allocator.add(block.cut(begin - block.address, allocator.counter_of(block)))
        if end < block.address + block.bytes:
            allocator.add(block.cut_end(end - begin, allocator.counter_of(block)))
        block.mapped = False
        allocator.reserve(block, -block.bytes)
        block.join()
        if not block.is_whole:
            pool.add(block)

    def mapped_at(self, address: int, size: int, pool: Pool, gap: Block | None) -> Block:
        """A free block, in no pool, at that address of the gap, which is unmapped; None: of a new segment."""
        allocator = self._allocator
        gap = self._new_segment(pool, address) if gap is None else gap
        pool.remove(gap)
        if address > gap.address:
            pool.add(gap.cut(address - gap.address, allocator.counter_of(gap)))
        pool.add(gap.cut_end(size, allocator.counter_of(gap)))
        gap.mapped = True
        allocator.reserve(gap, size)
        return gap

    def _new_segment(self, pool: Pool, address: int | None = None) -> Block:
        allocator = self._allocator
        total, page = allocator.total_bytes, allocator.settings.page_size(pool.small)
        # Pages of other streams may keep an eighth of the addresses occupied.
        size = ADDRESSES // page * page if total is None else rounded_up(total + total // 8, page)
        address = allocator.address_of(size, pool) if address is None else address
        block = Block(size, address, pool, allocator.counter_of(None), address, mapped=False)
        pool.add(block)
        return block

    def _map(self, gap: Block, size: int) -> bool:
        """Maps pages to the first bytes of the gap, which joins the free blocks beside it. Whether there was memory.

        It mirrors map_block.
        """
        allocator, pool = self._allocator, gap.pool
        size = rounded_up(size, allocator.settings.page_size(pool.small))
        if not allocator.has_memory(size):
            return False
        pool.remove(gap)
        if size < gap.bytes:
            pool.add(gap.cut_end(size, allocator.counter_of(gap)))
        gap.mapped = True
        allocator.reserve(gap, size)
        gap.join()
        allocator.add(gap)
        return True


def _with_room(gap: Block, size: int) -> Block | None:
    """The first of the adjacent free blocks, mapped or not, at an unmapped one, if they have that many bytes.

    It mirrors find_expandable_block.
    """
    first = gap.before if gap.before is not None and not gap.before.in_use else gap
    room, block = 0, first
    while room < size:
        room += block.bytes
        if room < size and (block.after is None or block.after.in_use):
            return None
        block = block.after or block
    return first

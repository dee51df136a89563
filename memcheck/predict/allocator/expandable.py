"""Expandable segments: a range of addresses with pages of memory mapped to parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcheck.predict.allocator.blocks import Block, Pool, rounded_up

if TYPE_CHECKING:
    from memcheck.predict.allocator.caching import CachingAllocator

ADDRESSES = 2**44  # Addresses of a segment if the memory of the GPU is unknown: larger than any request.


class ExpandableSegments:
    """Expandable segments of an allocator. Another one of a pool is made only when the addresses of one run out."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator

    def block(self, size: int, pool: Pool) -> Block | None:
        """Removes and returns the mapped block with the lowest address that has room. None if memory is exhausted."""
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
        """Unmaps the whole pages inside a free block."""
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
        """Maps pages to the first bytes of the gap, which joins the free blocks beside it. Whether there was memory."""
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
    """The first of the adjacent free blocks, mapped or not, at an unmapped one, if they have that many bytes."""
    first = gap.before if gap.before is not None and not gap.before.in_use else gap
    room, block = 0, first
    while room < size:
        room += block.bytes
        if room < size and (block.after is None or block.after.in_use):
            return None
        block = block.after or block
    return first

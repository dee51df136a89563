"""The allocator of the CPU, and of CUDA's the blocks and the pools of free ones, as in CUDACachingAllocator.cpp."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIB = 2**20
BLOCK = 512  # Every block is a multiple of it.
SMALL_REQUEST = MIB  # The largest request served by the small pool.
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # For requests below 10 MiB.
LEAST_WITH_A_SEGMENT_OF_ITS_OWN = 10 * MIB
SEGMENT = 2 * MIB  # Larger segments are multiples of it.


def rounded_up(size: int, unit: int) -> int:
    """The smallest multiple of the unit that is at least the size."""
    return -(-size // unit) * unit


@dataclass(eq=False, slots=True)
class Block:
    """A range of a segment, linked with its neighbours.

    counter: what orders it among free blocks of its size, before the address does.
    base: the address of its expandable segment; None: its segment is of a fixed size.
    born: age of its pool when the block became free, for the garbage collection.
    """

    bytes: int
    address: int
    pool: Pool
    counter: int = 0
    base: int | None = None
    requested: int = 0
    in_use: bool = False  # Until its release is complete.
    mapped: bool = True  # In an expandable segment: whether memory is mapped to the addresses.
    streams: set[int] = field(default_factory=set)  # Other streams that use it.
    born: int = 0
    before: Block | None = None
    after: Block | None = None

    def cut(self, size: int, counter: int) -> Block:
        """Cuts off the first bytes and returns them as a new block."""
        head = Block(size, self.address, self.pool, counter, self.base, mapped=self.mapped)
        link(self.before, head)
        link(head, self)
        self.address += size
        self.bytes -= size
        return head

    def cut_end(self, size: int, counter: int) -> Block:
        """Keeps the first bytes and returns the rest as a new block."""
        rest = Block(self.bytes - size, self.address + size, self.pool, counter, self.base, mapped=self.mapped)
        link(rest, self.after)
        link(self, rest)
        self.bytes = size
        return rest

    def join(self) -> None:
        """Takes in the free neighbours, mapped or unmapped as it is, which leave their pool (try_merge_blocks)."""
        for other in (self.before, self.after):
            if other is None or other.in_use or other.mapped != self.mapped:
                continue
            self.pool.remove(other)
            self.bytes += other.bytes
            if other is self.before:
                self.address = other.address
                link(other.before, self)
            else:
                link(self, other.after)

    @property
    def is_whole(self) -> bool:
        """Whether it is its whole segment."""
        return self.before is None and self.after is None

    @property
    def room(self) -> int:
        """Its size and that of the unmapped addresses behind it, into which it can grow."""
        behind = self.after
        return self.bytes + (behind.bytes if behind is not None and not behind.mapped else 0)


def link(before: Block | None, after: Block | None) -> None:
    """Makes two blocks neighbours. None: the other one begins or ends its segment."""
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


class Pool:
    """The free blocks of a stream: mapped ones ordered by size, counter and address, unmapped ones by address.

    private: the number of a pool of CUDA graphs or of torch.cuda.MemPool; 0: the default pool.
    """

    __slots__ = ("free", "private", "small", "stream", "unmapped")

    def __init__(self, private: int, small: bool, stream: int) -> None:
        self.private, self.small, self.stream = private, small, stream
        self.free: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.bytes, block.counter, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.bytes, block.counter, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]

    def index_for(self, size: int) -> int:
        """The index of the block that serves a request best; the number of blocks if none has room.

        Before unmapped addresses, the size to which a block can grow counts as its size.
        """
        index = bisect.bisect_left(self.free, (size,))
        while index + 1 < len(self.free) and self.free[index][3].base is not None:
            if self.free[index + 1][3].room >= self.free[index][3].room:
                break
            index += 1
        return index

    def blocks(self) -> list[Block]:
        return [entry[3] for entry in self.free]


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


class PlainAllocator:
    """Counts requested bytes against a budget, as memcheck's tracking allocator does on the CPU."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.room_bytes = limit_bytes
        self.requested = self.allocated = Count()

    def malloc(self, requested: int, stream: int = 0) -> int:
        """Returns the size of the block."""
        if self.room_bytes is not None and self.requested.current + requested > self.room_bytes:
            raise OutOfMemory(requested, self.requested.current)
        self.requested.add(requested)
        return requested

    def free(self, block: int) -> None:
        self.requested.add(-block)

"""The allocator of the CPU, and what it has in common with that of CUDA."""

from __future__ import annotations

from dataclasses import dataclass


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

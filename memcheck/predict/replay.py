"""Whether the events of a log fit another device, or fit with other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import cast

from memcheck.allocator import AllocatorSettings, Block, CachingAllocator, Order, OutOfMemory
from memcheck.core import devices, trace
from memcheck.core.step import Place

# Whether a prediction only has to say if the step fits: where its tensors alone do not, it is not run with the limit.
ONLY_FITS: ContextVar[bool] = ContextVar("ONLY_FITS", default=False)
MORE_THAN_ROOM = "the tensors at the peak do not fit"  # The reason of its record.


def refusal(
    log: trace.AllocationLog, place: Place, sizes: Sequence[int] | None = None, last: int | None = None
) -> OutOfMemory | None:
    """The first request that has no room at the place; None if all events fit.

    sizes: of the log's allocations, in place of theirs. last: the last event that is played.
    """
    given = [one.bytes for one in log.allocations] if sizes is None else sizes
    bytes_of = dict(zip(map(id, log.allocations), given, strict=True))
    events = log.events[:last]
    if place.for_device.kind == "cpu":
        now, room = 0, place.room_bytes
        for one, taken in events:
            size = bytes_of[id(one)]
            if taken and room is not None and now + size > room:
                return OutOfMemory(size, now)
            now += size if taken else -size
        return None
    settings = AllocatorSettings.parse(f"expandable_segments:{place.expandable_segments}")
    order = Order.of(cast(devices.Version, place.torch_version or devices.running()))
    usable, allowed = place.for_device.usable_bytes, place.limit_bytes
    allocator = CachingAllocator(usable, settings, allowed_bytes=allowed, order=order)
    blocks: dict[int, Block | None] = {}
    try:
        for one, taken in events:
            if not taken:
                allocator.free(blocks.pop(id(one)))
                continue
            if one.name == trace.EMPTY_CACHE:
                allocator.empty_cache()
            blocks[id(one)] = allocator.malloc(bytes_of[id(one)], one.stream)
    except OutOfMemory as error:
        return error
    return None

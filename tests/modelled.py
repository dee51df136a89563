"""What torch records of its allocator, made by memcheck's model of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from memcheck.allocator import CachingAllocator


def segments_of(allocator: CachingAllocator, frames: Mapping[int, Any], device: int = 0) -> list[dict[str, Any]]:
    """The segments of torch.cuda.memory._snapshot(). frames: of the blocks in use, by address."""
    return [
        {
            "device": device,
            "address": address,
            "total_size": sum(piece.bytes for piece in pieces),
            "stream": 0,
            "segment_type": "small" if pieces[0].small else "large",
            "is_expandable": pieces[0].expandable,
            "segment_pool_id": (0, 0),
            "blocks": [
                {
                    "address": piece.address,
                    "size": piece.bytes,
                    "requested_size": piece.requested,
                    "state": "active_allocated" if piece.in_use else "inactive",
                    "frames": list(frames.get(piece.address, ())) if piece.in_use else [],
                }
                for piece in pieces
            ],
        }
        for address, group in itertools.groupby(allocator.pieces(), key=lambda piece: piece.segment)
        if (pieces := list(group))
    ]

"""How many blocks of a kernel a multiprocessor holds at once, and what limits them.

The rules are those of cuda_occupancy.h, which a test compares with.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS = 64 << 10  # of a multiprocessor
REGISTER_UNIT = 256  # registers of a warp are given in multiples of this
PARTITIONS = 4  # of a multiprocessor: a warp's registers are in one of them
SHARED_UNIT = 128
RESERVED_SHARED = 1 << 10  # of each block, for the system


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has. FMA lanes: float32 multiply-adds in a cycle."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_bytes_per_block: int
    fma_lanes: int


# By compute capability (CUDA programming guide, "Compute Capabilities").
LIMITS = {
    "8.0": Limits(64, 32, 164 << 10, 163 << 10, 64),
    "8.6": Limits(48, 16, 100 << 10, 99 << 10, 128),
    "8.9": Limits(48, 24, 100 << 10, 99 << 10, 128),
    "9.0": Limits(64, 32, 228 << 10, 227 << 10, 128),
    "10.0": Limits(64, 32, 228 << 10, 227 << 10, 128),
    "12.0": Limits(48, 24, 100 << 10, 99 << 10, 128),
}


def ceil_to(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def blocks_per_multiprocessor(capability: str, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Blocks that are resident at once, and the first resource that allows no more: "warps", "blocks", "registers" or
    "shared memory". 0 blocks: the launch fails."""
    limits = LIMITS[capability]
    warps = -(-threads // WARP)
    warp_registers = ceil_to(registers * WARP, REGISTER_UNIT)
    resident_warps = REGISTERS // PARTITIONS // warp_registers * PARTITIONS
    allowed = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": resident_warps // warps,
        "shared memory": limits.shared_bytes // ceil_to(shared_bytes + RESERVED_SHARED, SHARED_UNIT),
    }
    if shared_bytes > limits.shared_bytes_per_block:
        allowed["shared memory"] = 0
    limit = min(allowed, key=lambda name: allowed[name])
    return allowed[limit], limit

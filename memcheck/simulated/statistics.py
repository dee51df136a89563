"""What torch.cuda.memory asks of torch._C about a simulated GPU: statistics, the history of events, and snapshots."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from typing import Any

from memcheck.simulated.library import library

KINDS = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
]
POOLS = ("all", "small_pool", "large_pool")
WORDS = ("current", "peak", "allocated", "freed")
COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
ACTIONS = [
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
]
asking = threading.Lock()  # The library has one place for its answer.


def memory_stats(device: int) -> dict[str, Any]:
    """torch._C._cuda_memoryStats: torch.cuda.memory_stats flattens it."""
    out = (ctypes.c_int64 * (len(KINDS) * 12 + 8 + len(COUNTS)))()
    library().stats(device, out)
    numbers = iter(out)

    def stat() -> dict[str, int]:
        return {word: next(numbers) for word in WORDS}

    found: dict[str, Any] = {kind: {pool: stat() for pool in POOLS} for kind in KINDS}
    found["oversize_allocations"], found["oversize_segments"] = stat(), stat()
    return found | {name: next(numbers) for name in COUNTS}


def record_history(
    enabled: str | None = None,
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = 2**63 - 1,
    clear_history: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    """torch._C._cuda_record_memory_history."""
    most = 0 if enabled == "state" else min(max_entries, 2**63 - 1)
    library().record(
        enabled is not None, context is not None, stacks != "python", context == "all", most, clear_history
    )


def record_history_legacy(enabled: bool, record_context: bool = True, max_entries: int = 1, *_: Any, **__: Any) -> None:
    library().record(enabled, record_context, 0, 0, max_entries, True)


def segment(found: list[Any], device: int, stacks: list[Any]) -> dict[str, Any]:
    address, total, allocated, active, requested, stream, is_small, is_expandable, pool, blocks = found
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": active,
        "requested_size": requested,
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": tuple(pool),
        "is_expandable": bool(is_expandable),
        "frames": [],
        "blocks": [
            {"address": at, "size": size, "requested_size": asked, "state": state, "frames": stacks[note]}
            for at, size, asked, state, note in blocks
        ],
    }


def entry(event: list[int], metadata: list[str], stacks: list[Any]) -> dict[str, Any]:
    action, size, address, stream, note, microseconds, number = event
    return {
        "action": ACTIONS[action],
        "device_free" if ACTIONS[action] == "oom" else "addr": address,
        "size": size,
        "stream": stream,
        "time_us": microseconds,
        "compile_context": "N/A",
        "user_metadata": metadata[number],
        "pool_id": (0, 0),
        "frames": stacks[note],
    }


def snapshot_of(settings: str, given: Any = None) -> dict[str, Any]:
    """torch._C._cuda_memorySnapshot, with the allocator's settings as torch was given them."""
    pool, with_traces = (given[:2], given[2]) if isinstance(given, tuple) else (None, True)
    with asking:
        found = json.loads(library().snapshot(bool(with_traces)).decode("utf-8", "replace"))
    frames = [{"filename": file, "name": name, "line": line} for file, name, line in found["frames"]]
    stacks = [
        [*({"filename": "??", "name": name, "line": 0} for name in doers.split("\n") if name)]
        + [frames[number] for number in stack]
        for stack, doers in zip(found["stacks"], found["doers"], strict=True)
    ]
    stacks.append([])  # Of the number -1: there is no stack.
    gpus = list(enumerate(found["gpus"]))
    segments = [segment(each, device, stacks) for device, gpu in gpus for each in gpu["segments"]]
    split = memory_stats(0)["max_split_size"]
    return {
        "segments": [each for each in segments if pool in (None, (0, 0), each["segment_pool_id"])],
        "device_traces": [[entry(event, found["metadata"], stacks) for event in gpu["events"]] for _, gpu in gpus],
        "external_annotations": [],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": settings,
            "max_split_size": split,
            "garbage_collection_threshold": float(setting(settings, "garbage_collection_threshold", "0")),
            "expandable_segments": setting(settings, "expandable_segments", "False") == "True",
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {},
        },
    }


def setting(text: str, name: str, default: str) -> str:
    found = re.search(rf"{name}:([^,]+)", text)
    return found[1].strip() if found else default

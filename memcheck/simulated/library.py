"""The library of csrc/simulated, which simulates GPUs in this process, and the GPU that it simulates."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcheck.core.devices import Device, Version

# Compute capability -> bytes of shared memory that a block may ask for, and threads of a multiprocessor: CUDA C++
# Programming Guide, technical specifications per compute capability.
LIMITS = {
    (7, 0): (96 * 1024, 2048),
    (7, 5): (64 * 1024, 1024),
    (8, 0): (163 * 1024, 2048),
    (8, 6): (99 * 1024, 1536),
    (8, 9): (99 * 1024, 1536),
    (9, 0): (227 * 1024, 2048),
    (10, 0): (227 * 1024, 2048),
    (12, 0): (99 * 1024, 1536),
}


@dataclass(frozen=True)
class Target:
    """The GPU that is simulated.

    limit_bytes: what torch's allocator may reserve, if it is less than the GPU has.
    torch_version: the torch whose allocator and kernels are simulated, if it is not the installed one.
    """

    device: Device
    limit_bytes: int | None
    gpus: int
    torch_version: Version | None = None

    @property
    def capability(self) -> tuple[int, int]:
        return self.device.architecture or (8, 0)

    @property
    def limits(self) -> tuple[int, int]:
        """As in LIMITS, of the newest capability that is not newer."""
        closest = max((known for known in LIMITS if known <= self.capability), default=(7, 0))
        return LIMITS[closest]

    @property
    def multiprocessors(self) -> int:
        return self.device.multiprocessors or 108


class Properties(ctypes.Structure):
    """As in csrc/simulated/memory.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("gpus", "major", "minor", "multiprocessors")),
        *((name, ctypes.c_int64) for name in ("total_bytes", "usable_bytes", "shared_bytes")),
    )


POOL = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)  # The device and both numbers of the pool.
# Of functions that take or return more than an int.
TYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "begin": (ctypes.c_int, (ctypes.POINTER(Properties), ctypes.c_int)),
    "register": (None, (ctypes.c_char_p,)),
    "replace": (None, (ctypes.c_char_p, ctypes.c_char_p)),
    "fact": (None, (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)),
    "rules": (ctypes.c_int64, ()),
    "host": (None, (ctypes.c_int64, ctypes.c_char_p)),
    "configure": (ctypes.c_char_p, (ctypes.c_char_p, ctypes.c_int)),
    "set_allowed": (None, (ctypes.c_int, ctypes.c_int64)),
    "allowed": (ctypes.c_int64, (ctypes.c_int,)),
    "free_bytes": (ctypes.c_int64, (ctypes.c_int,)),
    "empty_cache": (None, (ctypes.c_uint64, ctypes.c_uint64)),
    "requests": (ctypes.c_int64, ()),
    "note": (ctypes.c_int64, (ctypes.c_char_p,)),
    "noted": (ctypes.c_char_p, ()),
    "record": (None, (*[ctypes.c_int] * 4, ctypes.c_int64, ctypes.c_int)),
    "most_allocated": (ctypes.c_int64, (ctypes.c_int,)),
    "stats": (None, (ctypes.c_int, ctypes.POINTER(ctypes.c_int64))),
    "snapshot": (ctypes.c_char_p, (ctypes.c_int,)),
    "current_stream": (ctypes.c_int64, (ctypes.c_int,)),
    "exchange_stream": (ctypes.c_int64, (ctypes.c_int, ctypes.c_int64)),
    "new_stream": (ctypes.c_int64, ()),
    "record_stream": (None, (ctypes.c_void_p, ctypes.c_int64)),
    "resize": (ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int64)),
    "begin_capture": (ctypes.c_char_p, POOL),
    "end_capture": (ctypes.c_char_p, POOL),
    "begin_pool": (ctypes.c_char_p, (*POOL, ctypes.c_int)),
    "end_pool": (ctypes.c_char_p, POOL),
    "make_pool": (ctypes.c_char_p, (*POOL, ctypes.c_int, ctypes.c_int)),
    "retain_pool": (ctypes.c_char_p, POOL),
    "release_pool": (ctypes.c_char_p, POOL),
    "keep_pool_from_others": (ctypes.c_char_p, POOL),
    "pool_uses": (ctypes.c_char_p, (*POOL, ctypes.c_void_p)),
    "pool_lives": (ctypes.c_char_p, (*POOL, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)),
    "checkpoint": (ctypes.c_char_p, (*POOL, ctypes.c_void_p)),
    "forget_checkpoint": (None, (ctypes.c_int64,)),
    "restore": (ctypes.c_char_p, (ctypes.c_int, *[ctypes.c_int64, ctypes.c_void_p] * 2, ctypes.c_int64)),
    "allocate_for": (ctypes.c_char_p, (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "free_at": (ctypes.c_char_p, (ctypes.c_uint64,)),
    "owns": (ctypes.c_int, (ctypes.c_int64,)),
    "free_storage": (ctypes.c_char_p, (ctypes.c_int64,)),
    "refuse_tensor": (None, (ctypes.c_int64, ctypes.c_char_p)),
    "refuse_storage": (None, (ctypes.c_int64, ctypes.c_char_p)),
    "written": (None, (ctypes.c_int64,)),
    "log": (None, (ctypes.c_int,)),
    "mark": (None, (ctypes.c_int64,)),
    "logged": (ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "name": (ctypes.c_char_p, (ctypes.c_int64,)),
    "calls": (ctypes.c_char_p, ()),
    "forget_calls": (None, ()),
    "limit": (None, (ctypes.c_int64,)),
    "forget_plans": (None, (ctypes.c_int,)),
}


class Library:
    """The loaded library. Its functions are those of csrc/simulated, without "memcheck_simulated_" in their names."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"memcheck_simulated_{name}")
        function.restype, function.argtypes = TYPES.get(name, (ctypes.c_int, None))
        setattr(self, name, function)
        return function


LOADED: list[Library] = []


def library() -> Library:
    """The library of this process, which simulates a GPU."""
    return LOADED[0]


def refused(words: bytes) -> None:
    """Raises the error of a call of the library, if it has one."""
    if words:
        raise RuntimeError(words.decode())

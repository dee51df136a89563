"""Drives the C++ caching allocator, compiled alone, from Python."""

from __future__ import annotations

import ctypes
import hashlib
import random
import subprocess
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = [CSRC / "simulated" / name for name in ("caching_allocator.cpp", "replay.cpp")]
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{CSRC}"]

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "oom"),
)
KINDS = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
    *("oversize_allocations", "oversize_segments"),
)
POOLS = ("all", "small_pool", "large_pool")
NUMBERS = ("current", "peak", "allocated", "freed")
COUNTS = (
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
    "num_oom_rejections",
)
# Function -> its result and its arguments.
PROTOTYPES = {
    "new": (c_void_p, [c_int64, c_int64, c_int64, c_int, c_int]),
    "delete": (None, [c_void_p]),
    "configure": (c_char_p, [c_void_p, c_char_p]),
    "malloc": (c_void_p, [c_void_p, c_int64, c_int64]),
    "free": (None, [c_void_p, c_void_p, c_int]),
    "record_stream": (None, [c_void_p, c_void_p, c_int64]),
    "complete": (None, [c_void_p, c_void_p]),
    "complete_all": (None, [c_void_p]),
    "empty_cache": (None, [c_void_p, c_uint64, c_uint64]),
    "bytes": (c_int64, [c_void_p]),
    "address": (c_uint64, [c_void_p]),
    "allocated_at": (c_void_p, [c_void_p, c_uint64]),
    "events": (c_int64, [c_void_p, POINTER(POINTER(c_int64))]),
    "stat": (c_int64, [c_void_p, c_int, c_int, c_int]),
    "count": (c_int64, [c_void_p, c_int]),
    "reset_peaks": (None, [c_void_p]),
    "reset_accumulated": (None, [c_void_p]),
    "begin_pool": (c_char_p, [c_void_p, c_uint64, c_uint64, c_int64]),
    "end_pool": (c_char_p, [c_void_p, c_uint64, c_uint64]),
    "release_pool": (c_char_p, [c_void_p, c_uint64, c_uint64]),
    "use_on_oom": (c_char_p, [c_void_p, c_uint64, c_uint64, c_int]),
    "no_split": (c_char_p, [c_void_p, c_uint64, c_uint64]),
    "reserved": (c_int64, [c_void_p, c_uint64, c_uint64]),
    "capture": (None, [c_void_p, c_int]),
    "checkpoint": (c_char_p, [c_void_p, c_uint64, c_uint64]),
    "restore": (c_char_p, [c_void_p, c_int]),
    "live": (c_int64, [c_void_p, c_uint64, c_uint64, POINTER(c_uint64)]),
}


def build(compiler: str, folder: Path) -> ctypes.CDLL:
    """Compiles the allocator into the folder and loads it."""
    library = folder / "libreplay.so"
    subprocess.run([compiler, *FLAGS, *SOURCES, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(loaded, f"memcheck_replay_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


@dataclass(frozen=True)
class Block:
    """A block of the allocator, as it was when it was handed out."""

    pointer: int
    bytes: int
    address: int


class Allocator:
    """The caching allocator of one GPU. Limits that are None do not limit."""

    def __init__(
        self,
        library: ctypes.CDLL,
        settings: str = "",
        *,
        total: int = 0,
        driver: int | None = None,
        allowed: int | None = None,
        order: int = 2,
        completes_at_once: bool = True,
    ) -> None:
        limits = (-1 if limit is None else limit for limit in (driver, allowed))
        self._library = library
        self._self = library.memcheck_replay_new(total, *limits, order, completes_at_once)
        self.configure(settings)

    def __del__(self) -> None:
        self._call("delete")

    def _call(self, name: str, *arguments: object) -> int:
        result = getattr(self._library, f"memcheck_replay_{name}")(self._self, *arguments)
        if PROTOTYPES[name][0] is c_char_p and result:
            raise ValueError(result.decode())
        return result

    def configure(self, settings: str) -> None:
        """Changes the settings. ValueError: they are not allowed."""
        self._call("configure", settings.encode())

    def malloc(self, requested: int, stream: int = 0) -> Block | None:
        """Returns a block, or None if there is no memory."""
        pointer = self._call("malloc", requested, stream)
        return self._block(pointer) if pointer else None

    def _block(self, pointer: int) -> Block:
        library = self._library
        return Block(pointer, library.memcheck_replay_bytes(pointer), library.memcheck_replay_address(pointer))

    def must(self, requested: int, stream: int = 0) -> Block:
        """Returns a block, for which there must be memory."""
        block = self.malloc(requested, stream)
        assert block is not None
        return block

    def free(self, block: Block, *, waits: bool = False) -> None:
        self._call("free", block.pointer, waits)

    def record_stream(self, block: Block, stream: int) -> None:
        self._call("record_stream", block.pointer, stream)

    def complete(self, block: Block) -> None:
        self._call("complete", block.pointer)

    def complete_all(self) -> None:
        self._call("complete_all")

    def empty_cache(self, pool: tuple[int, int] = (0, 0)) -> None:
        self._call("empty_cache", *pool)

    def allocated_at(self, address: int) -> Block | None:
        """The block in use that begins at the address."""
        pointer = self._call("allocated_at", address)
        return self._block(pointer) if pointer else None

    def events(self, begin: int = 0) -> list[tuple[str, int, int, int]]:
        """Action, bytes, address and stream of each event. The address of an oom is the free memory of the driver."""
        at = POINTER(c_int64)()
        end = self._call("events", ctypes.byref(at))
        return [(ACTIONS[at[i]], at[i + 1], at[i + 2], at[i + 3]) for i in range(4 * begin, 4 * end, 4)]

    def stat(self, kind: str, number: str = "current", pool: str = "all") -> int:
        return self._call("stat", KINDS.index(kind), POOLS.index(pool), NUMBERS.index(number))

    def count(self, name: str) -> int:
        return self._call("count", COUNTS.index(name))

    def reset_peaks(self) -> None:
        self._call("reset_peaks")

    def reset_accumulated(self) -> None:
        self._call("reset_accumulated")

    def begin_pool(self, pool: tuple[int, int], stream: int = -1) -> None:
        """Requests of the stream, -1: of all streams, get memory from the private pool."""
        self._call("begin_pool", *pool, stream)

    def end_pool(self, pool: tuple[int, int]) -> None:
        self._call("end_pool", *pool)

    def release_pool(self, pool: tuple[int, int]) -> None:
        self._call("release_pool", *pool)

    def use_on_oom(self, pool: tuple[int, int], *, use: bool) -> None:
        self._call("use_on_oom", *pool, use)

    def no_split(self, pool: tuple[int, int]) -> None:
        self._call("no_split", *pool)

    def reserved_by(self, pool: tuple[int, int]) -> int:
        return self._call("reserved", *pool)

    def begin_capture(self) -> None:
        self._call("capture", 1)

    def end_capture(self) -> None:
        self._call("capture", 0)

    def checkpoint(self, pool: tuple[int, int]) -> None:
        """Keeps the state of a pool, for restore()."""
        self._call("checkpoint", *pool)

    def restore(self, number: int) -> None:
        """Returns a pool to the state that was kept, counted from 0."""
        self._call("restore", number)

    def live(self, pool: tuple[int, int]) -> list[int]:
        """The addresses of the blocks of a pool that are in use."""
        addresses = (c_uint64 * self._call("live", *pool, None))()
        self._call("live", *pool, addresses)
        return list(addresses)


SETTINGS = (
    ("", "expandable_segments:True", "expandable_segments:False"),
    ("", "", "max_split_size_mb:40", "max_split_size_mb:128"),
    ("", "", "max_non_split_rounding_mb:64"),
    ("", "garbage_collection_threshold:0.6"),
    ("", "roundup_power2_divisions:4", "roundup_power2_divisions:[256:1,512:2,1024:8,>:8]"),
    ("", "", "large_segment_size_mb:40"),
)


class Program:
    """Random requests, and a digest of what the allocator did: its events, its blocks' addresses, its statistics.

    kind: "streams": other streams use blocks, and settings change. "captures": other streams use blocks, and CUDA
    graphs are captured, which have private pools. "checkpoints": these pools return to checkpoints.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._chance = random.Random(seed)
        self._kind = kind
        self.settings = self._settings()
        self.total = self._chance.choice([1, 2, 8]) * 2**30
        self.allowed = self._chance.choice([None, self.total * 3 // 4, self.total // 2])
        self.driver = self.total - 500 * 2**20
        self._largest = self._chance.choice([21, 25, 28])
        self._live: list[Block] = []
        self._pool: tuple[int, int] | None = None  # That serves requests.
        self._checkpoints: list[tuple[int, int]] = []
        self._seen = 0

    def _settings(self) -> str:
        return ",".join(filter(None, map(self._chance.choice, SETTINGS)))

    def run(self, allocator: Allocator, steps: int = 1500) -> str:
        digest = hashlib.sha256()
        for _ in range(steps):
            self._step(allocator)
            events = allocator.events(self._seen)
            self._seen += len(events)
            # torch takes private pools, and releases that wait for the end of a capture, in the order of a hash map.
            digest.update(repr(events if self._kind == "streams" else sorted(events)).encode())
        digest.update(repr([block.address for block in self._live]).encode())
        numbers = tuple(number for number in NUMBERS if number != "peak" or self._kind == "streams")
        for kind in KINDS:
            for pool in POOLS[:1] if kind.startswith("oversize") else POOLS:
                digest.update(repr([allocator.stat(kind, number, pool) for number in numbers]).encode())
        digest.update(repr([allocator.count(name) for name in COUNTS]).encode())
        return digest.hexdigest()[:16]

    def _step(self, allocator: Allocator) -> None:
        chance, action = self._chance, self._chance.random()
        if action < 0.5 or not self._live:
            size = int(2 ** chance.uniform(0, chance.choice([12, 21, self._largest])))
            if block := allocator.malloc(size, chance.choice([0, 0, 0, 4096])):
                self._live.append(block)
        elif action < 0.88:
            allocator.free(self._live.pop(chance.randrange(len(self._live)) if chance.random() < 0.6 else -1))
        elif action < 0.92 and self._kind != "checkpoints":
            allocator.record_stream(chance.choice(self._live), 8192)
        elif action < 0.93:
            allocator.empty_cache()
        elif action < 0.94:
            allocator.reset_peaks()
        elif self._kind != "streams":
            self._use_pools(allocator)
        elif action < 0.95:
            changed = (option for option in self._settings().split(",") if not option.startswith("max_split"))
            allocator.configure(",".join(changed))

    def _use_pools(self, allocator: Allocator) -> None:
        chance = self._chance
        if self._pool is not None:
            allocator.end_capture()
            allocator.end_pool(self._pool)
            if self._kind == "checkpoints":
                allocator.checkpoint(self._pool)
                self._checkpoints.append(self._pool)
            self._pool = None
        elif not self._checkpoints or chance.random() < 0.5:
            self._pool = chance.choice([(0, 1), (3, 0)])
            allocator.begin_pool(self._pool)
            allocator.begin_capture()
        else:
            number = chance.randrange(len(self._checkpoints))
            pool = self._checkpoints[number]
            before = set(allocator.live(pool))
            allocator.restore(number)
            self._live = [block for block in self._live if block.address not in before]
            after = map(allocator.allocated_at, allocator.live(pool))
            self._live += [block for block in after if block is not None]

"""CUDA's caching allocator: csrc/simulated/caching_allocator.cpp, which Python calls by replay.cpp beside it."""

from __future__ import annotations

import ctypes
import functools
import re
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcheck.core.devices import BLOCKS_BY_CREATION, BLOCKS_BY_SEGMENT, Version
from memcheck.simulated.build import allocator

Ints = npt.NDArray[np.int64]
MIB = 2**20
SMALL_SEGMENT = 2 * MIB
# What torch records in the history of its allocator. The allocator makes all but the last.
ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "oom", "snapshot"),
)
# Function -> its result and its arguments. A text is an error, if it is not empty.
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "settings": (c_char_p, [c_char_p, POINTER(c_char_p)]),
    "rounded": (c_int64, [c_char_p, c_int64]),
    "new": (c_void_p, [c_int64, c_int64, c_int64, c_int, c_int]),
    "delete": (None, [c_void_p]),
    "configure": (c_char_p, [c_void_p, c_char_p]),
    "allow": (None, [c_void_p, c_int64]),
    "malloc": (c_void_p, [c_void_p, c_int64, c_int64]),
    "refused": (c_int64, [c_void_p]),
    "free": (None, [c_void_p, c_void_p, c_int]),
    "empty_cache": (None, [c_void_p, c_uint64, c_uint64]),
    "bytes": (c_int64, [c_void_p]),
    "address": (c_uint64, [c_void_p]),
    "stat": (c_int64, [c_void_p, c_int, c_int, c_int]),
    "events": (c_int64, [c_void_p, POINTER(c_void_p)]),
    "blocks": (c_int64, [c_void_p, c_void_p]),
    "adopt": (c_char_p, [c_void_p, c_uint64, *[c_int64] * 2, *[c_int] * 2, c_void_p, c_int64]),
    "play": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p, c_void_p]),
}
REQUESTED, ALLOCATED, RESERVED = 8, 4, 5  # Of Kind in caching_allocator.h.


@functools.cache
def library() -> ctypes.CDLL:
    """The functions of PROTOTYPES. ExtensionError: the library is missing and cannot be compiled."""
    loaded = ctypes.CDLL(str(allocator()))
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(loaded, f"memcheck_replay_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(loaded, name, function)
    return loaded


def check(error: bytes) -> None:
    """Raises the ValueError that a function returned, if it returned one."""
    if error:
        raise ValueError(error.decode())


class Order(IntEnum):
    """Which of several free blocks of the same size is taken first."""

    ADDRESS = 0  # That with the lowest address.
    BLOCK = 1  # That which was made first.
    SEGMENT = 2  # That of the segment that was made first, then with the lowest address.

    @classmethod
    def of(cls, version: Version) -> Order:
        return cls(BLOCKS_BY_CREATION.is_in(version) + BLOCKS_BY_SEGMENT.is_in(version))


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides, besides the requests, how much memory is reserved. Equal settings have the same text.

    text: what parse() returned for it; empty: torch's defaults.
    """

    text: str = ""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """The settings of a text such as "expandable_segments:True,max_split_size_mb:256", as torch reads them.

        ValueError: an option is unknown, or its value is not allowed. ExtensionError as of library().
        """
        found = c_char_p()
        check(library().settings(text.encode(), ctypes.byref(found)))
        return cls((found.value or b"").decode())

    def __str__(self) -> str:
        return self.text

    def changed_by(self, text: str) -> AllocatorSettings:
        """These settings with the options of the text. ValueError as of parse()."""
        return self.parse(f"{self.text},{text}".strip(","))

    def value(self, option: str) -> str | None:
        """The value of an option. None: torch's default."""
        found = re.search(rf"\b{option}:([^,]+)", self.text)
        return found and found[1]

    def rounded(self, size: int) -> int:
        """The size of the smallest block that can serve a request."""
        rounded: int = library().rounded(self.text.encode(), size)
        return rounded


class Event(NamedTuple):
    """What torch would record. address: of an oom the memory that the driver could still give."""

    action: str
    bytes: int
    address: int
    stream: int


@dataclass(frozen=True)
class Block:
    """A block in use, as it was handed out."""

    pointer: int
    bytes: int
    address: int
    requested: int


class Piece(NamedTuple):
    """A block, in use or free, of a segment that begins at `segment`."""

    segment: int
    address: int
    bytes: int
    requested: int
    in_use: bool
    small: bool
    expandable: bool


class OutOfMemory(Exception):  # noqa: N818
    """There is no room for the request (on CUDA: for a segment), even after cached memory was released."""

    def __init__(self, requested_bytes: int, in_use_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes requested, {in_use_bytes} in use")
        self.requested_bytes, self.in_use_bytes = requested_bytes, in_use_bytes


@dataclass(frozen=True)
class Count:
    """A statistic of torch.cuda.memory_stats, as it is now: current bytes, and their peak."""

    allocator: CachingAllocator
    kind: int

    @property
    def current(self) -> int:
        return self.allocator.call("stat", self.kind, 0, 0)

    @property
    def peak(self) -> int:
        return self.allocator.call("stat", self.kind, 0, 1)


class CachingAllocator:
    """The native CUDA allocator of a GPU.

    limit_bytes: the most bytes that the driver can give.
    allowed_bytes: the most that the process may reserve: torch.cuda.set_per_process_memory_fraction.
    total_bytes: the memory of the GPU, which bounds the addresses of an expandable segment, and of which settings may
    allow a part.

    Others, and None: there is no such limit. ExtensionError as of library().
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        allowed_bytes: int | None = None,
        total_bytes: int | None = None,
        order: Order = Order.ADDRESS,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.limit_bytes = limit_bytes
        self._library = library()
        self._self = self._library.new(total_bytes or 0, -1 if limit_bytes is None else limit_bytes, -1, order, 0)
        check(self._library.configure(self._self, self.settings.text.encode()))
        share = self.settings.value("per_process_memory_fraction")
        self.allowed_bytes = allowed_bytes if share is None or total_bytes is None else int(float(share) * total_bytes)
        self.requested, self.allocated, self.reserved = (Count(self, kind) for kind in (REQUESTED, ALLOCATED, RESERVED))

    def __del__(self) -> None:
        if hasattr(self, "_self"):
            self.call("delete")

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of PROTOTYPES for this allocator."""
        return getattr(self._library, name)(self._self, *arguments)

    @property
    def allowed_bytes(self) -> int | None:
        """The most that the process may reserve. It may be set at any time."""
        return self._allowed_bytes

    @allowed_bytes.setter
    def allowed_bytes(self, allowed: int | None) -> None:
        self._allowed_bytes = allowed
        self.call("allow", -1 if allowed is None else allowed)

    @property
    def room_bytes(self) -> int | None:
        """The lower limit; None if there is none."""
        return min((room for room in (self.limit_bytes, self.allowed_bytes) if room is not None), default=None)

    def malloc(self, requested: int, stream: int = 0) -> Block | None:
        """Returns a block of at least that size, or None for zero bytes. Raises OutOfMemory."""
        if requested == 0:
            return None
        pointer = self.call("malloc", requested, stream)
        if pointer is None:
            raise OutOfMemory(self.call("refused"), self.requested.current)
        return Block(pointer, self._library.bytes(pointer), self._library.address(pointer), requested)

    def free(self, block: Block | None) -> None:
        """Releases a block that is in use. None does nothing."""
        if block is not None:
            self.call("free", block.pointer, 0)

    def empty_cache(self) -> None:
        """Returns unused segments, or unused pages of expandable segments, to the driver."""
        self.call("empty_cache", 0, 0)

    def rows(self, begin: int = 0) -> Ints:
        """The events so far, but for the first ones: rows of the index in ACTIONS, bytes, address and stream."""
        at = c_void_p()
        row = 4 * ctypes.sizeof(c_int64)
        size = (self.call("events", ctypes.byref(at)) - begin) * row
        return np.frombuffer(ctypes.string_at((at.value or 0) + begin * row, size), np.int64).reshape(-1, 4)

    def events(self, begin: int = 0) -> list[Event]:
        """The events so far, but for the first ones."""
        return [Event(ACTIONS[action], *rest) for action, *rest in self.rows(begin).tolist()]

    def pieces(self) -> list[Piece]:
        """All blocks, by segment and address."""
        rows = np.zeros((self.call("blocks", None), len(Piece._fields)), np.int64)
        self.call("blocks", rows.ctypes.data)
        return [Piece(*row[:4], *map(bool, row[4:])) for row in rows.tolist()]

    def segments(self) -> dict[str, int]:
        """Reserved bytes by kind of segment."""
        sizes: dict[int, int] = {}
        kinds: dict[int, tuple[bool, bool]] = {}
        for piece in self.pieces():
            sizes[piece.segment] = sizes.get(piece.segment, 0) + piece.bytes
            kinds[piece.segment] = piece.small, piece.expandable
        large = int(self.settings.value("large_segment_size_mb") or 20) * MIB
        found: dict[str, int] = {}
        for segment in sorted(sizes, reverse=True):  # The first ones have the highest addresses.
            small, expandable = kinds[segment]
            unit = SMALL_SEGMENT if small else large
            kind = f"{'pages' if expandable else 'segments'} of {unit // MIB} MiB{', small pool' if small else ''}"
            if not small and not expandable and sizes[segment] != unit:
                kind = "larger segments"
            found[kind] = found.get(kind, 0) + sizes[segment]
        return found

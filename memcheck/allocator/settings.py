"""The settings of PYTORCH_CUDA_ALLOC_CONF, and the rule among equal sizes, which differs between versions of torch.

They follow c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from memcheck.allocator.blocks import (
    BLOCK,
    LARGE_SEGMENT,
    LEAST_WITH_A_SEGMENT_OF_ITS_OWN,
    MIB,
    SEGMENT,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    rounded_up,
)
from memcheck.core.devices import BLOCKS_BY_CREATION, BLOCKS_BY_SEGMENT, Version

# Sizes from 1 MiB to 64 GiB have a number of divisions for each power of two.
INTERVALS = 16
OPTION = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[\]]+)(?:,|$)")
# Options that change no reserved byte of the GPU.
NOT_OF_SEGMENTS = (
    "graph_capture_record_stream_reuse",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)


class Order(Enum):
    """Which of several free blocks of the same size is taken first."""

    ADDRESS = "the lowest address"
    BLOCK = "the block that was made first"
    SEGMENT = "that of the segment that was made first, then the lowest address"

    @classmethod
    def of(cls, version: Version) -> Order:
        if BLOCKS_BY_SEGMENT.is_in(version):
            return cls.SEGMENT
        return cls.BLOCK if BLOCKS_BY_CREATION.is_in(version) else cls.ADDRESS


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides, besides the requests, how much memory is reserved. Sizes are bytes.

    max_split_size: blocks of at least that size are not split, and serve only requests of about their size.
    max_non_split_rounding: how much larger than such a request a block must be to be too large.
    garbage_collection_threshold: the share of the process's limit above which old segments are freed. It needs a limit.
    roundup_divisions: parts of a power of two to which sizes are rounded, by interval; empty: blocks of 512 bytes.
    large_segment_size: of the segments for requests below 10 MiB, and of the pages of expandable segments.
    memory_fraction: the share of the GPU's memory that the process may reserve.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_divisions: tuple[int, ...] = field(default=())
    large_segment_size: int = LARGE_SEGMENT
    memory_fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """The settings of a text such as "expandable_segments:True,max_split_size_mb:256".

        ValueError: it is no such text, an option is unknown, or its value is not allowed.
        """
        return cls(**dict(_options(text.replace(" ", ""))))

    def __str__(self) -> str:
        """The text that parse() reads; empty: torch's defaults."""
        default = type(self)()
        named = {target: name for name, (target, _) in OPTIONS.items()}
        parts = []
        for target, value in vars(self).items():
            if value == getattr(default, target):
                continue
            name = named[target]
            if target == "roundup_divisions":
                pairs = [f"{2**index}:{number}" for index, number in enumerate(value[:-1])]
                text = str(value[0]) if len(set(value)) == 1 else f"[{','.join([*pairs, f'>:{value[-1]}'])}]"
            else:
                text = str(value // MIB if name.endswith("_mb") else value)
            parts.append(f"{name}:{text}")
        return ",".join(parts)

    def changed_by(self, text: str) -> AllocatorSettings:
        """These settings with the options of the text. ValueError as of parse()."""
        return replace(self, **dict(_options(text.replace(" ", ""))))

    def rounded(self, size: int) -> int:
        """The size of the smallest block that can serve a request."""
        if self.roundup_divisions and size >= BLOCK:
            index = min(max(size.bit_length() - 1 - 20, 0), INTERVALS - 1)
            divisions = self.roundup_divisions[index]
            if divisions > 1 and size > BLOCK * divisions:
                return rounded_up(size, (1 << (size.bit_length() - 1)) // divisions)
        return -(-size // BLOCK) * BLOCK

    def segment_size(self, size: int) -> int:
        """The size of the new segment if no free block has room for `size`."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if size < LEAST_WITH_A_SEGMENT_OF_ITS_OWN:
            return self.large_segment_size
        return rounded_up(size, SEGMENT)

    def page_size(self, small: bool) -> int:
        """The unit in which an expandable segment grows."""
        return SMALL_SEGMENT if small else self.large_segment_size


def _options(text: str) -> Iterator[tuple[str, Any]]:
    if "".join(found[0] for found in OPTION.finditer(text)) != text:
        raise ValueError(f"must look like 'expandable_segments:True,max_split_size_mb:256', got {text!r}")
    for name, value in OPTION.findall(text):
        if name in OPTIONS:
            target, convert = OPTIONS[name]
            yield target, convert(name, value)
        elif name == "backend":
            if value != "native":
                raise ValueError(f"backend:{value} is another allocator, which has no model")
        elif name not in NOT_OF_SEGMENTS and not name.startswith("pinned_"):
            raise ValueError(f"{name} is unknown; known: {', '.join(sorted(OPTIONS))}")


def _switch(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value == "True"


def _share(name: str, value: str) -> float:
    share = float(value)
    if not 0 < share <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
    return share


def _mib(least: int) -> Callable[[str, str], int]:
    def convert(name: str, value: str) -> int:
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        return int(value) * MIB

    return convert


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """The divisions of the intervals, of "4" or of "[256:1,512:2,>:8]", whose keys are MiB."""
    found = [0] * INTERVALS
    last = None
    pairs = [part.split(":") for part in value.strip("[]").split(",")] if value[0] == "[" else [[">", value]]
    for pair in pairs:
        key, number = pair if len(pair) == 2 else ("", "")
        if not number.isdecimal() or not (key == ">" or (key.isdecimal() and is_power_of_two(int(key)))):
            raise ValueError(f"{name} must look like '4' or '[256:1,512:2,>:8]', got {value!r}")
        if int(number) and not is_power_of_two(int(number)):
            raise ValueError(f"{name} must be powers of two, got {value!r}")
        index = last or 0 if key == ">" else min(int(key).bit_length() - 1, INTERVALS - 1)
        # The first interval reaches from the smallest sizes, the last to the largest.
        begin, end = (index if last is not None or key == ">" else 0), (INTERVALS if key == ">" else index + 1)
        found[begin:end] = [int(number)] * (end - begin)
        last = index
    return tuple(found)


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


# Option -> the field, and what reads its value.
OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _switch),
    "max_split_size_mb": ("max_split_size", _mib(20)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mib(20)),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    "large_segment_size_mb": ("large_segment_size", _mib(2)),
    "per_process_memory_fraction": ("memory_fraction", _share),
}

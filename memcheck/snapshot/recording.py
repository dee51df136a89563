"""The data of a memory snapshot as columns: a recording for each device."""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memcheck.allocator.caching import ACTIONS, MIB, AllocatorSettings, Ints, Order
from memcheck.allocator.history import ALLOC, IGNORED, OOM, History, Segment
from memcheck.core.script_record import Line, Origin
from memcheck.snapshot.files import calls_of, origin_of

CODES = {action: code for code, action in enumerate(ACTIONS)}
UNTRACED = Origin("no traceback was recorded", "elsewhere")
BEFORE = Origin("before the recording", "elsewhere")
NO_ADDRESS = NO_PLACE = -1


class ForeignDataError(ValueError):
    """The data are no memory snapshot."""


@dataclass
class Recording:
    """What torch recorded of one device: an entry per event in each array, and the segments after the last event.

    places: of the events' stacks; equal ones have other calls. place_of_block: of each block in use at the end, by
    address; -1: not recorded.
    """

    device: int
    actions: npt.NDArray[np.int8]  # Of ACTIONS.
    sizes: Ints  # Bytes; of an allocation as requested.
    addresses: Ints
    streams: Ints
    microseconds: Ints
    stacks: Ints  # Of places.
    places: list[Origin]
    calls: list[tuple[Line, ...]]  # Of Python to each place, outermost first.
    free_bytes: dict[int, int]  # Of the GPU, at the events that ran out of memory.
    segments: list[Segment]
    place_of_block: dict[int, int]
    settings: AllocatorSettings
    doubts: list[str] = field(default_factory=list)
    source: str | None = None
    order: Order = Order.ADDRESS

    def __len__(self) -> int:
        return len(self.actions)

    @functools.cached_property
    def history(self) -> History:
        """The recording for the model of the allocator."""
        rows = np.stack([self.actions.astype(np.int64), self.sizes, self.addresses, self.streams], axis=1)
        return History(rows, self.segments, self.settings, self.free_bytes, self.order)


def recordings_of(data: Any) -> list[Recording]:
    """A recording of each device that a snapshot has segments or events of.

    data: what torch.cuda.memory._snapshot() returns, a bare list of segments, or a history of tests/data/histories:
    {"device", "settings", "events": [[action, bytes, address, stream, free bytes]], "segments_at_end"}.

    ForeignDataError: it is none of these.
    """
    if isinstance(data, list):
        data = {"segments": data}
    if not isinstance(data, dict):
        raise ForeignDataError(f"it holds a {type(data).__name__}, not a dict")
    try:
        if "segments_at_end" in data:
            return [_from_history(data)]
        if data.get("device_type") == "cpu":
            raise ForeignDataError(
                "it is of the CPU, for the viewer at pytorch.org/memory_viz; memcheck run reports that"
            )
        if "segments" not in data:
            raise ForeignDataError(f"it has no segments, only {', '.join(map(str, data)) or 'nothing'}"[:120])
        return list(_from_torch(data))
    except ForeignDataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ForeignDataError(f"a part of it is missing or wrong ({type(error).__name__}: {error})"[:160]) from None


def whole(value: Any) -> int:
    """A number of bytes, or an address. TypeError or ValueError: it is none."""
    number = operator.index(value)
    if not 0 <= number < 2**56:
        raise ValueError(f"{number} is no address and no size")
    return number


def _from_torch(data: dict[str, Any]) -> Iterator[Recording]:
    traces: list[list[dict[str, Any]]] = data.get("device_traces") or []
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in data["segments"]:
        by_device.setdefault(whole(segment.get("device", 0)), []).append(segment)
    devices = {device for device, trace in enumerate(traces) if trace} | by_device.keys()
    for device in sorted(devices):
        trace = traces[device] if device < len(traces) else []
        yield _Reader(device).recording(trace, by_device.get(device, []), data.get("allocator_settings") or {})


def _from_history(data: dict[str, Any]) -> Recording:
    entries = []
    for action, size, address, stream, *free in data["events"]:
        entries.append({"action": action, "size": size, "addr": address, "stream": stream})
        if free:
            entries[-1]["device_free"] = free[0]
    segments = [dict(segment) for segment in data["segments_at_end"]]
    for segment in segments:
        segment["blocks"] = [
            {"size": size, "state": state, "requested_size": requested} for size, state, requested in segment["blocks"]
        ]
    found = _Reader(int(data["device"])).recording(entries, segments, data["settings"])
    found.source = data.get("source")
    return found


class _Reader:
    """Reads the entries of a device. Each is released once it was read, as a large file has millions."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._numbers: dict[tuple[Origin, tuple[Line, ...]], int] = {(UNTRACED, ()): 0}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._frames: list[Any] = []  # Kept, so that identities stay unique.
        self.doubts: list[str] = []

    def recording(self, trace: list[Any], segments: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Recording:
        actions = array("b")
        sizes, addresses, streams, times, stacks = (array("q") for _ in range(5))
        free_bytes: dict[int, int] = {}
        for index in range(len(trace)):
            entry, trace[index] = trace[index], None
            action = CODES.get(entry["action"], IGNORED)
            actions.append(action)
            sizes.append(entry.get("size", 0))
            address = entry.get("addr")
            addresses.append(NO_ADDRESS if address is None else address)
            streams.append(entry.get("stream", 0))
            times.append(entry.get("time_us", 0))
            stacks.append(self.place(entry.get("frames")) if action in (ALLOC, OOM) else 0)
            if action == OOM:
                free_bytes[index] = entry.get("device_free") or 0
                addresses[-1] = NO_ADDRESS
        if min(sizes, default=0) < 0:
            raise ForeignDataError("an event has a negative size")
        found, place_of_block = self.read_segments(segments)
        expandable = any(segment.expandable for segment in found) or CODES["segment_map"] in actions
        return Recording(
            device=self.device,
            actions=np.array(actions, np.int8),
            sizes=np.array(sizes),
            addresses=np.array(addresses),
            streams=np.array(streams),
            microseconds=np.array(times),
            stacks=np.array(stacks),
            places=[origin for origin, _ in self._numbers],
            calls=[calls for _, calls in self._numbers],
            free_bytes=free_bytes,
            segments=found,
            place_of_block=place_of_block,
            settings=self.read_settings(settings, expandable),
            doubts=self.doubts,
        )

    def place(self, frames: Any) -> int:
        """The number of the place of a stack."""
        if not frames:
            return 0
        key = tuple(map(id, frames))
        number = self._stacks.get(key)
        if number is None:
            self._frames.append(frames)
            place = origin_of(frames), calls_of(frames)
            number = self._stacks[key] = self._numbers.setdefault(place, len(self._numbers))
        return number

    def read_segments(self, segments: Iterable[dict[str, Any]]) -> tuple[list[Segment], dict[int, int]]:
        """The segments, and the place of each block in use."""
        segments = list(segments)
        private = sum(tuple(segment.get("segment_pool_id") or (0, 0)) != (0, 0) for segment in segments)
        if private:
            self.doubts.append(
                f"{private} segments are of private pools (CUDA graphs, torch.cuda.MemPool), which the replay takes "
                "for parts of the default pool"
            )
        found: list[Segment] = []
        places: dict[int, int] = {}
        for segment in segments:
            address, blocks = whole(segment["address"]), dict[int, tuple[int, int]]()
            begins = itertools.accumulate((whole(block["size"]) for block in segment["blocks"]), initial=address)
            for begin, block in zip(begins, segment["blocks"], strict=False):
                if block["state"] == "inactive":
                    continue
                first = (block.get("history") or [{}])[0]  # Of torch up to 2.0.
                requested = block.get("requested_size") or first.get("real_size") or block["size"]
                blocks[begin] = block["size"], whole(requested)
                places[begin] = self.place(block.get("frames") or first.get("frames")) or NO_PLACE
            kind = segment.get("segment_type", "large")
            expandable = bool(segment.get("is_expandable", False))
            found.append(
                Segment(
                    address,
                    whole(segment["total_size"]),
                    whole(segment.get("stream", 0)),
                    kind == "small",
                    expandable,
                    blocks,
                )
            )
        return found, places

    def read_settings(self, found: dict[str, Any], expandable: bool) -> AllocatorSettings:
        texts = [found.get("PYTORCH_CUDA_ALLOC_CONF") or found.get("PYTORCH_ALLOC_CONF") or ""]
        # What was in force, whoever set it.
        texts.append(f"expandable_segments:{bool(found.get('expandable_segments', expandable))}")
        if 0 < (most := operator.index(found.get("max_split_size", -1))) < 2**56:
            texts.append(f"max_split_size_mb:{most // MIB}")
        if threshold := float(found.get("garbage_collection_threshold", 0)):
            texts.append(f"garbage_collection_threshold:{threshold}")
        divisions = found.get("roundup_power2_divisions") or {}
        if any(map(whole, divisions.values())):
            texts.append(f"roundup_power2_divisions:[{','.join(f'{mib}:{parts}' for mib, parts in divisions.items())}]")
        settings = AllocatorSettings()
        for text in texts:
            try:
                settings = settings.changed_by(text)
            except ValueError as error:
                self.doubts.append(f"the settings {text!r} were not understood: {error}")
        return settings

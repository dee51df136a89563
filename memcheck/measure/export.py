"""Exports one forward and backward for other tools: memory snapshots, profiler traces and NVTX ranges."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from memcheck.core import arguments, files
from memcheck.core.step import HERE, Place, Step
from memcheck.core.timeline import Allocation, Timeline
from memcheck.core.units import format_time
from memcheck.measure import measurement, recorders
from memcheck.measure.run import MeasuredCall, MeasuredRun, range_around
from memcheck.measure.timeline import recorded

Rows = list[dict[str, Any]]


@arguments.takes_step(places=HERE[:1])
def write_snapshot(step: Step, place: Place, *, path: Path | str) -> Path:
    """Writes the memory of a step's forward and backward over time, for the viewer at pytorch.org/memory_viz.

        write_snapshot(model, x, path="snapshot.pickle")

    On CUDA the file is what torch.cuda.memory._dump_snapshot writes, with tracebacks. On the CPU it is a timeline in
    the same format: device 0 is the CPU, a segment is a range of addresses that was ever in use, and frames are
    operators and autograd nodes. Arguments are those of memcheck.measure_memory.
    """
    call = MeasuredCall(step, place.device)
    path = Path(path)
    if call.device.type == "cuda":
        with recorders.cuda_memory_history():
            MeasuredRun(call).measure()
            torch.cuda.memory._dump_snapshot(str(path))
    else:
        with files.whole_file(path) as file:  # The viewer reads pickle protocols up to 4.
            pickle.dump(snapshot_of(recorded(call)[0]), file, protocol=4)
    return path


def snapshot_of(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the format of torch.cuda.memory._snapshot(). The caller's tensors exist from the start."""
    births = [(block.born, _entry("alloc", block)) for block in timeline.blocks if block.born and block.bytes > 0]
    ends = [(block.died, block) for block in timeline.blocks if block.died is not None]
    ends += [(block.born, block) for block in timeline.blocks if block.bytes < 0]
    frees = [(step, _entry(action, block)) for step, block in ends for action in ("free_requested", "free_completed")]
    trace = [entry for _, entry in sorted(births + frees, key=lambda pair: pair[0])]
    return {"segments": _segments(timeline), "device_traces": [trace], "device_type": "cpu"}


def _entry(action: str, block: Allocation) -> dict[str, Any]:
    return {"action": action, "addr": block.address, "size": abs(block.bytes), "stream": 0, "frames": _frames(block)}


def _frames(block: Allocation) -> Rows:
    """Frames, innermost first as in a traceback, preceded by the name of the block."""
    shape = f" {block.dtype} {list(block.shape)}" if block.shape is not None else ""
    names = [f"{block.name}{shape}", *reversed(block.stack)]
    return [{"filename": block.phase or "before", "line": 0, "name": name} for name in names]


def _segments(timeline: Timeline) -> Rows:
    """Ranges of addresses that were ever in use, merged where they overlap, with the blocks alive at the end."""
    stretches: list[tuple[int, int]] = []
    for begin, end in sorted((block.address, block.address + abs(block.bytes)) for block in timeline.blocks):
        if stretches and begin <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((begin, end))
    left = sorted(timeline.alive_after(timeline.steps[-1]), key=lambda block: block.address)
    return [
        _segment(begin, end, [block for block in left if begin <= block.address < end and block.bytes > 0])
        for begin, end in stretches
    ]


def _segment(begin: int, end: int, alive: list[Allocation]) -> dict[str, Any]:
    blocks: Rows = []
    at = begin
    for block in alive:
        if block.address > at:
            blocks.append(_free_space(at, block.address))
        state = {"address": block.address, "size": block.bytes, "requested_size": block.bytes}
        blocks.append({**state, "state": "active_allocated", "frames": _frames(block)})
        at = block.address + block.bytes
    if at < end:
        blocks.append(_free_space(at, end))
    used = sum(block.bytes for block in alive)
    sizes = {"total_size": end - begin, "allocated_size": used, "active_size": used, "requested_size": used}
    pool = {"stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
    return {"device": 0, "address": begin, **sizes, **pool, "blocks": blocks}


def _free_space(begin: int, end: int) -> dict[str, Any]:
    return {"address": begin, "size": end - begin, "requested_size": 0, "state": "inactive", "frames": []}


@arguments.takes_step(places=HERE[:1])
def write_trace(step: Step, place: Place, *, path: Path | str) -> Rows:
    """Writes torch.profiler's trace of a step, and returns the times, the longest first.

        write_trace(model, x, path="trace.json")

    The file has Chrome's trace format, for chrome://tracing and ui.perfetto.dev; a path that ends in .gz is
    compressed. Each row has the name of a kernel (on CUDA) or an operator (on the CPU), its calls, self_ms (without
    what it called) and its share of the sum. A pass before is the warm-up. Arguments are those of
    memcheck.measure_memory.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    call = MeasuredCall(step, place.device)
    on_cuda = call.device.type == "cuda"
    measurement.timed_pass(call)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, record_shapes=True) as profiler, _ranges(record_function):
        measurement.timed_pass(call)
    profiler.export_chrome_trace(str(path))
    return _shares(profiler.key_averages(), on_cuda)


# The ranges that surround a pass; their own time is the time between operators.
BETWEEN = {"pass": "between forward and backward", "forward": "forward, between operators"}
BETWEEN |= {"backward": "backward, between nodes", "optimizer": "optimizer, between operators"}


def _shares(averages: Any, on_cuda: bool) -> Rows:
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    events = [event for event in averages if event.device_type == kind and not (on_cuda and event.key in BETWEEN)]
    times = [event.self_device_time_total if on_cuda else event.self_cpu_time_total for event in events]
    total = sum(times)
    rows = [
        {
            "name": BETWEEN.get(event.key, event.key),
            "calls": event.count,
            "self_ms": time / 1e3,
            "share": time / total if total else 0.0,
        }
        for event, time in zip(events, times, strict=True)
        if time > 0
    ]
    return sorted(rows, key=lambda row: -row["self_ms"])


def format_shares(rows: Rows, top: int = 15) -> str:
    """Formats the table as text; the smallest rows are summed in the last line."""
    if len(rows) > top:
        rest = rows[top - 1 :]
        sums = {field: sum(row[field] for row in rest) for field in ("calls", "self_ms", "share")}
        rows = [*rows[: top - 1], {"name": f"{len(rest)} others", **sums}]
    lines = [f"{format_time(row['self_ms']):>9} {row['share']:6.1%} {row['calls']:6}  {row['name']}" for row in rows]
    return "\n".join([f"{'self time':>9} {'share':>6} {'calls':>6}  name", *lines])


@contextmanager
def nvtx_ranges(enabled: bool = True) -> Iterator[None]:
    """Inside, memcheck's measurements have NVTX ranges around passes, forwards and backwards, for Nsight Systems.

    Without CUDA, or if they are not enabled, there are no ranges.
    """
    with _ranges(torch.cuda.nvtx.range) if enabled and torch.cuda.is_available() else nullcontext():
        yield


@contextmanager
def _ranges(kind: Callable[[str], Any]) -> Iterator[None]:
    token = range_around.set(kind)
    try:
        yield
    finally:
        range_around.reset(token)

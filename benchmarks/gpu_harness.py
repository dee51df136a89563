"""The measuring part of benchmarks/gpu.py: clocks, contenders, rows and tables."""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memcheck.measure.measurement import measure_memory

Function = Callable[..., Tensor]
Run = Callable[[], Any]
Row = dict[str, Any]

FORWARD, BOTH = "forward", "forward + backward"
# The GPU waits this long before each call, while the CPU queues the call's launches.
AHEAD_CYCLES = 2_000_000
# Total size of the input sets that take turns: several times any L2 cache.
ROTATED_BYTES = 256 << 20


@dataclass(frozen=True)
class Work:
    """Minimum bytes and operations: each input read once, each result written once."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Contender:
    """A function of the inputs, with autograd; or, if `both` is given, separate functions for forward and both passes.

    make: builds the function, which may fail. shapes: shapes of its inputs, if they differ from the operator's.
    works: minimum work of the forward and of both passes, if it differs from the operator's.
    """

    name: str
    make: Callable[[], Function]
    shapes: tuple[tuple[int, ...], ...] | None = None
    works: tuple[Work, Work] | None = None
    both: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Benchmark:
    section: str
    size: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]  # of the inputs; y has the shape of the first
    unit_bytes: int  # U
    works: tuple[Work, Work]  # of the forward, and of both passes
    contenders: tuple[Contender, ...]
    # The number of weights, which are the last inputs; they are divided by the root of their last dimension.
    weights: int = 0


@dataclass
class Settings:
    device: str
    rounds: int
    seconds: float  # for the rounds of one table
    ceilings: Row = field(default_factory=dict)


def results_folder() -> Path:
    """Returns the folder of this machine's results: MEMCHECK_RESULTS, or the GPU's in benchmarks/results, h200 say."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    named = Path(__file__).parent / "results" / name.lower().removeprefix("nvidia ").replace(" ", "-")
    return Path(os.environ.get("MEMCHECK_RESULTS") or named)


# ---- clocks


class CpuClock:
    def __call__(self, run: Run) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3


class CudaClock:
    """Measures milliseconds on the GPU; the whole call is queued before it begins."""

    def __init__(self) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Run) -> float:
        torch.cuda._sleep(AHEAD_CYCLES)
        self.start.record()
        run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)


def clock_of(device: str) -> Callable[[Run], float]:
    return CudaClock() if device.startswith("cuda") else CpuClock()


def release(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# ---- ceilings


def ceilings(device: str, small: bool) -> Row:
    """Returns bytes per second of a copy and operations per second of matrix products."""
    clock, rounds = clock_of(device), 5 if small else 30
    size = (1 << 20) if small else (1 << 28)
    taken, moved = copy_seconds(clock, torch.randn(size, device=device), rounds)
    found = {"copy_bytes_per_second": moved / taken}
    side = 256 if small else 8192
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        taken = seconds(clock, functools.partial(torch.mm, a, b), rounds)
        found[f"{name_of(dtype)}_flops_per_second"] = 2 * side**3 / taken
    release(device)
    return found


def copy_seconds(clock: Callable[[Run], float], source: Tensor, rounds: int) -> tuple[float, int]:
    """Returns seconds of a copy, and the bytes read and written."""
    target = torch.empty_like(source)
    return seconds(clock, functools.partial(target.copy_, source), rounds), 2 * source.nbytes


def seconds(clock: Callable[[Run], float], run: Run, rounds: int) -> float:
    for _ in range(3):
        run()
    return statistics.median(clock(run) for _ in range(rounds)) / 1e3


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- contenders


def random_inputs(benchmark: Benchmark, contender: Contender, device: str) -> list[Tensor]:
    shapes = contender.shapes or benchmark.shapes
    inputs = [torch.randn(shape, device=device, dtype=benchmark.dtype) for shape in shapes]
    for weight in inputs[len(inputs) - benchmark.weights :]:
        weight.div_(weight.shape[-1] ** 0.5)
    return [x.requires_grad_() for x in inputs]


class Entry:
    """A contender with several sets of inputs, which together exceed any cache."""

    def __init__(self, benchmark: Benchmark, contender: Contender, device: str, what: str) -> None:
        self.contender, self.what = contender, what
        self.function = contender.make()
        first = random_inputs(benchmark, contender, device)
        count = max(1, min(8, -(-ROTATED_BYTES // sum(x.nbytes for x in first))))
        self.sets = [first, *(random_inputs(benchmark, contender, device) for _ in range(count - 1))]
        self.turn = 0
        self.grad_y = torch.randn_like(self._forward(first)) if what == BOTH else None

    def _forward(self, inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return self.function(*inputs)

    def __call__(self) -> None:
        inputs = self.sets[self.turn % len(self.sets)]
        self.turn += 1
        if self.what == FORWARD:
            self._forward(inputs)
        elif self.contender.both is not None:
            with torch.no_grad():
                self.contender.both(*inputs, self.grad_y)
        else:
            for leaf in inputs:
                leaf.grad = None
            self.function(*inputs).backward(self.grad_y)

    def peak_bytes(self) -> int | None:
        """Returns the peak of requested bytes of everything alive, with inputs and without library workspaces."""
        if self.what == BOTH and self.contender.both is not None:
            return None
        record = measure_memory(self.function, *self.sets[0], backward=self.what == BOTH, dense_grad=self.what == BOTH)
        peak = record.backward_peak_bytes if self.what == BOTH else record.forward_peak_bytes
        return None if peak is None else peak - (record.library_workspace_bytes or 0)


def measure(benchmark: Benchmark, settings: Settings) -> Iterator[Row]:
    """Returns a row per contender for the forward and for both passes; a failed contender's row has the reason."""
    for number, what in enumerate((FORWARD, BOTH)):
        entries: dict[str, Entry] = {}
        for contender in benchmark.contenders:
            try:
                entry = Entry(benchmark, contender, settings.device, what)
                for _ in range(3):
                    entry()
                release(settings.device)
                entries[contender.name] = entry
            except Exception as error:
                yield failure(benchmark, contender.name, what, error)
                release(settings.device)
        times = time_rounds(entries, settings)
        for name, of_name in times.items():
            contender = entries[name].contender
            work = (contender.works or benchmark.works)[number]
            yield {
                **facts(benchmark, name, what),
                "status": "ok",
                **figures_of(of_name),
                **rates(work, statistics.median(of_name), benchmark.dtype, settings.ceilings),
                **peak_of(entries[name], benchmark.unit_bytes),
            }
        entries.clear()
        release(settings.device)


def time_rounds(entries: dict[str, Entry], settings: Settings) -> dict[str, list[float]]:
    """Returns milliseconds of every round. The order rotates, so that no contender has an advantage."""
    clock, names = clock_of(settings.device), list(entries)
    times: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + settings.seconds
    for number in range(settings.rounds):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            times[name].append(clock(entries[name]))
        if number >= 2 and time.perf_counter() > deadline:
            break
    return times


# ---- rows


def facts(benchmark: Benchmark, contender: str, what: str) -> Row:
    return {
        "section": benchmark.section,
        "size": benchmark.size,
        "dtype": name_of(benchmark.dtype),
        "what": what,
        "contender": contender,
    }


def failure(benchmark: Benchmark, contender: str, what: str, error: Exception) -> Row:
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return {**facts(benchmark, contender, what), "status": "oom" if out_of_memory else "failed", "reason": reason}


def figures_of(times: list[float]) -> Row:
    quartiles = statistics.quantiles(times, n=4, method="inclusive")[::2] if len(times) > 1 else [times[0]] * 2
    return {"ms": statistics.median(times), "ms_quartiles": quartiles, "rounds": len(times)}


def rates(work: Work, ms: float, dtype: torch.dtype, ceilings: Row) -> Row:
    """Returns rates of a row. of_ceiling: time of the work at the measured ceilings, divided by the measured time."""
    moving = work.bytes / ceilings["copy_bytes_per_second"]
    computing = work.flops / ceilings[f"{name_of(dtype)}_flops_per_second"]
    return {
        "gb_per_second": work.bytes / ms / 1e6,
        "tflop_per_second": work.flops / ms / 1e9,
        "bound": "memory" if moving >= computing else "compute",
        "of_ceiling": max(moving, computing) * 1e3 / ms,
    }


def peak_of(entry: Entry, unit_bytes: int) -> Row:
    try:
        peak = entry.peak_bytes()
    except Exception as error:  # peaks are measured in a separate pass, so the time remains valid
        return {"peak_bytes": None, "peak_reason": " ".join(str(error).split())[:300]}
    return {"peak_bytes": peak, "peak_units": None if peak is None else peak / unit_bytes}


# ---- tables

HEADS = ("contender", "ms", "to memcheck", "rate", "of ceiling", "peak MiB", "peak U")


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the Markdown lines of one benchmark and phase."""
    ours = next((row["ms"] for row in rows if row["contender"] == "memcheck" and row["status"] == "ok"), None)
    lines = [f"| {' | '.join(HEADS)} |", "| --- |" + " ---: |" * (len(HEADS) - 1)]
    for row in sorted(rows, key=lambda row: row["status"] != "ok"):
        if row["status"] != "ok":
            reason = row["reason"].replace("|", "/")
            lines.append(f"| {row['contender']} | {row['status']}: {reason} |" + " |" * (len(HEADS) - 2))
            continue
        rate = ("gb_per_second", "GB/s") if row["bound"] == "memory" else ("tflop_per_second", "TFLOP/s")
        peak = row.get("peak_bytes")
        cells = (
            row["contender"],
            f"{row['ms']:.3g}",
            f"{row['ms'] / ours:.2f} x" if ours else "",
            f"{row[rate[0]]:.4g} {rate[1]}",
            f"{row['of_ceiling']:.0%}",
            f"{peak / 2**20:.1f}" if peak is not None else "",
            f"{row['peak_units']:.2f}" if peak is not None else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def document(machine: Row, ceilings: Row, rows: Sequence[Row]) -> str:
    """Returns the whole result as Markdown."""
    lines = ["# Operators on " + str(machine["device_name"]), ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- {name}: {value:.4g}" for name, value in ceilings.items()]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(key, "")) for key in ("section", "size", "dtype", "what")), []).append(row)
    for (section, size, dtype, what), of_group in groups.items():
        lines += ["", f"## {section}, {size}, {dtype}, {what}", "", *table(of_group)]
    return "\n".join(lines) + "\n"


def write_results(folder: Path, machine: Row, ceilings: Row, rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "ceilings": ceilings, "rows": list(rows)}
    (folder / "bench.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "bench.md").write_text(document(machine, ceilings, rows))

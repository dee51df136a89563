"""Times contenders in one run, and writes the results with a description of the machine."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memcheck.measure.measurement import machine_facts

RESULTS = Path(__file__).parent / "results"


Run = Callable[[], Any]

# Ways to allocate memory, as environment variables of a process. fresh is torch's default: pages of a large result are
# new, of 4 KiB each (memcheck asks for huge pages). With "huge pages", torch asks for them too. With "kept", malloc
# keeps freed memory, so that no page is new.
ALL_KEPT = str(1 << 33)  # bytes
MEMORY: dict[str, dict[str, str]] = {
    "fresh": {},
    "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept": {"MALLOC_MMAP_THRESHOLD_": ALL_KEPT, "MALLOC_TRIM_THRESHOLD_": ALL_KEPT},
}

# For contenders in their own processes: the duration of a turn, and the pause between turns, in which the threads of
# the last contender stop spinning for work.
TURN, PAUSE = 0.5, 0.05  # seconds


def forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Run:
    def run() -> None:
        with torch.no_grad():
            function(*inputs)

    return run


def forward_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> Run:
    """Runs forward and backward from .grad None, so that gradients are allocated."""

    def run() -> None:
        for leaf in inputs:
            leaf.grad = None
        function(*inputs).backward(gradient)

    return run


def passes(what: str, function: Callable[..., Tensor], inputs: Sequence[Tensor], shape: Sequence[int]) -> Run:
    """Returns a run of forward, or of forward + backward with a dense gradient of this shape."""
    if what == "forward":
        return forward(function, inputs)
    return forward_backward(function, inputs, torch.randn(shape, dtype=inputs[0].dtype))


@dataclass(frozen=True)
class Work:
    """What the maths needs: bytes of memory read and written, each tensor once, and operations of matrix products."""

    moved_bytes: int
    flops: int = 0

    @classmethod
    def of_pass(cls, what: str, inputs: Sequence[Tensor], y: int, flops: Mapping[str, int] | None = None) -> Work:
        """Returns the work of what passes() runs: inputs read, and y elements written. The backward reads the inputs
        and a gradient, and writes a gradient of each input."""
        of_inputs, of_y = sum(x.numel() for x in inputs), y
        elements = of_inputs + of_y if what == "forward" else 3 * of_inputs + 2 * of_y
        return cls(elements * inputs[0].element_size(), (flops or {}).get(what, 0))

    def limits(self, dtype: torch.dtype) -> dict[str, Callable[[], Run]]:
        """Returns setups of contenders that show the limits of the machine for this work: a copy that moves the same
        bytes, and a matrix product in dtype with the same operations. Their ratio to memcheck is memcheck's share of
        the limit."""
        setups: dict[str, Callable[[], Run]] = {"copy": functools.partial(_copy, self.moved_bytes)}
        if self.flops:
            setups["product"] = functools.partial(_product, self.flops, dtype)
        return setups

    def rates(self, ms: float) -> dict[str, float]:
        rates = {"gb_per_s": self.moved_bytes / ms / 1e6}
        return {**rates, "gflop_per_s": self.flops / ms / 1e6} if self.flops else rates


def _copy(moved_bytes: int) -> Run:
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def _product(flops: int, dtype: torch.dtype, side: int = 1024) -> Run:
    x, w = (
        torch.randn(max(1, round(flops / (2 * side * side))), side, dtype=dtype),
        torch.randn(side, side, dtype=dtype),
    )
    y = x @ w
    return lambda: torch.mm(x, w, out=y)


def time_rounds(contenders: Mapping[str, Run], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Returns milliseconds per contender and round. The order rotates, so that no contender has an advantage."""
    return take_turns({name: lambda run=run: milliseconds(run) for name, run in contenders.items()}, rounds, warmup)


def time_apart(
    setups: Mapping[str, Callable[[], Run]],
    rounds: int,
    warmup: int = 5,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[float]]:
    """Like time_rounds, with a process per contender, so that none inherits another's heap.

    In each process a setup, which must pickle, makes the run. All have the same seed, this process's number of threads
    and these additional environment variables. A turn is several calls; its time is their median without the first.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment or {}))
        spawn = multiprocessing.get_context("spawn")
        workers: dict[str, Executor] = {
            name: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for name in setups
        }
        started = [workers[name].submit(_set_up, setup, torch.get_num_threads()) for name, setup in setups.items()]
        for each in started:
            each.result()
        turns = {name: lambda worker=worker: worker.submit(_turn).result() for name, worker in workers.items()}
        return take_turns(turns, rounds, warmup)


_run: Run  # the run of this process's contender


def _set_up(setup: Callable[[], Run], threads: int) -> None:
    global _run
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    _run = setup()


def _turn() -> float:
    time.sleep(PAUSE)
    end = time.perf_counter() + TURN
    _run()
    times = [milliseconds(_run)]
    while time.perf_counter() < end:
        times.append(milliseconds(_run))
    return statistics.median(times)


def milliseconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, list[float]]:
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time_of_turn = turns[name]()
            if number >= 0:
                times[name].append(time_of_turn)
    return times


def compare(
    times: Mapping[str, list[float]], base: str, work: Work | None = None, **facts: Any
) -> list[dict[str, Any]]:
    """Returns a row per contender: its median, the median of its ratios to the base in the same round, and the rates
    at which it does the work."""
    rows = []
    for name, of_name in times.items():
        ratios = [one / of_base for one, of_base in zip(of_name, times[base], strict=True)]
        row = {**facts, "contender": name, **figures("ms", of_name), **figures("ratio", ratios)}
        rows.append({**row, **work.rates(row["ms"])} if work else row)
    return rows


def figures(name: str, values: list[float]) -> dict[str, Any]:
    return {
        name: statistics.median(values),
        f"{name}_quartiles": statistics.quantiles(values, n=4, method="inclusive")[::2],
        "rounds": len(values),
    }


def write_result(name: str, rows: Any, output: Path | None = None, **facts: Any) -> Path:
    """Writes benchmarks/results/NAME.json, or the file of --output; facts apply to all rows."""
    machine = {
        **{name: fact for name, fact in machine_facts("cpu").items() if name != "allocator"},
        "platform": f"{platform.system()} {platform.machine()}",
        "python_version": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }
    path = output or RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **facts, "rows": rows}, indent=2) + "\n")
    return path


def print_rows(rows: list[dict[str, Any]], *columns: str) -> None:
    figures = ["ms", "ratio", *(rate for rate in ("gb_per_s", "gflop_per_s") if any(rate in row for row in rows))]
    print(" ".join(f"{column:>20}" for column in (*columns, "contender", *figures)))
    for row in rows:
        words = [str(row[column]) for column in (*columns, "contender")]
        words += [f"{row[figure]:.2f}" if figure in row else "" for figure in figures]
        print(" ".join(f"{word:>20}" for word in words))

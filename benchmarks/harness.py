"""Times contenders in one run, and writes the results with a description of the machine."""

from __future__ import annotations

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


def compare(times: Mapping[str, list[float]], base: str, **facts: Any) -> list[dict[str, Any]]:
    """Returns a row per contender: its median, and the median of its ratios to the base in the same round."""
    rows = []
    for name, of_name in times.items():
        ratios = [one / of_base for one, of_base in zip(of_name, times[base], strict=True)]
        rows.append({**facts, "contender": name, **figures("ms", of_name), **figures("ratio", ratios)})
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
    print(" ".join(f"{column:>20}" for column in (*columns, "contender", "ms", "ratio")))
    for row in rows:
        words = [str(row[column]) for column in (*columns, "contender")]
        print(" ".join(f"{word:>20}" for word in [*words, f"{row['ms']:.2f}", f"{row['ratio']:.2f}"]))

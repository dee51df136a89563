"""Times contenders side by side in one run, and writes what came out beside the machine it came from."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memcheck.measurement import machine_facts

RESULTS = Path(__file__).parent / "results"


Runs = Mapping[str, Callable[[], Any]]


def forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            function(*inputs)

    return run


def forward_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> Callable[[], Any]:
    """Begins with .grad None, so that gradients are allocated afresh."""

    def run() -> None:
        for leaf in inputs:
            leaf.grad = None
        function(*inputs).backward(gradient)

    return run


def time_rounds(contenders: Runs, rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Milliseconds of every contender in every round; their order turns, so that none gains by it."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            contenders[name]()
            milliseconds = (time.perf_counter() - start) * 1e3
            if number >= 0:
                times[name].append(milliseconds)
    return times


def compare(times: Mapping[str, list[float]], base: str, **facts: Any) -> list[dict[str, Any]]:
    """A row per contender: the median, and the median over rounds of its time by the base's in the same round."""
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
    """benchmarks/results/NAME.json, unless told otherwise; facts are those of all rows."""
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

"""Measures the cost of predictions: commands, a sweep of 1,000 predicted cells, its tables and pictures, single cells.

    python benchmarks/prediction.py [--rounds 3] [--output FILE]

The cells are ten operators, five lengths, five dimensions, two dtypes and two batch sizes. A sweep is predict_sweep
into a new folder, which includes writing rows to the disk; the target is 60 s on two cores. Processor seconds are
recorded too: they show how busy the machine was otherwise. A command is timed from its start to its end; those of a
configuration of transformers are left out without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import figures, write_result

from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.predict import predict_case
from memcheck.bench.sweep.predicted_sweep import predict_sweep
from memcheck.core.devices import DEVICES, Device
from memcheck.report.plots.pictures import write_pictures
from memcheck.report.records import write_tables

OPERATORS = (
    *("naive", "softmax", "softmax/math", "softplus", "linear-causal", "linear-cumsum", "compressed"),
    *("combinator", "memcheck-pyt/naive", "cs336/naive"),
)
LENGTHS = (512, 1024, 2048, 4096, 8192)
DIMS = (128, 256, 512, 1024, 2048)
DTYPES = ("float32", "bfloat16")
BATCHES = (8, 16)
GPU = DEVICES["A100-40GB"]
PROMISED_SECONDS = 60.0
ROOT = Path(__file__).parents[1]
EXAMPLE, LLAMA = "--model docs/examples/model.py:make", "--hf-config docs/examples/llama-8b.json --bsz 1 --dtype bf16"
COMMANDS = (
    f"predict {EXAMPLE} --bsz 24 --device RTX-4090",
    f"predict {EXAMPLE} --bsz 24 --device RTX-4090 --no-changes",
    f"fit {EXAMPLE} --find bsz --device RTX-4090",
    f"predict {LLAMA} --seq-len 2048 --device H100-80GB --no-changes",
    f"fit {LLAMA} --find seq-len --checkpointing --fsdp 8 --device H100-80GB --no-changes",
)


def cases() -> list[Case]:
    return [
        make_one(name, dtype, bsz, length, dim)
        for dtype in DTYPES
        for bsz in BATCHES
        for length in LENGTHS
        for dim in DIMS
        for name in OPERATORS
    ]


def make_one(name: str, dtype: str, bsz: int, length: int, dim: int) -> Case:
    fields: dict[str, Any] = {"bsz": bsz, "query_len": length, "dim": dim, "dtype": dtype, "device": "cuda"}
    if CONTENDERS[name].kind == "combinator":
        return make_combinator_case(name, **fields)
    return make_case(name, kv_len=length, heads=8, core_dim=None, factor=None, **fields)


@dataclass
class Watch:
    """A context manager that collects wall and processor seconds of each use."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        clock, processor = time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - clock)
        self.cpu_seconds.append(time.process_time() - processor)


def time_sweeps(rounds: int) -> list[dict[str, Any]]:
    """Returns a row for the sweep, and one for its tables and pictures, which are made once."""
    sweeps, files = Watch(), Watch()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, sweeps.running():
            records = predict_sweep(cases(), folder, GPU)
    styles = {name: contender.style for name, contender in CONTENDERS.items()}
    with tempfile.TemporaryDirectory() as folder, files.running():
        write_tables(records, folder)
        write_pictures(records, folder, styles=styles, title="sweep")
    what = {"cells": len(records), "device": GPU.name, "threads": torch.get_num_threads()}
    whole = {**figures("seconds", sweeps.seconds), **figures("cpu_seconds", sweeps.cpu_seconds)}
    return [
        {"what": "a sweep, rows on the disk", **what, **whole, "promised_seconds": PROMISED_SECONDS},
        {"what": "its tables and pictures", **what, "seconds": files.seconds[0], "cpu_seconds": files.cpu_seconds[0]},
    ]


def time_commands(rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each command, with the processor seconds of its process."""
    rows = []
    for command in COMMANDS:
        if "--hf-config" in command and importlib.util.find_spec("transformers") is None:
            continue
        watch = Watch()
        for _ in range(rounds):
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-m", "memcheck", *command.split()], cwd=ROOT, check=True, capture_output=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            watch.seconds.append(time.perf_counter() - start)
            watch.cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        timed = {**figures("seconds", watch.seconds), **figures("cpu_seconds", watch.cpu_seconds)}
        rows.append({"what": f"memcheck {command}", "threads": torch.get_num_threads(), **timed})
    return rows


def time_cells(device: Device) -> list[dict[str, Any]]:
    """Returns a row per operator: milliseconds per prediction, and the statuses of the predictions."""
    rows = []
    for name in OPERATORS:
        mine = [case for case in cases() if case.operator == name]
        milliseconds, records = [], []
        for case in mine:
            start = time.perf_counter()
            records.append(predict_case(case, device).record)
            milliseconds.append((time.perf_counter() - start) * 1e3)
        counts = {status: sum(record.status == status for record in records) for status in ("ok", "oom", "skipped")}
        rows.append(
            {
                "what": "a cell",
                "operator": name,
                "device": device.name,
                "cells": len(mine),
                **{"median_ms": statistics.median(milliseconds), "most_ms": max(milliseconds)},
                **counts,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need as many")
    rows = [*time_commands(args.rounds), *time_sweeps(args.rounds), *time_cells(GPU)]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(write_result("prediction", rows, args.output))


if __name__ == "__main__":
    main()

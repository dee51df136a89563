"""What a prediction costs: a sweep of 1,000 cells that runs nothing, and single cells by operator.

    python benchmarks/prediction.py [--rounds 3] [--output FILE]

The cells are of ten operators, five lengths, five dimensions, two dtypes and two GPUs. A sweep is predict_sweep into a
new folder, rows on the disk included, tables and pictures not; the promise is 60 s on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import figures, write_result

from memcheck.catalog import CONTENDERS, Case, make_case, make_combinator_case
from memcheck.devices import DEVICES, Device
from memcheck.predicted_sweep import predict_sweep
from memcheck.prediction import predict_memory

OPERATORS = (
    *("naive", "softmax", "softmax/math", "softplus", "linear-causal", "linear-cumsum", "compressed"),
    *("combinator", "memcheck-pyt/naive", "cs336/naive"),
)
LENGTHS = (512, 1024, 2048, 4096, 8192)
DIMS = (128, 256, 512, 1024, 2048)
DTYPES = ("float32", "bfloat16")
GPUS = ("A100-40GB", "H100-80GB")
PROMISED_SECONDS = 60.0


def cases() -> list[Case]:
    return [
        make_one(name, dtype, length, dim)
        for dtype in DTYPES
        for length in LENGTHS
        for dim in DIMS
        for name in OPERATORS
    ]


def make_one(name: str, dtype: str, length: int, dim: int) -> Case:
    fields: dict[str, Any] = {"bsz": 8, "query_len": length, "dim": dim, "dtype": dtype, "device": "cuda"}
    if CONTENDERS[name].kind == "combinator":
        return make_combinator_case(name, **fields)
    return make_case(name, kv_len=length, heads=8, core_dim=None, factor=None, **fields)


def time_sweeps(rounds: int) -> list[float]:
    """Seconds of each sweep over all cells, on both devices."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for gpu in GPUS:
            with tempfile.TemporaryDirectory() as folder:
                predict_sweep(cases(), folder, DEVICES[gpu])
        seconds.append(time.perf_counter() - start)
    return seconds


def time_cells(device: Device) -> list[dict[str, Any]]:
    """A row for each operator: milliseconds of one prediction, and how the predictions ended."""
    rows = []
    for name in OPERATORS:
        mine = [case for case in cases() if case.operator == name]
        milliseconds, records = [], []
        for case in mine:
            start = time.perf_counter()
            records.append(predict_memory(case, device).record)
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
    cells = len(cases()) * len(GPUS)
    seconds = time_sweeps(args.rounds)
    sweep = {"what": f"a sweep of {cells} cells", "cells": cells, "threads": torch.get_num_threads()}
    rows = [
        {**sweep, **figures("seconds", seconds), "promised_seconds": PROMISED_SECONDS},
        *time_cells(DEVICES[GPUS[0]]),
    ]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(write_result("prediction", rows, args.output))


if __name__ == "__main__":
    main()

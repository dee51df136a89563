"""Derived times of kernels on an H100: a sum of terms of the host's counts, fitted to what an H200 measured.

An H200 has the same multiprocessors and more bandwidth. `MEASURED` has its times beside the terms of the kernels that
ran then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200" / "derived_times.csv"
MULTIPROCESSORS = 132
BANDWIDTH = 3.35e12  # bytes a second, nominal
CLOCK = 1.98e9  # cycles a second, the highest
TERMS = ["launches", "memory", "shared", "chain"]


def resident_blocks(threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks a multiprocessor holds at once."""
    warps = math.ceil(threads / 32)
    by_registers = (64 << 10) // (math.ceil(registers / 8) * 8 * 32 * warps)
    return min(64 // warps, 32, by_registers, (228 << 10) // (shared_bytes + 1024))


def terms_of(row: Mapping[str, Any], registers: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds for each of `TERMS` of a kernel's counts, before they are weighed. registers: of a kernel's thread.

    launches: a microsecond each
    memory: distinct bytes of a launch, at the peak bandwidth
    shared: turns of the banks, one in a cycle, on the multiprocessor that has most blocks
    chain: of linear attention's scans on tensor cores, whose warps take one chunk after the other: rounds of copies of
    a block, in every wave of blocks, 600 cycles each
    """
    blocks = row["blocks"] // row["launches"]
    turns = row["shared_read_turns"] + row["shared_write_turns"]
    rounds = 0.0
    if row["kernel"].startswith("linear_attention_") and row["kernel"].endswith("_tensor"):
        of_thread = registers[row["instance"]]
        resident = MULTIPROCESSORS * resident_blocks(row["threads"], of_thread, row["shared_bytes"])
        copied = 16 * row["copies"] / (row["blocks"] * row["threads"])
        rounds = row["launches"] * math.ceil(blocks / resident) * copied * row["awaits"] / row["bytes_in_flight"]
    seconds = {
        "launches": row["launches"] * 1e-6,
        "memory": row["distinct_sectors"] * 32 / BANDWIDTH,
        "shared": turns * math.ceil(blocks / MULTIPROCESSORS) / blocks / CLOCK,
        "chain": rounds * 600 / CLOCK,
    }
    return {name: 1e3 * x for name, x in seconds.items()}


def weights(measured: pd.DataFrame) -> np.ndarray:
    """The weights of the terms with the least squares of relative errors, over passes that were timed alone."""
    alone = measured[measured["contains"].isna()]
    relative = alone[TERMS].to_numpy() / alone[["measured ms"]].to_numpy()
    return np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0]


def derived_ms(terms: pd.DataFrame) -> pd.Series:
    """The derived time of each row."""
    return (terms[TERMS] * weights(pd.read_csv(MEASURED))).sum(axis=1)

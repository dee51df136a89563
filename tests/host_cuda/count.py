"""Counts of the CUDA kernels, on the host: memory that they move, bank conflicts, barriers, products; and races.

python tests/host_cuda/count.py           counts, prints a table, and stores it in benchmarks/results/cuda_counts
python tests/host_cuda/count.py --check   exit code 1 if a count is larger than the stored one
python tests/host_cuda/count.py --lines   the lines of the kernels that cost most
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
# The modules of tests, and the kernels on the host behind the operators.
sys.path.insert(0, str(ROOT / "tests"))
os.environ["MEMCHECK_TEST_HOST_CUDA"] = "1"

from host_cuda import counters, library  # noqa: E402

import memcheck  # noqa: E402

STORED = ROOT / "benchmarks" / "results" / "cuda_counts" / "counts.csv"
KEYS = ["case", "pass", "kernel"]
# What may not grow by more than a percent: another compiler may read a value once more.
CHECKED = [
    "launches",
    "shared_bytes",
    "global_read_bytes",
    "global_write_bytes",
    "global_read_sectors",
    "global_write_sectors",
    "distinct_sectors",
    "shared_read_turns",
    "shared_write_turns",
    "barriers",
    "collectives",
    "mma",
    "idle_awaits",
]


# ---- what is counted


@dataclass(frozen=True)
class Case:
    """A call whose kernels are counted. The floor is the bytes that it must move: inputs read once, outputs written
    once; for the combinator, whose products are the library's, what its own kernels read and write."""

    name: str
    inputs: Callable[[], list[Tensor]]
    function: Callable[..., Tensor]
    forward_floor: Callable[[list[Tensor], Tensor], int]
    backward_floor: Callable[[list[Tensor], Tensor], int]


def attention(name: str, inputs: Callable[[], list[Tensor]], function: Callable[..., Tensor]) -> Case:
    return Case(
        name,
        inputs,
        function,
        lambda tensors, y: bytes_of(*tensors, y),
        # The gradient of y has the size of y, and gradients that of the inputs.
        lambda tensors, y: 2 * bytes_of(*tensors) + bytes_of(y),
    )


def bytes_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def softplus(B: int, R: int, T: int, dtype: torch.dtype, causal: bool = True) -> Case:
    return attention(
        f"softplus_attention {spelled(dtype)} B{B} R{R} T{T}{'' if causal else ' not causal'}",
        lambda: [zeros(B, T, R, dtype=dtype), zeros(B, R, T, dtype=dtype), zeros(B, R, T, dtype=dtype)],
        lambda q, k, v: memcheck.softplus_attention(q, k, v, causal=causal),
    )


def linear(B: int, H: int, T: int, D: int, dtype: torch.dtype, causal: bool = True, Hkv: int | None = None) -> Case:
    heads = Hkv or H
    group = f"/{heads}" if heads != H else ""
    return attention(
        f"linear_attention {spelled(dtype)} B{B} H{H}{group} T{T} D{D}{'' if causal else ' not causal'}",
        lambda: [
            zeros(B, H, T, D, dtype=dtype),
            zeros(B, heads, T, D, dtype=dtype),
            zeros(B, heads, T, D, dtype=dtype),
        ],
        lambda q, k, v: memcheck.linear_attention(q, k, v, causal=causal),
    )


def compressed(B: int, H: int, T: int, D: int, factor: int, dtype: torch.dtype, causal: bool = True) -> Case:
    return attention(
        f"compressed_attention {spelled(dtype)} B{B} H{H} T{T} D{D} factor {factor}{'' if causal else ' not causal'}",
        lambda: [zeros(B, H, T, D, dtype=dtype) for _ in range(3)],
        lambda q, k, v: memcheck.compressed_attention(q, k, v, factor=factor, causal=causal),
    )


def combinator(rows: int, E: int, dtype: torch.dtype) -> Case:
    return Case(
        f"combinator {spelled(dtype)} rows {rows} E{E}",
        lambda: [zeros(rows, E, dtype=dtype), zeros(2, E, E, dtype=dtype)],
        memcheck.combinator,
        lambda _, y: 3 * bytes_of(y),  # two pre-activations, and y
        lambda _, y: 5 * bytes_of(y),  # two pre-activations, the gradients of both, and that of y
    )


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """No count depends on values."""
    return torch.zeros(shape, dtype=dtype)


def spelled(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def small_cases() -> Iterator[Case]:
    """What CI counts, in about a minute."""
    for dtype in (torch.bfloat16, torch.float32):
        yield softplus(1, 64, 600, dtype)
        yield softplus(1, 64, 600, dtype, causal=False)
        yield linear(1, 2, 192, 64, dtype)
        yield compressed(1, 1, 256, 64, 8, dtype)
        yield combinator(64, 128, dtype)
    yield linear(1, 2, 128, 128, torch.bfloat16)
    yield linear(1, 2, 192, 64, torch.bfloat16, causal=False)
    yield linear(1, 2, 192, 64, torch.bfloat16, Hkv=1)
    yield compressed(1, 1, 256, 128, 8, torch.bfloat16)


# ---- counts


@dataclass(frozen=True)
class Pass:
    """The launches of a forward or backward, and the bytes that it must move."""

    case: str
    name: str
    floor: int
    launches: list[counters.LaunchCounts]


def passes(case: Case) -> Iterator[Pass]:
    """Forward and backward of a case. Raises RuntimeError for a race."""
    leaves = [x.requires_grad_() for x in case.inputs()]
    library.forget_counts()
    y = case.function(*leaves)
    yield Pass(case.name, "forward", case.forward_floor(leaves, y), library.counts())
    library.forget_counts()
    torch.autograd.grad(y, leaves, torch.zeros_like(y))
    yield Pass(case.name, "backward", case.backward_floor(leaves, y), library.counts())


def rows_of(of: Pass) -> Iterator[dict[str, object]]:
    """A row for every kernel."""
    for kernel, launches in counters.by_kernel(of.launches):

        def total(*names: str, launches: list[counters.LaunchCounts] = launches) -> int:
            return sum(launch[name] for launch in launches for name in names)

        yield {
            "case": of.case,
            "pass": of.name,
            "kernel": kernel,
            "launches": len(launches),
            "blocks": total("blocks"),
            "threads": max(launch["threads"] for launch in launches),
            "shared_bytes": max(launch["shared"] for launch in launches),
            "global_read_bytes": total("global_read_bytes"),
            "global_write_bytes": total("global_write_bytes"),
            "global_read_sectors": total("global_read_units"),
            "global_write_sectors": total("global_write_units"),
            "least_sectors": total("global_read_least", "global_write_least"),
            "distinct_sectors": total("global_read_distinct_sectors", "global_write_distinct_sectors"),
            "shared_read_turns": total("shared_read_units"),
            "shared_write_turns": total("shared_write_units"),
            "least_turns": total("shared_read_least", "shared_write_least"),
            "barriers": total("barriers"),
            "collectives": sum(launch.collectives() for launch in launches),
            "mma": total("mma_m16n8k16"),
            "ldmatrix": total("ldmatrix_x4", "ldmatrix_x4_transposed"),
            "copies": total("copies"),
            "awaits": total("awaits"),
            "idle_awaits": total("idle_awaits"),
            "bytes_in_flight": total("bytes_in_flight"),
            "floor": of.floor,
        }


def shown(counts: pd.DataFrame) -> pd.DataFrame:
    """What a reader compares: ratios, each 1 at best, and counts for a block."""
    moved = counts["global_read_sectors"] + counts["global_write_sectors"]
    turns = counts["shared_read_turns"] + counts["shared_write_turns"]
    table = counts[["case", "pass", "kernel", "blocks", "threads"]].copy()
    table["shared KiB"] = (counts["shared_bytes"] / 1024).round(1)
    table["moved KiB"] = (moved * 32 / 1024).round(1)
    table["moved/floor"] = (moved * 32 / counts["floor"]).round(2)
    table["distinct/floor"] = (counts["distinct_sectors"] * 32 / counts["floor"]).round(2)
    table["sectors/least"] = (moved / counts["least_sectors"]).round(2)
    table["turns/least"] = (turns / counts["least_turns"]).round(2)
    for name in ("barriers", "mma"):
        table[f"{name}/block"] = (counts[name] / counts["blocks"]).round(1)
    table["idle awaits"] = (counts["idle_awaits"] / counts["awaits"]).round(2)
    in_flight = counts["bytes_in_flight"] / counts["awaits"] * counts["threads"]
    table["KiB in flight/block"] = (in_flight / 1024).round(1)
    return table


def totals(counts: pd.DataFrame) -> pd.DataFrame:
    """Bytes of each pass against its floor."""
    sectors = counts.assign(moved=counts["global_read_sectors"] + counts["global_write_sectors"])
    passes = sectors.groupby(["case", "pass"], sort=False).agg(
        {"moved": "sum", "distinct_sectors": "sum", "floor": "first"}
    )
    floor = passes["floor"]
    return pd.DataFrame(
        {
            "floor KiB": (floor / 1024).round(1),
            "moved/floor": (passes["moved"] * 32 / floor).round(2),
            "distinct/floor": (passes["distinct_sectors"] * 32 / floor).round(2),
        }
    ).reset_index()


def growths(counts: pd.DataFrame, stored: pd.DataFrame) -> list[str]:
    """A line for each count that is larger than the stored one, and for each kernel that is not stored."""
    lines = []
    known = stored.set_index(KEYS)
    for row in counts.to_dict("records"):
        key = tuple(row[name] for name in KEYS)
        if key not in known.index:
            lines.append(f"{', '.join(key)}: not stored")
            continue
        for name in CHECKED:
            before = int(known.loc[key, name])
            if row[name] > 1.01 * before:
                lines.append(f"{', '.join(key)}: {name} {before} -> {row[name]}")
    return lines


# ---- lines


def costly_lines(of: Pass, most: int = 6) -> Iterator[str]:
    """The places of each kernel with most sectors or turns beyond the least."""
    for kernel, launches in counters.by_kernel(of.launches):
        places: dict[tuple[int, ...], counters.Numbers] = {}
        for launch in launches:
            for place in launch.places:
                key = (place["code"], place["shared"], place["writes"])
                known = places.setdefault(key, {"units": 0, "least": 0, "worst": 0, "bytes": place["bytes"]})
                known["units"] += place["units"]
                known["least"] += place["least"]
                known["worst"] = max(known["worst"], place["worst"])
        order = sorted(places.items(), key=lambda item: item[1]["least"] - item[1]["units"])
        for (code, shared, writes), place in order[:most]:
            if place["units"] == place["least"]:
                break
            space = ("shared" if shared else "global") + (" write" if writes else " read")
            units = "turns" if shared else "sectors"
            yield (
                f"{of.case}, {of.name}, {kernel}: {space} of {place['bytes']} bytes, {place['units']} {units} of "
                f"{place['least']} at least, at most {place['worst']} a request, {line_of(code)}"
            )


def line_of(code: int) -> str:
    """The lines that a place in the library belongs to: of the function, and of the calls around it."""
    path = library.loaded_path()
    text = subprocess.run(["addr2line", "-i", "-e", path, hex(code - 1)], capture_output=True, text=True).stdout
    lines = [line.split(" ")[0].rpartition("csrc/")[2] for line in text.splitlines()]
    return " < ".join(line for line in lines if "host_cuda.h" not in line)


# ---- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored counts; store nothing")
    parser.add_argument("--lines", action="store_true", help="the lines of the kernels that cost most; store nothing")
    parser.add_argument("--only", default="", help="cases whose names contain this; store nothing")
    arguments = parser.parse_args()
    try:
        library.load(counts=True)
    except FileNotFoundError as error:
        print(f"skipped, {error}")
        return 1 if os.environ.get("CI") else 0
    rows = []
    for case in small_cases():
        if arguments.only not in case.name:
            continue
        for of in passes(case):
            rows += list(rows_of(of))
            if arguments.lines:
                print("\n".join(costly_lines(of)))
    if arguments.lines:
        return 0
    counts = pd.DataFrame(rows)
    if arguments.check:
        grown = growths(counts, pd.read_csv(STORED))
        print("\n".join(grown) or "no count is larger than the stored one")
        return 1 if grown else 0
    print(shown(counts).to_string(index=False, na_rep=""), "\n")
    print(totals(counts).to_string(index=False))
    if not arguments.only:
        STORED.parent.mkdir(parents=True, exist_ok=True)
        counts.to_csv(STORED, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

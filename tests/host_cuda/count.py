"""Counts of the CUDA kernels, on the host: memory that they move, bank conflicts, barriers, arithmetic; and races.

python tests/host_cuda/count.py            counts, prints tables, and stores them in benchmarks/results/cuda_counts
python tests/host_cuda/count.py --check    exit code 1 if a count is larger than the stored one
python tests/host_cuda/count.py --lines    the lines of the kernels that cost most
python tests/host_cuda/count.py --derive   derived times of large shapes on an H100; stores them too
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from host_cuda import counters, derived, library  # noqa: E402
from host_cuda.resources import REGISTERS, spelled_alike  # noqa: E402

import memcheck  # noqa: E402

STORED = ROOT / "benchmarks" / "results" / "cuda_counts" / "counts.csv"
DERIVED = STORED.with_name("derived.csv")
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
    "fma",
    "special",
    "double",
    "idle_awaits",
]
# On the host this kernel's table begins where malloc puts it, which may be inside a sector: it may touch one more.
TABLE = "table of sequences"


# ---- what is counted


@dataclass(frozen=True)
class Case:
    """A call whose kernels are counted. The floor is the bytes that it must move: inputs read once, outputs written
    once; for the combinator, whose products are the library's, what its own kernels read and write. backward_floor is
    None for a call without gradients."""

    name: str
    inputs: Callable[[], list[Tensor]]
    function: Callable[..., Tensor]
    forward_floor: Callable[[list[Tensor], Tensor], int]
    backward_floor: Callable[[list[Tensor], Tensor], int] | None
    # Blocks of each launch that run if the shape is large. Those of a packed batch are less alike.
    sampled: int = 8


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


def decaying(B: int, H: int, T: int, D: int, dtype: torch.dtype) -> Case:
    """A decay for each position, and a state from another call, of which the backward forms gradients too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, S: Tensor, z: Tensor) -> Tensor:
        return memcheck.linear_attention(q, k, v, causal=True, decay=decay, initial_state=(S, z))

    return attention(
        f"linear_attention with decays and a state {spelled(dtype)} B{B} H{H} T{T} D{D}",
        lambda: [
            *(zeros(B, H, T, D, dtype=dtype) for _ in range(3)),
            zeros(B, H, T, dtype=torch.float32).fill_(0.5),
            zeros(B, H, D, D, dtype=torch.float32),
            zeros(B, H, D, dtype=torch.float32),
        ],
        attend,
    )


def lengths_of_documents(count: int, mean: int) -> list[int]:
    """From 3/4 to 5/4 of the mean, in mixed order."""
    return [mean - mean // 4 + mean // 2 * (89 * i % count) // max(1, count - 1) for i in range(count)]


def linear_documents(count: int, H: int, mean: int, D: int, dtype: torch.dtype) -> Case:
    """A packed batch."""
    lengths = lengths_of_documents(count, mean)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    case = attention(
        f"linear_attention {spelled(dtype)} {count} documents of {mean} H{H} D{D}",
        lambda: [zeros(1, H, sum(lengths), D, dtype=dtype) for _ in range(3)],
        lambda q, k, v: memcheck.linear_attention(q, k, v, causal=True, cu_seqlens=ends),
    )
    return replace(case, sampled=128)


def compressed(
    B: int, H: int, T: int, D: int, factor: int, dtype: torch.dtype, causal: bool = True, window: int | None = None
) -> Case:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how = {"factor": factor, "causal": causal, "window": window}
        y, lse = memcheck.compressed_attention(q, k, v, **how, return_lse=True)
        if library.samples_blocks():
            seen = (torch.arange(T) + 1) // factor if causal else torch.full((T,), math.ceil(T / factor))
            if window is not None:
                blocks = (torch.arange(T) - window + 1).clamp(min=0) // factor
                seen = blocks + torch.arange(T) + 1 - blocks * factor
            set_lse(lse, seen)
        return y

    more = "" if causal else " not causal"
    more += "" if window is None else f" window {window}"
    return attention(
        f"compressed_attention {spelled(dtype)} B{B} H{H} T{T} D{D} factor {factor}{more}",
        lambda: [zeros(B, H, T, D, dtype=dtype) for _ in range(3)],
        attend,
    )


def set_lse(lse: Tensor, seen: Tensor) -> None:
    """Sets lse where blocks that do not run would have written it, because the backward reads it. All scores are 0."""
    lse.data.copy_(seen.float().log())


def documents(count: int, H: int, mean: int, D: int, factor: int, dtype: torch.dtype) -> Case:
    """Compressed attention on a packed batch."""
    lengths = lengths_of_documents(count, mean)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, lse = memcheck.compressed_attention(q, k, v, factor=factor, cu_seqlens=ends, return_lse=True)
        if library.samples_blocks():
            set_lse(lse, torch.cat([(torch.arange(length) + 1) // factor for length in lengths]))
        return y

    case = attention(
        f"compressed_attention {spelled(dtype)} {count} documents of {mean} H{H} D{D} factor {factor}",
        lambda: [zeros(1, H, sum(lengths), D, dtype=dtype) for _ in range(3)],
        attend,
    )
    return replace(case, sampled=128)


def combinator(rows: int, E: int, dtype: torch.dtype) -> Case:
    return Case(
        f"combinator {spelled(dtype)} rows {rows} E{E}",
        lambda: [zeros(rows, E, dtype=dtype), zeros(2, E, E, dtype=dtype)],
        memcheck.combinator,
        lambda _, y: 3 * bytes_of(y),  # two pre-activations, and y
        lambda _, y: 5 * bytes_of(y),  # two pre-activations, the gradients of both, and that of y
    )


def softplus_step(B: int, R: int, dtype: torch.dtype) -> Case:
    """Of decoding: one new position, and a state."""
    return Case(
        f"softplus_attention_step {spelled(dtype)} B{B} R{R}",
        lambda: [
            zeros(B, 1, R, dtype=dtype),
            *(zeros(B, R, 1, dtype=dtype) for _ in range(2)),
            *(zeros(B, R, dtype=torch.float32) for _ in range(2)),
        ],
        lambda q, k, v, *state: memcheck.softplus_attention_step(q, k, v, state)[0],
        lambda tensors, y: bytes_of(*tensors, y, *tensors[3:]),
        None,
    )


def linear_step(B: int, H: int, D: int, dtype: torch.dtype) -> Case:
    return Case(
        f"linear_attention_step {spelled(dtype)} B{B} H{H} D{D}",
        lambda: [
            *(zeros(B, H, 1, D, dtype=dtype) for _ in range(3)),
            zeros(B, H, D, D, dtype=torch.float32),
            zeros(B, H, D, dtype=torch.float32),
        ],
        lambda q, k, v, *state: memcheck.linear_attention_step(q, k, v, state)[0],
        lambda tensors, y: bytes_of(*tensors, y, *tensors[3:]),
        None,
    )


def compressed_step(B: int, H: int, T: int, D: int, factor: int, dtype: torch.dtype) -> Case:
    """After T positions. The floor has what the kernel moves; torch adds the new position to the sums."""
    return Case(
        f"compressed_attention_step {spelled(dtype)} B{B} H{H} T{T} D{D} factor {factor}",
        lambda: [
            *(zeros(B, H, 1, D, dtype=dtype) for _ in range(3)),
            *(zeros(B, H, T // factor, D, dtype=dtype) for _ in range(2)),
            *(zeros(B, H, D, dtype=torch.float32) for _ in range(2)),
        ],
        lambda q, k, v, *state: memcheck.compressed_attention_step(
            q, k, v, memcheck.CompressedAttentionState(*state, 0, factor), factor=factor
        )[0],
        lambda tensors, y: bytes_of(tensors[0], *tensors[3:5], y),
        None,
    )


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros, of which those that nothing reads take no memory. Counts do not depend on values as long as these are
    finite."""
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def spelled(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def small_cases() -> Iterator[Case]:
    """What CI counts, in about a minute."""
    for dtype in (torch.bfloat16, torch.float32):
        yield softplus(1, 64, 600, dtype)
        yield softplus(1, 64, 600, dtype, causal=False)
        yield linear(1, 2, 192, 64, dtype)
        yield compressed(1, 1, 256, 64, 8, dtype)
        yield compressed(1, 1, 256, 64, 8, dtype, window=32)
        yield combinator(64, 128, dtype)
        yield softplus_step(2, 64, dtype)
        yield linear_step(1, 2, 64, dtype)
        yield compressed_step(1, 2, 1024, 64, 8, dtype)
    yield linear(1, 2, 128, 128, torch.bfloat16)
    yield linear(1, 2, 192, 64, torch.bfloat16, causal=False)
    yield linear(1, 2, 192, 64, torch.bfloat16, Hkv=1)
    yield linear(1, 2, 64, 256, torch.bfloat16)
    yield compressed(1, 1, 256, 128, 8, torch.bfloat16)
    yield decaying(1, 1, 64, 32, torch.bfloat16)
    yield linear_documents(2, 1, 1100, 64, torch.bfloat16)
    yield compressed(1, 1, 256, 256, 8, torch.bfloat16)
    yield documents(3, 1, 128, 64, 8, torch.bfloat16)


def large_cases() -> Iterator[Case]:
    """Shapes of users, of which some blocks of each launch are counted."""
    yield softplus(8, 256, 4096, torch.bfloat16)
    yield softplus(4, 1024, 4096, torch.bfloat16)
    yield linear(4, 8, 4096, 64, torch.bfloat16)
    yield linear(4, 64, 4096, 128, torch.bfloat16)
    yield linear(4, 32, 4096, 128, torch.bfloat16, Hkv=8)
    yield compressed(1, 8, 4096, 64, 8, torch.bfloat16)
    yield compressed(1, 8, 4096, 64, 16, torch.bfloat16)
    yield compressed(4, 16, 4096, 128, 8, torch.bfloat16)
    yield compressed(1, 8, 4096, 256, 8, torch.bfloat16)
    yield compressed(256, 8, 4096, 64, 8, torch.bfloat16)
    yield documents(256, 8, 4096, 64, 8, torch.bfloat16)
    yield linear(4, 8, 4096, 64, torch.float32)
    yield linear(1, 8, 4096, 64, torch.bfloat16)
    yield decaying(1, 8, 4096, 64, torch.bfloat16)
    yield linear(1, 8, 256 * 4096, 64, torch.bfloat16)
    yield linear_documents(256, 8, 4096, 64, torch.bfloat16)
    yield linear(1, 8, 4096, 256, torch.bfloat16)
    yield compressed(1, 8, 4096, 64, 8, torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        yield compressed(1, 8, 16384, 64, 16, dtype, window=512)
        # Its two parts: blocks, and as many scores of positions.
        yield compressed(1, 8, 16384, 64, 16, dtype)
        yield compressed(16, 8, 1024, 64, 1, dtype)
    yield softplus_step(8, 1024, torch.bfloat16)
    yield linear_step(8, 64, 128, torch.bfloat16)
    yield compressed_step(8, 16, 32768, 128, 8, torch.bfloat16)


# ---- counts


@dataclass(frozen=True)
class Pass:
    """The launches of a forward or backward, and the bytes that it must move."""

    case: str
    name: str
    floor: int
    launches: list[counters.LaunchCounts]


def passes(case: Case) -> Iterator[Pass]:
    """Forward of a case, and backward if it has one. Raises RuntimeError for a race."""
    leaves = [x.requires_grad_(case.backward_floor is not None) for x in case.inputs()]
    library.forget_counts()
    y = case.function(*leaves)
    yield Pass(case.name, "forward", case.forward_floor(leaves, y), library.counts())
    if case.backward_floor is None:
        return
    library.forget_counts()
    torch.autograd.grad(y, leaves, zeros(*y.shape, dtype=y.dtype))
    yield Pass(case.name, "backward", case.backward_floor(leaves, y), library.counts())


def rows_of(of: Pass) -> Iterator[dict[str, Any]]:
    """A row for every kernel."""
    for kernel, launches in counters.by_kernel(of.launches):

        def total(*names: str, launches: list[counters.LaunchCounts] = launches) -> int:
            return sum(launch[name] for launch in launches for name in names)

        def arithmetic(kind: str, launches: list[counters.LaunchCounts] = launches) -> int:
            return sum(launch.arithmetic(instructions(), kind) for launch in launches)

        yield {
            "case": of.case,
            "pass": of.name,
            "kernel": kernel,
            "instance": library.instances()[launches[0]["function"]],
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
            **{kind: arithmetic(kind) for kind in counters.ARITHMETIC},
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
    for name in ("barriers", "mma", "fma", "special"):
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
            room = 1 if row["kernel"] == TABLE and name == "distinct_sectors" else 0
            if row[name] > max(1.01 * before, before + room):
                lines.append(f"{', '.join(key)}: {name} {before} -> {row[name]}")
    return lines


# ---- derived times


@functools.cache
def instructions() -> dict[int, counters.Numbers]:
    """Arithmetic of the library's basic blocks."""
    return counters.instructions_of(library.loaded_path())


def derive(only: str) -> pd.DataFrame:
    """A row for every pass of the large cases: the terms of its kernels on an H100, and the derived time."""
    stored = pd.read_csv(REGISTERS).query("architecture == 'sm_90'").to_dict("records")
    registers = {spelled_alike(row["kernel"]): row["registers"] for row in stored}
    # What blocks that do not run would have written is zero, and finite: memory is fresh from the system.
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 << 10)
    library.stand_for("9.0")
    rows: list[dict[str, object]] = []
    for case in large_cases():
        if only not in case.name:
            continue
        library.sample_blocks(case.sampled)
        for of in passes(case):
            terms = [derived.terms_of(row, registers) for row in rows_of(of)]
            rows.append({"case": of.case, "pass": of.name, **pd.DataFrame(terms).sum()})
    library.sample_blocks(0)
    library.stand_for(library.this_gpu())
    table = pd.DataFrame(rows)
    table["derived ms"] = derived.derived_ms(table)
    return table.round(6)


def sampling_errors() -> list[str]:
    """A line for each kernel of a small case whose counts by some blocks differ from those of all by more than 2 %.

    Not of special functions: blocks have different numbers of visible keys.
    """
    lines = []
    # What blocks that do not run would have written is zero, and finite: malloc fills memory with the complement.
    m_perturb, ones = -6, 0xFF
    ctypes.CDLL(None).mallopt(m_perturb, ones)
    for case in (compressed(1, 4, 1024, 64, 4, torch.bfloat16), linear(1, 16, 128, 64, torch.bfloat16)):
        everything = [row for of in passes(case) for row in rows_of(of)]
        library.sample_blocks(case.sampled)
        some = [row for of in passes(case) for row in rows_of(of)]
        library.sample_blocks(0)
        for whole, part in zip(everything, some, strict=True):
            for name in ("global_read_bytes", "global_write_sectors", "shared_read_turns", "barriers", "mma", "fma"):
                if abs(int(str(part[name])) - int(str(whole[name]))) > 0.02 * int(str(whole[name])):
                    lines.append(f"{case.name}, {whole['kernel']}: {name} {whole[name]}, by some blocks {part[name]}")
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
    parser.add_argument("--derive", action="store_true", help="large shapes on an H100; some blocks of each launch run")
    parser.add_argument("--only", default="", help="cases whose names contain this; store nothing")
    arguments = parser.parse_args()
    os.environ["MEMCHECK_TEST_HOST_CUDA"] = "1"
    try:
        library.load(counts=True)
    except FileNotFoundError as error:
        print(f"skipped, {error}")
        return 1 if os.environ.get("CI") else 0
    if arguments.derive:
        table = derive(arguments.only)
        print(table.to_string(index=False))
        if not arguments.only:
            table.to_csv(DERIVED, index=False)
        return 0
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
        grown = growths(counts, pd.read_csv(STORED)) + sampling_errors()
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

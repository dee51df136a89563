"""Measures the cost of tracking for a small allocation: `torch.empty(16)` with and without an open tracker.

    python benchmarks/tracking_allocator.py [--rounds 201] [--output FILE]

A round takes the processor time of a block of allocations of each kind, in alternating order. The result is the median
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from harness import compare, print_rows, take_turns, write_result
from tracking_passes import processor_time

import memcheck

CALLS = 20_000  # calls of torch.empty in a block


def plain() -> None:
    empty = torch.empty
    for _ in range(CALLS):
        empty(16)


def tracked() -> None:
    with memcheck.track():
        plain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs = {"plain": plain, "tracked": tracked}
    times = take_turns({name: processor_time(run) for name, run in runs.items()}, args.rounds, warmup=3)
    rows = compare(times, "plain", what="torch.empty(16), allocated and freed", calls=CALLS)
    for row in rows:
        row["ns_per_call"] = row["ms"] * 1e6 / CALLS
    print_rows(rows, "calls")
    print(write_result("tracking_allocator", rows, args.output))


if __name__ == "__main__":
    main()

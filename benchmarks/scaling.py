"""The CPU operators on 1, 2, ... threads: how their times fall.

    python benchmarks/scaling.py [--operators linear softplus] [--threads 1 2 4] [--rounds 9] [--output FILE]

One run, fp32, one batch entry of a long sequence. Numbers of threads take turns, each in a process
of its own. The ratio is to the time on the first number of threads.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import torch
from harness import Run, compare, passes, print_rows, time_apart, write_result

from memcheck import compressed_attention, linear_attention, softplus_attention

HEADS = (1, 8, 8192, 64)
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "softplus": ((1, 32768, 256), (1, 256, 32768), (1, 256, 32768)),
    "linear": (HEADS,) * 3,
    "compressed": (HEADS,) * 3,
}
OPERATORS = {
    "softplus": softplus_attention,
    "linear": functools.partial(linear_attention, causal=True),
    "compressed": functools.partial(compressed_attention, factor=8),
}


def prepare(operator: str, what: str, threads: int) -> Run:
    torch.set_num_threads(threads)
    inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES[operator]]
    return passes(what, OPERATORS[operator], inputs, SHAPES[operator][0])


def measure(operator: str, what: str, threads: list[int], rounds: int) -> list[dict[str, Any]]:
    setups = {f"{count} threads": functools.partial(prepare, operator, what, count) for count in threads}
    facts = {"operator": operator, "shape": SHAPES[operator][0], "what": what}
    return compare(time_apart(setups, rounds, warmup=2), f"{threads[0]} threads", **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = os.cpu_count() or 1
    powers = [2**i for i in range(8) if 2**i <= cores]
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--threads", type=int, nargs="+", default=powers)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for operator in args.operators:
        for what in ("forward", "forward + backward"):
            rows += measure(operator, what, args.threads, args.rounds)
    print_rows(rows, "operator", "what")
    print(write_result("scaling", rows, args.output))


if __name__ == "__main__":
    main()

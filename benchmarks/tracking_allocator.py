"""What tracking costs a small allocation: `torch.empty(16)` with a tracker open, against without.

    python benchmarks/tracking_allocator.py [--output FILE]

Blocks of both kinds alternate in one run, in an order that flips from pair to pair; a pair gives one ratio, and the
median of the ratios is the result.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import memcheck
from memcheck.measurement import _processor_name

RESULT = Path(__file__).parent / "results" / "tracking_allocator.json"
CALLS = 20_000  # of torch.empty in a block


def block_ns() -> float:
    """Nanoseconds for one torch.empty(16) that is freed at once."""
    empty = torch.empty
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        empty(16)
    return (time.perf_counter_ns() - start) / CALLS


def tracked_block_ns() -> float:
    with memcheck.track():
        return block_ns()


def pair_ns(tracked_first: bool) -> tuple[float, float]:
    if tracked_first:
        tracked = tracked_block_ns()
        return block_ns(), tracked
    return block_ns(), tracked_block_ns()


def measure(pairs: int) -> dict[str, Any]:
    pair_ns(False)  # warms up
    results = [pair_ns(index % 2 == 1) for index in range(pairs)]
    plain, tracked = zip(*results, strict=True)
    ratios = [with_tracker / without for without, with_tracker in results]
    return {
        "what": "torch.empty(16), allocated and freed in a Python loop, one thread",
        "baseline": "the same without a tracker",
        "pairs": pairs,
        "calls_per_block": CALLS,
        "baseline_ns": statistics.median(plain),
        "tracked_ns": statistics.median(tracked),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4, method="inclusive")[::2],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "machine": platform.platform(),
        "cpu": _processor_name(),
        "threads": torch.get_num_threads(),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=201, help="pairs of blocks (default 201)")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result = measure(arguments.pairs)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{result['baseline_ns']:.0f} ns, tracked {result['tracked_ns']:.0f} ns: {100 * (result['ratio'] - 1):+.2f} %"
    )


if __name__ == "__main__":
    main()

"""Compares the projections with plain PyTorch: x @ w, and x @ w with its transpose made contiguous.

    python benchmarks/projection.py [--rounds 15] [--output FILE]

One run, two threads, fp32, B8 S2048, E = R = 512, forward + backward with a dense gradient. Each contender has its own
process.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from harness import Run, compare, forward_backward, print_rows, time_apart, write_result

from memcheck.ops import projection
from memcheck.ops.reference import projection as reference

MODULES = {"memcheck": projection, "eager": reference}


def prepare(module: str, name: str, B: int, S: int, E: int, R: int) -> Run:
    x = torch.randn(B, S, E, requires_grad=True)
    w = torch.randn(E, R, requires_grad=True)
    gradient = torch.randn_like(getattr(reference, name)(x, w))
    return forward_backward(getattr(MODULES[module], name), [x, w], gradient)


def measure(name: str, B: int, S: int, E: int, R: int, rounds: int) -> list[dict[str, Any]]:
    setups = {module: functools.partial(prepare, module, name, B, S, E, R) for module in MODULES}
    facts = {"operator": name, "B": B, "S": S, "E": E, "R": R, "what": "forward + backward"}
    return compare(time_apart(setups, rounds), "memcheck", **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bsz", 8), ("seq-len", 2048), ("dim", 512), ("threads", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in ("linear_r", "linear_l"):
        rows += measure(name, args.bsz, args.seq_len, args.dim, args.dim, args.rounds)
    print_rows(rows, "operator", "what")
    print(write_result("projection", rows, args.output))


if __name__ == "__main__":
    main()

"""Compares the combinator, in both modes, with the same maths in three lines of plain PyTorch.

    python benchmarks/combinator.py [--rounds 15] [--dtypes float32] [--output FILE]

By default one run, two threads, B8 S2048 E512. Each contender has its own process and torch's default memory. Forward
runs under no_grad, where both modes are the same; forward + backward begins with .grad None and a dense gradient.
*copy* moves the bytes of the inputs and results once, and *product* is a matrix product of as many operations. On a
processor without products of bfloat16 matrices, plain PyTorch takes tens of seconds for a pass in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Run, Work, compare, passes, print_rows, time_apart, write_result
from torch import Tensor
from torch.nn.functional import softplus

from memcheck import combinator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the combinator in plain PyTorch, whose softplus is the identity above 20."""
    a = x @ weight[0].T
    b = x @ weight[1].T
    return softplus(a) * b


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": plain,
    "memcheck": combinator,
    "memcheck, low memory": functools.partial(combinator, low_memory=True),
}


def prepare(name: str, B: int, S: int, E: int, dtype: torch.dtype, what: str) -> Run:
    x = torch.randn(B, S, E, dtype=dtype).requires_grad_()
    weight = (torch.randn(2, E, E) / E**0.5).to(dtype).requires_grad_()
    return passes(what, FUNCTIONS[name], [x, weight], (B, S, E))


def measure(B: int, S: int, E: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for what in ("forward", "forward + backward"):
        setups = {name: functools.partial(prepare, name, B, S, E, DTYPES[dtype], what) for name in FUNCTIONS}
        flops = {"forward": 4 * B * S * E * E, "forward + backward": 12 * B * S * E * E}
        inputs = [torch.empty(shape, dtype=DTYPES[dtype]) for shape in ((B, S, E), (2, E, E))]
        work = Work.of_pass(what, inputs, B * S * E, flops)
        setups |= work.limits(DTYPES[dtype])
        rows += compare(time_apart(setups, rounds), "eager", work, B=B, S=S, E=E, dtype=dtype, what=what)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bsz", 8), ("seq-len", 2048), ("dim", 512), ("threads", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in args.dtypes:
        rows += measure(args.bsz, args.seq_len, args.dim, dtype, args.rounds)
    print_rows(rows, "dtype", "what")
    print(write_result("combinator", rows, args.output))


if __name__ == "__main__":
    main()

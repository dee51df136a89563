"""The combinator, in both modes, against the same maths in three lines of plain PyTorch.

    python benchmarks/combinator.py [--rounds 31] [--output FILE]

One run, two threads, B8 S2048 E512 unless told otherwise. Forward runs under no_grad, where both modes are one;
forward + backward begins with .grad None and a dense gradient. All sides allocate their results afresh, as torch does
by default.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import compare, forward, forward_backward, print_rows, time_rounds, write_result
from torch import Tensor
from torch.nn.functional import softplus

from memcheck import combinator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Function = Callable[[Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """Its softplus is the identity above 20."""
    a = x @ weight[0].T
    b = x @ weight[1].T
    return softplus(a) * b


def measure(B: int, S: int, E: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    functions: dict[str, Function] = {
        "eager": plain,
        "memcheck": combinator,
        "memcheck, low memory": functools.partial(combinator, low_memory=True),
    }
    x = torch.randn(B, S, E, dtype=DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(2, E, E) / E**0.5).to(DTYPES[dtype]).requires_grad_()
    gradient = torch.randn(B, S, E, dtype=DTYPES[dtype])
    rows = []
    for what, runs in (
        ("forward", {name: forward(function, [x, weight]) for name, function in functions.items()}),
        (
            "forward + backward",
            {name: forward_backward(function, [x, weight], gradient) for name, function in functions.items()},
        ),
    ):
        rows += compare(time_rounds(runs, rounds), "eager", B=B, S=S, E=E, dtype=dtype, what=what)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bsz", 8), ("seq-len", 2048), ("dim", 512), ("threads", 2), ("rounds", 31)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in DTYPES:
        rows += measure(args.bsz, args.seq_len, args.dim, dtype, args.rounds)
    print_rows(rows, "dtype", "what")
    print(write_result("combinator", rows, args.output))


if __name__ == "__main__":
    main()

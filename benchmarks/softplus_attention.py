"""Compares softplus attention with the same maths in plain PyTorch, eager and compiled, and with the reference.

    python benchmarks/softplus_attention.py [--rounds 15] [--output FILE]

By default one run, two threads, B8 S2048 R256. Each contender has its own process, with torch's default memory and with
memory that malloc keeps (harness.MEMORY). Forward runs under no_grad; forward + backward begins with .grad None and a
dense gradient. *copy* moves the bytes of the inputs and results once.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import MEMORY, Run, Work, compare, passes, print_rows, time_apart, write_result
from torch import Tensor
from torch.nn.functional import softplus

import memcheck
from memcheck.ops.reference.softplus_attention import softplus_attention as reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns softplus attention in plain PyTorch. Its softplus is the identity above 20; the reference's is exact."""
    weights = softplus(k)
    z = weights.cumsum(2).transpose(1, 2)
    a = (weights * v).cumsum(2).transpose(1, 2)
    return softplus(q) * a / (z + 1e-6)


def leaves(B: int, S: int, R: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((B, S, R), (B, R, S), (B, R, S))]


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "memcheck": memcheck.softplus_attention,
    "eager": plain,
    "compiled": torch.compile(plain),
    "reference": reference,
}


def prepare(name: str, B: int, S: int, R: int, dtype: torch.dtype, what: str) -> Run:
    return passes(what, ATTENTIONS[name], leaves(B, S, R, dtype), (B, S, R))


def measure(B: int, S: int, R: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for what in ("forward", "forward + backward"):
        setups = {name: functools.partial(prepare, name, B, S, R, DTYPES[dtype], what) for name in ATTENTIONS}
        work = Work.of_pass(what, leaves(B, S, R, DTYPES[dtype]), B * S * R)
        setups |= work.limits(DTYPES[dtype])
        for memory in ("fresh", "kept"):
            times = time_apart(setups, rounds, environment=MEMORY[memory])
            rows += compare(times, "memcheck", work, B=B, S=S, R=R, dtype=dtype, what=what, memory=memory)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bsz", 8), ("seq-len", 2048), ("core-dim", 256), ("threads", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in DTYPES:
        rows += measure(args.bsz, args.seq_len, args.core_dim, dtype, args.rounds)
    for row in rows:
        row["ns_per_position"] = row["ms"] * 1e6 / (args.bsz * args.seq_len * args.core_dim)
    print_rows(rows, "dtype", "what", "memory")
    print(write_result("softplus_attention", rows, args.output))


if __name__ == "__main__":
    main()

"""Compares linear attention with plain PyTorch.

    python benchmarks/linear_attention.py [--rounds 15] [--output FILE]

Causal: the chunked reference (memcheck.ops.reference.linear_attention_chunked); the common cumsum over states would
hold 2 GiB per tensor of states here. Bidirectional: plain PyTorch without a mask, and its two matmuls alone, given
phi(q) and phi(k) and without the division.

By default one run, two threads, B4 H8 N4096 D64. Each contender has its own process. Forward runs under no_grad;
forward + backward begins with .grad None and a dense gradient.

The first touch of the result can be much of a forward, so it is timed with three ways to allocate memory, the same
for all contenders (harness.MEMORY). *copy* moves the bytes of the inputs and results once, and *product* is a matrix
product of as many operations as the products with states have.
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

import memcheck
from memcheck.ops.reference.linear_attention import features, linear_attention_chunked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    phi_q, phi_k = features(q), features(k)
    return (phi_q @ (phi_k.mT @ v)) / (phi_q @ phi_k.sum(2)[..., None] + 1e-6)


ATTENTIONS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "causal": {
        "memcheck": functools.partial(memcheck.linear_attention, causal=True),
        "chunked": linear_attention_chunked,
    },
    "none": {"memcheck": memcheck.linear_attention, "plain": plain},
}


def prepare(mask: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Run:
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    return passes(what, ATTENTIONS[mask][name], inputs, shape)


def two_matmuls(shape: tuple[int, ...], dtype: torch.dtype) -> Run:
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    phi_q, phi_k = features(q), features(k)
    return lambda: phi_q @ (phi_k.mT @ v)


def measure(B: int, H: int, N: int, D: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    of_type = DTYPES[dtype]
    rows = []
    for mask, attentions in ATTENTIONS.items():
        for what, memories in (("forward", list(MEMORY)), ("forward + backward", ["fresh"])):
            setups: dict[str, Callable[[], Run]] = {
                name: functools.partial(prepare, mask, name, (B, H, N, D), of_type, what) for name in attentions
            }
            if (mask, what) == ("none", "forward"):
                setups["two matmuls"] = functools.partial(two_matmuls, (B, H, N, D), of_type)
            of_head = 2 * B * H * N * D * D  # of one product with the states
            inputs = [torch.empty(B, H, N, D, dtype=of_type) for _ in range(3)]
            flops = {"forward": 2 * of_head, "forward + backward": 7 * of_head}
            work = Work.of_pass(what, inputs, inputs[0].numel(), flops)
            setups |= work.limits(of_type)
            for memory in memories:
                facts = {"B": B, "H": H, "N": N, "D": D, "dtype": dtype, "mask": mask, "what": what, "memory": memory}
                times = time_apart(setups, rounds, environment=MEMORY[memory])
                rows += compare(times, "memcheck", work, **facts)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("bsz", 4), ("heads", 8), ("seq-len", 4096), ("head-dim", 64), ("threads", 2), ("rounds", 15))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in DTYPES:
        rows += measure(args.bsz, args.heads, args.seq_len, args.head_dim, dtype, args.rounds)
    for row in rows:
        row["us_per_token"] = row["ms"] * 1e3 / (args.bsz * args.heads * args.seq_len)
    print_rows(rows, "dtype", "mask", "what", "memory")
    print(write_result("linear_attention", rows, args.output))


if __name__ == "__main__":
    main()

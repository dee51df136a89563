"""Linear attention against plain PyTorch.

    python benchmarks/linear_attention.py [--rounds 15] [--output FILE]

Causal: the chunked lines that a careful user would write (memcheck.reference.linear_attention_chunked); the usual
cumsum over states would hold 2 GiB for each tensor of states here. Bidirectional: the same lines without a mask, and
their two matmuls alone, given phi(q) and phi(k) and without the division.

One run, two threads, B4 H8 N4096 D64 unless told otherwise. Forward runs under no_grad; forward + backward begins with
.grad None and a dense gradient. All sides allocate their results afresh, as torch does by default.
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

import memcheck
from memcheck.reference.linear_attention import features, linear_attention_chunked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    phi_q, phi_k = features(q), features(k)
    return (phi_q @ (phi_k.mT @ v)) / (phi_q @ phi_k.sum(2)[..., None] + 1e-6)


def matmuls(inputs: list[Tensor]) -> Callable[[], Any]:
    q, k, v = (x.detach() for x in inputs)
    phi_q, phi_k = features(q), features(k)
    return lambda: phi_q @ (phi_k.mT @ v)


def measure(B: int, H: int, N: int, D: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    inputs = [torch.randn(B, H, N, D, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)]
    gradient = torch.randn(B, H, N, D, dtype=DTYPES[dtype])
    rows = []
    for mask, attentions in (
        (
            "causal",
            {
                "memcheck": functools.partial(memcheck.linear_attention, causal=True),
                "chunked": linear_attention_chunked,
            },
        ),
        ("none", {"memcheck": memcheck.linear_attention, "plain": plain}),
    ):
        facts = {"B": B, "H": H, "N": N, "D": D, "dtype": dtype, "mask": mask}
        runs = {name: forward(attention, inputs) for name, attention in attentions.items()}
        if mask == "none":
            runs["two matmuls"] = matmuls(inputs)
        # In a virtual machine the first rounds also wait for memory that it has to get from its host.
        rows += compare(time_rounds(runs, rounds, warmup=12), "memcheck", **facts, what="forward")
        both = {name: forward_backward(attention, inputs, gradient) for name, attention in attentions.items()}
        rows += compare(time_rounds(both, rounds, warmup=2), "memcheck", **facts, what="forward + backward")
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
    print_rows(rows, "dtype", "mask", "what")
    print(write_result("linear_attention", rows, args.output))


if __name__ == "__main__":
    main()

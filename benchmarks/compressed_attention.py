"""Compressed attention against softmax attention over the full sequence, and against the same maths in plain PyTorch.

    python benchmarks/compressed_attention.py [--rounds 11] [--output FILE]

One run, two threads, B1 H8 N4096 D64 and factor 8, causal, unless told otherwise. Forward runs under no_grad; forward +
backward begins with .grad None and a dense gradient. All sides allocate their results afresh, as torch does by default.
Decoding is one query after the other over the blocks of N positions, against SDPA over all N.
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
from torch.nn.functional import scaled_dot_product_attention

import memcheck
from memcheck.reference.compressed_attention import compressed_attention as reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(shape: tuple[int, ...], factor: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    B, H, N, D = shape
    attentions = {
        "memcheck": functools.partial(memcheck.compressed_attention, factor=factor),
        "softmax": functools.partial(scaled_dot_product_attention, is_causal=True),
        "reference": functools.partial(reference, factor=factor),
    }
    inputs = [torch.randn(shape, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, dtype=DTYPES[dtype])
    rows = []
    for what, runs in (
        ("forward", {name: forward(attention, inputs) for name, attention in attentions.items()}),
        (
            "forward + backward",
            {name: forward_backward(attention, inputs, gradient) for name, attention in attentions.items()},
        ),
        ("decoding", decoding(inputs, factor)),
    ):
        facts = {"B": B, "H": H, "N": N, "D": D, "factor": factor, "dtype": dtype, "what": what}
        rows += compare(time_rounds(runs, rounds), "memcheck", **facts)
    return rows


def decoding(inputs: list[Tensor], factor: int) -> dict[str, Callable[[], Any]]:
    """As many steps as complete a block; SDPA has its keys at hand, and appends none."""
    q, k, v = (x.detach() for x in inputs)
    N = q.shape[2]
    steps = [[x[:, :, t : t + 1] for x in (q, k, v)] for t in range(N - factor, N)]
    prompt = memcheck.compressed_attention_state(k[:, :, :-factor], v[:, :, :-factor], factor=factor)

    def ours() -> None:
        state = prompt
        for new in steps:
            _, state = memcheck.compressed_attention_step(*new, state, factor=factor)

    def softmax() -> None:
        for new in steps:
            scaled_dot_product_attention(new[0], k, v)

    return {"memcheck": ours, "softmax": softmax}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bsz", 1), ("heads", 8), ("seq-len", 4096), ("head-dim", 64), ("factor", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("threads", 2), ("rounds", 11)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.bsz, args.heads, args.seq_len, args.head_dim)
    rows = []
    for dtype in DTYPES:
        rows += measure(shape, args.factor, dtype, args.rounds)
    print_rows(rows, "dtype", "what")
    print(write_result("compressed_attention", rows, args.output))


if __name__ == "__main__":
    main()

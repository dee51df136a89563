"""Compares compressed attention with softmax attention over the full sequence, and with plain PyTorch.

    python benchmarks/compressed_attention.py [--rounds 15] [--dtypes float32] [--output FILE]

By default one run, two threads, B1 H8 N4096 D64, factor 8, causal. Each contender has its own process and torch's
default memory. Forward runs under no_grad; forward + backward begins with .grad None and a dense gradient. Decoding
runs single queries over the blocks of N positions, compared with SDPA over all N. *copy* moves the bytes of the inputs
and results once, and *product* is a matrix product of as many operations as the products with blocks have.
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
from torch.nn.functional import scaled_dot_product_attention

import memcheck
from memcheck.ops.reference.compressed_attention import compressed_attention as reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "memcheck": memcheck.compressed_attention,
    "softmax": lambda q, k, v, factor: scaled_dot_product_attention(q, k, v, is_causal=True),
    "reference": reference,
}


def prepare(name: str, shape: tuple[int, ...], factor: int, dtype: torch.dtype, what: str) -> Run:
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    if what == "decoding":
        return decoding(name, inputs, factor)
    return passes(what, functools.partial(ATTENTIONS[name], factor=factor), inputs, shape)


def decoding(name: str, inputs: list[Tensor], factor: int) -> Run:
    """Returns a run of as many steps as complete a block. SDPA has all keys already and appends none."""
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

    return ours if name == "memcheck" else softmax


def measure(shape: tuple[int, ...], factor: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    B, H, N, D = shape
    rows = []
    for what, names in (
        ("forward", list(ATTENTIONS)),
        ("forward + backward", list(ATTENTIONS)),
        ("decoding", ["memcheck", "softmax"]),
    ):
        setups = {name: functools.partial(prepare, name, shape, factor, DTYPES[dtype], what) for name in names}
        facts = {"B": B, "H": H, "N": N, "D": D, "factor": factor, "dtype": dtype, "what": what}
        work = None
        if what != "decoding":
            of_blocks = B * H * N * (N // factor) * D  # of one product of queries with the blocks before them
            inputs = [torch.empty(shape, dtype=DTYPES[dtype]) for _ in range(3)]
            flops = {"forward": 2 * of_blocks, "forward + backward": 7 * of_blocks}
            work = Work.of_pass(what, inputs, inputs[0].numel(), flops)
            setups |= work.limits(DTYPES[dtype])
        rows += compare(time_apart(setups, rounds), "memcheck", work, **facts)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bsz", 1), ("heads", 8), ("seq-len", 4096), ("head-dim", 64), ("factor", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("threads", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.bsz, args.heads, args.seq_len, args.head_dim)
    rows = []
    for dtype in args.dtypes:
        rows += measure(shape, args.factor, dtype, args.rounds)
    print_rows(rows, "dtype", "what")
    print(write_result("compressed_attention", rows, args.output))


if __name__ == "__main__":
    main()

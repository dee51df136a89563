"""Compares compressed attention with softmax attention over the full sequence, and with plain PyTorch.

    python benchmarks/compressed_attention.py [--rounds 15] [--dtypes float32] [--window W] [--output FILE]

By default one run, two threads, B1 H8 N4096 D64, factor 8, causal. Each contender has its own process and torch's
default memory. Forward runs under no_grad; forward + backward begins with .grad None and a dense gradient. Decoding
runs single queries over the blocks of N positions, compared with SDPA over all N. *copy* moves the bytes of the inputs
and results once, and *product* is a matrix product of as many operations as the products with blocks have.

With a window, *masked* is one SDPA over blocks and positions, whose mask says which of them a query sees, and *merged*
is compressed attention to the positions before the window merged with SDPA that has a mask for the window. That has no
backward, because the lse of torch's SDPA has none. Both masks are made once, and not timed.
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
from torch.nn.functional import pad, scaled_dot_product_attention

import memcheck
from memcheck.ops.reference.compressed_attention import compress, hidden_from_window
from memcheck.ops.reference.compressed_attention import compressed_attention as reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "memcheck": memcheck.compressed_attention,
    "softmax": lambda q, k, v, factor: scaled_dot_product_attention(q, k, v, is_causal=True),
    "reference": reference,
}


def masked(q: Tensor, k: Tensor, v: Tensor, factor: int, window: int) -> Tensor:
    """One SDPA over blocks and positions: what a user would write."""
    keys, values = (torch.cat([compress(x, factor), x], 2) for x in (k, v))
    return scaled_dot_product_attention(q, keys, values, attn_mask=~hidden(k.shape[2], factor, window))


def merged(q: Tensor, k: Tensor, v: Tensor, factor: int, window: int) -> Tensor:
    """SDPA with a mask for the window, merged with compressed attention to the positions before it."""
    T = q.shape[2]
    before = (q[:, :, window:], k[:, :, : T - window], v[:, :, : T - window])
    y, lse = memcheck.compressed_attention(*before, factor=factor, return_lse=True)
    far = pad(y, (0, 0, window, 0)), pad(lse, (window, 0), value=-torch.inf)
    mask = of_positions(T, factor, window, q.dtype)
    near = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    return memcheck.merge_attention([near[0], far[0]], [near[1], far[1]])


@functools.cache
def hidden(T: int, factor: int, window: int) -> Tensor:
    """(T,C+T)"""
    q, kc = torch.empty(1, 1, T, 1), torch.empty(1, 1, -(-T // factor), 1)
    return hidden_from_window(q, kc, q, factor, T, strict=False, window=window)


@functools.cache
def of_positions(T: int, factor: int, window: int, dtype: torch.dtype) -> Tensor:
    """(T,T)"""
    return torch.zeros(T, T, dtype=dtype).masked_fill_(hidden(T, factor, window)[:, -T:], -torch.inf)


def contenders(window: int | None, what: str) -> dict[str, Callable[..., Tensor]]:
    if window is None:
        return ATTENTIONS
    ours = {"memcheck": functools.partial(memcheck.compressed_attention, window=window)}
    theirs = {"softmax": ATTENTIONS["softmax"], "masked": functools.partial(masked, window=window)}
    return ours | theirs | ({"merged": functools.partial(merged, window=window)} if what == "forward" else {})


def prepare(name: str, shape: tuple[int, ...], factor: int, window: int | None, dtype: torch.dtype, what: str) -> Run:
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    if what == "decoding":
        return decoding(name, inputs, factor, window)
    return passes(what, functools.partial(contenders(window, what)[name], factor=factor), inputs, shape)


def decoding(name: str, inputs: list[Tensor], factor: int, window: int | None) -> Run:
    """Returns a run of as many steps as complete a block. SDPA has all keys already and appends none."""
    q, k, v = (x.detach() for x in inputs)
    N = q.shape[2]
    steps = [[x[:, :, t : t + 1] for x in (q, k, v)] for t in range(N - factor, N)]
    prompt = memcheck.compressed_attention_state(k[:, :, :-factor], v[:, :, :-factor], factor=factor, window=window)

    def ours() -> None:
        state = prompt
        for new in steps:
            _, state = memcheck.compressed_attention_step(*new, state, factor=factor, window=window)

    def softmax() -> None:
        for new in steps:
            scaled_dot_product_attention(new[0], k, v)

    return ours if name == "memcheck" else softmax


def measure(
    shape: tuple[int, ...], factor: int, dtype: str, rounds: int, window: int | None = None
) -> list[dict[str, Any]]:
    B, H, N, D = shape
    rows = []
    for what, names in (
        ("forward", list(contenders(window, "forward"))),
        ("forward + backward", list(contenders(window, "forward + backward"))),
        ("decoding", ["memcheck", "softmax"]),
    ):
        setups = {name: functools.partial(prepare, name, shape, factor, window, DTYPES[dtype], what) for name in names}
        facts = {"B": B, "H": H, "N": N, "D": D, "factor": factor, "dtype": dtype, "what": what}
        facts |= {} if window is None else {"window": window}
        work = None
        if what != "decoding" and window is None:
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
    parser.add_argument("--window", type=int, help="of positions; default: none")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.bsz, args.heads, args.seq_len, args.head_dim)
    rows = []
    for dtype in args.dtypes:
        rows += measure(shape, args.factor, dtype, args.rounds, args.window)
    print_rows(rows, "dtype", "what")
    print(write_result("compressed_attention" if args.window is None else "compressed_window", rows, args.output))


if __name__ == "__main__":
    main()

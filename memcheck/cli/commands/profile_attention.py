"""`memcheck profile-attention`: memory and time of attention operators."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from memcheck.bench.catalog import SHORT_DTYPES, Case, batch_of, make_case
from memcheck.bench.profile import find_device
from memcheck.cli.cases import run_cases
from memcheck.cli.options import (
    DEFAULT_SIZES,
    DEFAULT_TYPES,
    GPU_DTYPE,
    GPU_LENGTHS,
    GPU_SIZES,
    gpu_words,
    make_lengths,
)
from memcheck.core.errors import UsageError

DEFAULT_LENGTHS = [256, 512, 1024, 2048, 4096]


def run(args: argparse.Namespace) -> int:
    cases = cases_of(args)
    given = {name for name in ("dtype", *GPU_SIZES) if getattr(args, name)}
    given |= {"seq_len"} if args.seq_len or args.query_len or args.kv_len else set()
    given |= {"seq_len", "bsz"} if args.lengths else set()
    note = gpu_words(given) if cases[0].device != "cpu" else ""
    return run_cases(cases, args, title="Peak memory of attention", note=note)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The cases of the flags, from small to large, so that an early end loses only the largest."""
    device = find_device(args.device)
    on_gpu = device != "cpu"
    sizes = {name: getattr(args, name) or default for name, default in (GPU_SIZES if on_gpu else DEFAULT_SIZES).items()}
    dtype = args.dtype or (GPU_DTYPE if on_gpu else "float32")
    return [
        make_case(
            name,
            **{**sizes, **batch},
            core_dim=args.core_dim,
            factor=args.factor,
            dtype=SHORT_DTYPES.get(dtype, dtype),
            causal=args.causal,
            mode=args.mode,
            compiled=args.compile,
            device=device,
        )
        for batch in batches_of(args, GPU_LENGTHS if on_gpu else DEFAULT_LENGTHS)
        for name in dict.fromkeys(args.attention_type or DEFAULT_TYPES)
    ]


def batches_of(args: argparse.Namespace, default: list[int]) -> Iterator[dict[str, Any]]:
    """The lengths of each case, and the batch that --lengths makes of them: without --packed or --padded, both."""
    layouts = [name for name in ("padded", "packed") if getattr(args, name)]
    if not args.lengths:
        if layouts:
            raise UsageError(f"--{layouts[0]} needs --lengths, the positions of each sequence")
        for query_len, kv_len in make_lengths(args.mode, args.seq_len, args.query_len, args.kv_len, default=default):
            yield {"query_len": query_len, "kv_len": kv_len}
        return
    for name in ("bsz", "seq_len", "query_len", "kv_len"):
        if getattr(args, name):
            raise UsageError(f"--lengths has the number and lengths of sequences: leave out --{name.replace('_', '-')}")
    for lengths in sorted(args.lengths, key=sum):
        for layout in layouts or ("padded", "packed"):
            yield batch_of(lengths, layout)

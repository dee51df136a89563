"""`memcheck profile-attention`: memory and time of attention operators."""

from __future__ import annotations

import argparse

from memcheck.bench.catalog import SHORT_DTYPES, Case, make_case
from memcheck.bench.profile import find_device
from memcheck.cli.cases import batches_of, run_cases
from memcheck.cli.options import (
    DEFAULT_SIZES,
    DEFAULT_TYPES,
    GPU_DTYPE,
    GPU_LENGTHS,
    GPU_SIZES,
    gpu_words,
)

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
        for batch in batches_of(vars(args), GPU_LENGTHS if on_gpu else DEFAULT_LENGTHS)
        for name in dict.fromkeys(args.attention_type or DEFAULT_TYPES)
    ]

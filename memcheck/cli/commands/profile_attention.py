"""`memcheck profile-attention`: memory and time of attention operators."""

from __future__ import annotations

import argparse

from memcheck.bench.catalog import SHORT_DTYPES, make_case
from memcheck.bench.profile import find_device
from memcheck.cli.cases import run_cases
from memcheck.cli.options import DEFAULT_SIZES, DEFAULT_TYPES, make_lengths

DEFAULT_LENGTHS = [256, 512, 1024, 2048, 4096]


def run(args: argparse.Namespace) -> int:
    """Runs the cases from small to large, so that an early end loses only the largest."""
    device = find_device(args.device)
    sizes = {name: getattr(args, name) or default for name, default in DEFAULT_SIZES.items()}
    lengths = make_lengths(args.mode, args.seq_len, args.query_len, args.kv_len, default=DEFAULT_LENGTHS)
    cases = [
        make_case(
            name,
            **sizes,
            query_len=query_len,
            kv_len=kv_len,
            core_dim=args.core_dim,
            factor=args.factor,
            dtype=SHORT_DTYPES.get(args.dtype, args.dtype),
            causal=args.causal,
            mode=args.mode,
            compiled=args.compile,
            device=device,
        )
        for query_len, kv_len in lengths
        for name in dict.fromkeys(args.attention_type or DEFAULT_TYPES)
    ]
    return run_cases(cases, args, title="Peak memory of attention")

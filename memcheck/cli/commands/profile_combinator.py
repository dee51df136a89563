"""`memcheck profile-combinator`: memory and time of the combinator."""

from __future__ import annotations

import argparse

from memcheck.bench.catalog import SHORT_DTYPES, make_combinator_case
from memcheck.bench.profile import find_device
from memcheck.cli.cases import run_cases
from memcheck.core.errors import UsageError


def run(args: argparse.Namespace) -> int:
    """Runs the cases from small to large, so that an early end loses only the largest."""
    if args.low_memory and args.combinator_type:
        raise UsageError("--low-memory is --combinator-type combinator-low-memory: leave out one of the two")
    device = find_device(args.device)
    default = "combinator-low-memory" if args.low_memory else "combinator"
    cases = [
        make_combinator_case(
            name,
            bsz=args.bsz,
            query_len=query_len,
            dim=args.dim,
            dtype=SHORT_DTYPES.get(args.dtype, args.dtype),
            mode=args.mode,
            compiled=args.compile,
            device=device,
        )
        for query_len in sorted(args.query_len or ([1] if args.mode == "decode" else [512]))
        for name in dict.fromkeys(args.combinator_type or [default])
    ]
    return run_cases(cases, args, title="Peak memory of the combinator")

"""Memory and time of the combinator, in either mode: a table, records and a plot."""

from __future__ import annotations

import argparse

from memcheck.catalog import SHORT_DTYPES, Case, make_combinator_case
from memcheck.profile_commands import add_common_arguments, count, counts, run_cases
from memcheck.profiling import find_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, meaning, default in (("bsz", "batch size B", 64), ("dim", "token dimension E", 128)):
        help_text = f"{meaning}; default: {default}"
        parser.add_argument(f"--{flag}", type=count(f"--{flag}"), default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--query-len", type=counts("--query-len"), default=[512], metavar="S[,S]", help="lengths S; default: 512"
    )
    parser.add_argument(
        "--low-memory", action="store_true", help="keep no pre-activations for the backward, but form them again"
    )
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_cases(make_cases(args), args, title="Peak memory of the combinator")


def make_cases(args: argparse.Namespace) -> list[Case]:
    device = find_device(args.device)
    return [
        make_combinator_case(
            "combinator-low-memory" if args.low_memory else "combinator",
            bsz=args.bsz,
            query_len=query_len,
            dim=args.dim,
            dtype=SHORT_DTYPES.get(args.dtype, args.dtype),
            mode=args.mode,
            device=device,
        )
        for query_len in sorted(args.query_len)
    ]

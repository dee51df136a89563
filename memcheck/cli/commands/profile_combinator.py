"""Memory and time of the combinator, in either mode: a table, records and a plot."""

from __future__ import annotations

import argparse

from memcheck.bench.catalog import SHORT_DTYPES, Case, combinator_types, make_combinator_case
from memcheck.bench.profile import find_device
from memcheck.cli.cases import add_common_arguments, add_inspection_arguments, count, counts, run_cases
from memcheck.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, meaning, default in (("bsz", "batch size B", 64), ("dim", "token dimension E", 128)):
        help_text = f"{meaning}; default: {default}"
        parser.add_argument(f"--{flag}", type=count(f"--{flag}"), default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--query-len", type=counts("--query-len"), metavar="S[,S]", help="lengths S; default: 512, and 1 to decode"
    )
    parser.add_argument(
        "--combinator-type",
        action="append",
        metavar="NAME[,NAME]",
        help=f"repeatable; {', '.join(combinator_types())}; default: combinator",
    )
    parser.add_argument(
        "--low-memory", action="store_true", help="combinator-low-memory: no pre-activations kept, but formed again"
    )
    add_common_arguments(parser)
    add_inspection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_cases(make_cases(args), args, title="Peak memory of the combinator")


def make_cases(args: argparse.Namespace) -> list[Case]:
    device = find_device(args.device)
    return [
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
        for name in combinators(args)
    ]


def combinators(args: argparse.Namespace) -> list[str]:
    if args.low_memory and args.combinator_type:
        raise UsageError("--low-memory is --combinator-type combinator-low-memory: leave out one of the two")
    default = "combinator-low-memory" if args.low_memory else "combinator"
    names = [name.strip() for given in args.combinator_type or [default] for name in given.split(",")]
    return list(dict.fromkeys(names))

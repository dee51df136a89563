"""Memory and time of attention operators: a table, records and a plot."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from memcheck.bench.catalog import SHORT_DTYPES, Case, attention_types, make_case
from memcheck.bench.profile import find_device
from memcheck.cli.cases import add_common_arguments, add_inspection_arguments, count, counts, run_cases
from memcheck.core.errors import UsageError


# A preset: the value of every flag that is not given.
@dataclass(frozen=True)
class Preset:
    attention_type: list[str]
    seq_len: list[int]
    bsz: int
    dim: int
    heads: int


PRESETS = {
    "quick": Preset(
        ["naive", "softmax", "softplus", "linear-causal", "compressed"],
        [256, 512, 1024, 2048, 4096],
        bsz=1,
        dim=256,
        heads=4,
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(attention_types())
    parser.add_argument(
        "--preset", choices=PRESETS, default="quick", help="what the flags left out say; default: quick"
    )
    parser.add_argument(
        "--attention-type", action="append", metavar="NAME[,NAME]", help=f"repeatable; {known}; default: of the preset"
    )
    for flag, meaning in (("bsz", "batch size B"), ("dim", "token dimension E"), ("heads", "H, where there are heads")):
        default = getattr(PRESETS["quick"], flag)
        parser.add_argument(f"--{flag}", type=count(f"--{flag}"), metavar="N", help=f"{meaning}; default: {default}")
    parser.add_argument("--seq-len", type=counts("--seq-len"), metavar="N[,N]", help="S and T at once")
    parser.add_argument("--query-len", type=counts("--query-len"), metavar="S[,S]", help="default: --kv-len")
    parser.add_argument("--kv-len", type=counts("--kv-len"), metavar="T[,T]", help="default: --query-len")
    parser.add_argument(
        "--core-dim", type=count("--core-dim"), metavar="R", help="of softplus attention; default: --dim"
    )
    parser.add_argument(
        "--factor", type=count("--factor"), metavar="C", help="compressed only: positions to a block; default: 8"
    )
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: --causal")
    add_common_arguments(parser)
    add_inspection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_cases(make_cases(args), args, title="Peak memory of attention")


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The cases from small to large, so that an early end loses only the largest."""
    preset = PRESETS[args.preset]
    names = [name.strip() for given in args.attention_type or preset.attention_type for name in given.split(",")]
    device = find_device(args.device)
    return [
        make_case(
            name,
            bsz=args.bsz or preset.bsz,
            query_len=query_len,
            kv_len=kv_len,
            dim=args.dim or preset.dim,
            heads=args.heads or preset.heads,
            core_dim=args.core_dim,
            factor=args.factor,
            dtype=SHORT_DTYPES.get(args.dtype, args.dtype),
            causal=args.causal,
            mode=args.mode,
            compiled=args.compile,
            device=device,
        )
        for query_len, kv_len in make_lengths(args, preset.seq_len)
        for name in dict.fromkeys(names)
    ]


def make_lengths(args: argparse.Namespace, default: list[int]) -> list[tuple[int, int]]:
    """(S, T) pairs. Two lists of equal length are paired; a single length is combined with every one of the other
    list.
    """
    if args.seq_len and (args.query_len or args.kv_len):
        raise UsageError("--seq-len sets both lengths: leave out --query-len and --kv-len, or --seq-len")
    if args.mode == "decode":
        return [(1, key) for key in sorted(one_query(args.query_len, args.kv_len or args.seq_len or default))]
    queries = args.query_len or args.kv_len or args.seq_len or default
    keys = args.kv_len or args.query_len or args.seq_len or default
    longest = max(len(queries), len(keys))
    if {len(queries), len(keys)} - {1, longest}:
        raise UsageError(f"--query-len and --kv-len must be as long as each other, got {len(queries)} and {len(keys)}")
    return sorted(zip(queries * (longest // len(queries)), keys * (longest // len(keys)), strict=True))


def one_query(query_len: list[int] | None, kv_len: list[int]) -> list[int]:
    """The lengths of the state in decode mode, in which a step takes one token."""
    if query_len not in (None, [1]):
        given = ",".join(map(str, query_len))
        raise UsageError(
            f"--query-len must be 1 in --mode decode, got {given}; --kv-len says how many tokens went before"
        )
    return kv_len

"""Memory and time of attention operators: a table, records and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from memcheck.catalog import CONTENDERS, SHORT_DTYPES, Case, make_case
from memcheck.errors import UsageError
from memcheck.plotting import plot_memory
from memcheck.profiling import find_device, profile_case
from memcheck.quantities import parse_bytes
from memcheck.records import Record, write_csv
from memcheck.reports import LEGEND, common_case, table_header, table_row


# A preset is the value of every flag that is not given.
@dataclass(frozen=True)
class Preset:
    attention_type: list[str]
    seq_len: list[int]
    bsz: int
    dim: int
    heads: int


PRESETS = {"quick": Preset(["naive", "softmax", "softplus"], [256, 512, 1024, 2048, 4096], bsz=1, dim=256, heads=4)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(CONTENDERS)
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
    parser.add_argument("--core-dim", type=count("--core-dim"), metavar="R", help="softplus only; default: --dim")
    parser.add_argument(
        "--factor", type=count("--factor"), metavar="C", help="compressed only: positions to a block; default: 8"
    )
    parser.add_argument("--dtype", default="float32", help="fp32, bf16, fp16, fp64 or torch's names; default: fp32")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: --causal")
    parser.add_argument("--mode", choices=("train", "inference"), default="train", help="default: train")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda where there is one")
    parser.add_argument(
        "--memory-limit", type=size("--memory-limit"), metavar="40GiB", help="OOM above this; bytes, KiB..GB"
    )
    parser.add_argument(
        "--passes", type=count("--passes"), metavar="N", help="timed passes; default: 10, or 1.5 s of them"
    )
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument(
        "--output",
        type=folder,
        default=Path("results"),
        metavar="DIR",
        help="files there are replaced; default: results",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")


def run(args: argparse.Namespace) -> int:
    out = sys.stderr if args.format == "json" else sys.stdout
    cases = make_cases(args)
    files = ResultFiles.open(args.output)
    note_unused_flags(args, cases)
    records = []
    for record in profile_all(cases, args, out):
        files.append(record)
        records.append(record)
    files.finish(records)
    print(f"\n{LEGEND}\n\nWrote {files}", file=out)
    if args.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in records) + "]")
    return exit_code(records)


def profile_all(cases: list[Case], args: argparse.Namespace, out: TextIO) -> Iterator[Record]:
    for number, case in enumerate(cases):
        record = profile_case(case, passes=args.passes, timed=not args.no_time, limit_bytes=args.memory_limit)
        if number == 0:
            print(f"{common_case(cases)}\n\n{table_header()}", file=out)
        print(table_row(record), file=out, flush=True)
        yield record


def exit_code(records: list[Record]) -> int:
    """An OOM is a result; an error is not, nor is a run in which torch refused every case."""
    statuses = {record.status for record in records}
    return int("error" in statuses or not statuses & {"ok", "oom"})


def make_cases(args: argparse.Namespace) -> list[Case]:
    """From small to large, so that what ends early has shown the most."""
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
            device=device,
        )
        for query_len, kv_len in make_lengths(args, preset.seq_len)
        for name in dict.fromkeys(names)
    ]


def make_lengths(args: argparse.Namespace, default: list[int]) -> list[tuple[int, int]]:
    """(S, T) pairs: two lists go in step, a single length goes with every one of the other list."""
    if args.seq_len and (args.query_len or args.kv_len):
        raise UsageError("--seq-len sets both lengths: leave out --query-len and --kv-len, or --seq-len")
    queries = args.query_len or args.kv_len or args.seq_len or default
    keys = args.kv_len or args.query_len or args.seq_len or default
    longest = max(len(queries), len(keys))
    if {len(queries), len(keys)} - {1, longest}:
        raise UsageError(f"--query-len and --kv-len must be as long as each other, got {len(queries)} and {len(keys)}")
    return sorted(zip(queries * (longest // len(queries)), keys * (longest // len(keys)), strict=True))


def note_unused_flags(args: argparse.Namespace, cases: list[Case]) -> None:
    for field in ("heads", "core_dim", "factor"):
        without = dict.fromkeys(case.operator for case in cases if getattr(case, field) is None)
        if getattr(args, field) is not None and without:
            print(f"note: --{field.replace('_', '-')} is not used by {', '.join(without)}", file=sys.stderr)


@dataclass
class ResultFiles:
    """records.jsonl grows a line per case, so that a crash loses none; what is drawn from it is written at the end."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> ResultFiles:
        files = cls(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in files.paths():
                path.unlink(missing_ok=True)
            files.paths()[0].touch()
        except OSError as error:
            raise UsageError(f"--output {folder} cannot be written to: {error.strerror}") from None
        return files

    def paths(self) -> tuple[Path, Path, Path]:
        return self.folder / "records.jsonl", self.folder / "records.csv", self.folder / "memory.png"

    def append(self, record: Record) -> None:
        with self.paths()[0].open("a") as lines:
            lines.write(record.to_json() + "\n")

    def finish(self, records: list[Record]) -> None:
        _, table, picture = self.paths()
        write_csv(records, table)
        styles = {name: contender.style for name, contender in CONTENDERS.items()}
        plot_memory(records, picture, styles=styles, subtitle=common_case(records))

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths()))


def count(flag: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{flag} must be a whole number, got {text!r}") from None
        if number < 1:
            raise UsageError(f"{flag} must be at least 1, got {number}")
        if number >= 2**63:
            raise UsageError(f"{flag} must be below 2^63, got {number}")
        return number

    return parse


def counts(flag: str) -> Callable[[str], list[int]]:
    return lambda text: [count(flag)(word) for word in text.split(",")]


def folder(text: str) -> Path:
    if not text:
        raise UsageError("--output must name a folder, got ''")
    return Path(text)


def size(flag: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise UsageError(f"{flag} {error}") from None

    return parse

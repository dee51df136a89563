"""What numbers become in lower precision: long sums by dtype, and every stage of a network under autocast."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import torch

from memcheck.bench.profile import find_device
from memcheck.bench.sweep.grid import check_names
from memcheck.core.case import SHORT_DTYPES
from memcheck.report import Table, render
from memcheck.studies.accumulation import Accumulation, LibrarySum, Underflow, accumulate, library_sums, underflows
from memcheck.studies.autocast_stages import StagesRun, run_stages
from memcheck.studies.mixed_precision_report import (
    accumulation_table,
    kept_table,
    library_table,
    observations,
    stages_table,
    underflow_table,
)

DTYPES = {name: SHORT_DTYPES[name] for name in ("bf16", "fp16")}


@dataclasses.dataclass(frozen=True)
class Findings:
    accumulations: list[Accumulation]
    one_call: list[LibrarySum]
    without_autocast: StagesRun
    under_autocast: StagesRun
    underflow: list[Underflow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", help="of autocast: bf16 or fp16; default: bf16")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda where there is one")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of stdout; default: table")


def run(args: argparse.Namespace) -> int:
    check_names("--dtype", [args.dtype], [*DTYPES, *DTYPES.values()])
    found = find(DTYPES.get(args.dtype, args.dtype), find_device(args.device))
    print(
        json.dumps(to_object(found), indent=1) if args.format == "json" else render(tables(found), "table", sys.stdout)
    )
    return 0


def find(dtype: str, device: str) -> Findings:
    """Runs everything. dtype is autocast's."""
    return Findings(
        accumulate(device),
        library_sums(device),
        run_stages(getattr(torch, dtype), autocast=False, device=device),
        run_stages(getattr(torch, dtype), autocast=True, device=device),
        underflows(device),
    )


def tables(found: Findings) -> list[Table]:
    return [
        accumulation_table(found.accumulations),
        library_table(found.one_call, found.accumulations),
        stages_table(found.without_autocast, found.under_autocast),
        kept_table(found.under_autocast),
        underflow_table(found.underflow),
    ]


def to_object(found: Findings) -> dict[str, Any]:
    stages = found.without_autocast, found.under_autocast
    said = {
        "device": found.under_autocast.device,
        "torch_version": str(torch.__version__),
        **dataclasses.asdict(found),
        "observations": list(observations(*stages)),
    }
    for name, run in zip(("without_autocast", "under_autocast"), stages, strict=True):
        for stage, one in zip(said[name]["stages"], run.stages, strict=True):
            stage["kept_bytes"] = one.kept_bytes
    return said

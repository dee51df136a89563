"""`memcheck calibrate`: what a model's operators take on this machine's CPU, as a table that can be carried."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from memcheck.bench.probe import CpuProbe, Table, environment
from memcheck.cli.cases import make_room
from memcheck.cli.models import ModelPredictor
from memcheck.core.errors import UsageError
from memcheck.report import Screen
from memcheck.report.model_prediction import certainty, verdict


def run(args: argparse.Namespace) -> int:
    if not (args.model or args.hf_config):
        raise UsageError("there is no model to calibrate: give --model or --hf-config (see memcheck calibrate --help)")
    make_room("--output", args.output)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    table = Table(args.output)
    before = len(table.found) + len(table.checks)
    prediction = ModelPredictor.of(args, probe=CpuProbe(table)).predict()
    operators, functions = len(table.found), len(table.checks)
    done = {"operators": operators, "functions": functions, "new": operators + functions - before}
    if args.format == "json":
        print(json.dumps({"table": str(args.output), **done, "place": environment()}))
        return 0
    screen = Screen.of(sys.stdout)
    print(screen.fill(verdict(prediction)))
    print(screen.fill(certainty(prediction)))
    counts = f"{operators} operators and {functions} functions, {done['new']} of them new"
    print(f"Wrote {args.output}: {counts} ({', '.join(environment())}).")
    return 0

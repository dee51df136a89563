"""`memcheck calibrate`: what a model's operators take on this machine's CPU, as a table that can be carried."""

from __future__ import annotations

import json
import sys

import torch

from memcheck.bench.probe import CpuProbe, Table, environment
from memcheck.cli.models import ModelPredictor
from memcheck.cli.output import make_room
from memcheck.cli.requests import Calibrate
from memcheck.core.errors import UsageError
from memcheck.core.place import Place
from memcheck.core.verdict import certainty, verdict
from memcheck.report.tables import Screen


def run(request: Calibrate) -> int:
    if request.source is None:
        raise UsageError("there is no model to calibrate: give --model or --hf-config (see memcheck calibrate --help)")
    make_room("output", request.output)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    table = Table(request.output)
    before = len(table.found) + len(table.checks)
    prediction = ModelPredictor.of(request, Place(), CpuProbe(table)).predict()
    operators, functions = len(table.found), len(table.checks)
    done = {"operators": operators, "functions": functions, "new": operators + functions - before}
    if request.format == "json":
        print(json.dumps({"table": str(request.output), **done, "place": environment()}))
        return 0
    screen = Screen.of(sys.stdout)
    print(screen.fill(verdict(prediction)))
    print(screen.fill(certainty(prediction)))
    counts = f"{operators} operators and {functions} functions, {done['new']} of them new"
    is_needed = operators + functions > 0
    wrote = f"Wrote {request.output}: {counts} ({', '.join(environment())})."
    print(wrote if is_needed else "No table was written: every operator of the model has a rule.")
    return 0

"""`memcheck mixed-precision`: long sums by dtype, and the stages of a network under autocast."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from memcheck.bench.profile import find_device
from memcheck.cli.requests import MixedPrecision
from memcheck.report.tables import render
from memcheck.studies.accumulation import accumulate, library_sums, underflows
from memcheck.studies.autocast_stages import StagesRun, run_stages
from memcheck.studies.mixed_precision_report import (
    accumulation_table,
    kept_table,
    library_table,
    observations,
    stages_table,
    underflow_table,
)


def run(request: MixedPrecision) -> int:
    dtype, device = getattr(torch, request.dtype), find_device(request.device)
    sums, one_call, lost = accumulate(device), library_sums(device), underflows(device)
    off, on = (run_stages(dtype, autocast=autocast, device=device) for autocast in (False, True))
    if request.format == "json":
        found = {
            "device": on.device,
            "torch_version": str(torch.__version__),
            "accumulations": list(map(asdict, sums)),
            "one_call": list(map(asdict, one_call)),
            "without_autocast": stages_object(off),
            "under_autocast": stages_object(on),
            "underflow": list(map(asdict, lost)),
            "observations": list(observations(off, on)),
        }
        print(json.dumps(found, indent=1))
    else:
        tables = [accumulation_table(sums), library_table(one_call, sums), stages_table(off, on), kept_table(on)]
        print(render([*tables, underflow_table(lost)], "table", sys.stdout))
    return 0


def stages_object(run: StagesRun) -> dict[str, object]:
    """The run for JSON, with the bytes that each stage keeps."""
    stages = [{**asdict(stage), "kept_bytes": stage.kept_bytes} for stage in run.stages]
    return {**asdict(run), "stages": stages}

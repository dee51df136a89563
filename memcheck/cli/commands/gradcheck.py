"""`memcheck gradcheck`: gradients of the operators against central differences."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap

from tqdm import tqdm

from memcheck.bench.profile import find_device
from memcheck.cli.output import watch
from memcheck.cli.requests import Gradcheck
from memcheck.ops.gradcheck import Outcome, check, configurations_of

LINE = "{:<27}  {:<6}  {}"


def run(request: Gradcheck) -> int:
    out = sys.stderr if request.format == "json" else sys.stdout
    configurations, device = configurations_of(request.operator or []), find_device(request.device)
    print(LINE.format("operator", "", f"configuration, on {device}"), file=out)
    outcomes = []
    for configuration in watch(configurations, "gradcheck"):
        outcomes.append(check(configuration, device))
        tqdm.write(line(outcomes[-1]), file=out)
        out.flush()
    print(f"\n{summary(outcomes)}", file=out)
    if request.format == "json":
        print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    return int(not all(outcome.ok for outcome in outcomes))


def line(outcome: Outcome) -> str:
    row = LINE.format(outcome.operator, "ok" if outcome.ok else "FAILED", outcome.configuration)
    return f"{row}\n    {textwrap.shorten(outcome.reason, 300)}" if outcome.reason else row


def summary(outcomes: list[Outcome]) -> str:
    failed = sum(not outcome.ok for outcome in outcomes)
    words = f"{failed} of {len(outcomes)} FAILED" if failed else f"all {len(outcomes)} ok"
    return f"{words} (torch.autograd.gradcheck: |analytic - numeric| <= 1e-5 + 1e-3 |numeric|, float64)"

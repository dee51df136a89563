"""Finds the runs of `memcheck run` among the folders and files that a command is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from memcheck.bench.sweep.store import FILE
from memcheck.cli.options import Request
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.script_record import RUN, ScriptRecord, is_run


def runs_in(paths: Sequence[Path]) -> list[ScriptRecord]:
    """The run of each path, which is a folder with run.json or such a file. Empty: the paths hold no runs, or folders
    hold records of cases, too.

    UsageError: some hold runs and others do not.
    """
    files = [path / RUN if path.is_dir() else path for path in paths]
    runs = [path for path, file in zip(paths, files, strict=True) if is_run(file)]
    cases = [path for path in paths if (path / FILE).exists()]
    if runs and len(cases) == len(paths):
        print(f"note: {runs[0]} also holds a run: {runs[0] / RUN}", file=sys.stderr)
        return []
    if runs and len(runs) < len(paths):
        other = next(path for path in paths if path not in runs)
        what = "records of cases" if other in cases else f"no {RUN}"
        raise UsageError(f"{runs[0]} holds a run of a script and {other} {what}: give paths of one kind")
    return [ScriptRecord.read(file) for file in files] if runs else []


def check_only(request: Request, kept: Sequence[str], rule: str) -> None:
    """UsageError: the request has another option than those kept. rule: what the others are for."""
    if others := [name for name in request.asked if name not in kept and request.given(name)]:
        raise UsageError(f"{named(others[0])} is for {rule}")

"""`memcheck sweep -- SCRIPT`: runs of a script with every combination of values, each in a folder of its own."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from memcheck.cli.output import make_room
from memcheck.cli.script_requests import SweepScript
from memcheck.cli.trials import Trials
from memcheck.core.errors import UsageError
from memcheck.core.files import write_text
from memcheck.core.script_record import RUN, ScriptRecord, is_run
from memcheck.core.step import Place
from memcheck.report.plots.style import save
from memcheck.report.script_tables import script_title
from memcheck.report.tables import data_rows, render, write_files
from memcheck.report.trials import FAILED, outcome, trials_figure, trials_table


def run(request: SweepScript) -> int:
    titles, device = request.titles, Place(request.device, request.memory_limit).resolved().for_device.name
    folders = {values: request.output / name_of(titles, values) for values in request.combinations()}
    runs = {values: record for values, folder in folders.items() if (record := done(request, values, folder, device))}
    missing = [values for values in folders if values not in runs]
    print(f"memcheck: {len(folders)} runs, {len(runs)} of them are in {request.output}", file=sys.stderr)
    if request.dry_run:
        print(*(shlex.join(request.command(values)) for values in missing), sep="\n")
        return 0
    make_room("output", request.output / "runs.csv")
    tried = Trials(request)
    for values in missing:
        runs[values] = record = tried(*values).record
        folders[values].mkdir(parents=True, exist_ok=True)
        write_text(folders[values] / RUN, json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    runs = {values: runs[values] for values in folders}
    table = trials_table(titles, runs)
    first = next(iter(runs.values()))
    picture = request.output / "runs.png"
    save(trials_figure(titles, runs, f"{script_title(first)} on {first.device_words}"), picture)
    files = [*write_files([table], request.output), picture]
    print(json.dumps(data_rows(table)) if request.format == "json" else render([table], "table", sys.stdout))
    print(f"\nWrote {', '.join(map(str, files))} and {RUN} of each run", file=sys.stderr)
    return 0


def name_of(titles: Sequence[str], values: Sequence[str]) -> str:
    """The folder of a run: "batch-size=16,dtype=float16"."""
    parts = [f"{title}={value}" for title, value in zip(titles, values, strict=True)]
    return re.sub(r"[^\w.,=+-]", "_", ",".join(parts))


def done(request: SweepScript, values: Sequence[str], folder: Path, device: str) -> ScriptRecord | None:
    """The record of the run, if its folder has it. One that failed runs again.

    UsageError: it has one of another command or device.
    """
    path = folder / RUN
    if not is_run(path):
        return None
    record = ScriptRecord.read(path)
    same = record.command == request.command(values) and record.device_name == device
    if not same or record.limit_bytes != request.memory_limit:
        raise UsageError(
            f"{path} is of another run, {shlex.join(record.command)} on {record.device_words}: give another --output"
        )
    return None if outcome(record) == FAILED else record

"""Runs a script, unchanged, and reports its memory: the peak, what was alive then, and the picture over time."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from memcheck.cli.next_steps import after_run
from memcheck.cli.output import make_room
from memcheck.cli.requests import Run
from memcheck.cli.streams import patient_streams
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.python_command import prepare
from memcheck.core.script_record import ScriptRecord
from memcheck.core.tensors import resolve_device
from memcheck.measure.script_watch import ScriptWatch, run_script
from memcheck.report.plots.script_plot import plot_script, script_figure
from memcheck.report.plots.style import inline_svg
from memcheck.report.script_tables import script_page, script_report, script_title
from memcheck.report.tables import Screen

FILES = ("run.html", "run.png", "run.json")
SNAPSHOT = "run-snapshot.pickle"


def run(request: Run) -> int:
    command = (request.script or []) if request.module is None else ["-m", *request.module]
    if not (request.module or request.script):
        raise UsageError("there is no SCRIPT and no -m MODULE to run (see memcheck run --help)")
    device = chosen_device(request.device)
    if request.snapshot is not None and device.type != "cuda":
        raise UsageError(f"{named('snapshot')} records the allocator of a GPU, and this run is of {device}")
    output = request.output.absolute()  # The script may change the current folder.
    for name in FILES:
        make_room("output", output / name)
    snapshot = request.snapshot or request.output / SNAPSHOT
    there = snapshot.absolute()
    if request.snapshot is not None:
        make_room("snapshot", there)
    watch = ScriptWatch(device, request.memory_limit, keep_history=request.snapshot is not None)
    record = run_script(prepare(command), command, watch)
    if watch.snapshot is not None and (request.snapshot is not None or record.ran_out):
        try:
            write_snapshot(watch.snapshot, there)
            record.snapshot = str(snapshot)
        except OSError as error:
            record.doubts.append(f"the memory snapshot {snapshot} could not be written: {error.strerror or error}")
    try:
        write_files(record, output)
    finally:
        # On stderr, because stdout is the script's.
        with patient_streams():
            print(f"\n{script_report(record, Screen.of(sys.stderr))}", file=sys.stderr)
    with patient_streams():
        print(f"\nWrote {', '.join(str(request.output / name) for name in FILES)}", file=sys.stderr)
        print(f"\n{after_run(request)}", file=sys.stderr)
    return record.exit_code


def chosen_device(name: str | None) -> torch.device:
    try:
        device = resolve_device(name or ("cuda" if torch.cuda.is_available() else "cpu"), ())
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UsageError(f"--{str(error).partition(chr(10))[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: there is no GPU here that torch can use")
    return device


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("wb") as file:
            # The viewer at pytorch.org/memory_viz reads protocols up to 4.
            pickle.dump(snapshot, file, protocol=4)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_files(record: ScriptRecord, output: Path) -> None:
    page, picture, data = (output / name for name in FILES)
    title = script_title(record)
    how = {"title": title, "subtitle": f"on {record.device}"}
    plot_script(record, picture, **how)
    svg = inline_svg(lambda: script_figure(record, **how), "run", title)
    page.write_text(script_page(record, svg), encoding="utf-8")
    data.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n", encoding="utf-8")

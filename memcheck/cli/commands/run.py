"""Runs a script, unchanged, and reports its memory: the peak, what was alive then, and the picture over time."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memcheck.cli import flags, rank_runs, simulated_runs, trials
from memcheck.cli.live_line import live_line
from memcheck.cli.output import make_room
from memcheck.cli.requests import Run
from memcheck.core import files, options, python_command, tensors
from memcheck.core.errors import UsageError
from memcheck.core.script_record import RUN, ScriptRecord, is_run
from memcheck.measure.script_watch import ScriptWatch, run_script, set_interrupt
from memcheck.report.plots.timeline import plot_timeline
from memcheck.report.script_tables import script_page, script_report, script_title
from memcheck.report.tables import Screen, to_text
from memcheck.report.trials import changes_table

FILES = (RUN, "run.html", "run.png")
SNAPSHOT = "run-snapshot.pickle"


def run(request: Run) -> int:
    command = (request.script or []) if request.module is None else ["-m", *request.module]
    if not (request.module or request.script):
        raise UsageError("there is no SCRIPT and no -m MODULE to run (see memcheck run --help)")
    if not request.simulated and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        request.output /= f"rank-{os.environ.get('RANK', '0')}"  # torchrun runs this command for each.
    if request.all_ranks:
        return rank_runs.run_ranks(request, command)
    if request.launch and request.launch.launcher == "accelerate":
        rank_runs.set_environment_of_accelerate(request.launch)
    if not request.changes:
        return run_once(request, command)
    code, file = trials.in_forked_process(lambda: run_once(request, command)), request.output / RUN
    if code == 0 or (is_run(file) and ScriptRecord.read(file).ran_out):
        table = changes_table(*trials.tried_changes(command, request, ScriptRecord.read(file)))
        print(f"\n{to_text(table, Screen.of(sys.stderr))}", file=sys.stderr)
    return code


def run_once(request: Run, command: list[str]) -> int:
    """Runs the script in this process, reports, and returns the exit code."""
    simulated = simulated_runs.SimulatedRun(request) if request.simulated else None
    watch = simulated.watch() if simulated else watch_here(request)
    output = request.output.absolute()  # The script may change the current folder.
    snapshot = request.snapshot or request.output / SNAPSHOT
    there = snapshot.absolute()
    call = python_command.prepare(command)
    for name in FILES:
        make_room("output", output / name)
    if request.snapshot is not None:
        make_room("snapshot", there)
    interrupt = signal.getsignal(signal.SIGINT)
    with live_line(watch.now):
        record = run_script(call, command, watch)
    if simulated:
        simulated.note(record)
    written, failure = list[str](), None
    if record.peak.bytes or record.refusal or record.other_peaks:
        if watch.snapshot is not None and (request.snapshot is not None or record.ran_out):
            write_snapshot(record, watch.snapshot, snapshot, there)
        written, failure = write_files(record, output, interrupt)
    set_interrupt(interrupt)
    with flags.patient_streams():  # On stderr, because stdout is the script's.
        report = script_report(record, Screen.of(sys.stderr), doubts=request.doubts)
        print(f"\n{report}\n\n{files_sentence(request.output, written, failure)}", file=sys.stderr)
        if record.simulated and record.ran_out and not request.changes:
            print(f"{options.named('changes')} runs it again with settings that may help.", file=sys.stderr)
        if simulated_runs.needs_gpu(record):
            print(f"\n{simulated_runs.gpu_sentence(record)}", file=sys.stderr)
    return record.exit_code or (0 if failure is None else 130 if isinstance(failure, KeyboardInterrupt) else 1)


def watch_here(request: Run) -> ScriptWatch:
    """A watch of a device of this machine."""
    device = chosen_device(request.device)
    if request.snapshot is not None and device.type != "cuda":
        raise UsageError(f"{options.named('snapshot')} records the allocator of a GPU, and this run is of {device}")
    return ScriptWatch(device, request.memory_limit, keep_history=request.snapshot is not None)


def chosen_device(name: str | None) -> torch.device:
    try:
        device = tensors.resolve_device(name or ("cuda" if torch.cuda.is_available() else "cpu"), ())
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UsageError(f"--{str(error).partition(chr(10))[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: there is no GPU here that torch can use")
    return device


def write_snapshot(record: ScriptRecord, snapshot: dict[str, Any], path: Path, there: Path) -> None:
    """Writes torch's memory snapshot. path: as the user gave it; there: the same from any folder."""
    try:
        with files.whole_file(there) as file:
            # The viewer at pytorch.org/memory_viz reads protocols up to 4.
            pickle.dump(snapshot, file, protocol=4)
        record.snapshot = str(path)
    except OSError as error:
        record.doubts.append(f"the memory snapshot {path} could not be written: {error.strerror or error}")


def write_files(record: ScriptRecord, output: Path, interrupt: Any) -> tuple[list[str], BaseException | None]:
    """Writes the report: first the data, and then the page and the picture, which Ctrl-C stops by the given handler.

    Returns the names of the files that were written, and the error that kept others from it. These are as they were.
    """
    how = {"title": script_title(record), "subtitle": f"on {record.device_words}"}
    writers: dict[str, Callable[[Path], object]] = {
        RUN: lambda path: files.write_text(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n"),
        "run.html": lambda path: files.write_text(path, script_page(record)),
        "run.png": lambda path: plot_timeline(record, path, **how),
    }
    written = list[str]()
    try:
        for name in FILES:
            try:
                writers[name](output / name)
            finally:
                set_interrupt(interrupt)
            written.append(name)
    except (Exception, KeyboardInterrupt) as error:
        return written, error
    return written, None


def files_sentence(output: Path, written: Sequence[str], failure: BaseException | None) -> str:
    """Which files were written, and which were not and why."""
    paths = [str(output / name) for name in FILES]
    words = f"Wrote {', '.join(paths[: len(written)])}"
    if len(written) == len(FILES):
        return words
    if failure is None:
        return f"Wrote nothing, as no memory was allocated: {output} is as it was."
    why = getattr(failure, "strerror", None) or f"{type(failure).__name__} {failure}".strip()
    missing = f"Could not write {paths[len(written)]}: {why}. Left as it was: {', '.join(paths[len(written) :])}."
    return f"{words}. {missing}" if written else missing

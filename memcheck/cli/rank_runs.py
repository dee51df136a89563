"""Runs of every rank of a script, each in a process of its own, and what launchers set for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from memcheck.cli.launchers import Launch
from memcheck.cli.output import make_room
from memcheck.cli.requests import Run
from memcheck.core.errors import UsageError
from memcheck.core.script_record import RUN, ScriptRecord
from memcheck.report import script_tables, tables

OUTPUT = "output.txt"  # What a rank printed, in its folder.


def run_ranks(request: Run, command: Sequence[str]) -> int:
    """Runs the ranks one by one, with a line of each, and a table in the end. Returns the highest exit code."""
    records, codes = list[ScriptRecord](), list[int]()
    for rank in range(request.ranks or 1):
        folder = request.output / f"rank-{rank}"
        make_room("output", folder / OUTPUT)
        (folder / RUN).unlink(missing_ok=True)
        code = run_rank(request, command, rank, folder)
        codes.append(code)
        if not (folder / RUN).exists():
            print(
                f"Rank {rank} ended with exit code {code} and allocated no memory: {folder / OUTPUT}", file=sys.stderr
            )
            continue
        records.append(ScriptRecord.read(folder / RUN))
        print(script_tables.simulated_verdict(records[-1]), file=sys.stderr, flush=True)
    if records:
        table = tables.to_text(script_tables.ranks_table(records), tables.Screen.of(sys.stderr))
        print(f"\n{table}\n\nWrote the reports into {request.output / 'rank-0'} and so on.", file=sys.stderr)
    return max(codes)


def run_rank(request: Run, command: Sequence[str], rank: int, folder: Path) -> int:
    """Runs one rank in a process of its own. Returns its exit code."""
    given = {"device": request.device, "ranks": request.ranks, "rank": rank, "output": folder, "gpus": request.gpus}
    given |= {"memory_limit": request.memory_limit, "steps": request.steps}
    if request.snapshot is not None:
        given["snapshot"] = folder / request.snapshot.name
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    words += [f"--{name}" for name in ("whole", "doubts") if getattr(request, name)]
    if (launch := request.launch) and launch.launcher == "accelerate":
        command = ["accelerate", "launch", *launch.options, *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / OUTPUT).open("wb") as output:
        process = [sys.executable, "-m", "memcheck", "run", *words, *command]
        return subprocess.run(process, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def set_environment_of_accelerate(launch: Launch) -> None:
    """Sets the variables by which `accelerate launch` tells its options to Accelerator()."""
    try:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
    except ImportError as error:
        raise UsageError(f"accelerate launch needs accelerate: {error}") from None
    words = [word for word in launch.words if word != "-m"]
    options = [*launch.options, *(["--module"] if words != launch.words else []), *words]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(options))
    before = dict(os.environ)
    several = (launch.ranks or 1) > 1
    found = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    os.environ.update({name: value for name, value in found.items() if name not in before})

"""Tests in several gloo processes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(worker: Path, processes: int, folder: Path) -> list[Any]:
    """What each of these processes wrote: python WORKER RANK PROCESSES FOLDER writes FOLDER/RANK.json."""
    commands = [[sys.executable, str(worker), str(rank), str(processes), str(folder)] for rank in range(processes)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def join(rank: int, processes: int, folder: Path) -> None:
    """Joins the group of all processes, with one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'store'}", timedelta(seconds=300), processes, rank)


def run_cases(cases: Mapping[str, Callable[[], None]], rank: int, processes: int, folder: Path) -> None:
    """Runs every case in this rank, and writes what went wrong in each, or an empty word.

    Uninitialised memory holds NaN, as in all tests.
    """
    join(rank, processes, folder)
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    wrong = {}
    for name, case in cases.items():
        wrong[name] = ""
        try:
            case()
        except AssertionError:
            wrong[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(wrong), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()

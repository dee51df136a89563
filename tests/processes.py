"""Tests in several gloo processes on the CPU."""

from __future__ import annotations

import json
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_python


def run_all(commands: Sequence[Sequence[object]]) -> list[subprocess.CompletedProcess[str]]:
    """Runs Python with each command's words, all at the same time."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda words: run_python(*words, timeout=300), commands))


def run_ranks(worker: Path, processes: int, folder: Path) -> list[Any]:
    """What each of these processes wrote: python WORKER RANK PROCESSES FOLDER writes FOLDER/RANK.json."""
    ended = run_all([(worker, rank, processes, folder) for rank in range(processes)])
    assert [process.returncode for process in ended] == [0] * processes, "\n".join(process.stderr for process in ended)
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

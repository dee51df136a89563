"""Runs Python in a process of its own, without the seconds that each process takes to import torch."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

# This module imports torch and pytest. memcheck is left out, because it reads its variables while it is loaded.
PRELOADED = ["forked", "hypothesis"]
# Beginnings of the variables that are read while Python or torch starts. Those of LATE are applied after the fork.
EARLY = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "OPENBLAS_", "GLIBC_", "MALLOC_")
EARLY += ("ATEN_", "TORCH_", "PYTORCH_", "THP_", "ASAN_", "UBSAN_")
LATE = ("PYTHONPATH", "OMP_NUM_THREADS")

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)
environment_of_server: dict[str, str] = {}


def run_python(
    *words: object, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Returns what subprocess.run returns for Python with these words: [-W ignore] -m MODULE ...,
    -c CODE ... or FILE ....

    A server that has imported torch and started no thread forks the process. If the server's environment differs in a
    variable that torch may have read, a new Python is started instead. No function of atexit runs.
    """
    words, cwd, env = [str(word) for word in words], cwd or Path.cwd(), dict(os.environ if env is None else env)
    start_server()
    if early(env) != early(environment_of_server):
        return subprocess.run(
            [sys.executable, *words], timeout=timeout, cwd=cwd, env=env, capture_output=True, text=True
        )
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=run_words, args=(words, cwd, env, folder))
        process.start()
        process.join(timeout)
        ended = process.exitcode is not None
        process.kill()
        process.join()
        written = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    if not ended:
        raise subprocess.TimeoutExpired(words, timeout, *written)
    return subprocess.CompletedProcess(words, process.exitcode, *written)


def start_server() -> None:
    if not environment_of_server:
        environment_of_server.update(os.environ)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            multiprocessing.forkserver.ensure_running()


def early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(EARLY) and name not in LATE}


def run_words(words: list[str], cwd: Path, env: dict[str, str], folder: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(cwd))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = ModuleType("__main__")
        exec(words[1], vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")

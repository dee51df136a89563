"""Runs a script or a module as python itself would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from memcheck.core.errors import UsageError


def prepare_script(script: str) -> Callable[[], object]:
    """`python SCRIPT`: its folder is the first on the path, in place of the current one."""
    path = Path(os.path.abspath(script))
    if not path.is_file():
        raise UsageError(f"there is no script '{script}'")
    set_first_on_path(str(path.resolve().parent))

    def run() -> None:
        # Unlike runpy's, this __main__ lives on for threads and for what runs at exit.
        sys.modules["__main__"] = ModuleType("__main__")
        sys.modules["__main__"].__file__ = str(path)
        # The script has its own future statements, and not this file's.
        code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
        exec(code, sys.modules["__main__"].__dict__)

    return run


def prepare_module(name: str) -> Callable[[], object]:
    """`python -m MODULE`: the current folder is the first on the path."""
    set_first_on_path(os.getcwd())
    # The package alone: finding what is in it imports it, and the caller may have to prepare that.
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise UsageError(f"there is no module '{name}'")
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def set_first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def prepare(words: Sequence[str]) -> Callable[[], object]:
    """Sets sys.argv and sys.path for `SCRIPT ARGS` or `-m MODULE ARGS`, and returns what runs it."""
    prepare_what = prepare_module if words[:1] == ["-m"] else prepare_script
    sys.argv = list(words[1:] if words[:1] == ["-m"] else words)
    if not sys.argv or sys.argv[0].startswith("-"):
        raise UsageError(f"SCRIPT or -m MODULE must come first, got {sys.argv[0] if sys.argv else 'nothing'}")
    return prepare_what(sys.argv[0])

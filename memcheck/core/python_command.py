"""Runs a script or a module as python itself would."""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import print_exception
from types import ModuleType

from memcheck.core.errors import UsageError


def prepare_script(script: str) -> Callable[[], object]:
    """`python SCRIPT`, or the cells of a notebook: its folder is the first on the path, in place of the current one."""
    path = Path(os.path.abspath(script))
    if not path.is_file():
        raise UsageError(f"there is no script '{script}'")
    set_first_on_path(str(path.resolve().parent))
    is_notebook = path.suffix == ".ipynb"
    cells = cells_of(path) if is_notebook else {}

    def run() -> None:
        # Unlike runpy's, this __main__ lives on for threads and for what runs at exit.
        sys.modules["__main__"] = ModuleType("__main__")
        sys.modules["__main__"].__file__ = str(path)
        if is_notebook:
            sys.modules["__main__"].__dict__["display"] = print
            if sys.excepthook is sys.__excepthook__:
                sys.excepthook = print_exception  # Python's own does not read the sources of cells.
        # The script has its own future statements, and not this file's.
        for name, source in cells.items() if is_notebook else [(str(path), path.read_bytes())]:
            code = compile(source, name, "exec", dont_inherit=True)
            exec(code, sys.modules["__main__"].__dict__)

    return run


def cells_of(notebook: Path) -> dict[str, str]:
    """The code cells of a notebook: name, as tracebacks have it, -> source, without lines that only IPython reads.

    UsageError: the file is no notebook.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{notebook.name} is no notebook of version 4: {type(error).__name__} {error}") from None
    found = {f"{notebook} cell {number}": python_of(source) for number, source in enumerate(sources, 1)}
    for name, source in found.items():  # Tracebacks and reports read lines there.
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return found


def python_of(source: str) -> str:
    """The cell with "pass" in place of lines that begin with % or !, where it is no Python without that.

    A cell of another language is empty.
    """
    with suppress(SyntaxError):
        compile(source, "", "exec", dont_inherit=True)
        return source
    first = source.lstrip().partition("\n")[0]
    if first.startswith("%%") and first.split()[0] not in ("%%time", "%%timeit", "%%capture"):
        return ""
    return re.sub(r"^([ \t]*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


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

"""Runs client code of the closed bluewalm module on memcheck, unchanged."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from memcheck.compat import install
from memcheck.core.errors import MemcheckError, UsageError

USAGE = """usage: python -m memcheck.compat SCRIPT [ARGS]
       python -m memcheck.compat -m MODULE [ARGS]

Runs SCRIPT or MODULE as python itself would. There, and in every Python that it starts, bluewalm,
bluewalm.softplus_attention and torch.ops.bluewalm_extension are memcheck's modules and operators.
"""


def prepare_script(script: str) -> Callable[[], object]:
    """Like `python SCRIPT`: the script's folder is first on the path, in place of the current one."""
    path = Path(os.path.abspath(script))
    if not path.is_file():
        raise UsageError(f"there is no script '{script}'")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(path.resolve().parent)

    def run() -> None:
        # Unlike runpy's, this __main__ stays alive for threads and exit handlers.
        sys.modules["__main__"] = ModuleType("__main__")
        sys.modules["__main__"].__file__ = str(path)
        # Without inheriting this file's future statements.
        code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
        exec(code, sys.modules["__main__"].__dict__)

    return run


def prepare_module(name: str) -> Callable[[], object]:
    """Like `python -m MODULE`."""
    # Only the package is looked up: looking into it would import it, and it may import bluewalm.
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise UsageError(f"there is no module '{name}'")
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def prepare(words: list[str]) -> Callable[[], object]:
    """The function that runs the script or module of the command line. UsageError if there is none."""
    prepare_what = prepare_module if words[:1] == ["-m"] else prepare_script
    sys.argv = words[1:] if words[:1] == ["-m"] else words
    if not sys.argv or sys.argv[0].startswith("-"):
        raise UsageError(f"SCRIPT or -m MODULE must come first, got {sys.argv[0] if sys.argv else 'nothing'}")
    return prepare_what(sys.argv[0])


def install_everywhere() -> None:
    """Installs compat here, and in every Python that this process starts."""
    try:
        added = install()
    except ImportError as error:
        raise MemcheckError(str(error)) from error
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([inherited, *added] if inherited else added)


def main() -> None:
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return
    try:
        run = prepare(words)
        install_everywhere()
    except UsageError as error:
        sys.exit(complain(f"{error} (see python -m memcheck.compat --help)", error.exit_code))
    except MemcheckError as error:
        sys.exit(complain(str(error), error.exit_code))
    run()


def complain(message: str, exit_code: int) -> int:
    """Prints the message and returns the exit code."""
    print("memcheck:", message, file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()

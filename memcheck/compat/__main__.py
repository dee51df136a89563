"""Runs client code of the closed bluewalm module on memcheck, unchanged."""

from __future__ import annotations

import os
import sys

from memcheck.compat import install
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.python_command import prepare

USAGE = """usage: python -m memcheck.compat SCRIPT [ARGS]
       python -m memcheck.compat -m MODULE [ARGS]

Runs SCRIPT or MODULE as python itself would. There, and in every Python that it starts, bluewalm,
bluewalm.softplus_attention and torch.ops.bluewalm_extension are memcheck's modules and operators.
"""


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

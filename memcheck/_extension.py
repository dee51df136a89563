"""The only importer of the compiled module memcheck._C, which the operators and measuring on the CPU need.

Importing this module registers torch.ops.memcheck, with derivatives and checks. Where the extension is missing the
import succeeds all the same, and whatever needs it raises an ExtensionError. An extension calls into the torch it was
compiled against, so under any other it is not loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from memcheck.core.errors import ExtensionError

FOLDER = Path(__file__).resolve().parent


def build_command() -> str:
    source = f"-e {FOLDER.parent}" if (FOLDER.parent / "setup.py").is_file() else "PATH_TO_MEMCHECK"
    return f"pip install --no-build-isolation {source}"


def why_missing() -> str | None:
    """The state of an extension that cannot be loaded; None if it can be.

    With MEMCHECK_EXTENSION=0 it is left out at run time, too.
    """
    if os.environ.get("MEMCHECK_EXTENSION") == "0" or not getattr(BUILD, "EXTENSION", True):
        return "left out by MEMCHECK_EXTENSION=0"
    if BUILD is None or importlib.util.find_spec("memcheck._C") is None:
        return f"not built in {FOLDER}"
    if torch.__version__ != BUILD.TORCH_VERSION:
        return f"built against torch {BUILD.TORCH_VERSION}, and this is torch {torch.__version__}"
    return None


# What setup.py wrote of the build; None if it never ran.
BUILD: Any = importlib.util.find_spec("memcheck._build") and importlib.import_module("memcheck._build")
MISSING = why_missing()


def extension(user: str) -> Any:
    """The compiled module. user: what needs it, such as an operator's name.

    ExtensionError: it is missing.
    """
    if MISSING is not None:
        raise ExtensionError(
            f"{user} needs memcheck's compiled extension, which is {MISSING}; build it: {build_command()}"
        )
    return _C


class MissingOperators:
    """Stands for torch.ops.memcheck and all below it: a call raises the error that says how to build the extension."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> MissingOperators:
        if name.startswith("_"):
            raise AttributeError(name)
        return MissingOperators(self._name if name == "default" else f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return extension(self._name)


if MISSING is None:
    _C: Any = importlib.import_module("memcheck._C")

    # By name, as measuring imports this module and knows no operator.
    importlib.import_module("memcheck.ops.checks")
    importlib.import_module("memcheck.ops.derivatives")
else:
    torch.ops.memcheck = MissingOperators("memcheck")  # type: ignore[attr-defined]

    def __getattr__(name: str) -> Any:
        if name == "_C":
            return extension("memcheck._C")
        raise AttributeError(f"module 'memcheck._extension' has no attribute {name!r}")

"""The only importer of the compiled module: `from memcheck._extension import _C`.

An extension calls into the torch it was compiled against, so under any other it is refused before it is loaded.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

__all__ = ["_C"]


def build_command() -> str:
    root = Path(__file__).resolve().parent.parent
    source = f"-e {root}" if (root / "setup.py").is_file() else "PATH_TO_MEMCHECK"
    return f"pip install --no-build-isolation {source}"


if not all(importlib.util.find_spec(f"memcheck.{module}") for module in ("_C", "_build")):
    raise ImportError(f"{Path(__file__).parent} lacks its compiled module memcheck._C; build it: {build_command()}")

from memcheck import _build  # noqa: E402

if torch.__version__ != _build.TORCH_VERSION:
    raise ImportError(
        f"memcheck was built against torch {_build.TORCH_VERSION}, and this is torch {torch.__version__}; "
        f"rebuild it: {build_command()}"
    )

from memcheck import _C  # type: ignore[attr-defined]  # noqa: E402

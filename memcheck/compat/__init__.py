"""Runs client code of the closed bluewalm module on memcheck. It has that module's names, shapes and defaults, no code.

`python -m memcheck.compat SCRIPT ARGS` runs a script unchanged. `memcheck.compat.install()` does the same for the
current process: `bluewalm`, `bluewalm.softplus_attention` and `torch.ops.bluewalm_extension` are then memcheck's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["install"]

# The folder with our package named bluewalm, and the folder with memcheck. Processes started by multiprocessing inherit
# the search path, but not sys.modules.
SEARCH_PATH = Path(__file__).parent / "search_path"
ENTRIES = (str(SEARCH_PATH), str(Path(__file__).parents[2]))


def foreign_bluewalm() -> str | None:
    """The path of an installed bluewalm that is not ours; None without one. A folder without __init__.py is none."""
    spec = importlib.util.find_spec("bluewalm")
    if spec is None or spec.origin is None or Path(spec.origin).is_relative_to(SEARCH_PATH):
        return None
    return spec.origin


def install() -> list[str]:
    """Makes the closed module's names resolve to memcheck's. A second call does nothing.

    Returns:
        The entries that it appended to sys.path.

    Raises:
        ImportError: the real bluewalm is installed.
    """
    if where := foreign_bluewalm():
        raise ImportError(f"compat: another bluewalm is there, {where}; remove it, or do without compat")
    added = [entry for entry in ENTRIES if entry not in sys.path]
    sys.path.extend(added)
    importlib.import_module("bluewalm")
    return added

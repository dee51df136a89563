"""Client code of the closed bluewalm module runs on memcheck: its names, shapes and defaults, and nothing of its code.

`python -m memcheck.compat SCRIPT ARGS` runs a script as it is; `memcheck.compat.install()` does for the process at hand
what that does: `bluewalm`, `bluewalm.softplus_attention` and `torch.ops.bluewalm_extension` are then memcheck's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["install"]

# A folder that holds a package of the name bluewalm, and the one that holds memcheck. Being on the path, rather than in
# sys.modules, is what a process started by multiprocessing takes over.
SEARCH_PATH = Path(__file__).parent / "search_path"
ENTRIES = (str(SEARCH_PATH), str(Path(__file__).parents[2]))


def foreign_bluewalm() -> str | None:
    """Where a bluewalm that is not ours is installed. A folder of that name without an __init__.py is none."""
    spec = importlib.util.find_spec("bluewalm")
    if spec is None or spec.origin is None or Path(spec.origin).is_relative_to(SEARCH_PATH):
        return None
    return spec.origin


def install() -> list[str]:
    """Makes the closed module's names resolve to memcheck's. A second time it does nothing.

    Returns:
        What it appended to sys.path.

    Raises:
        ImportError: a real bluewalm is installed; it is not shadowed.
    """
    if where := foreign_bluewalm():
        raise ImportError(f"compat: another bluewalm is there, {where}; remove it, or do without compat")
    added = [entry for entry in ENTRIES if entry not in sys.path]
    sys.path.extend(added)
    importlib.import_module("bluewalm")
    return added

"""Python runs this module when it starts: it simulates the GPU of MEMCHECK_SIMULATED before torch is imported.

Then it runs the user's own sitecustomize, which this one hides.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

HERE = Path(__file__).parent


class BeforeTorch:
    """An entry of sys.meta_path that simulates the GPU when torch is looked for, as most processes need no torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if "memcheck.simulated.library" not in sys.modules:  # Else this process simulates a GPU by itself.
            simulate()
        return importlib.util.find_spec(name)


def simulate() -> None:
    root = str(HERE.parents[2])
    sys.path.insert(0, root)  # memcheck may be on the path of the process that started this one alone.
    try:
        from memcheck.simulated import simulate_as_parent
        from memcheck.simulated.saving import leave_out_stand_ins
    finally:
        sys.path.remove(root)
    simulate_as_parent()
    leave_out_stand_ins()


sys.path[:] = [folder for folder in sys.path if folder != str(HERE)]
sys.meta_path.insert(0, BeforeTorch())
if (hidden := PathFinder.find_spec("sitecustomize")) and hidden.loader:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(hidden)
    hidden.loader.exec_module(sys.modules["sitecustomize"])

"""Python runs this module when it starts: it simulates the GPU of MEMCHECK_SIMULATED when torch is first imported.

Then it runs the user's own sitecustomize, which this one hides.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).parent


class BeforeTorch:
    """A finder that finds nothing, and simulates the GPU before others find torch."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name == "torch":
            sys.meta_path.remove(self)
            simulate(os.environ["MEMCHECK_SIMULATED"])


def simulate(text: str) -> None:
    """Simulates the GPU of "DEVICE;LIMIT;GPUS"."""
    device, limit, gpus = text.split(";")
    root = str(HERE.parents[2])
    sys.path.insert(0, root)  # memcheck may be on the path of the process that started this one alone.
    try:
        from memcheck import simulated
        from memcheck.simulated.saving import leave_out_stand_ins
    finally:
        sys.path.remove(root)
    if simulated.simulated_device() is None:
        simulated.simulate(device, memory_limit=limit or None, gpus=int(gpus))
        leave_out_stand_ins()


sys.path[:] = [folder for folder in sys.path if folder != str(HERE)]
if "MEMCHECK_SIMULATED" in os.environ:
    sys.meta_path.insert(0, BeforeTorch())
if (hidden := PathFinder.find_spec("sitecustomize")) and hidden.loader:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(hidden)
    hidden.loader.exec_module(sys.modules["sitecustomize"])

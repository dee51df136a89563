"""A folder on PYTHONPATH, whose sitecustomize.py simulates the GPU in the Python processes that a script starts."""

import os
from pathlib import Path

from memcheck.simulated import simulate
from memcheck.simulated.saving import leave_out_stand_ins
from memcheck.simulated.world import World

FOLDER = str(Path(__file__).parent)


def simulate_with_children(
    device: str, memory_limit: int | None = None, gpus: int = 1, world: World | None = None
) -> None:
    """Simulates the GPUs for a script: in this process, and in those that it starts."""
    simulate(device, memory_limit=memory_limit, gpus=gpus, world=world)
    leave_out_stand_ins()
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", FOLDER)]
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *others])

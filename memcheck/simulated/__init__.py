"""Simulated GPUs: torch's own device cuda:0 on a machine without one, with addresses and no memory.

PyTorch runs as on a GPU, with its own dispatch, autograd and allocator settings; kernels compute sizes alone. This
module imports no torch, as a GPU is simulated before torch is imported.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from memcheck.core.devices import DEVICES, Device, device_named
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.units import parse_bytes

if TYPE_CHECKING:
    from memcheck.simulated.library import Target
    from memcheck.simulated.world import World

# For child processes: the device, the limit in bytes, the number of GPUs, and of a rank of torchrun's its rank and
# their number.
VARIABLE = "MEMCHECK_SIMULATED"
_target: list[Target] = []


def simulate(
    device: str | Device, *, memory_limit: int | str | None = None, gpus: int = 1, world: World | None = None
) -> None:
    """Lets torch, imported afterwards, find this GPU. It stays until the process ends.

    Args:
        device: a GPU of the catalog, such as "A100-80GB", or a size, such as "40GiB".
        memory_limit: bytes, or a text such as "40GiB", that torch's allocator may reserve of each GPU.
        gpus: how many of them there are.
        world: the ranks of torchrun's, if this process is one of them.

    Raises:
        UsageError: there is no such GPU, torch is imported already, or a different one is simulated.
        ExtensionError: the library that simulates is missing and cannot be compiled.
    """
    target = target_of(device, memory_limit, gpus)
    if _target:
        if _target[0] == target:
            return
        raise UsageError(f"this process simulates {_target[0].device.name} already")
    if "torch" in sys.modules:
        raise UsageError(
            "torch is imported already, and it looks for GPUs once: call memcheck.simulate before anything imports "
            "torch (in a notebook: restart the kernel, and begin with it), or run the script by memcheck run --device"
        )
    from memcheck.simulated.load import load
    from memcheck.simulated.threads import keep_threads
    from memcheck.simulated.world import answer_groups, enter

    load(target)
    answer_groups()
    keep_threads()
    _target.append(target)
    ranks = ""
    if world is not None:
        enter(world)
        ranks = f"{world.rank},{world.ranks}"
    os.environ[VARIABLE] = f"{target.device.name};{target.limit_bytes or ''};{gpus};{ranks}"


def simulate_as_parent() -> None:
    """Simulates the GPU of the process that started this one, if it simulates one."""
    if (text := os.environ.get(VARIABLE)) and "torch" not in sys.modules:
        from memcheck.simulated.world import World

        device, limit, gpus, ranks = text.split(";")
        rank, _, of = ranks.partition(",")
        world = World(int(rank), int(of), int(gpus)) if ranks else None
        simulate(device, memory_limit=int(limit) if limit else None, gpus=int(gpus), world=world)


def simulated_device() -> Device | None:
    """The GPU that this process simulates; None if it simulates none."""
    return _target[0].device if _target else None


def target_of(device: str | Device, memory_limit: int | str | None, gpus: int) -> Target:
    from memcheck.simulated.library import Target

    found = device if isinstance(device, Device) else device_named(device)
    if found.kind != "cuda" or found.usable_bytes is None:
        raise UsageError(f"{named('device')} {found.name} is no GPU that can be simulated; known: {', '.join(DEVICES)}")
    if gpus < 1:
        raise UsageError(f"gpus must be at least 1, got {gpus}")
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    return Target(found, limit, gpus)

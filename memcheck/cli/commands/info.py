"""`memcheck info`: versions, the build, kernels, and the devices of this machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch

from memcheck._extension import BUILD, MISSING, build_command, extension
from memcheck.cli.requests import Info
from memcheck.core.version import __version__
from memcheck.simulated.build import state

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE")


def run(request: Info) -> int:
    facts = gather()
    print(json.dumps(facts, indent=2) if request.format == "json" else "\n".join(lines(facts)))
    return 0


def gather() -> dict[str, Any]:
    """Sections of name -> value for JSON. None is unknown or unset; sizes are bytes."""
    return {
        "versions": {"memcheck": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "build": build(),
        "kernels": kernels(),
        "cpu": {**cpu_choices(), "threads": torch.get_num_threads()},
        "cuda": {"torch_cuda": torch.version.cuda, "launch": cuda_launch(), "gpus": gpus()},
        "allocator": {name: os.environ.get(name) for name in ALLOCATOR_VARIABLES},
    }


def build() -> dict[str, Any]:
    """Whether the extension and the library that simulates GPUs are there, and what setup.py noted."""
    facts = {
        "torch": "TORCH_VERSION",
        "compiler": "COMPILER",
        "flags": "COMPILE_FLAGS",
        "cuda_toolkit": "CUDA_VERSION",
        "cuda_architectures": "CUDA_ARCH_LIST",
        "cuda_left_out": "CUDA_LEFT_OUT",
    }
    loaded = "loaded" if MISSING is None else f"{MISSING}; build it: {build_command()}"
    noted = {name: getattr(BUILD, fact, None) for name, fact in facts.items()}
    return {"extension": loaded, "simulated_gpu": state(), **noted}


def cpu_choices() -> dict[str, Any]:
    """What the extension has chosen for this processor; None without it."""
    if MISSING is not None:
        return dict.fromkeys(("level", "levels"))
    compiled = extension("memcheck info")
    return {"level": compiled.cpu_level(), "levels": compiled.cpu_levels()}


def kernels() -> dict[str, list[str]]:
    """Operator -> the devices that have kernels for it, from the dispatcher.

    The projections' products are torch's own, on CUDA too; a build of torch without CUDA has none.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)
    operators = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("memcheck::"))
    return {name: [key for key in keys if has_kernel(name, key)] for name in operators}


def cuda_launch() -> str | None:
    """The result of launching an empty kernel of this build. None if the build has no CUDA kernels."""
    if MISSING is not None or BUILD.CUDA_VERSION is None:
        return None
    error = extension("memcheck info").cuda_probe()
    return "ok" if error is None else f"fails: {error}"


def gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append({"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"})
    return found


def lines(facts: dict[str, Any]) -> Iterator[str]:
    for section, values in facts.items():
        yield section
        for name, value in values.items():
            yield f"  {name if section in ('kernels', 'allocator') else name.replace('_', ' ')}: {text_of(value)}"
        if not values:
            yield "  none"


def text_of(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        separator = ", " if len(value) < 4 else " "
        return separator.join(map(text_of, value))
    if isinstance(value, dict):
        return f"{value['name']}, {value['memory_bytes'] / 2**30:.1f} GiB, capability {value['capability']}"
    return str(value)

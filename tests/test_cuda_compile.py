"""Kernels compile, link and load without torch or a GPU, and a launch without one answers instead of crashing."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from host_cuda.resources import CSRC, compile_kernels, resources


@pytest.mark.slow
def test_kernels_compile_link_and_load(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    nvcc = require_tool("nvcc")
    objects, _ = compile_kernels()
    library = tmp_path / "kernels.so"
    # Linked statically, as cudart is by default, the library loads where there is no driver.
    subprocess.run([nvcc, "-shared", "-cudart=static", *objects, "-o", library], check=True)

    probe = ctypes.CDLL(str(library)).launch_cuda_probe
    probe.argtypes = [ctypes.c_void_p]
    probe.restype = ctypes.c_char_p
    error = probe(None)
    # None where there is a GPU.
    assert error is None or b"CUDA" in error


@pytest.mark.slow
def test_what_kernels_take_is_known_for_every_architecture(require_tool: Callable[[str], str]) -> None:
    require_tool("nvcc")
    rows = resources(compile_kernels()[1])
    kernels = {name: [row["kernel"] for row in rows if row["architecture"] == name] for name in ("sm_80", "sm_90")}
    assert sorted(kernels["sm_80"]) == sorted(kernels["sm_90"])
    instantiated = {str(name).partition("<")[0].rpartition("::")[2] for name in kernels["sm_80"]}
    assert instantiated == {name for path in CSRC.rglob("*.cu*") for name in written_kernels(path)}


def written_kernels(path: Path) -> list[str]:
    return re.findall(r"__global__\s+void\s+(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)\s*", "", path.read_text()))

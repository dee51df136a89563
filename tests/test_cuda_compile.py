"""Kernels compile, link and load without torch or a GPU, and a launch without one answers instead of crashing."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
ARCHITECTURES = ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]


@pytest.mark.slow
def test_kernels_compile_link_and_load(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    nvcc = require_tool("nvcc")
    library = tmp_path / "kernels.so"
    sources = sorted(map(str, CSRC.rglob("*.cu")))
    architectures = [f"-gencode={architecture}" for architecture in ARCHITECTURES]
    # Linked statically, as cudart is by default, the library loads where there is no driver.
    command = [nvcc, "-shared", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", "--threads=2", "-cudart=static"]
    ended = subprocess.run(
        [*command, *architectures, f"-I{CSRC}", *sources, "-o", library], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr

    probe = ctypes.CDLL(str(library)).launch_cuda_probe
    probe.argtypes = [ctypes.c_void_p]
    probe.restype = ctypes.c_char_p
    error = probe(None)
    # None where there is a GPU.
    assert error is None or b"CUDA" in error

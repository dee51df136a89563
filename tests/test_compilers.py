"""Every C++ file compiles with the oldest gcc we promise, with clang, and for aarch64, without a warning."""

import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# The stand-in for CUDA includes CUDA's headers, and is built by its own tests.
SOURCES = sorted(set(CSRC.rglob("*.cpp")) - set(CSRC.rglob("host_cuda/*.cpp")))
# What setup.py passes, but for the optimisation.
FLAGS = [
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wall",
    "-Werror",
]
# -Wall finds torch's own headers wanting under some compilers: they are not ours to warn about.
INCLUDES = [f"-I{CSRC}", *(f"-isystem{folder}" for folder in [*include_paths(), sysconfig.get_path("include")])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        # C++17 is what torch 2.11 asks for, C++20 what 2.13 does.
        # gcc sees indices out of bounds, and what may be uninitialised, only where it optimises. The others need not
        # see them again: -O0 still generates code, where clang finds instructions that a function may not use.
        pytest.param("g++-11", ["-std=c++17", "-O1", "-fopenmp"], id="gcc 11"),
        pytest.param("clang++", ["-std=c++20", "-O0", "-include", "common/parallel_clang.h"], id="clang"),
        pytest.param("aarch64-linux-gnu-g++", ["-std=c++17", "-fsyntax-only", "-fopenmp"], id="aarch64"),
    ],
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_file_compiles(
    source: Path, compiler: str, flags: list[str], require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    # Debian keeps pyconfig.h by architecture. To compile, though not to run, this machine's will do for the other.
    (tmp_path / "aarch64-linux-gnu").symlink_to(f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}")
    command = [require_tool(compiler), *FLAGS, *flags, *INCLUDES, f"-isystem{tmp_path}", "-c", source]
    ended = subprocess.run([*command, "-o", tmp_path / "object.o"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-20_000:]

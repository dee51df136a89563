"""Every C++ file compiles with the oldest gcc we promise, with clang, and for aarch64, without a warning."""

import os
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# What setup.py passes, but for the optimisation, and the standard that torch passes.
FLAGS = [
    "-O1",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-std=c++20",
]
# -Wall finds torch's own headers wanting under some compilers: they are not ours to warn about.
INCLUDES = [f"-I{CSRC}", *(f"-isystem{folder}" for folder in [*include_paths(), sysconfig.get_path("include")])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        ("g++-11", ["-fopenmp"]),
        ("clang++", ["-include", "common/parallel_clang.h"]),
        ("aarch64-linux-gnu-g++", ["-fopenmp"]),
    ],
)
def test_every_file_compiles(
    compiler: str, flags: list[str], require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    # Debian keeps pyconfig.h by architecture. To compile, though not to run, this machine's will do for the other.
    (tmp_path / "aarch64-linux-gnu").symlink_to(f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}")
    command = [require_tool(compiler), *FLAGS, *flags, *INCLUDES, f"-isystem{tmp_path}", "-c"]

    def compile_file(source: Path) -> str:
        target = tmp_path / f"{source.stem}.o"
        ended = subprocess.run([*command, source, "-o", target], capture_output=True, text=True, timeout=300)
        return "" if ended.returncode == 0 else f"{source}\n{ended.stderr}"

    # The largest first, so that no core waits for it at the end.
    sources = sorted(CSRC.rglob("*.cpp"), key=lambda source: source.stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = "\n".join(filter(None, pool.map(compile_file, sources)))
    assert not errors, errors[-20_000:]

"""Every C++ file compiles with the oldest gcc we promise, with clang, and for aarch64, without a warning."""

import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from one_unit import one_unit
from torch.utils.cpp_extension import include_paths

from memcheck.simulated.flags import ALLOCATOR_FILES, CPU_FILES, gpu_files

pytestmark = pytest.mark.ci

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = sorted(CSRC.rglob("*.cpp"))
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


COMPILERS = {
    # C++17 is what torch 2.11 asks for, C++20 what 2.13 does.
    # gcc sees indices out of bounds, and what may be uninitialised, only where it optimises. The others need not
    # see them again: -O0 still generates code, where clang finds instructions that a function may not use.
    "gcc 11": ("g++-11", ["-std=c++17", "-O1", "-fopenmp"]),
    "gcc 11, alone": ("g++-11", ["-std=c++17", "-fsyntax-only", "-fopenmp"]),
    "clang": ("clang++", ["-std=c++20", "-O0"]),
    "aarch64": ("aarch64-linux-gnu-g++", ["-std=c++17", "-fsyntax-only", "-fopenmp"]),
}
# The glue and the autograd of operators.
REGISTERING = [
    source for source in SOURCES if re.search(r"common/torch/(registration|autograd)\.h", source.read_text())
]


SIMULATED = CSRC / "simulated"
UNITS = {
    "registering": REGISTERING,
    "simulated GPU": [SIMULATED / name for name in gpu_files(path.name for path in SIMULATED.glob("*.cpp"))],
    "simulated CPU": [SIMULATED / name for name in CPU_FILES],
    "allocator": [SIMULATED / name for name in ALLOCATOR_FILES],
}


def units_of(compiler: str) -> dict[str, list[Path]]:
    """What it is given at once, by a name: files that share most of their headers are one unit. gcc 11 alone sees each
    of those that register by itself, too, so what one forgot to include."""
    if compiler == "gcc 11, alone":
        return {source.name: [source] for source in REGISTERING}
    units = dict(UNITS)
    in_units = {source for sources in units.values() for source in sources}
    for source in SOURCES:
        if source not in in_units:
            units.setdefault(source.parent.name, []).append(source)
    return units


@pytest.mark.parametrize(
    ("sources", "compiler"),
    [
        pytest.param(sources, compiler, id=f"{name}-{compiler}")
        for compiler in COMPILERS
        for name, sources in units_of(compiler).items()
    ],
)
def test_every_file_compiles(
    sources: list[Path], compiler: str, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    # Debian keeps pyconfig.h by architecture. To compile, though not to run, this machine's will do for the other.
    (tmp_path / "aarch64-linux-gnu").symlink_to(f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}")
    source = sources[0] if len(sources) == 1 else one_unit(sources, tmp_path / "unit.cpp")
    tool, flags = COMPILERS[compiler]
    command = [require_tool(tool), *FLAGS, *flags, *INCLUDES, f"-isystem{tmp_path}", "-c", source]
    ended = subprocess.run([*command, "-o", tmp_path / "object.o"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-20_000:]

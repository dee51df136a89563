"""The library that simulates GPUs compiles against the oldest and the newest torch that memcheck names.

Their wheels for macOS are downloaded, as those are the smallest ones that have torch's headers: 80 and 139 MB. Whether
the library links with these versions and what it does there needs the versions themselves: see docs/install.md.
"""

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from memcheck.simulated import build
from memcheck.simulated.flags import CPU_FILES, gpu_files

SMALLEST = ("macosx_11_0_arm64", "macosx_14_0_arm64")


@pytest.fixture(scope="module", params=["2.11.0", "2.15.0"])
def headers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a torch's headers."""
    folder = tmp_path_factory.mktemp("torch")
    platforms = [f"--platform={name}" for name in SMALLEST]
    asked = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", *platforms, f"torch=={request.param}"]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *asked]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("torch/include/")])
    return folder / "torch" / "include"


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["library", "rules", "cpu"])
def test_it_compiles(part: str, headers: Path, require_tool: Callable[[str], str]) -> None:
    library = gpu_files(path.name for path in (build.sources() / "simulated").glob("*.cpp"))
    members = {"library": library, "rules": ["rules.cpp"], "cpu": CPU_FILES}[part]
    includes = [headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    command = [require_tool("g++"), "-fsyntax-only", *build.COMPILE_FLAGS, "-DTORCH_EXTENSION_NAME=_simulated_rules"]
    command += [f"-I{build.sources()}", *(f"-isystem{folder}" for folder in includes), "-x", "c++", "-"]
    unit = "".join(f'#include "simulated/{name}"\n' for name in members)
    ended = subprocess.run(command, input=unit, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-20_000:]

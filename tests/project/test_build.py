"""Building and importing: what is missing is said in one message, and what is unchanged is not compiled again."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import torch
from torch.utils.cpp_extension import include_paths

from memcheck._extension import _C
from memcheck.core.version import __version__
from memcheck.simulated.flags import ALLOCATOR_FILES, CPU_FILES

ROOT = Path(__file__).resolve().parents[2]


def run_python(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def fork_python(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """For variables that memcheck alone reads."""
    return forked.run_python("-c", code, cwd=cwd, env={**os.environ, **environment}, timeout=120)


def import_error(code: str, cwd: Path = ROOT, **environment: str) -> str:
    """The last line of the traceback, which must be the only one."""
    ended = fork_python(code, cwd, **environment)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    return ended.stderr.splitlines()[-1]


USE = "import memcheck; memcheck.linear_r(torch.ones(1, 2, 2), torch.ones(2, 2))"


def test_another_torch_is_refused() -> None:
    said = import_error(f"import torch; torch.__version__ = '1.2.3'; {USE}")
    assert said == (
        "memcheck.core.errors.ExtensionError: memcheck.linear_r needs memcheck's compiled extension, which is built "
        f"against torch {torch.__version__}, and this is torch 1.2.3; "
        f"build it: pip install --no-build-isolation -e {ROOT}"
    )


def test_a_source_tree_without_its_extension_says_so(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "memcheck", tmp_path / "memcheck", ignore=shutil.ignore_patterns("*.so", "_build.py"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    said = import_error(f"import torch; {USE}", cwd=tmp_path)
    assert said == (
        "memcheck.core.errors.ExtensionError: memcheck.linear_r needs memcheck's compiled extension, which is not "
        f"built in {tmp_path / 'memcheck'}; build it: pip install --no-build-isolation -e {tmp_path}"
    )


def test_importing_memcheck_leaves_torch_compile_alone() -> None:
    """It takes as long as torch does."""
    code = "import sys, torch; before = 'torch._dynamo' in sys.modules; import memcheck.__main__; "
    assert run_python("-c", code + "print(before, 'torch._dynamo' in sys.modules)").stdout in (
        "False False\n",
        "True True\n",
    )


LEVELS = ("avx2", "avx512")


def test_cpu_levels() -> None:
    assert _C.cpu_levels() == list(LEVELS)[: len(_C.cpu_levels())]
    assert _C.cpu_level() == os.environ.get("MEMCHECK_CPU", _C.cpu_levels()[-1])


@pytest.mark.parametrize("level", LEVELS)
def test_the_cpu_level_is_lowered(level: str) -> None:
    code = "from memcheck._extension import _C; print(_C.cpu_level())"
    if level in _C.cpu_levels():
        assert fork_python(code, MEMCHECK_CPU=level).stdout == f"{level}\n"
    else:
        said = import_error(code, MEMCHECK_CPU=level)
        assert f"MEMCHECK_CPU={level} asks for more than this machine has" in said


def test_16_bit_products_of_many_rows_need_instructions() -> None:
    assert _C.cpu_multiplies(dtype="float32", rows=100)
    assert _C.cpu_multiplies(dtype="bfloat16", rows=3)
    code = "from memcheck._extension import _C; f = _C.cpu_multiplies;"
    code += "print(f(dtype='bfloat16', rows=4), f(dtype='float16', rows=4))"
    if "avx2" in _C.cpu_levels():
        assert fork_python(code, MEMCHECK_CPU="avx2").stdout == "False False\n"


@pytest.mark.parametrize(
    "value", ["", pytest.param("AVX2", marks=pytest.mark.ci), pytest.param("sse", marks=pytest.mark.ci)]
)
def test_a_wrong_cpu_level_fails_the_import(value: str) -> None:
    said = import_error("import memcheck", MEMCHECK_CPU=value)
    assert f"MEMCHECK_CPU must be avx2 or avx512, got '{value}'" in said


def setup_for_cuda(tmp_path: Path, torch_has: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py under a torch that says it is a CUDA build, beside something that says it is nvcc."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    code = (
        f"import runpy, sys, types, torch; torch.version.cuda = '13.0'; {torch_has}\n"
        "sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py')"
    )
    return run_python("-c", code, CUDA_HOME=str(tmp_path), MEMCHECK_CUDA="1", **environment)


@pytest.mark.parametrize(
    ("listed", "old"),
    [
        pytest.param("7.5", "7.5", marks=pytest.mark.ci),
        ("6.1 7.5+PTX;8.0;9.0a", "6.1, 7.5+PTX"),
        pytest.param("Turing;Ampere", "Turing", marks=pytest.mark.ci),
    ],
)
def test_building_for_old_gpus_is_refused_in_a_line(listed: str, old: str, tmp_path: Path) -> None:
    ended = setup_for_cuda(tmp_path, TORCH_CUDA_ARCH_LIST=listed)
    assert ended.returncode == 1
    # A CUDA build of torch warns first that there is no GPU.
    assert ended.stderr.endswith(
        "memcheck's CUDA kernels need GPUs of compute capability 8.0 or later, "
        f"but TORCH_CUDA_ARCH_LIST='{listed}' asks for {old}; "
        "MEMCHECK_CUDA=0 builds without them, TORCH_CUDA_ARCH_LIST=8.0 for other GPUs\n"
    )


def test_building_for_newer_gpus_goes_on(tmp_path: Path) -> None:
    home = f"import torch.utils.cpp_extension; torch.utils.cpp_extension.CUDA_HOME = {str(tmp_path)!r}"
    ended = setup_for_cuda(tmp_path, home, TORCH_CUDA_ARCH_LIST="8.0;8.6 9.0a 10.0f Ampere Hopper 12.0+PTX")
    assert ended.returncode == 0, ended.stderr


def test_building_beside_an_old_gpu_is_refused_in_a_line(tmp_path: Path) -> None:
    gpus = (
        "torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2; "
        "torch.cuda.get_device_properties = lambda i: types.SimpleNamespace(name=['Tesla T4', 'NVIDIA A10'][i], "
        "major=[7, 8][i], minor=[5, 6][i])"
    )
    ended = setup_for_cuda(tmp_path, gpus, TORCH_CUDA_ARCH_LIST="")
    assert ended.returncode == 1
    assert ended.stderr == (
        "memcheck's CUDA kernels need GPUs of compute capability 8.0 or later, "
        "but of this machine's GPUs Tesla T4 has 7.5; "
        "MEMCHECK_CUDA=0 builds without them, TORCH_CUDA_ARCH_LIST=8.0 for other GPUs\n"
    )


def test_memcheck_cuda_is_checked() -> None:
    ended = run_python("setup.py", "--name", MEMCHECK_CUDA="yes")
    assert ended.returncode == 1
    assert "MEMCHECK_CUDA must be auto, 0 or 1, got 'yes'" in ended.stderr


@pytest.mark.smoke
def test_asking_for_cuda_kernels_without_nvcc_fails(tmp_path: Path) -> None:
    ended = run_python("setup.py", "--name", MEMCHECK_CUDA="1", CUDA_HOME=str(tmp_path))
    assert ended.returncode == 1
    assert "MEMCHECK_CUDA=1 asks for CUDA kernels, which need" in ended.stderr
    assert f"nvcc (CUDA_HOME is {tmp_path})" in ended.stderr
    assert ("a CUDA build of torch" in ended.stderr) == (torch.version.cuda is None)


def test_an_nvcc_of_another_cuda_is_named(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    code = "import runpy, sys, torch; torch.version.cuda = '13.2'; sys.argv = ['setup.py', '--name']; "
    code += "runpy.run_path('setup.py', run_name='__main__')"
    said = f"nvcc 13, as this torch has ({nvcc} is 11.8.89)"
    asked = run_python("-c", code, MEMCHECK_CUDA="1", CUDA_HOME=str(tmp_path))
    assert asked.returncode == 1
    assert asked.stderr.rstrip().endswith(f"\nMEMCHECK_CUDA=1 asks for CUDA kernels, which need {said}")
    left_to_it = run_python("-c", code, MEMCHECK_CUDA="auto", CUDA_HOME=str(tmp_path))
    assert left_to_it.returncode == 0, left_to_it.stderr
    assert f"CUDA kernels: needs {said}" in left_to_it.stdout


def unimportable_torch(folder: Path, version: str) -> str:
    """A PYTHONPATH with an installed torch of this version, whose import fails in a way that no message covers."""
    (folder / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    metadata = folder / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return str(folder)


def test_a_missing_compiler_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    path = unimportable_torch(tmp_path, "2.13.0")
    ended = run_python("setup.py", "--name", CXX="no-such-compiler", PYTHONPATH=path)
    assert ended.returncode == 1
    assert "memcheck is compiled, by no-such-compiler" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_old_torch_is_named_without_importing_it(tmp_path: Path) -> None:
    """The oldest that will do is that of pyproject.toml."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    ended = run_python("setup.py", "--name", PYTHONPATH=unimportable_torch(tmp_path, "2.9.1+cpu"))
    assert ended.returncode == 1
    assert f"has torch 2.9.1+cpu, older than {oldest[1]}." in ended.stderr
    assert f"pip install 'torch>={oldest[1]}'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_torch_is_named() -> None:
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--name']; "
    ended = run_python("-c", code + "runpy.run_path('setup.py')")
    assert ended.returncode == 1
    assert f"{sys.executable} lacks torch." in ended.stderr
    assert "pip install --no-build-isolation ." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_torch_pip_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")\n")
    words = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", str(tmp_path / "to"), str(ROOT)]
    ended = run_python(*words, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert "cannot import torch (No module named 'torch')" in said
    assert "pip install --no-build-isolation ." in said


def small_project(folder: Path) -> Path:
    """Makes memcheck's project in the folder, with neither Python nor C++ in it. Returns the folder of the C++."""
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "README.md").touch()
    (folder / "memcheck_pytest.py").touch()
    (folder / "memcheck" / "core").mkdir(parents=True)
    (folder / "memcheck" / "__init__.py").touch()
    (folder / "memcheck" / "core" / "__init__.py").touch()
    (folder / "memcheck" / "core" / "version.py").write_text('__version__ = "0"\n')
    (folder / "memcheck" / "simulated").mkdir()
    shutil.copy(ROOT / "memcheck" / "simulated" / "flags.py", folder / "memcheck" / "simulated")
    for name in (*(f"simulated/{name}" for name in ("device.cpp", "rules.cpp", *ALLOCATOR_FILES, *CPU_FILES)),):
        (folder / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "csrc" / name).touch()
    return folder / "csrc"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(["setup.py", "build_ext", "--inplace"], id="build_ext"),
        # What `pip install -e .` calls.
        pytest.param(
            ["-c", "from setuptools import build_meta; build_meta.build_editable('.')"],
            id="editable",
        ),
    ],
)
def test_only_what_changed_is_compiled_again(build: list[str], tmp_path: Path) -> None:
    csrc = small_project(tmp_path)
    (csrc / "one.h").touch()
    (csrc / "one.cpp").write_text('#include "one.h"\n#include <Python.h>\n')
    (csrc / "two.cpp").touch()

    def compiled() -> set[str]:
        """The objects that this build wrote."""
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
        ended = run_python(*build, cwd=tmp_path, MEMCHECK_CUDA="0")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return {path.stem for path in tmp_path.rglob("*.o") if before.get(path) != path.stat().st_mtime_ns}

    assert compiled() == {"one", "two", "simulated", "simulated_cpu", "rules", "allocator"}
    assert compiled() == set()
    (csrc / "two.cpp").touch()
    assert compiled() == {"two"}
    (csrc / "one.h").touch()
    assert compiled() == {"one"}
    (csrc / "simulated" / "device.cpp").touch()
    assert compiled() == {"simulated"}


def test_make_builds_again_what_another_environment_has_built_since(tmp_path: Path, require_tool) -> None:
    """Environments whose pip notes its own torch, as a build does, and that it was called."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("memcheck", "csrc"):
        (tmp_path / name).mkdir()
    for name in ("pyproject.toml", "setup.py", "calls"):
        (tmp_path / name).touch()
    for torch_version in ("2.13.0", "2.15.0"):
        pip = tmp_path / torch_version / "bin" / "pip"
        pip.parent.mkdir(parents=True)
        pip.write_text(f"#!/bin/sh\necho \"TORCH_VERSION = '{torch_version}'\" > memcheck/_build.py; echo >> calls\n")
        pip.chmod(0o755)
        (tmp_path / torch_version / ".torch-installed").touch()

    def calls_for(torch_version: str) -> int:
        command = [require_tool("make"), f"VENV={torch_version}", f"{torch_version}/.memcheck-built"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        assert torch_version in (tmp_path / "memcheck" / "_build.py").read_text()
        return len((tmp_path / "calls").read_text())

    assert [calls_for(name) for name in ("2.13.0", "2.13.0", "2.15.0", "2.15.0", "2.13.0")] == [1, 1, 2, 2, 3]


CONSOLE = """
import os, pathlib, shutil, sys
import memcheck._C
def main():
    assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang++"))), os.environ["PATH"]
    with open("calls", "a") as calls:
        print(*sys.argv[1:], file=calls)
"""
MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C"};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() { return PyModule_Create(&module); }
"""


@pytest.mark.nightly
def test_wheels_are_built_and_tried_without_a_compiler(tmp_path: Path, require_tool) -> None:
    (small_project(tmp_path) / "module.cpp").write_text(MODULE)
    (tmp_path / "memcheck" / "__main__.py").write_text(CONSOLE)
    shutil.copy(ROOT / "Makefile", tmp_path)
    project = tmp_path / "pyproject.toml"
    # Of the dependencies torch alone, so that nothing else is fetched.
    project.write_text(
        re.sub(r"^dependencies = \[.*?^\]", 'dependencies = ["torch"]', project.read_text(), flags=re.M | re.S)
    )
    version = torch.__version__.partition("+")[0]
    command = [require_tool("make"), "wheels", f"TORCH={version}", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "MEMCHECK_CUDA": "0"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    tag = sys.implementation.cache_tag.replace("cpython-", "cp")
    assert wheel.name.startswith(f"memcheck-0+torch{'.'.join(version.split('.')[:2])}cpu-{tag}-")
    (calls,) = tmp_path.glob(".venv-wheels/*-empty/calls")
    assert calls.read_text().splitlines() == ["info", "gradcheck", "profile-attention"]


@pytest.mark.ci
def test_the_sdist_is_made_without_torch_and_complete(tmp_path: Path) -> None:
    """It holds every file that the build reads, and no trace of one."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("memcheck", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    kept = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "memcheck_pytest.py")
    for name in kept:
        shutil.copy(ROOT / name, source)
    ended = run_python("-m", "build", "--sdist", cwd=source)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (sdist,) = (source / "dist").iterdir()
    assert f"memcheck-{__version__}" in sdist.name
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(source)) for path in (source / "csrc").rglob("*") if path.is_file()}
    wanted |= {str(path.relative_to(source)) for path in (source / "memcheck").rglob("*.py")}
    assert wanted - inside == {"memcheck/_build.py"} & wanted
    checked = run_python("-m", "twine", "check", "--strict", str(sdist))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "unit",
    [
        "glue",
        pytest.param("autograd", marks=pytest.mark.nightly),
        pytest.param("module", marks=pytest.mark.nightly),
    ],
)
def test_units_compile_where_apple_is_defined(unit: str, require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """As far as a compiler on Linux can tell. A header stands for macOS's own."""
    (tmp_path / "TargetConditionals.h").write_text("#define TARGET_OS_MAC 1\n#define TARGET_OS_IPHONE 0\n")
    # On macOS int64_t is long long, which this header of torch asserts and the others do not.
    scalar = "c10/core/Scalar.h"
    (tmp_path / scalar).parent.mkdir(parents=True)
    text = next(Path(folder, scalar) for folder in include_paths() if Path(folder, scalar).is_file()).read_text()
    (tmp_path / scalar).write_text(text.replace("__APPLE__", "INT64_IS_LONG_LONG"))

    sources = [tmp_path / "unit.cpp", ROOT / "csrc" / "common" / "torch" / "parallel.cpp"]
    shutil.copy(ROOT / "build" / "units" / f"{unit}.cpp", sources[0])
    includes = [f"-isystem{folder}" for folder in [*include_paths(), sysconfig.get_path("include")]]
    command = [require_tool("g++"), "-fsyntax-only", "-std=c++20", "-Wall", "-Werror", "-U__linux__", "-D__APPLE__"]
    ended = subprocess.run(
        [*command, f"-isystem{tmp_path}", f"-I{ROOT / 'csrc'}", *includes, *sources],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-20_000:]

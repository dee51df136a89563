"""Building and importing: what is missing is said in one message, and what is unchanged is not compiled again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memcheck._extension import _C

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


def import_error(code: str, **arguments: object) -> str:
    """The last line of the traceback, which must be the only one."""
    ended = run_python("-c", code, **arguments)  # type: ignore[arg-type]
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    return ended.stderr.splitlines()[-1]


def test_another_torch_is_refused() -> None:
    said = import_error("import torch; torch.__version__ = '1.2.3'; import memcheck")
    assert said.startswith(
        f"ImportError: memcheck was built against torch {torch.__version__}, and this is torch 1.2.3"
    )
    assert f"pip install --no-build-isolation -e {ROOT}" in said


def test_a_source_tree_without_its_extension_says_so(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "memcheck", tmp_path / "memcheck", ignore=shutil.ignore_patterns("*.so", "_build.py"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    said = import_error("import memcheck", cwd=tmp_path)
    assert said.startswith(f"ImportError: {tmp_path / 'memcheck'} lacks its compiled module")
    assert f"pip install --no-build-isolation -e {tmp_path}" in said


def test_importing_memcheck_leaves_torch_compile_alone() -> None:
    """It takes as long as torch does."""
    code = "import sys, torch; before = 'torch._dynamo' in sys.modules; import memcheck.__main__; "
    assert run_python("-c", code + "print(before, 'torch._dynamo' in sys.modules)").stdout in (
        "False False\n",
        "True True\n",
    )


def test_cpu_levels() -> None:
    assert _C.cpu_levels()[0] == "default"
    assert set(_C.cpu_levels()) <= {"default", "avx2", "avx512"}
    assert _C.cpu_level() == os.environ.get("MEMCHECK_CPU", _C.cpu_levels()[-1])


@pytest.mark.parametrize("level", ["default", "avx2", "avx512"])
def test_the_cpu_level_is_lowered(level: str) -> None:
    code = "from memcheck._extension import _C; print(_C.cpu_level())"
    if level in _C.cpu_levels():
        assert run_python("-c", code, MEMCHECK_CPU=level).stdout == f"{level}\n"
    else:
        said = import_error(code, MEMCHECK_CPU=level)
        assert f"MEMCHECK_CPU={level} asks for more than this machine has" in said


@pytest.mark.parametrize("value", ["", "AVX2", "sse"])
def test_a_wrong_cpu_level_fails_the_import(value: str) -> None:
    said = import_error("import memcheck", MEMCHECK_CPU=value)
    assert f"MEMCHECK_CPU must be default, avx2 or avx512, got '{value}'" in said


def test_memcheck_cuda_is_checked() -> None:
    ended = run_python("setup.py", "--name", MEMCHECK_CUDA="yes")
    assert ended.returncode == 1
    assert "MEMCHECK_CUDA must be auto, 0 or 1, got 'yes'" in ended.stderr


def test_asking_for_cuda_kernels_without_nvcc_fails(tmp_path: Path) -> None:
    ended = run_python("setup.py", "--name", MEMCHECK_CUDA="1", CUDA_HOME=str(tmp_path))
    assert ended.returncode == 1
    assert "MEMCHECK_CUDA=1 asks for CUDA kernels, which need" in ended.stderr
    assert f"nvcc (CUDA_HOME is {tmp_path})" in ended.stderr
    assert ("a CUDA build of torch" in ended.stderr) == (torch.version.cuda is None)


def test_a_missing_compiler_is_named() -> None:
    ended = run_python("setup.py", "--name", CXX="no-such-compiler")
    assert ended.returncode == 1
    assert "memcheck is compiled, by no-such-compiler" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_torch_pip_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")\n")
    words = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", str(tmp_path / "to"), str(ROOT)]
    ended = run_python(*words, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert "cannot import torch (No module named 'torch')" in said
    assert "pip install --no-build-isolation ." in said


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(["setup.py", "build_ext", "--inplace"], id="build_ext"),
        # What `pip install -e .` calls.
        pytest.param(
            ["-c", "from setuptools import build_meta; build_meta.build_editable('.')"],
            id="editable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_only_what_changed_is_compiled_again(build: list[str], tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    (tmp_path / "memcheck").mkdir()
    (tmp_path / "memcheck" / "__init__.py").write_text('__version__ = "0"\n')
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "one.h").touch()
    (csrc / "one.cpp").write_text('#include "one.h"\n#include <Python.h>\n')
    (csrc / "two.cpp").touch()

    def compiled() -> set[str]:
        """The objects that this build wrote."""
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
        ended = run_python(*build, cwd=tmp_path, MEMCHECK_CUDA="0")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return {path.stem for path in tmp_path.rglob("*.o") if before.get(path) != path.stat().st_mtime_ns}

    assert compiled() == {"one", "two"}
    assert compiled() == set()
    (csrc / "two.cpp").touch()
    assert compiled() == {"two"}
    (csrc / "one.h").touch()
    assert compiled() == {"one"}

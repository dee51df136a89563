"""The library that simulates GPUs is found, or compiled once for the torch that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from memcheck.allocator.caching import CachingAllocator, library
from memcheck.core.errors import ExtensionError
from memcheck.simulated import build

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# Compiles nothing, and notes that it was called.
COMPILER = """#!/bin/sh
cat > /dev/null
echo >> "{folder}/calls"
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo made > "$2"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in an install that no library was built for, with a compiler that counts its calls."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "built_with_extension", lambda _folder: False)
    return tmp_path / "cache" / "memcheck"


def calls(cache: Path) -> int:
    """How often the compiler was called."""
    return len((cache.parents[1] / "calls").read_text())


@pytest.mark.extension
def test_the_library_of_the_extension_is_found() -> None:
    files = [build.PACKAGE / f"_simulated{SUFFIX}", build.PACKAGE / f"_simulated_rules{SUFFIX}"]
    assert [*build.library()] == files
    assert all(file.is_file() for file in files)
    assert build.state() == "built with the extension"


def test_the_torch_that_is_installed_is_known_without_importing_it() -> None:
    code = "import sys; from memcheck.simulated import build; print(build.torch_version(build.torch_folder())); "
    code += "assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{torch.__version__}\n"


def test_it_is_compiled_once(cache: Path) -> None:
    assert build.state() == "will be compiled at first use"
    path, rules_path = build.library()
    assert (path.read_text(), rules_path.read_text()) == ("made\n", "made\n")
    assert (path, rules_path) == build.library()
    assert calls(cache) == 2
    assert path.parent.parent == cache
    assert build.state() == f"compiled in {path.parent}"
    assert {*cache.iterdir()} == {path.parent, Path(f"{path.parent}.lock")}


def test_processes_that_begin_at_once_compile_once(cache: Path) -> None:
    code = (
        "from memcheck.simulated import build; build.built_with_extension = lambda _: False; print(build.library()[0])"
    )
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    (path,) = {process.communicate()[0] for process in started}
    assert Path(path.strip()).read_text() == "made\n"
    assert calls(cache) == 2


@pytest.mark.parametrize("what", ["sources", "torch"])
def test_a_change_compiles_again(what: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library()
    if what == "sources":
        changed = tmp_path / "changed" / "csrc"
        (changed / "simulated").mkdir(parents=True)
        for path in (build.sources() / "simulated").iterdir():
            (changed / "simulated" / path.name).write_bytes(path.read_bytes() + b"\n")
        monkeypatch.setattr(build, "sources", lambda: changed)
    else:
        (tmp_path / "version.py").write_text("from typing import Any\n__version__ = '2.99.0+cu999'\n")
        monkeypatch.setattr(build, "torch_folder", lambda: tmp_path)
    after = build.library()
    assert after != before
    assert calls(cache) == 4
    assert ("torch-2.99.0+cu999-" in after[0].parent.name) == (what == "torch")


def test_a_terminal_sees_that_it_compiles(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    build.library()
    build.library()
    said = capsys.readouterr().err
    assert said.startswith(f"memcheck: compiling the simulated GPU for torch {torch.__version__}, once,")
    assert said.endswith(" ... 0 s\n")
    assert said.count("\n") == 1


def test_the_allocator_alone_is_compiled_once_for_any_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ALLOCATOR", "_absent.so")
    monkeypatch.setattr(build, "torch_folder", None)
    assert build.allocator().read_text() == "made\n"
    assert build.allocator().parent.parent == cache
    assert calls(cache) == 1


def test_without_a_compiler_a_replay_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ALLOCATOR", "_absent.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.cache_clear()
    with pytest.raises(ExtensionError) as raised:
        CachingAllocator()
    assert str(raised.value) == (
        "memcheck's model of CUDA's allocator is compiled at its first use, by no-such-compiler, which is missing: "
        "install it (on Debian: apt-get install g++), or a wheel of memcheck for this Python"
    )


def test_without_a_compiler_it_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExtensionError) as raised:
        build.library()
    assert str(raised.value) == build.state()
    assert str(raised.value) == (
        "memcheck's simulated GPU is compiled at its first use, by no-such-compiler and with Python.h, which are "
        "missing: install them (on Debian: apt-get install g++ python3-dev), or a wheel of memcheck for this torch"
    )
    assert not cache.exists()


def test_a_library_that_is_there_needs_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library() == made


def test_a_compiler_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'In file included\na.h:1:1: error: no such type' >&2; exit 1\n")
    with pytest.raises(ExtensionError) as raised:
        build.library()
    assert str(raised.value) == (
        f"memcheck's simulated GPU does not compile against torch {torch.__version__}, by {compiler} (exit status 1): "
        "a.h:1:1: error: no such type"
    )
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ExtensionError, match=r"cannot be written \(Not a directory\): set XDG_CACHE_HOME"):
        build.library()


def test_a_wheel_without_the_extension_has_the_sources(tmp_path: Path) -> None:
    """And finds them where it is installed."""
    environment = {**os.environ, "MEMCHECK_EXTENSION": "0"}
    words = ["-q", "build", "--build-base", str(tmp_path / "build"), "bdist_wheel", "--dist-dir", str(tmp_path)]
    words = ["setup.py", *words, "--bdist-dir", str(tmp_path / "wheel"), "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    inside = tmp_path / "installed" / "memcheck"
    wanted = {path.name: path.read_bytes() for path in (ROOT / "csrc" / "simulated").iterdir()}
    assert {path.name: path.read_bytes() for path in (inside / "csrc" / "simulated").iterdir()} == wanted
    code = "from memcheck.simulated import build; print(build.sources())"
    command = [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code]
    environment["PYTHONPATH"] = str(inside.parent)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert ended.stdout == f"{inside / 'csrc'}\n"


USE = """
import memcheck
from memcheck.simulated import build
build.built_with_extension = lambda _folder: False
memcheck.simulate("A100-40GB")
import torch
x = torch.ones(512, 512, device="cuda", requires_grad=True)
(x @ x).sum().backward()
assert torch.cuda.memory_allocated() >= 2 * 2**20, torch.cuda.memory_allocated()
print(build.state())
"""


def test_what_is_compiled_at_first_use_simulates(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "MEMCHECK_EXTENSION": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", USE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"compiled in {tmp_path / 'memcheck'}")

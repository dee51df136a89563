"""After a build of the tests' libraries was interrupted or killed, the next one goes on."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_cuda.build import ROOT, Target, build

# It stops in the middle of writing a file until there is a file "go".
STOPPING_COMPILER = """#!/bin/sh
before=
for word in "$@"; do
    if [ ! -e go ] && [ "$before" = -o ]; then echo torn > "$word"; touch begun; fi
    before=$word
done
while [ ! -e go ]; do sleep 0.02; done
exec c++ "$@"
"""
BUILD = """
import pathlib, test_builds_of_tests
test_builds_of_tests.build_program(pathlib.Path.cwd())
"""

Begin = Callable[[], subprocess.Popen[bytes]]


def build_program(folder: Path) -> Path:
    target = Target("program", [(folder / "program.cpp", ["-DNAME=a b$"]), (folder / "other.cpp", [])])
    (program,) = build(folder, target, compiler=shlex.quote(str(folder / "compiler")))
    return program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "program.cpp").write_text("int number();\nint main() { return number(); }\n")
    (folder / "other.cpp").write_text("int number() { return 7; }\n")
    (folder / "compiler").write_text(STOPPING_COMPILER)
    (folder / "compiler").chmod(0o755)
    return folder


@pytest.fixture
def begin(folder: Path) -> Iterator[Begin]:
    """Begins a build in a process group of its own, which stops in the middle of a file."""
    begun = []

    def begin() -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests")])
        command = [sys.executable, "-c", BUILD]
        begun.append(
            subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
        )
        wait_for(folder / "begun")
        return begun[-1]

    yield begin
    (folder / "go").touch()
    for process in begun:
        process.wait()


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def exit_code(program: Path) -> int:
    return subprocess.run([program]).returncode


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_the_next_build_goes_on(folder: Path, begin: Begin, by: signal.Signals) -> None:
    process = begin()
    os.killpg(process.pid, by)
    assert process.wait() != 0
    assert not (folder / "program").exists()
    (folder / "lock").touch()  # as torch's builder leaves it
    (folder / "go").touch()
    assert exit_code(build_program(folder)) == 7


def test_a_build_that_outlives_its_process_is_waited_for(
    folder: Path, begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    process = begin()
    process.kill()
    process.wait()
    threading.Timer(0.5, (folder / "go").touch).start()
    assert exit_code(build_program(folder)) == 7
    assert f"{folder}: waiting for the build of process {process.pid}\n" in capfd.readouterr().err


def test_what_changed_or_is_missing_is_built(folder: Path) -> None:
    (folder / "go").touch()
    program = build_program(folder)
    built = program.stat().st_mtime_ns
    assert build_program(folder).stat().st_mtime_ns == built
    program.unlink()
    assert exit_code(build_program(folder)) == 7
    (folder / "other.cpp").write_text("int number() { return 8; }\n")
    assert exit_code(build_program(folder)) == 8
    (folder / "other.cpp").write_text("int number() { return wrong; }\n")
    with pytest.raises(subprocess.CalledProcessError):
        build_program(folder)

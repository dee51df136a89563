"""The package is typed for its users: mypy --strict infers the types of typical calls."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "typing"


def run_python(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.ci
@pytest.mark.ci
def test_mypy_infers_the_types_of_typical_calls(tmp_path: Path) -> None:
    """mypy sees memcheck as an installed package, whose types it reads only if there is a py.typed."""
    installed = BUILD / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    built = run_python("setup.py", "-q", "build_py", "--build-lib", installed, cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    calls = Path(__file__).with_name("typed_calls.py")
    checked = run_python(
        *("-m", "mypy", "--strict", "--cache-dir", BUILD / "cache", calls), cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

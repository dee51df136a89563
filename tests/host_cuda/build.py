"""Builds libraries and programs of the tests by ninja, which compiles what changed.

A build may be interrupted or killed at any time. The system releases its lock, and each file is written under another
name and renamed once it is complete, so that the next build goes on from there.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
# A compiler that outlives a killed build writes a file of its own.
RULES = """\
rule compile
  command = $compiler $flags -MD -MT $out -MF $out.d -c $in -o $out.$$$$.part && mv $out.$$$$.part $out
  depfile = $out.d
  deps = gcc
  description = compile $in
rule link
  command = $compiler $in $flags -o $out.$$$$.part && mv $out.$$$$.part $out
  description = link $out
"""


@dataclass(frozen=True)
class Target:
    """A file to link: the C++ files and the compiler's flags for each, and the flags of the link."""

    name: str
    units: Sequence[tuple[Path, Sequence[str]]]
    link: Sequence[str] = ()


def folder_of(name: str) -> Path:
    """Returns the folder of a build, in build/."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build(folder: Path, *targets: Target, compiler: str | None = None) -> list[Path]:
    """Builds what changed, and returns the files of the targets. Waits for another process that builds in the folder.

    compiler: shell words, such as `ccache g++`; by default CXX, or c++. Raises subprocess.CalledProcessError if a file
    does not compile; the compiler has printed why.
    """
    with locked(folder) as lock:
        (folder / "build.ninja").write_text(rules_of(targets, compiler or os.environ.get("CXX", "c++")))
        # `make` runs pytest without its environment's folder on PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        ninja = shutil.which("ninja", path=path) or "ninja"
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        # As its standard input ninja holds the lock, too, and goes on with the build if this process is killed.
        subprocess.run([ninja, "-j", jobs], cwd=folder, stdin=lock, stdout=sys.__stderr__, check=True)
    return [folder / target.name for target in targets]


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Holds the lock of a folder. Prints one line if another process holds it."""
    with (folder / "process").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            print(f"{folder}: waiting for the build of process {lock.read()}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock


def rules_of(targets: Sequence[Target], compiler: str) -> str:
    """Returns the text of build.ninja."""
    lines = [RULES, f"compiler = {compiler.replace('$', '$$')}"]
    for target in targets:
        objects = []
        for source, flags in target.units:
            objects.append(f"{target.name}.{source.stem}.o")
            lines += [f"build {objects[-1]}: compile {spelled(source)}", f"  flags = {joined(flags)}"]
        lines += [f"build {target.name}: link {' '.join(objects)}", f"  flags = {joined(target.link)}"]
    return "\n".join([*lines, ""])


def spelled(path: Path) -> str:
    """The path as ninja's syntax wants it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def joined(flags: Sequence[str]) -> str:
    return shlex.join(flags).replace("$", "$$")

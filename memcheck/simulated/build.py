"""Finds the library that simulates GPUs, and compiles it at first use where none fits the torch that is installed.

It is two files: the library itself, which is loaded before torch, and a module for Python with its rules, which is
imported after torch. A third file is the model of CUDA's caching allocator alone, for any torch. setup.py builds them
with the extension. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from memcheck.core.errors import ExtensionError
from memcheck.simulated import flags as all_flags
from memcheck.simulated.flags import ALLOCATOR_FILES, ALLOCATOR_FLAGS, COMPILE_FLAGS, LIBRARIES, gpu_files

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
NAMES = (f"_simulated{SUFFIX}", f"_simulated_rules{SUFFIX}")
ALLOCATOR = f"_allocator{SUFFIX}"
MODEL = "memcheck's model of CUDA's allocator"


def library() -> tuple[Path, Path]:
    """The library and the module with its rules, for the torch that is installed.

    ExtensionError: there is neither such a library nor what compiles one.
    """
    folder = torch_folder()
    if built_with_extension(folder):
        return in_folder(PACKAGE)
    cached = cache_folder(folder)
    if not cached.is_dir():
        require_compiler()
        fill(cached, lambda made: compile_into(made, folder))
    return in_folder(cached)


def allocator() -> Path:
    """The library with the model of CUDA's caching allocator.

    ExtensionError: there is neither this library nor what compiles it.
    """
    if (PACKAGE / ALLOCATOR).is_file():
        return PACKAGE / ALLOCATOR
    headers = ("caching_allocator.h", "exports.h")
    words = digest(ALLOCATOR_FLAGS, [sources() / "simulated" / name for name in (*ALLOCATOR_FILES, *headers)])
    cached = cache_root() / f"{sys.implementation.cache_tag}-allocator-{words}"
    if not cached.is_dir():
        if shutil.which(compiler()[0]) is None:
            raise ExtensionError(
                f"{MODEL} is compiled at its first use, by {compiler()[0]}, which is missing: install it (on Debian: "
                "apt-get install g++), or a wheel of memcheck for this Python"
            )
        fill(cached, compile_allocator)
    return cached / ALLOCATOR


def in_folder(folder: Path) -> tuple[Path, Path]:
    return folder / NAMES[0], folder / NAMES[1]


def state() -> str:
    """Where the library is, or what the first use of a simulated GPU will do."""
    try:
        folder = torch_folder()
        if built_with_extension(folder):
            return "built with the extension"
        cached = cache_folder(folder)
        if cached.is_dir():
            return f"compiled in {cached}"
        require_compiler()
    except ExtensionError as error:
        return str(error)
    return "will be compiled at first use"


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ExtensionError("a simulated GPU needs torch, which is not installed: pip install torch")
    return Path(next(iter(spec.submodule_search_locations)))


def torch_version(folder: Path) -> str:
    """torch.__version__, such as "2.15.0+cu132", without importing torch."""
    found = re.search(r"^__version__ = '([^']+)'", (folder / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ExtensionError(f"{folder / 'version.py'} does not say which torch this is")
    return found[1]


def built_with_extension(folder: Path) -> bool:
    """Whether setup.py built both files against this torch and for this Python."""
    if importlib.util.find_spec("memcheck._build") is None or not all(path.is_file() for path in in_folder(PACKAGE)):
        return False
    return getattr(importlib.import_module("memcheck._build"), "TORCH_VERSION", None) == torch_version(folder)


def sources() -> Path:
    """The folder of the library's sources: in memcheck where it is installed, beside it in a source tree."""
    for parent in (PACKAGE, PACKAGE.parent):
        if (parent / "csrc" / "simulated" / "rules.cpp").is_file():
            return parent / "csrc"
    raise ExtensionError(
        f"the sources of memcheck's simulated GPU are missing in {PACKAGE / 'csrc'}: reinstall memcheck"
    )


def cache_folder(folder: Path) -> Path:
    """Where the library is kept. A change of torch, the sources or the C library gives another folder."""
    words = digest(COMPILE_FLAGS, [folder / "version.py", *sorted((sources() / "simulated").glob("*.*"))])
    return cache_root() / f"{sys.implementation.cache_tag}-torch-{torch_version(folder)}-{words}"


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memcheck"


def digest(flags: list[str], paths: Iterable[Path]) -> str:
    """Names what is compiled: the flags, this machine and the files."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else platform.release()
    words = hashlib.sha256(f"{flags} {platform.machine()} {libc} ".encode())
    for path in paths:
        words.update(path.read_bytes())
    return words.hexdigest()[:12]


def compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def require_compiler() -> None:
    name = compiler()[0]
    if shutil.which(name) is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise ExtensionError(
            f"memcheck's simulated GPU is compiled at its first use, by {name} and with Python.h, which are missing: "
            "install them (on Debian: apt-get install g++ python3-dev), or a wheel of memcheck for this torch"
        )


def fill(cached: Path, compiled_into: Callable[[Path], None]) -> None:
    """Compiles into a folder that is complete as soon as it exists, unless another process has done so meanwhile."""
    import fcntl  # Windows, for which memcheck does not compile, lacks it.

    with lock_of(cached) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cached.is_dir():
            return
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix="compiling-") as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            compiled_into(made)
            made.rename(cached)


def lock_of(cached: Path) -> TextIO:
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        return open(f"{cached}.lock", "w")
    except OSError as error:
        raise ExtensionError(
            f"memcheck compiles a library into {cached.parent}, which cannot be written ({error.strerror}): "
            "set XDG_CACHE_HOME to another folder"
        ) from None


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Says on a terminal that it compiles, and afterwards how long it took."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    words = f"memcheck: compiling the simulated GPU for torch {torch_version(folder)}, once, in about a minute ..."
    print(words, end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print(file=sys.stderr)
        raise
    print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def compile_into(made: Path, folder: Path) -> None:
    """Compiles both files at once, the library as one unit, because torch's headers take longer than its own code."""
    members = gpu_files(path.name for path in (sources() / "simulated").glob("*.cpp"))
    python = [f"-I{sysconfig.get_path('include')}", f"-DTORCH_EXTENSION_NAME={NAMES[1].partition('.')[0]}"]
    path, rules_path = in_folder(made)
    with told(folder), ThreadPoolExecutor() as both:
        jobs = [
            both.submit(compile_unit, members, path, folder, LIBRARIES, []),
            both.submit(compile_unit, ["rules.cpp"], rules_path, folder, all_flags.RULES_LIBRARIES, python),
        ]
        for job in jobs:
            job.result()


def compile_unit(members: list[str], to: Path, folder: Path, libraries: list[str], flags: list[str]) -> None:
    """ExtensionError: the compiler fails. It has the compiler's first error."""
    includes = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include"]
    flags = [*COMPILE_FLAGS, *flags, *(f"-isystem{path}" for path in includes)]
    links = [f"-L{folder / 'lib'}", *(f"-l{name}" for name in libraries)]
    if sys.platform == "darwin":
        links += ["-undefined", "dynamic_lookup"]  # Python's own symbols.
    call_compiler(
        members, to, flags, links, f"memcheck's simulated GPU does not compile against torch {torch_version(folder)}"
    )


def compile_allocator(made: Path) -> None:
    call_compiler(ALLOCATOR_FILES, made / ALLOCATOR, ALLOCATOR_FLAGS, [], f"{MODEL} does not compile")


def call_compiler(members: list[str], to: Path, flags: list[str], links: list[str], failure: str) -> None:
    """Compiles files of csrc/simulated as one unit. ExtensionError: the failure, with the compiler's first error."""
    unit = "".join(f'#include "simulated/{name}"\n' for name in members)
    command = [*compiler(), *flags, f"-I{sources()}", "-fPIC", "-shared", "-x", "c++", "-", "-o", str(to), *links]
    ended = subprocess.run(command, input=unit, capture_output=True, text=True)
    if ended.returncode != 0:
        lines = ended.stderr.splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no output")
        raise ExtensionError(f"{failure}, by {command[0]} (exit status {ended.returncode}): {first}")

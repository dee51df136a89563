"""Builds memcheck._C against the torch that is installed. Project metadata lives in pyproject.toml.

MEMCHECK_EXTENSION=0 installs the Python package alone, which reports. Nothing is compiled for that.
Every install has the sources of the library that simulates GPUs, which is compiled where none fits the torch that runs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import setuptools
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMPILE_FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]
# Python's own flags say -fwrapv, under which an index of type int does not vectorise.
COMPILE_FLAGS += ["-fno-wrapv"]


# As in pyproject.toml, which pip reads after the build.
OLDEST_TORCH = (2, 11)
WITHOUT_EXTENSION = "Reports need none of this: MEMCHECK_EXTENSION=0 pip install .\n"


def require_tools() -> None:
    """Exits with one message for what is missing, where torch and the compiler would each fail in a way of its own.

    torch is imported last, because that takes over a second.
    """
    if importlib.util.find_spec("torch") is None:
        refuse("lacks torch")
    installed = next(iter(importlib.metadata.distributions(name="torch")), None)
    if installed and tuple(map(int, installed.version.split(".")[:2])) < OLDEST_TORCH:
        refuse(f"has torch {installed.version}, older than {'.'.join(map(str, OLDEST_TORCH))}")
    if int(setuptools.__version__.split(".")[0]) < 70:
        refuse(f"has setuptools {setuptools.__version__}, older than 70")
    if sys.platform == "win32":
        sys.exit(f"\nmemcheck's extension is not written for Windows.\n{WITHOUT_EXTENSION}")
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        sys.exit(
            f"\nmemcheck is compiled, by {compiler} and with Python.h. On Debian: apt-get install g++ python3-dev\n"
            f"{WITHOUT_EXTENSION}"
        )
    try:
        import torch  # noqa: F401
    except ImportError as error:
        refuse(f"cannot import torch ({error})")


def refuse(why: str) -> None:
    """Exits with what is wrong with this Python, and the commands that install what is missing."""
    sys.exit(
        "\nmemcheck is built without isolation, against the torch that will run it,\n"
        f"and {sys.executable} {why}.\n\n"
        "If you have torch, pip's isolation has hidden it:\n"
        "    pip install --no-build-isolation .\n"
        "If you do not, install what builds memcheck first:\n"
        "    pip install 'torch>=2.11' 'setuptools>=70.1' ninja\n"
        "    pip install --no-build-isolation .\n"
        f"{WITHOUT_EXTENSION}"
    )


def find_cuda_home() -> str | None:
    """CUDA_HOME where it is set. Else where the nvcc on PATH stands, unless that is a script away from its toolkit."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return named
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    for home in [*homes, Path("/usr/local/cuda")]:
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return str(home)
    return None


class BuildPython(build_py):
    """The Python package with the sources of the library that simulates GPUs, which a source tree has beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copied = Path(self.build_lib, "memcheck", "csrc", "simulated")
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(ROOT / "csrc" / "simulated", copied)


class BuildPythonAlone(BuildPython):
    """The same, with a note that the extension was left out."""

    def run(self) -> None:
        super().run()
        write_facts(
            ROOT / "memcheck" if self.editable_mode else Path(self.build_lib) / "memcheck", {"EXTENSION": False}
        )


def write_facts(package: Path, facts: dict[str, Any]) -> None:
    """Writes memcheck/_build.py, which `memcheck info` prints."""
    lines = [f"{name} = {value!r}\n" for name, value in facts.items()]
    (package / "_build.py").write_text('"""What was built. Written by setup.py."""\n\n' + "".join(lines))


def choice_of(variable: str, choices: tuple[str, ...]) -> str:
    """The value of an environment variable; the first of the choices if it is not set."""
    value = os.environ.get(variable, choices[0])
    if value not in choices:
        sys.exit(f"\n{variable} must be {', '.join(choices[:-1])} or {choices[-1]}, got '{value}'\n")
    return value


if choice_of("MEMCHECK_EXTENSION", ("1", "0")) == "0":
    setuptools.setup(
        cmdclass={"build_py": BuildPythonAlone}, options={"build": {"build_base": str(ROOT / "build" / "python")}}
    )
    sys.exit()
# `python -m build` asks for these in an environment without torch. pip asks for egg_info, too, and then for more.
if sys.argv[1:2] in (["egg_info"], ["sdist"]) and importlib.util.find_spec("torch") is None:
    setuptools.setup()
    sys.exit()
require_tools()
# torch finds ninja on PATH alone, where a virtual environment that is used without being activated does not stand.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
if cuda_home := find_cuda_home():
    os.environ["CUDA_HOME"] = cuda_home

import torch  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


def nvcc_version() -> str:
    """As in "Cuda compilation tools, release 13.0, V13.0.88"."""
    text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text.partition(", V")[2].split()[0]


def major_of(version: str) -> str:
    return version.split(".")[0]


def why_no_cuda() -> str | None:
    """None where CUDA kernels are built: MEMCHECK_CUDA=auto|0|1. That takes a CUDA torch and nvcc, but never a GPU."""
    choice = choice_of("MEMCHECK_CUDA", ("auto", "0", "1"))
    if choice == "0":
        return "MEMCHECK_CUDA=0"
    missing = []
    if torch.version.cuda is None:
        missing.append(f"a CUDA build of torch (this one is {torch.__version__})")
    if cuda_home is None or not Path(cuda_home, "bin", "nvcc").is_file():
        missing.append(f"nvcc (CUDA_HOME is {cuda_home})")
    elif torch.version.cuda is not None and major_of(nvcc_version()) != major_of(torch.version.cuda):
        # torch refuses such a pair, in the middle of the build.
        missing.append(
            f"nvcc {major_of(torch.version.cuda)}, as this torch has ({cuda_home}/bin/nvcc is {nvcc_version()})"
        )
    if choice == "1" and missing:
        sys.exit(f"\nMEMCHECK_CUDA=1 asks for CUDA kernels, which need {' and '.join(missing)}\n")
    return f"needs {' and '.join(missing)}" if missing else None


# The compute capability that CUDA kernels need, and torch's names of the architectures before it.
LEAST_CAPABILITY = (8, 0)
OLDER_ARCHITECTURES = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")


def require_new_gpus() -> None:
    """One line for GPUs that are too old, where ptxas would fail without a message."""
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        old = [name for name in listed.replace(";", " ").split() if is_old(name)]
        found = f"TORCH_CUDA_ARCH_LIST='{listed}' asks for {', '.join(old)}"
    elif torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        old = [
            f"{gpu.name} has {gpu.major}.{gpu.minor}" for gpu in properties if (gpu.major, gpu.minor) < LEAST_CAPABILITY
        ]
        found = f"of this machine's GPUs {', '.join(old)}"
    else:
        return
    if old:
        sys.exit(
            f"memcheck's CUDA kernels need GPUs of compute capability 8.0 or later, but {found}; "
            "MEMCHECK_CUDA=0 builds without them, TORCH_CUDA_ARCH_LIST=8.0 for other GPUs"
        )


def is_old(architecture: str) -> bool:
    """Of an architecture as torch writes it: 7.5, 9.0a, 8.6+PTX, Turing."""
    name = architecture.partition("+")[0]
    number = name.rstrip("af")
    if number.replace(".", "", 1).isdigit():
        return tuple(map(int, number.split("."))) < LEAST_CAPABILITY
    return name in OLDER_ARCHITECTURES


def default_jobs() -> int:
    """One compiler per core, and 1.5 GiB of memory for each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // (3 << 29)))


def compiler_version() -> str:
    compiler = os.environ.get("CXX", "c++")
    text = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=True).stdout
    return text.splitlines()[0]


CUDA_LEFT_OUT = why_no_cuda()
CUDA = CUDA_LEFT_OUT is None
print(f"memcheck: torch {torch.__version__}, CUDA kernels: {CUDA_LEFT_OUT or f'built by {cuda_home}/bin/nvcc'}")
os.environ.setdefault("MAX_JOBS", str(default_jobs()))
if CUDA:
    require_new_gpus()
if CUDA and not torch.cuda.is_available():
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
COMPILER = compiler_version()
# at::parallel_for is serial without OpenMP. It is compiled but not linked, so that torch's runtime stays the only one.
# For clang and macOS see csrc/common/torch/parallel.cpp.
COMPILE_FLAGS += [] if "clang" in COMPILER or sys.platform == "darwin" else ["-fopenmp"]
# gcc clears and copies small arrays with string instructions. To start one takes longer than to store a few vectors,
# and kernels clear such arrays for every row.
if "clang" not in COMPILER and platform.machine() == "x86_64":
    STRATEGY = "vector_loop:1024:noalign,libcall:-1:noalign"
    COMPILE_FLAGS += [f"-mmemset-strategy={STRATEGY}", f"-mmemcpy-strategy={STRATEGY}"]
# `make asan`: the same sources in a build folder of their own, at a level at which a kernel compiles in minutes.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g", "-O1"]
SANITIZE = SANITIZERS if os.environ.get("MEMCHECK_ASAN") else []
# Python's own flags often say -g, which takes almost as long as the rest and makes the module many times larger.
COMPILE_FLAGS += SANITIZE or ["-g0"]
# Every Python and torch has a folder of its own for objects and modules, which is kept.
KIND = ("cuda" if CUDA else "cpu") + ("-asan" if SANITIZE else "")
BUILD_FOLDER = ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{torch.__version__}-{KIND}"


class Build(BuildExtension):
    """Keeps objects between builds, and notes beside the extension what it was built with."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # setuptools would build in a temporary folder for `pip install -e`, and so compile everything every time.
        self.build_temp = str(BUILD_FOLDER)

    def build_extensions(self) -> None:
        for built in self.extensions:
            built.depends += built.sources
            if built.name in ("memcheck._C", "memcheck._simulated", "memcheck._simulated_cpu", "memcheck._allocator"):
                built.sources = in_units(built.sources, built.name)
        super().build_extensions()

    def run(self) -> None:
        super().run()
        write_facts(Path(self.get_ext_fullpath("memcheck._C")).parent, build_facts())


def build_facts() -> dict[str, Any]:
    return {
        "EXTENSION": True,
        "TORCH_VERSION": str(torch.__version__),
        "CUDA_VERSION": nvcc_version() if CUDA else None,
        "CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "this machine's") if CUDA else None,
        "CUDA_LEFT_OUT": CUDA_LEFT_OUT,
        "COMPILER": COMPILER,
        "COMPILE_FLAGS": COMPILE_FLAGS,
    }


# Folders of csrc with libraries of their own.
APART = ("simulated",)


def files(*suffixes: str) -> list[str]:
    """The files of csrc with these suffixes that are part of memcheck._C."""
    found = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes and path.parent.name not in APART)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def unit_of(source: str, extension: str) -> str | None:
    """The unit that compiles the file, because torch's headers take longer than the file itself; None for kernels.

    parallel.cpp decides what a header of torch says, so it is alone.
    """
    path = Path(source)
    if path.parent.name == "simulated":
        return extension.rpartition("._")[2]
    if path.stem == "parallel":
        return None
    if path.stem == "library" or path.parent.name == "memory":
        return "module"
    if path.stem.endswith("_autograd"):
        return "autograd"
    is_glue = path.parent.name == "torch" or "common/torch/registration.h" in (ROOT / path).read_text()
    return "glue" if is_glue else None


def in_units(sources: list[str], extension: str) -> list[str]:
    """The files to compile, in place of these: units, each of which includes its files, and the files that are in none.

    A unit is written again only if its list of files has changed.
    """
    units: dict[str, list[str]] = {}
    for source in sources:
        if (name := unit_of(source, extension)) is not None:
            units.setdefault(name, []).append(source)
    written = []
    for name, members in units.items():
        unit = ROOT / "build" / "units" / f"{name}.cpp"
        text = "".join(f'#include "{Path(member).relative_to("csrc").as_posix()}"\n' for member in members)
        if not unit.is_file() or unit.read_text() != text:
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
        written.append(str(unit.relative_to(ROOT)))
    return [*written, *(source for source in sources if unit_of(source, extension) is None)]


def macros() -> list[tuple[str, str | None]]:
    """Kernels that run float32 on tensor cores are built by request: no GPU has run them yet."""
    asked = [name for name in ("MEMCHECK_FLOAT32_TENSOR_CORES",) if os.environ.get(name) == "1"]
    return [(name, None) for name in ("MEMCHECK_WITH_CUDA", *asked)]


def extension() -> Any:
    return (CUDAExtension if CUDA else CppExtension)(
        "memcheck._C",
        files(".cpp", ".cu") if CUDA else files(".cpp"),
        # ninja knows what each object includes; setuptools asks it only if one of these is newer than the extension.
        depends=[*files(".h", ".cuh"), "setup.py"],
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros() if CUDA else [],
        extra_compile_args={"cxx": COMPILE_FLAGS, "nvcc": ["-O3", "--expt-relaxed-constexpr"]},
        extra_link_args=SANITIZE,
    )


def simulated() -> list[Any]:
    """The library that simulates GPUs, its rules, the simulated CPU, and the allocator's model. See
    memcheck/simulated/flags.py."""
    found = runpy.run_path(str(ROOT / "memcheck" / "simulated" / "flags.py"))

    def sources(members: Iterable[str]) -> list[str]:
        return [f"csrc/simulated/{name}" for name in members]

    gpu = found["gpu_files"](path.name for path in (ROOT / "csrc" / "simulated").glob("*.cpp"))
    flags, libraries = found["COMPILE_FLAGS"], found["RULES_LIBRARIES"]
    return [
        against_torch("_simulated", sources(gpu), flags, found["LIBRARIES"]),
        against_torch("_simulated_rules", sources(["rules.cpp"]), flags, libraries),
        against_torch("_simulated_cpu", sources(found["CPU_FILES"]), flags, libraries),
        against_torch("_allocator", sources(found["ALLOCATOR_FILES"]), found["ALLOCATOR_FLAGS"], []),
    ]


def against_torch(name: str, sources: list[str], flags: list[str], libraries: list[str]) -> Any:
    from torch.utils.cpp_extension import include_paths, library_paths

    return setuptools.Extension(
        f"memcheck.{name}",
        sources,
        depends=[str(path.relative_to(ROOT)) for path in (ROOT / sources[0]).parent.glob("*.h")],
        include_dirs=[*include_paths(), str(ROOT / "csrc")],
        library_dirs=library_paths(),
        libraries=libraries,
        extra_compile_args=[*flags, "-Wall"],
        language="c++",
    )


def local_version() -> str:
    """What MEMCHECK_LOCAL_VERSION=1 adds to the version, as `make wheels` asks for: memcheck 0.3.0+torch2.15cpu."""
    if not os.environ.get("MEMCHECK_LOCAL_VERSION"):
        return ""
    release = ".".join(torch.__version__.split(".")[:2])
    device = "cu" + str(torch.version.cuda).replace(".", "") if CUDA else "cpu"
    return f"+torch{release}{device}"


setuptools.setup(
    ext_modules=[extension(), *simulated()],
    cmdclass={"build_ext": Build, "build_py": BuildPython},
    options={"build": {"build_base": str(BUILD_FOLDER)}, "egg_info": {"tag_build": local_version()}},
)

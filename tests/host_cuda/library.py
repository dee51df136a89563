"""CUDA kernels on the host: libraries that replace the CPU's kernels behind the same operators.

One has the .cu files, compiled by a C++ compiler with host_cuda.h: plainly, with sanitizers, or with counters. It
exports the operators' tables of kernels. The other one, the operators' glue, registers these tables. After both are
loaded, the dispatcher calls them for tensors of the CPU, so that every test of an operator tests its CUDA kernels.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from host_cuda import counters
from host_cuda.build import ROOT, Target, build, folder_of
from host_cuda.resources import demangled, spelled_alike
from one_unit import one_unit
from torch.utils import cpp_extension

import memcheck  # noqa: F401  (its kernels are registered first, and then replaced)

CSRC = ROOT / "csrc"
ORDERS = ("ascending", "descending", "shuffled")
# The stand-in for the CUDA language.
HOST_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
# Bytes of shared memory that a block of threads may have, by compute capability (CUDA programming guide).
SHARED_BYTES = {
    "7.0": 96 << 10,
    "7.5": 64 << 10,
    "8.0": 163 << 10,
    "8.6": 99 << 10,
    "8.9": 99 << 10,
    "9.0": 227 << 10,
    "10.0": 227 << 10,
    "12.0": 99 << 10,
}
# The glue calls these. memcheck._C has them too, but exports nothing. The first one wants to be before torch's headers.
COMMON = [
    "common/torch/parallel.cpp",
    "common/cpu_level.cpp",
    "common/torch/device.cpp",
    "common/torch/sequences.cpp",
]
DEFINES = ["-DMEMCHECK_HOST_CUDA", "-DMEMCHECK_FLOAT32_TENSOR_CORES"]
WARNINGS = ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"]
# Flags of each build of the kernels, by the end of its name.
KINDS = {
    "": ["-O1"],
    "-asan": ["-Og", "-g1", "-fno-omit-frame-pointer", *SANITIZERS],
    "-counts": ["-O2", *counters.DEFINES],
}


def cuda_include() -> Path | None:
    """The folder of CUDA's headers, or None. A C++ compiler needs nothing else of CUDA."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), Path(nvcc).resolve().parents[1] if nvcc else None, "/usr/local/cuda"]
    for home in homes:
        if home and Path(home, "include", "cuda_fp16.h").is_file():
            return Path(home, "include")
    return None


def sanitizes() -> bool:
    return bool(os.environ.get("MEMCHECK_ASAN"))


def kernel_flags(kind: str = "") -> list[str]:
    """Flags of the C++ compiler for .cu files and their stand-in for CUDA, of a kind of KINDS."""
    include = cuda_include()
    if include is None:
        raise FileNotFoundError("no cuda_fp16.h: CUDA_HOME names no toolkit, and nvcc is not on PATH")
    common = ["-std=c++17", "-fPIC", *WARNINGS, "-fno-math-errno", "-U_FORTIFY_SOURCE", *DEFINES]
    includes = [f"-I{CSRC}", f"-I{ROOT / 'tests'}", "-isystem", str(include), "-include", "host_cuda/host_cuda.h"]
    return [*common, *KINDS[kind], *includes, "-xc++"]


def kernels_target(kind: str, folder: Path) -> Target:
    """The library of kernels, which exports its tables and what tests call, and nothing else."""
    exports = folder / "exports.txt"
    exports.write_text('{ global: host_cuda_*; extern "C++" { memcheck::*_cuda; }; local: *; };\n')
    flags = kernel_flags(kind)
    of_kernels = [*flags, *counters.INSTRUMENTED] if kind == "-counts" else flags
    units = [(path, of_kernels) for path in kernels()] + [(path, [*flags, "-O3"]) for path in HOST_SOURCES]
    link = ["-shared", f"-Wl,--version-script={exports}"]
    return Target(f"kernels{kind}.so", units, link + (SANITIZERS if kind == "-asan" else []))


def glue_target(folder: Path) -> Target:
    """The library that registers the tables of whichever kernels are loaded."""
    unit = one_unit([*(CSRC / name for name in COMMON), *glue_sources()], folder / "glue.cpp")
    return Target("glue.so", [(unit, glue_flags())], glue_links())


def glue_flags() -> list[str]:
    """Flags of the C++ compiler for an operator's glue, of which the tests need no debug information."""
    torch_flags = ["-std=c++20", *(f"-isystem{folder}" for folder in cpp_extension.include_paths())]
    return [*torch_flags, "-O1", "-g0", "-fPIC", "-fvisibility=hidden", *WARNINGS, "-DMEMCHECK_HOST_CUDA", f"-I{CSRC}"]


def glue_links() -> list[str]:
    return ["-shared", *(f"-L{folder}" for folder in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]


def kernels() -> list[Path]:
    """The .cu files of the operators."""
    return [path for path in sorted(CSRC.rglob("*_cuda.cu")) if path.parent.name != "cuda_probe"]


def glue_sources() -> list[Path]:
    """The glue of every operator that has kernels, and of the projections, which need none."""
    kernels = {kernel.parent for kernel in CSRC.rglob("*_cuda.cu")}
    folders = kernels - {CSRC / "cuda_probe", CSRC / "common"} | {CSRC / "projection"}
    sources = [path for folder in sorted(folders) for path in sorted(folder.glob("*.cpp"))]
    return [path for path in sources if "_cpu" not in path.stem and "_autograd" not in path.stem]


def load(*, counts: bool = False) -> None:
    """Builds what changed, and loads it. Raises FileNotFoundError if CUDA's headers are not installed.

    counts: a build that counts and finds races, as with MEMCHECK_HOST_CUDA_COUNTS in the environment.
    """
    counts = counts or bool(os.environ.get("MEMCHECK_HOST_CUDA_COUNTS"))
    kind = "-counts" if counts else "-asan" if sanitizes() else ""
    folder = folder_of(f"host-cuda-torch-{torch.__version__}")
    # The glue is first, because it takes longest.
    glue, kernels = build(folder, glue_target(folder), kernels_target(kind, folder))
    global _library
    # The glue finds the tables among the symbols of the process.
    _library = ctypes.CDLL(str(kernels), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(glue))
    _library.host_cuda_launches.restype = ctypes.c_char_p
    _library.host_cuda_stand_for.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    if counts:
        _library.host_cuda_counts.restype = ctypes.c_char_p
    stand_for(this_gpu())


def this_gpu() -> str:
    """The compute capability of the GPU that the host stands for: an A100's, or MEMCHECK_HOST_CUDA_GPU."""
    capability = os.environ.get("MEMCHECK_HOST_CUDA_GPU", "8.0")
    if capability not in SHARED_BYTES:
        raise ValueError(f"MEMCHECK_HOST_CUDA_GPU must be one of {', '.join(SHARED_BYTES)}, got '{capability}'")
    return capability


_library: ctypes.CDLL | None = None


def set_order(order: str) -> None:
    """Sets the order in which the threads of a block take turns: one of ORDERS."""
    assert _library is not None
    _library.host_cuda_set_order(ORDERS.index(order))


def stand_for(capability: str) -> None:
    """Sets the GPU that the host stands for; launches that it would refuse are refused."""
    assert _library is not None
    major, minor = capability.split(".")
    _library.host_cuda_stand_for(int(major), int(minor), SHARED_BYTES[capability])


def last_error() -> int:
    """CUDA's error that nobody has read yet, or 0."""
    assert _library is not None
    code: int = _library.host_cuda_peek_at_last_error()
    return code


@dataclass(frozen=True)
class Launches:
    """Launch statistics of one kernel: launches, and the most threads and bytes of shared memory of a block."""

    count: int
    threads: int
    shared_bytes: int


def forget_launches() -> None:
    assert _library is not None
    _library.host_cuda_forget_launches()


def launches() -> dict[str, Launches]:
    """Statistics by kernel name, of this process, since the last call of forget_launches."""
    by_name: dict[str, Launches] = {}
    for name, _, of in _launches():
        known = by_name.get(name, Launches(0, 0, 0))
        by_name[name] = Launches(
            known.count + of.count, max(known.threads, of.threads), max(known.shared_bytes, of.shared_bytes)
        )
    return by_name


def launches_by_function() -> dict[int, Launches]:
    """The same by the address of the kernel's function, of which `instances` has the name."""
    return {function: of for _, function, of in _launches()}


def _launches() -> list[tuple[str, int, Launches]]:
    assert _library is not None
    lines = [line.split("\t") for line in _library.host_cuda_launches().decode().splitlines()]
    return [(kernel, int(function), Launches(*map(int, numbers))) for kernel, function, *numbers in lines]


@functools.cache
def instances() -> dict[int, str]:
    """The kernels of the library as in the source, by address."""
    text = subprocess.run(["nm", loaded_path()], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in text.splitlines() if "_kernel" in line]
    found = [(int(words[0], 16), words[2]) for words in symbols if len(words) == 3]
    names = map(spelled_alike, demangled([name for _, name in found]))
    return dict(zip([address for address, _ in found], names, strict=True))


def loaded_path() -> str:
    """The file of the library."""
    assert _library is not None
    return str(_library._name)


def sample_blocks(most: int) -> None:
    """From now on a launch runs that many of its blocks, one of each equal range of numbers. 0: all.

    Results are wrong: only counts are of use.
    """
    global _sampled
    assert _library is not None
    _library.host_cuda_sample_blocks(ctypes.c_int64(most))
    _sampled = most > 0


_sampled = False


def samples_blocks() -> bool:
    """Whether launches run only some of their blocks."""
    return _sampled


def forget_counts() -> None:
    assert _library is not None
    _library.host_cuda_forget_counts()


def counts() -> list[counters.LaunchCounts]:
    """The launches since the last call of forget_counts, of a build that counts."""
    assert _library is not None
    return counters.parsed(_library.host_cuda_counts().decode())

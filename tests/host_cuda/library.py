"""CUDA kernels on the host: a library whose kernels replace the CPU's behind the same operators.

It has the .cu files, compiled by a C++ compiler with csrc/host_cuda, and the operators' glue. After it is loaded, the
dispatcher calls it for tensors of the CPU, so that every test of an operator tests its CUDA kernels.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from host_cuda import counters
from host_cuda.resources import demangled, spelled_alike
from torch.utils import cpp_extension

import memcheck  # noqa: F401  (its kernels are registered first, and then replaced)

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
ORDERS = ("ascending", "descending", "shuffled")
# The stand-in for the CUDA language.
HOST_SOURCES = sorted((CSRC / "host_cuda").glob("*.cpp"))
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
# The glue calls these. memcheck._C has them too, but exports nothing.
COMMON = [
    "common/cpu_level.cpp",
    "common/cpu_products.cpp",
    "common/torch/packed_product.cpp",
    "common/torch/parallel.cpp",
    "common/torch/sequences.cpp",
]


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


def flags() -> list[str]:
    """Flags of the C++ compiler, for glue and kernels."""
    with_warnings = ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas", "-fno-math-errno", "-fvisibility=hidden"]
    speed = ["-O2"]
    if sanitizes():
        speed = ["-Og", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        speed += ["-fno-sanitize=vptr"]
    # longjmp between stacks is no overrun.
    return [*with_warnings, *speed, "-U_FORTIFY_SOURCE", "-DMEMCHECK_HOST_CUDA", "-DMEMCHECK_WITH_CUDA"]


def kernels() -> list[Path]:
    """The .cu files of the operators."""
    return [path for path in sorted(CSRC.rglob("*_cuda.cu")) if path.parent.name != "cuda_probe"]


def kernel_sources(folder: Path) -> list[Path]:
    """A C++ file for each .cu, as torch's builder wants it. An unchanged file is not written again, so that ninja sees
    that it is unchanged."""
    paths = []
    for kernel in kernels():
        path = folder / f"{kernel.stem}.cpp"
        text = f'#include "host_cuda/host_cuda.h"\n#include "{kernel.relative_to(CSRC)}"\n'
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        paths.append(path)
    return paths


def glue_sources() -> list[Path]:
    """The glue of every operator that has kernels, and of the projections, which need none."""
    folders = {kernel.parent for kernel in CSRC.rglob("*_cuda.cu")} - {CSRC / "cuda_probe"} | {CSRC / "projection"}
    sources = [path for folder in sorted(folders) for path in sorted(folder.glob("*.cpp"))]
    return [path for path in sources if "_cpu" not in path.stem and "_autograd" not in path.stem]


def instrumented_objects(folder: Path, include: Path) -> list[Path]:
    """An object for each .cu, whose loads and stores the compiler reports to the counters. Compiles what changed; then
    the library in the folder is removed, so that it is linked again."""

    def build(kernel: Path) -> tuple[Path, bool]:
        made, needs = folder / f"{kernel.stem}.o", folder / f"{kernel.stem}.d"
        if made.is_file() and needs.is_file():
            depends = [Path(name) for name in needs.read_text().replace("\\\n", " ").partition(":")[2].split()]
            if all(path.is_file() and path.stat().st_mtime <= made.stat().st_mtime for path in depends):
                return made, False
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-fPIC", *flags(), *counters.DEFINES]
        command += [*counters.INSTRUMENTED, f"-I{CSRC}", "-isystem", str(include), "-include", "host_cuda/host_cuda.h"]
        subprocess.run([*command, "-x", "c++", "-MD", "-MF", needs, "-c", kernel, "-o", made], check=True)
        return made, True

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        built = list(pool.map(build, kernels()))
    if any(is_new for _, is_new in built):
        (folder / "memcheck_host_cuda.so").unlink(missing_ok=True)
    return [made for made, _ in built]


def load(*, counts: bool = False) -> None:
    """Builds what changed, and loads it. Raises FileNotFoundError if CUDA's headers are not installed.

    counts: a build that counts and finds races, as with MEMCHECK_HOST_CUDA_COUNTS in the environment.
    """
    counts = counts or bool(os.environ.get("MEMCHECK_HOST_CUDA_COUNTS"))
    include = cuda_include()
    if include is None:
        raise FileNotFoundError("no cuda_fp16.h: CUDA_HOME names no toolkit, and nvcc is not on PATH")
    kind = "-counts" if counts else "-asan" if sanitizes() else ""
    folder = ROOT / "build" / f"host-cuda-torch-{torch.__version__}{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*glue_sources(), *HOST_SOURCES, *(CSRC / name for name in COMMON)]
    if not counts:
        sources += kernel_sources(folder)
    objects = instrumented_objects(folder, include) if counts else []
    cpp_extension.load(
        name="memcheck_host_cuda",
        sources=[str(source) for source in sources],
        extra_cflags=[*flags(), *(counters.DEFINES if counts else [])],
        extra_ldflags=["-fsanitize=address,undefined"] if sanitizes() else [str(path) for path in objects],
        extra_include_paths=[str(CSRC), str(include)],
        build_directory=str(folder),
        is_python_module=False,
    )
    global _library
    _library = ctypes.CDLL(str(folder / "memcheck_host_cuda.so"))
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
    assert _library is not None
    _library.host_cuda_sample_blocks(ctypes.c_int64(most))


def forget_counts() -> None:
    assert _library is not None
    _library.host_cuda_forget_counts()


def counts() -> list[counters.LaunchCounts]:
    """The launches since the last call of forget_counts, of a build that counts."""
    assert _library is not None
    return counters.parsed(_library.host_cuda_counts().decode())

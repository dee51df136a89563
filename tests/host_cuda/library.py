"""CUDA kernels on the host: a library in which they take the place of the CPU's, behind the same operators.

The same .cu files, compiled by a C++ compiler under csrc/host_cuda, and the operators' glue. Loading it replaces
what the dispatcher calls for tensors of the CPU, so that every test of an operator is one of its CUDA kernels.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

import memcheck  # noqa: F401  (its kernels are registered first, and then replaced)

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
ORDERS = ("ascending", "descending", "shuffled")
# Compute capability: the bytes of shared memory that a block of threads may have, by CUDA's programming guide.
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
# torch's glue calls these; they are in memcheck._C too, which exports nothing.
COMMON = ["common/cpu_level.cpp"]


def cuda_include() -> Path | None:
    """Where CUDA's headers are, of which a compiler needs no more."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), Path(nvcc).resolve().parents[1] if nvcc else None, "/usr/local/cuda"]
    for home in homes:
        if home and Path(home, "include", "cuda_fp16.h").is_file():
            return Path(home, "include")
    return None


def sanitizes() -> bool:
    return bool(os.environ.get("MEMCHECK_ASAN"))


def flags() -> list[str]:
    """Of a compiler for both glue and kernels."""
    with_warnings = ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas", "-fno-math-errno", "-fvisibility=hidden"]
    speed = ["-O2"]
    if sanitizes():
        speed = ["-Og", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        speed += ["-fno-sanitize=vptr"]
    # longjmp between stacks is no overrun.
    return [*with_warnings, *speed, "-U_FORTIFY_SOURCE", "-DMEMCHECK_HOST_CUDA", "-DMEMCHECK_WITH_CUDA"]


def kernel_sources(folder: Path) -> list[Path]:
    """For each .cu a file that torch's builder takes for C++. Written only where it is new, so that ninja can tell."""
    paths = []
    for kernel in sorted(CSRC.rglob("*_cuda.cu")):
        if kernel.parent.name == "cuda_probe":
            continue
        path = folder / f"{kernel.stem}.cpp"
        text = f'#include "host_cuda/host_cuda.h"\n#include "{kernel.relative_to(CSRC)}"\n'
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        paths.append(path)
    return paths


def glue_sources() -> list[Path]:
    """Of every operator that has kernels, and of the projections, which need none."""
    folders = {kernel.parent for kernel in CSRC.rglob("*_cuda.cu")} - {CSRC / "cuda_probe"} | {CSRC / "projection"}
    return [folder / f"{folder.name}.cpp" for folder in sorted(folders)]


def load() -> None:
    """Builds what changed, and loads it. Raises FileNotFoundError where there are no headers of CUDA."""
    include = cuda_include()
    if include is None:
        raise FileNotFoundError("no cuda_fp16.h: CUDA_HOME names no toolkit, and nvcc is not on PATH")
    folder = ROOT / "build" / f"host-cuda-torch-{torch.__version__}{'-asan' if sanitizes() else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*kernel_sources(folder), *glue_sources(), CSRC / "host_cuda" / "host_cuda.cpp"]
    sources += [CSRC / name for name in COMMON]
    cpp_extension.load(
        name="memcheck_host_cuda",
        sources=[str(source) for source in sources],
        extra_cflags=flags(),
        extra_ldflags=["-fsanitize=address,undefined"] if sanitizes() else [],
        extra_include_paths=[str(CSRC), str(include)],
        build_directory=str(folder),
        is_python_module=False,
    )
    global _library
    _library = ctypes.CDLL(str(folder / "memcheck_host_cuda.so"))
    _library.host_cuda_launches.restype = ctypes.c_char_p
    _library.host_cuda_stand_for.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    stand_for(this_gpu())


def this_gpu() -> str:
    """The compute capability of the GPU that the host stands for: that of an A100, unless the environment says."""
    capability = os.environ.get("MEMCHECK_HOST_CUDA_GPU", "8.0")
    if capability not in SHARED_BYTES:
        raise ValueError(f"MEMCHECK_HOST_CUDA_GPU must be one of {', '.join(SHARED_BYTES)}, got '{capability}'")
    return capability


_library: ctypes.CDLL | None = None


def set_order(order: str) -> None:
    """In which order the threads of a block take turns."""
    assert _library is not None
    _library.host_cuda_set_order(ORDERS.index(order))


def stand_for(capability: str) -> None:
    """From now on launches are refused that a GPU of this compute capability refuses."""
    assert _library is not None
    major, minor = capability.split(".")
    _library.host_cuda_stand_for(int(major), int(minor), SHARED_BYTES[capability])


def last_error() -> int:
    """CUDA's error that nobody has asked for yet, 0 where there is none."""
    assert _library is not None
    code: int = _library.host_cuda_peek_at_last_error()
    return code


@dataclass(frozen=True)
class Launches:
    """Of one kernel: how often, and the most threads of a block and bytes of shared memory."""

    count: int
    threads: int
    shared_bytes: int


def forget_launches() -> None:
    assert _library is not None
    _library.host_cuda_forget_launches()


def launches() -> dict[str, Launches]:
    """Of this process so far, or since they were forgotten, by the name of the kernel."""
    assert _library is not None
    lines = [line.split("\t") for line in _library.host_cuda_launches().decode().splitlines()]
    return {kernel: Launches(*map(int, numbers)) for kernel, *numbers in lines}

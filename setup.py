"""Builds memcheck._C against the torch that is installed. Project metadata lives in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(
        f"memcheck is built against the torch that will run it, and {sys.executable} cannot import torch ({error}).\n"
        "Install torch first, then build without isolation:\n"
        "    pip install torch\n"
        "    pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent
COMPILE_FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]


def wants_cuda() -> bool:
    """MEMCHECK_CUDA=auto|0|1. A GPU is never needed to build: a CUDA torch and nvcc are."""
    choice = os.environ.get("MEMCHECK_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        sys.exit(f"MEMCHECK_CUDA must be auto, 0 or 1, got {choice!r}")
    missing = []
    if torch.version.cuda is None:
        missing.append(f"a CUDA build of torch (this one is {torch.__version__})")
    if CUDA_HOME is None or shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) is None:
        missing.append("nvcc (set CUDA_HOME to the toolkit's folder)")
    if choice == "1" and missing:
        sys.exit(f"MEMCHECK_CUDA=1 asks for CUDA kernels, which need {' and '.join(missing)}")
    return choice != "0" and not missing


def default_jobs() -> int:
    """One compiler per core, and 1.5 GiB of memory for each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // (3 << 29)))


CUDA = wants_cuda()
os.environ.setdefault("MAX_JOBS", str(default_jobs()))
if CUDA and not torch.cuda.is_available():
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")


class Build(BuildExtension):  # type: ignore[misc]
    """Keeps objects between builds, and notes beside the extension what it was built against."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-{'cuda' if CUDA else 'cpu'}")

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("memcheck._C")).parent
        package.mkdir(parents=True, exist_ok=True)
        lines = [f"{name} = {value!r}\n" for name, value in build_facts().items()]
        (package / "_build.py").write_text(
            '"""What memcheck._C was built with. Written by setup.py."""\n\n' + "".join(lines)
        )


def build_facts() -> dict[str, Any]:
    compiler = os.environ.get("CXX", "c++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return {
        "TORCH_VERSION": str(torch.__version__),
        "CUDA_VERSION": torch.version.cuda if CUDA else None,
        "CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") if CUDA else None,
        "COMPILER": version.splitlines()[0] if version else compiler,
        "COMPILE_FLAGS": COMPILE_FLAGS,
    }


def extension() -> Any:
    suffixes = (".cpp", ".cu") if CUDA else (".cpp",)
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)
    kind = CUDAExtension if CUDA else CppExtension
    macros = [("MEMCHECK_WITH_CUDA", None)] if CUDA else []
    return kind(
        "memcheck._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros,
        # -fopenmp compiles at::parallel_for; it is not linked, so that torch's own OpenMP runtime stays the only one.
        extra_compile_args={"cxx": COMPILE_FLAGS, "nvcc": ["-O3", "--expt-relaxed-constexpr"]},
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})

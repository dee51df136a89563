"""How the libraries of csrc/simulated are compiled: by setup.py with the extension, or by build.py at first use."""

from collections.abc import Iterable

# The libraries are compiled where they run, so -O1: the kernels compute sizes, and -O3 compiles for twice as long.
COMPILE_FLAGS = ["-std=c++20", "-O1", "-g0", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS"]
LIBRARIES = ["torch_cpu", "c10"]
# Of the modules for Python: csrc/simulated/rules.cpp, and the simulated CPU.
RULES_LIBRARIES = ["torch_python", *LIBRARIES]
# The files of the simulated CPU, two of which are the simulated GPU's, too.
CPU_FILES = ["contents.cpp", "cpu.cpp", "cpu_memory.cpp", "cpu_module.cpp", "cpu_probe.cpp", "values.cpp"]
# The model of CUDA's caching allocator alone, which needs no torch. Beside a real GPU a process cannot load the library
# that simulates one, whose kernels would take the place of that GPU's.
ALLOCATOR_FLAGS = ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden"]
ALLOCATOR_FILES = ["caching_allocator.cpp", "replay.cpp"]


def gpu_files(names: Iterable[str]) -> list[str]:
    """Those of the library that simulates GPUs, among the files of csrc/simulated."""
    return sorted(name for name in names if name not in ("replay.cpp", "rules.cpp") and not name.startswith("cpu"))

"""How the library that simulates GPUs is compiled: by setup.py with the extension, and by build.py at first use."""

# The library is compiled where it runs, so -O1: the kernels compute sizes, and -O3 compiles for twice as long.
COMPILE_FLAGS = ["-std=c++20", "-O1", "-g0", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS"]
LIBRARIES = ["torch_cpu", "c10"]
# Of the module for Python, csrc/simulated/rules.cpp.
RULES_LIBRARIES = ["torch_python", *LIBRARIES]

"""What kernels take of a GPU: registers and spilled bytes of every instance, by ptxas; threads and shared memory, as
launched.

    python tests/host_cuda/resources.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tabulate import tabulate

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ARCHITECTURES = ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]
# As torch compiles them, which takes half types' operators away.
WITHOUT = ["HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS"]
FLAGS = ["-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", f"-I{CSRC}", *(f"-D__CUDA_NO_{name}__" for name in WITHOUT)]


def compile_kernel(source: Path, folder: Path) -> str:
    """What ptxas says of the kernels of one file."""
    architectures = [f"-gencode={architecture}" for architecture in ARCHITECTURES]
    command = ["nvcc", "-c", *FLAGS, *architectures, source, "-o", folder / f"{source.stem}.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def demangled(names: list[str]) -> list[str]:
    """As in the source, without namespaces and parameters."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    words = [re.sub(r"^void |memcheck::|\(anonymous namespace\)::|<unnamed>::", "", line) for line in text.splitlines()]
    return [word.partition("(")[0] if ">(" not in word else word.partition(">(")[0] + ">" for word in words]


def resources(log: str) -> list[dict[str, object]]:
    """A row per kernel and architecture."""
    pattern = (
        r"Compiling entry function '(?P<kernel>\S+)' for '(?P<architecture>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers"
    )
    found = [match.groupdict() for match in re.finditer(pattern, log, re.DOTALL)]
    names = demangled([row["kernel"] for row in found])
    return [
        {
            "kernel": name,
            "architecture": row["architecture"],
            "registers": int(row["registers"]),
            "stack bytes": int(row["stack"]),
            "spilled bytes": int(row["stores"]) + int(row["loads"]),
        }
        for name, row in zip(names, found, strict=True)
    ]


def side_by_side(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """A row per kernel, its architectures beside each other."""
    table: dict[object, dict[str, object]] = {}
    for row in rows:
        line = table.setdefault(row["kernel"], {"kernel": row["kernel"]})
        for column in ("registers", "stack bytes", "spilled bytes"):
            line[f"{column} {row['architecture']}"] = row[column]
    return [table[kernel] for kernel in sorted(table, key=str)]


def main() -> int:
    if shutil.which("nvcc") is None:
        print("resources of kernels: skipped, nvcc is not on PATH")
        return 1 if os.environ.get("CI") else 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        logs = pool.map(lambda source: compile_kernel(source, Path(folder)), sorted(CSRC.rglob("*.cu")))
        rows = [row for log in logs for row in resources(log)]
    print(tabulate(side_by_side(rows), headers="keys"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

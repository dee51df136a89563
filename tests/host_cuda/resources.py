"""Prints the resources of CUDA kernels: registers and spilled bytes as ptxas reports them, shared memory of a block
from launches on the host, and how many blocks a multiprocessor holds at once.

python tests/host_cuda/resources.py            compiles for 8.0 and 9.0; other architectures as they are stored
python tests/host_cuda/resources.py --store    compiles for every architecture, and stores registers, for count.py too
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from host_cuda import occupancy  # noqa: E402

CSRC = ROOT / "csrc"
REGISTERS = ROOT / "benchmarks" / "results" / "cuda_counts" / "registers.csv"
# A build on a machine without a GPU has the binaries of 8.0 and 9.0, and drivers compile its PTX for later GPUs.
ARCHITECTURES = ("arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]")
# A build on a machine with a GPU has the binary of that GPU.
EVERY_ARCHITECTURE = ("arch=compute_80,code=[sm_80,sm_86,sm_89]", "arch=compute_90,code=[sm_90,sm_100,sm_120]")
# torch compiles kernels without CUDA's operators for 16-bit types.
WITHOUT = ["HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS"]
FLAGS = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", "-Xptxas=-v", f"-I{CSRC}"]
FLAGS += [f"-D__CUDA_NO_{name}__" for name in WITHOUT]


def folder_of_this_source(flags: list[str]) -> Path:
    """Returns the folder for the objects of these sources. Its name is a hash of them, so that objects are reused."""
    kernels = [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".cu", ".cuh", ".h")]
    of_all = hashlib.sha256(" ".join(flags).encode())
    for path in kernels:
        of_all.update(path.read_bytes())
    return ROOT / "build" / "nvcc" / of_all.hexdigest()[:16]


def compile_kernel(source: Path, folder: Path, flags: list[str]) -> tuple[Path, str]:
    """Returns the object of one file and ptxas' report. Raises RuntimeError with the compiler's output."""
    made, log = folder / f"{source.stem}.o", folder / f"{source.stem}.log"
    if not log.is_file():
        done = subprocess.run(["nvcc", "-c", *flags, source, "-o", made], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        log.write_text(done.stdout + done.stderr)
    return made, log.read_text()


def compile_kernels(architectures: tuple[str, ...] = ARCHITECTURES) -> tuple[list[Path], dict[str, str]]:
    """Returns the objects of all files, and ptxas' reports by folder."""
    flags = [*FLAGS, *(f"-gencode={architecture}" for architecture in architectures)]
    folder = folder_of_this_source(flags)
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        sources = sorted(CSRC.rglob("*.cu"))
        results = list(pool.map(lambda source: compile_kernel(source, folder, flags), sources))
    logs: dict[str, str] = {}
    for source, (_, log) in zip(sources, results, strict=True):
        logs[source.parent.name] = logs.get(source.parent.name, "") + log
    return [made for made, _ in results], logs


def demangled(names: list[str]) -> list[str]:
    """Returns demangled names without namespaces and parameters."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    noise = r"^void |memcheck::|\(anonymous namespace\)::|<unnamed>::|_NV_ANON_NAMESPACE::|\((?:bool|int|long)\)"
    return [without_parameters(re.sub(noise, "", line)) for line in text.splitlines()]


def without_parameters(name: str) -> str:
    """Returns the name up to the first parenthesis outside of angle brackets."""
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def resources(logs: dict[str, str]) -> list[dict[str, object]]:
    """Returns a row per kernel and architecture."""
    return [{"operator": operator, **row} for operator, log in logs.items() for row in resources_of(log)]


def resources_of(log: str) -> list[dict[str, object]]:
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
            "stack": int(row["stack"]),
            "spilled": int(row["stores"]) + int(row["loads"]),
        }
        for name, row in zip(names, found, strict=True)
    ]


@dataclass(frozen=True)
class Block:
    """Threads and bytes of shared memory of a kernel's block, the most of all its launches."""

    threads: int
    shared_bytes: int


def blocks() -> dict[str, dict[str, Block]]:
    """Blocks of every kernel as in the source, by the compute capability that the host stands for; a limit of shared
    memory has one of them. Raises FileNotFoundError without CUDA's headers, RuntimeError if a launch is refused."""
    os.environ["MEMCHECK_TEST_HOST_CUDA"] = "1"
    from host_cuda import library, widest
    from ops.checks import run

    library.load()
    asked = {}
    for gpu in GPUS:
        library.stand_for(gpu)
        library.forget_launches()
        for it in widest.passes():
            run(it.contract.function, *it.make_inputs())
        for _, more in (*widest.steps(), *widest.sinks()):
            more()
        names = library.instances()
        launches = library.launches_by_function()
        asked[gpu] = {names[at]: Block(of.threads, of.shared_bytes) for at, of in launches.items()}
    return asked


def side_by_side(rows: list[dict[str, object]], asked: dict[str, dict[str, Block]]) -> list[dict[str, object]]:
    """Returns a row per kernel, with a column per architecture: registers, spilled bytes, the blocks that a
    multiprocessor holds at once, and what allows no more."""
    table: dict[str, dict[str, object]] = {}
    for row in rows:
        name, capability = str(row["kernel"]), capability_of(str(row["architecture"]))
        line = table.setdefault(name, {"kernel": name, "threads": "", "KiB": ""})
        text = f"{row['registers']}" + (f" +{row['spilled']}" if row["spilled"] else "")
        block = asked.get(FIRST_WITH_LIMIT[capability], {}).get(spelled_alike(name))
        if block is not None:
            allowed, limit = occupancy.blocks_per_multiprocessor(
                capability, block.threads, int(str(row["registers"])), block.shared_bytes
            )
            text += f": {allowed} ({limit})"
            kib = f"{block.shared_bytes / 1024:.1f}"
            known = str(line["KiB"])
            line |= {"threads": block.threads, "KiB": known if kib in known.split("/") else f"{known}/{kib}".strip("/")}
        line[str(row["architecture"])] = text
    return [table[name] for name in sorted(table)]


def capability_of(architecture: str) -> str:
    """sm_120 is 12.0."""
    number = architecture.removeprefix("sm_")
    return f"{number[:-1]}.{number[-1]}"


def spelled_alike(name: str) -> str:
    """Compilers spell numbers and truths in names alike but for these."""
    return name.replace("true", "1").replace("false", "0")


# The first compute capability with each limit of shared memory, and all that have it.
GPUS = {"8.0": ["8.0"], "8.6": ["8.6", "8.9", "12.0"], "9.0": ["9.0", "10.0"]}
FIRST_WITH_LIMIT = {capability: first for first, alike in GPUS.items() for capability in alike}


def with_stored(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The rows, and those that are stored of the same kernels for other architectures."""
    kernels, compiled = ({row[name] for row in rows} for name in ("kernel", "architecture"))
    stored = pd.read_csv(REGISTERS).to_dict("records")
    return [*rows, *(row for row in stored if row["kernel"] in kernels and row["architecture"] not in compiled)]


def main() -> int:
    stores = "--store" in sys.argv
    try:
        asked = blocks()
    except FileNotFoundError as error:
        print(f"blocks of kernels: skipped, {error}")
        asked = {}
    if shutil.which("nvcc") is None:
        print("resources of kernels: skipped, nvcc is not on PATH")
        return 1 if os.environ.get("CI") else 0
    try:
        _, logs = compile_kernels(EVERY_ARCHITECTURE if stores else ARCHITECTURES)
    except RuntimeError as error:
        sys.exit(str(error))
    rows = resources(logs)
    if stores:
        pd.DataFrame(rows).sort_values(["operator", "kernel", "architecture"]).to_csv(REGISTERS, index=False)
    print("Threads and KiB of shared memory: of a block, the most of all launches; several KiB where GPUs differ.")
    print("sm_*: registers of a thread, + bytes spilled: blocks that a multiprocessor holds at once (the limit)")
    print(pd.DataFrame(side_by_side(with_stored(rows), asked)).to_string(index=False, na_rep=""))
    return 0


if __name__ == "__main__":
    sys.exit(main())

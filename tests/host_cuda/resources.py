"""Prints the resources of CUDA kernels: registers and spilled bytes as ptxas reports them, and threads and shared
memory of a block from launches on the host.

python tests/host_cuda/resources.py            those that are stored; sources that have changed since are compiled
python tests/host_cuda/resources.py --store    compiles these sources for every architecture, and stores their registers

sources.csv says of which sources the stored registers are. Comments and the layout of lines change nothing.
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

CSRC = ROOT / "csrc"
REGISTERS = ROOT / "benchmarks" / "results" / "cuda_counts" / "registers.csv"
SOURCES = REGISTERS.with_name("sources.csv")
Row = dict[str, object]
# A build on a machine without a GPU has the binaries of 8.0 and 9.0, and drivers compile its PTX for later GPUs.
ARCHITECTURES = ("arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]")
# A build on a machine with a GPU has the binary of that GPU.
EVERY_ARCHITECTURE = ("arch=compute_80,code=[sm_80,sm_86,sm_89]", "arch=compute_90,code=[sm_90,sm_100,sm_120]")
# torch compiles kernels without CUDA's operators for 16-bit types.
WITHOUT = ["HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS"]
FLAGS = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", "-Xptxas=-v"]
FLAGS += [f"-D__CUDA_NO_{name}__" for name in WITHOUT]
COMMENT_OR_LITERAL = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")""", re.DOTALL)


def code_of(path: Path) -> str:
    """Returns the text of a file without comments and indentation."""
    text = COMMENT_OR_LITERAL.sub(lambda found: found[1] or " ", path.read_text())
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def fingerprint(source: Path) -> str:
    """Returns a hash of the code of a .cu file and of all that it includes of csrc, and of nvcc's flags."""
    codes: dict[Path, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path not in codes and path.is_file():
            codes[path] = code_of(path)
            left += [CSRC / name for name in re.findall(r'^#\s*include "([^"]+)"', codes[path], re.MULTILINE)]
    return hashlib.sha256("\0".join([*FLAGS, *(codes[path] for path in sorted(codes))]).encode()).hexdigest()[:16]


def cuda_sources() -> dict[str, Path]:
    """Returns the .cu files, by their names in csrc."""
    return {str(path.relative_to(CSRC)): path for path in sorted(CSRC.rglob("*.cu"))}


def changed_sources() -> list[str]:
    """Returns the names of the .cu files whose code is not that of the stored registers."""
    stored = {row["source"]: row["fingerprint"] for row in pd.read_csv(SOURCES, dtype=str).to_dict("records")}
    return [name for name, path in cuda_sources().items() if stored.get(name) != fingerprint(path)]


def nvcc_release() -> str:
    """Returns nvcc's version, such as 13.0.88."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text.rpartition(", V")[2].split()[0]


def sources_to_compile() -> list[str]:
    """Returns the names of the .cu files that this nvcc may not have compiled: those that have changed, and all if
    another version of nvcc has compiled them."""
    with_this_nvcc = set(pd.read_csv(SOURCES, dtype=str)["nvcc"]) == {nvcc_release()}
    return changed_sources() if with_this_nvcc else list(cuda_sources())


def compile_kernels(names: list[str], architectures: tuple[str, ...] = ARCHITECTURES) -> tuple[list[Path], list[Row]]:
    """Returns an object for each .cu file, and a row of resources for each kernel and architecture. Raises RuntimeError
    with the compiler's output. The objects in build/ are used again as long as the code is the same."""
    flags = [*FLAGS, *(f"-gencode={architecture}" for architecture in architectures)]
    of_flags = hashlib.sha256(" ".join([nvcc_release(), *flags]).encode()).hexdigest()[:8]

    def compile_one(name: str) -> tuple[Path, list[Row]]:
        source = cuda_sources()[name]
        made = ROOT / "build" / "nvcc" / f"{source.stem}-{fingerprint(source)}-{of_flags}.o"
        made.parent.mkdir(parents=True, exist_ok=True)
        log = made.with_suffix(".log")
        if not log.is_file():
            done = subprocess.run(
                ["nvcc", "-c", *flags, f"-I{CSRC}", source, "-o", made], capture_output=True, text=True
            )
            if done.returncode != 0:
                raise RuntimeError(done.stdout + done.stderr)
            log.write_text(done.stdout + done.stderr)
        return made, [{"source": name, **row} for row in resources_of(log.read_text())]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(compile_one, names))
    return [made for made, _ in results], [row for _, rows in results for row in rows]


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


def resources_of(log: str) -> list[Row]:
    """Returns the rows of ptxas' report."""
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


def side_by_side(rows: list[Row], asked: dict[str, dict[str, Block]]) -> list[dict[str, object]]:
    """Returns a row per kernel, with a column per architecture: registers and spilled bytes."""
    table: dict[str, dict[str, object]] = {}
    for row in rows:
        name, capability = str(row["kernel"]), capability_of(str(row["architecture"]))
        line = table.setdefault(name, {"kernel": name, "threads": "", "KiB": ""})
        block = asked.get(FIRST_WITH_LIMIT[capability], {}).get(spelled_alike(name))
        if block is not None:
            kib = f"{block.shared_bytes / 1024:.1f}"
            known = str(line["KiB"])
            line |= {"threads": block.threads, "KiB": known if kib in known.split("/") else f"{known}/{kib}".strip("/")}
        line[str(row["architecture"])] = f"{row['registers']}" + (f" +{row['spilled']}" if row["spilled"] else "")
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


def with_stored(rows: list[Row], names: list[str]) -> list[Row]:
    """Returns the rows of the sources of these names, and those that are stored of the others."""
    stored = pd.read_csv(REGISTERS).to_dict("records")
    kept = cuda_sources().keys() - set(names)
    return [*rows, *(row for row in stored if row["source"] in kept)]


def store(rows: list[Row]) -> None:
    """Stores the rows of all sources, and of which code they are."""
    pd.DataFrame(rows).sort_values(["source", "kernel", "architecture"]).to_csv(REGISTERS, index=False)
    release = nvcc_release()
    sources = [(name, fingerprint(path), release) for name, path in cuda_sources().items()]
    pd.DataFrame(sources, columns=["source", "fingerprint", "nvcc"]).to_csv(SOURCES, index=False)


def main() -> int:
    stores = "--store" in sys.argv
    has_nvcc = shutil.which("nvcc") is not None
    names = sources_to_compile() if has_nvcc else changed_sources()
    if names and not has_nvcc:
        print(f"resources of kernels: skipped, nvcc is not on PATH, and these have changed: {', '.join(names)}")
        return 1 if os.environ.get("CI") else 0
    try:
        asked = blocks()
    except FileNotFoundError as error:
        print(f"blocks of kernels: skipped, {error}")
        asked = {}
    try:
        rows = with_stored(compile_kernels(names, EVERY_ARCHITECTURE if stores else ARCHITECTURES)[1], names)
    except RuntimeError as error:
        sys.exit(str(error))
    if stores:
        store(rows)
    print("Threads and KiB of shared memory: of a block, the most of all launches; several KiB where GPUs differ.")
    print("sm_*: registers of a thread, + bytes spilled")
    print(pd.DataFrame(side_by_side(rows, asked)).to_string(index=False, na_rep=""))
    return 0


if __name__ == "__main__":
    sys.exit(main())

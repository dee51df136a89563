"""Counts of the CUDA kernels on the host: what tests/host_cuda/counters.h writes, as numbers by name.

Arithmetic is counted in the machine code of the host: the instructions of each basic block, times its runs.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

DEFINES = ["-DHOST_CUDA_COUNTS"]
# The compiler reports every load and store, and every basic block. Copies of packs stay whole, as on a GPU, loops are
# not made vectors, and a product and a sum become one instruction where nvcc makes one too.
INSTRUMENTED = ["-O1", "-g1", "-fno-tree-sra", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
INSTRUMENTED += ["-fsanitize-coverage=trace-pc", "-fexpensive-optimizations", "-ffp-contract=fast"]
INSTRUMENTED += ["-mfma"] if platform.machine() == "x86_64" else []

Numbers = dict[str, int]


@dataclass(frozen=True)
class LaunchCounts:
    """Counts of one launch, by the names of tests/host_cuda/counters.cpp, and those of every place in its code that
    accesses memory. A unit is a sector of 32 bytes in global memory, and a turn of the banks in shared memory."""

    kernel: str
    numbers: Numbers
    places: list[Numbers] = field(default_factory=list)
    # Runs of each basic block, by the address after its first instruction.
    code_runs: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        """A number of the launch, or a count of all its blocks: if only some ran, those of the others are taken to be
        alike. Zero for a collective that the kernel does not call. Raises KeyError for other names."""
        count = self.numbers.get(name, 0) if name.startswith(COLLECTIVES) else self.numbers[name]
        return count if name in OF_THE_LAUNCH else self.of_all_blocks(count)

    def of_all_blocks(self, count: int) -> int:
        if self.numbers["runs"] == self.numbers["blocks"]:
            return count
        return round(count * self.numbers["blocks"] / self.numbers["runs"])

    def arithmetic(self, instructions: dict[int, Numbers], kind: str) -> int:
        """How many operations of a kind of `ARITHMETIC` all threads did. instructions: those of the library that
        ran, as `instructions_of` returns them."""
        runs = self.code_runs.items()
        return self.of_all_blocks(sum(times * instructions.get(at, {}).get(kind, 0) for at, times in runs))

    def collectives(self) -> int:
        """How often the lanes of a warp met, but for products."""
        return sum(self[name] for name in self.numbers if name.startswith(COLLECTIVES) and "mma" not in name)


OF_THE_LAUNCH = ("function", "blocks", "runs", "threads", "shared")
# How the names of collectives begin.
COLLECTIVES = ("__", "mma_", "ldmatrix_")


def parsed(text: str) -> list[LaunchCounts]:
    """The launches of a text of counters, in order."""
    launches: list[LaunchCounts] = []
    for line in text.splitlines():
        kind, *words = line.split("\t")
        values = dict(word.rsplit("=", 1) for word in words)
        if kind == "launch":
            launches.append(LaunchCounts(values.pop("kernel"), as_numbers(values.items())))
        elif kind == "place":
            launches[-1].places.append(as_numbers(values.items()))
        else:
            launches[-1].code_runs[int(values["at"])] = int(values["runs"])
    return launches


def as_numbers(values: Iterable[tuple[str, str]]) -> Numbers:
    return {name: int(value) for name, value in values}


def by_kernel(launches: Iterable[LaunchCounts]) -> Iterator[tuple[str, list[LaunchCounts]]]:
    """The launches of each kernel, in the order of their first."""
    groups: dict[str, list[LaunchCounts]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel, []).append(launch)
    yield from groups.items()


# ---- arithmetic

FUNCTIONS = "(?:exp|exp2|expm1|log|log2|log1p|tanh|pow)"
# Operations of a thread, as x86-64 and AArch64 spell them. On a GPU each of "fma" takes one instruction, and each of
# "special" at least one of the special function units; "double" is what is done in float64.
ARITHMETIC = {
    "fma": r"v?(?:add|sub|mul|fn?m(?:add|sub)\d+)ss\b|fn?m?(?:add|sub|mul)\s+s\d",
    "special": rf"v?(?:div|sqrt)ss\b|f(?:div|sqrt)\s+s\d|(?:call|bl)\b.*<{FUNCTIONS}f@plt",
    "double": r"v?(?:add|sub|mul|div|sqrt|fn?m(?:add|sub)\d+)sd\b|f(?:div|sqrt|n?m?(?:add|sub|mul))\s+d\d|"
    rf"(?:call|bl)\b.*<{FUNCTIONS}@plt",
}
BLOCK_BEGINS = r"(?:call|bl)\b.*<__sanitizer_cov_trace_pc\b"


def instructions_of(path: str) -> dict[int, Numbers]:
    """Arithmetic instructions of each basic block of a library or program, by kind, where it has any. The key is the
    address after the call that reports the block."""
    line = re.compile(
        rf"^ *(?P<at>[0-9a-f]+):\t(?:(?P<begins>{BLOCK_BEGINS})|"
        + "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in ARITHMETIC.items())
        + r")|^(?P<function>[0-9a-f]+ <)"
    )
    found: dict[int, Numbers] = {}
    block, begins = 0, False
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if begins and ":\t" in text:
                block, begins = int(text.partition(":")[0], 16), False
            if (match := line.match(text)) is None:
                continue
            if match["function"] or match["begins"]:
                block, begins = 0, not match["function"]
            elif block:
                kind = str(match.lastgroup)
                of_block = found.setdefault(block, {})
                of_block[kind] = of_block.get(kind, 0) + 1
    if process.returncode != 0:
        raise RuntimeError(f"objdump could not read {path}")
    return found

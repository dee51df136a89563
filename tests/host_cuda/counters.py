"""Counts of the CUDA kernels on the host: what csrc/host_cuda/counters.h writes, as numbers by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

DEFINES = ["-DHOST_CUDA_COUNTS", "-g1"]
# The compiler reports every load and store. Copies of packs stay whole, as on a GPU; loops are not made vectors.
INSTRUMENTED = ["-O1", "-fno-tree-sra", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]

Numbers = dict[str, int]


@dataclass(frozen=True)
class LaunchCounts:
    """Counts of one launch, by the names of csrc/host_cuda/counters.cpp, and those of every place in its code that
    accesses memory. A unit is a sector of 32 bytes in global memory, and a turn of the banks in shared memory."""

    kernel: str
    numbers: Numbers
    places: list[Numbers] = field(default_factory=list)

    def __getitem__(self, name: str) -> int:
        """A number of the launch, or a count of all its blocks: if only some ran, those of the others are taken to be
        alike. Zero for a collective that the kernel does not call. Raises KeyError for other names."""
        count = self.numbers.get(name, 0) if name.startswith(COLLECTIVES) else self.numbers[name]
        if name in OF_THE_LAUNCH or self.numbers["runs"] == self.numbers["blocks"]:
            return count
        return round(count * self.numbers["blocks"] / self.numbers["runs"])

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
        else:
            launches[-1].places.append(as_numbers(values.items()))
    return launches


def as_numbers(values: Iterable[tuple[str, str]]) -> Numbers:
    return {name: int(value) for name, value in values}


def by_kernel(launches: Iterable[LaunchCounts]) -> Iterator[tuple[str, list[LaunchCounts]]]:
    """The launches of each kernel, in the order of their first."""
    groups: dict[str, list[LaunchCounts]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel, []).append(launch)
    yield from groups.items()

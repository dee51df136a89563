"""Bytes kept account of by name, while a computation that is not run takes and frees them."""

from __future__ import annotations


class Ledger:
    """What is alive as a computation goes on, and what was when most was. Names may have underscores for spaces."""

    def __init__(self, **held: int) -> None:
        self.alive = dict(held)
        self.peak: dict[str, int] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new peak, from what is alive now."""
        self.peak = spaced(self.alive)

    def take(self, **sizes: int) -> None:
        self.alive.update(sizes)
        if sum(self.alive.values()) > sum(self.peak.values()):
            self.peak = spaced(self.alive)

    def free(self, *names: str) -> None:
        for name in names:
            del self.alive[name]

    def replace(self, *names: str, **sizes: int) -> None:
        """What is made from things that are freed as soon as it is there."""
        self.take(**sizes)
        self.free(*names)

    def rename(self, name: str, other: str) -> None:
        self.alive[other] = self.alive.pop(name)


def spaced(sizes: dict[str, int]) -> dict[str, int]:
    return {name.replace("_", " "): size for name, size in sizes.items() if size}

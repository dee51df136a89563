"""Requests that run a script several times, with {} in its words for what changes. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from memcheck.cli.options import FORMAT, Request
from memcheck.cli.requests import Run
from memcheck.core import converters, devices
from memcheck.core.converters import count, switch
from memcheck.core.errors import UsageError
from memcheck.core.options import flags_of, named, option
from memcheck.core.step import Place
from memcheck.core.units import RANGE, parse_sizes

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class OfScript(Request):
    """A request that runs a script on a simulated GPU, once for each value."""

    forms = ("--device GPU [options] -- SCRIPT [its own options, with {}]",)
    takes = (FORMAT, flags_of(Place, "memory_limit"))
    run: Run  # As which each run is one.

    device: str | None = option(None, "a GPU such as RTX-4090, or a size such as 40GiB", converters.text)
    steps: int | None = option(
        None,
        "end each run after N optimizer steps; default: when three in a row, or rounds of up to four, have allocated "
        "the same",
        count,
    )
    ranks: int | None = option(None, "the script is rank 0 of N processes that torchrun starts, each with a GPU", count)
    script: list[str] = option((), "as for memcheck run: SCRIPT ARGS, or -m MODULE ARGS", positional=True, nargs="*")

    def check(self) -> None:
        if not self.script:
            raise UsageError("there is no SCRIPT behind -- to run")
        if self.device is None:
            raise UsageError(f"a script needs {named('device')}, such as RTX-4090: it runs on a simulated GPU")
        if devices.device_named(self.device).kind != "cuda":
            raise UsageError(f"{named('device')} {self.device} is no GPU that can be simulated")
        given = {name: getattr(self, name) for name in ("device", "memory_limit", "steps", "ranks")}
        words = {"module": self.script[1:]} if self.script[0] == "-m" else {"script": self.script}
        self.run = Run(**given, **words)
        self.script = ["-m", *self.run.module] if self.run.module else self.run.script or []

    def before_torch(self) -> None:
        self.run.before_torch()

    @property
    def placeholders(self) -> list[str]:
        """What stands between the braces of each placeholder."""
        return [found for word in self.script for found in PLACEHOLDER.findall(word)]

    def command(self, values: Sequence[object]) -> list[str]:
        """The script's words with these values in place of the placeholders."""
        given = iter(values)
        return [PLACEHOLDER.sub(lambda _: str(next(given)), word) for word in self.script]

    @property
    def titles(self) -> list[str]:
        """The option of the script before each placeholder, "batch-size" of --batch-size {}; else "value"."""
        found = []
        for place, word in enumerate(self.script):
            before = re.match(r"-*([\w.+-]+)=", word) or re.match(r"-+([\w.-]+)$", self.script[max(place - 1, 0)])
            found += [before[1] if before else "value"] * len(PLACEHOLDER.findall(word))
        return found


class FitScript(OfScript):
    """Finds the largest value of an argument of a script with which memory does not run out on a simulated GPU.

    memcheck fit --device RTX-4090 -- train.py --batch-size {}
    memcheck fit --device RTX-4090 --find batch-size --step 8 -- train.py --batch-size {} --dtype bfloat16
    memcheck fit --device A100-40GB -- train.py --batch-size '{16,32,64}'
    """

    first = ("device", "memory_limit", "find", "step", "start", "up_to")

    find: str | None = option(None, "what the value is called; default: the script's option before {}", converters.text)
    step: int = option(1, "try only multiples of N", count)
    start: int = option(8, "the first value that is tried", count)
    up_to: int = option(2**30, "end of the search; default: 2^30", count)
    fail_on_oom: bool = option(False, "exit code 3 unless a value fits", switch)

    def check(self) -> None:
        super().check()
        if len(self.placeholders) != 1:
            rule = "must have one {} in its words, which stands for the value, or '{16,32}' in quotes"
            raise UsageError(f"the script {rule}, got {len(self.placeholders)}")
        if self.up_to < self.step:
            raise UsageError(f"{named('up_to')} must be at least the step of {self.step}, got {self.up_to}")

    @property
    def titles(self) -> list[str]:
        return [self.find] if self.find else super().titles

    @property
    def listed(self) -> list[str]:
        """The values of {16,32,64} or {16:128:x2}; empty where the largest one is searched for."""
        return values_of(self.placeholders[0])


class SweepScript(OfScript):
    """Runs a script with every combination of the values in braces, on a simulated GPU; one that is there is not run.

    memcheck sweep --device RTX-4090 --output results/batches -- train.py --batch-size {8:64:x2}
    memcheck sweep --device RTX-4090 -- train.py --batch-size '{16,32}' --dtype '{float16,bfloat16}'
    """

    first = ("device", "memory_limit", "output", "dry_run")

    output: Path = option(Path("results"), "folder of a table, a picture, and a folder for each run", converters.folder)
    dry_run: bool = option(False, "list the runs, run none", switch)

    def check(self) -> None:
        super().check()
        if not self.placeholders or not all(map(values_of, self.placeholders)):
            raise UsageError("the script must have values in braces, as in --batch-size '{16,32,64}' or {16:128:x2}")

    def combinations(self) -> Iterator[tuple[str, ...]]:
        return product(*map(values_of, self.placeholders))


def values_of(text: str) -> list[str]:
    """ "16,32" and "16:64:x2" as words."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    return [str(size) for word in words for size in (parse_sizes(word) if RANGE.fullmatch(word) else [word])]


# The commands that take a script behind --.
OF_SCRIPTS: dict[str, type[OfScript]] = {"fit": FitScript, "sweep": SweepScript}

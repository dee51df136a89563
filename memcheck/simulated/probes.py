"""Tables of what kernels took in probes: files of JSON lines, so that none runs again, also for another machine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.step import Place
from memcheck.measure.machine import processor_name

FORMAT = 3  # Rows of other formats are not read.


class Machine(NamedTuple):
    """What decides what a kernel allocates, besides its arguments."""

    threads: int
    torch_version: str
    cpu: str

    def __str__(self) -> str:
        return f"{self.threads} threads, torch {self.torch_version}, {self.cpu}"


def table_path() -> Path:
    """MEMCHECK_PROBES, else a file in the user's cache."""
    if (given := os.environ.get("MEMCHECK_PROBES")) is not None:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "memcheck" / "probes.jsonl"


class Table:
    """The rows of one machine in a file.

    grows: what the file lacks is probed and added. is_cache: the user did not name the file, which is then of use as
    far as it can be read and written.
    """

    numbers = itertools.count(1)

    def __init__(self, path: Path, machine: Machine, grows: bool, is_cache: bool) -> None:
        self.path, self.machine, self.grows, self.is_cache = path, machine, grows, is_cache
        self._head = json.dumps({"format": FORMAT, "machine": machine})[:-1]
        self._number, self._read, self._lock = next(self.numbers), "", Lock()

    def configure(self, module: Any, *options: int) -> None:
        """Configures the simulation of this thread, and gives it the rows that are new in the file."""
        with self._lock:
            text = text_of(self.path, self.is_cache)
            if not text.startswith(self._read):
                self._number, self._read = next(self.numbers), ""
            module.configure(*options, self._number)
            for line in text[len(self._read) :].splitlines():
                if line.startswith(self._head):
                    with suppress(ValueError, KeyError, TypeError):  # It was cut off.
                        row = json.loads(line)
                        module.know(row["operator"], row["key"], row["plan"])
            self._read = text[: text.rfind("\n") + 1]

    def add(self, plans: list[tuple[str, list[int], Any]]) -> None:
        """Appends (operator, key, plan) of probes: of torch's operators, and those of others that the user wants."""
        rows = [
            f"{self._head}, {json.dumps({'operator': name, 'key': key, 'plan': plan})[1:]}\n"
            for name, key, plan in plans
            if name.startswith("aten::") or not (self.is_cache or name.startswith("memcheck::"))
        ]
        with suppress(*[OSError] * self.is_cache):
            if rows:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                start = "" if text_of(self.path, self.is_cache)[-1:] in ("", "\n") else "\n"
                with self.path.open("ab", buffering=0) as file:  # One write, as other processes append, too.
                    file.write((start + "".join(rows)).encode())


# Of this process: each file is read once, and then what is new in it.
table_of = functools.cache(Table)


def table_for(probes: Path | str | bool, place: Place) -> tuple[Table | None, Place]:
    """The table of a prediction, and the place that it is for. probes: as of predict_memory.

    UsageError: the place is no CPU, or the file is no table, or has rows of several other machines or another torch.
    """
    is_cpu = place.for_device.kind == "cpu"
    if probes is False or (probes is True and not is_cpu):
        return None, place
    cpu = f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
    here = Machine(place.threads or torch.get_num_threads(), str(torch.__version__), cpu)
    if probes is True:
        return table_of(table_path(), here, True, True), place
    if not is_cpu:
        raise UsageError(f"{named('probes')} is of a CPU, and {named('device')} {place.for_device.name} is none")
    if place.torch_version is not None:
        raise UsageError(f"{named('probes')} is of the torch that wrote it: leave out {named('torch_version')}")
    path = Path(probes)
    machines = machines_in(path)
    known = [machine for machine in machines if place.threads in (None, machine.threads)]
    if not known or here in known:
        return table_of(path, here, True, False), place
    if len(known) > 1:
        rows = f"choose by {named('threads')}; it has {'; '.join(map(str, machines))}"
        raise UsageError(f"{named('probes')} {path}: one machine is needed, {rows}")
    if known[0].torch_version != here.torch_version:
        versions = f"is of torch {known[0].torch_version}, and this is torch {here.torch_version}"
        raise UsageError(f"{named('probes')} {path} {versions}")
    return table_of(path, known[0], False, False), dataclasses.replace(place, threads=known[0].threads)


def text_of(path: Path, is_cache: bool) -> str:
    """The text of a file, empty if there is none. UsageError: it has no text."""
    try:
        return path.read_text("utf-8", errors="replace" if is_cache else "strict")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no table of probes: {error}") from None
    except OSError:
        if is_cache or not path.exists():
            return ""
        raise


def machines_in(path: Path) -> list[Machine]:
    """The machines that have rows in a file. UsageError: it is no table."""
    heads = {line.partition("]")[0] for line in text_of(path, False).splitlines()} - {""}
    if heads and not any(head.startswith('{"format": ') for head in heads):
        raise UsageError(f"{path} is no table of probes")
    found = []
    for head in heads:
        with suppress(ValueError):  # It was cut off.
            match json.loads(f"{head}]}}"):
                case {"format": kind, "machine": [int(threads), str(version), str(cpu)]} if kind == FORMAT:
                    found.append(Machine(threads, version, cpu))
    return sorted(found)

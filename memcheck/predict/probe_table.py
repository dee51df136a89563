"""The table of what operators took that ran alone on a CPU: in memory, and in a file that another machine can read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck.core.errors import UsageError
from memcheck.core.tensors import dtype_name
from memcheck.predict.known_contents import KnownContents
from memcheck.predict.probed import FunctionCall, Probed, Result
from memcheck.predict.sparse import is_sparse, parts_of

# The format of a table's rows. Rows of other formats say too little about their operands and are not read.
FORMAT = 2


def table_path() -> Path:
    """MEMCHECK_PROBES, else a file in the user's cache."""
    if (given := os.environ.get("MEMCHECK_PROBES")) is not None:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "memcheck" / "probes.jsonl"


class Table:
    """Probed operators by key, in memory and, with a path, in a file of JSON lines."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found: dict[str, Probed | None] = {}
        self.checks: dict[str, str | None] = {}  # Doubts about functions.
        if path is not None and path.exists():
            self._read(path)

    def add(self, key: str, probed: Probed | None) -> None:
        self.found[key] = probed
        self._write({"key": key, "probed": probed and dataclasses.asdict(probed)})

    def add_check(self, key: str, doubt: str | None) -> None:
        self.checks[key] = doubt
        self._write({"key": key, "doubt": doubt})

    @property
    def machines(self) -> list[tuple[str, ...]]:
        """The threads, the torch version and the device of the machines that have rows."""
        return sorted({tuple(json.loads(key)[-3:]) for key in (*self.found, *self.checks)})

    def _write(self, row: dict[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"format": FORMAT, **row}) + "\n")

    def _read(self, path: Path) -> None:
        """Skips lines that were cut off, and rows of another format. UsageError: the file is no text."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is no table of probes: {error}") from None
        for line in lines:
            try:
                row = json.loads(line)
                if row["format"] != FORMAT:
                    continue
                if "doubt" in row:
                    self.checks[row["key"]] = row["doubt"]
                else:
                    self.found[row["key"]] = row["probed"] and read_probed(row["probed"])
            except (ValueError, KeyError, TypeError):
                continue


def read_probed(row: dict[str, Any]) -> Probed:
    results = (
        {**result, "shape": tuple(result["shape"]), "stride": tuple(result["stride"])} for result in row["results"]
    )
    return Probed(row["scratch_bytes"], tuple(Result(**result) for result in results), row["doubt"])


def key_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contents: KnownContents,
    machine: tuple[str, ...] | None = None,
) -> str:
    """The operator and its arguments, the threads, torch's version and the device; by default those of this process."""
    words = tree_map(lambda part: described(part, contents), (args, kwargs))
    # Some operators return more where gradients are wanted.
    return json.dumps([str(func), repr(words), f"grad {torch.is_grad_enabled()}", *(machine or environment())])


def environment() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{torch.get_num_threads()} threads", f"torch {torch.__version__}", f"cpu {capability}"


def described(part: Any, contents: KnownContents) -> Any:
    if not isinstance(part, Tensor):
        return part
    if is_sparse(part):
        own = [described(inner, contents) for inner in parts_of(part)]
        return f"{part.layout}{list(part.shape)}{own}{part.layout == torch.sparse_coo and part.is_coalesced()}"
    words = f"{dtype_name(part)}{list(part.shape)}{list(part.stride())}+{part.storage_offset()}"
    words += f"{' conjugated' * part.is_conj()}{' negated' * part.is_neg()}"
    known = None if part.is_floating_point() and not contents.decides(part) else contents.of(part)
    if known is not None:
        plain = known.resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
        words += hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return words


class CarriedProbe:
    """Answers from the rows of one machine. It runs nothing: operators that the table lacks are unknown.

    machine: the threads, the torch version and the device of the rows that count.
    """

    def __init__(self, table: Table, machine: tuple[str, ...]) -> None:
        self.table, self.machine = table, machine

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: KnownContents
    ) -> Probed | None:
        return self.table.found.get(key_of(func, args, kwargs, contents, self.machine))

    def check(self, call: FunctionCall) -> str | None:
        if call.name == "untyped_storage":  # Predictions themselves call it. It allocates nothing.
            return None
        untried = f"{call.name} was not compared with its prediction"
        return self.table.checks.get(json.dumps([call.key, *self.machine]), untried)

    @property
    def threads(self) -> int:
        return int(self.machine[0].split()[0])

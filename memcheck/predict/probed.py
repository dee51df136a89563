"""What a probe returns about an operator that ran alone on the device, and the calls of functions that it checks.

Operators without a rule are measured. That does not show what PyTorch decides above the operators: which operators a
function runs on the device, and what a backward writes in place if no mode is active. So each function of a model is
run once, alone, with its backward, and compared with its prediction. The table keeps the results in memory, and in a
file that another machine can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from memcheck.core.errors import UsageError
from memcheck.core.tensors import dtype_name
from memcheck.predict.autocast import dtype_in_use
from memcheck.predict.known_contents import KnownContents, is_meta, is_wrapped
from memcheck.predict.operators.value_shapes import is_sparse, parts_of
from memcheck.predict.scratch import are_plain


@dataclass(frozen=True)
class Result:
    """A tensor that the operator returned.

    operand: the number of the operand whose storage it shares, or None.
    same: the number of the earlier result that is the same tensor, or None.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    storage_bytes: int
    operand: int | None = None
    same: int | None = None


@dataclass(frozen=True)
class Probed:
    """The result of a probe.

    scratch_bytes: the operator's peak besides operands and results.
    doubt: why that may differ in another run.
    """

    scratch_bytes: int
    results: tuple[Result, ...]
    doubt: str | None = None


class Probe(Protocol):
    """Runs operators and functions on the device for a prediction."""

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: KnownContents
    ) -> Probed | None:
        """Runs an operator alone; its arguments are on meta. None: it did not run."""

    def check(self, call: FunctionCall) -> str | None:
        """Runs a function alone and compares it with its prediction. A doubt, or None where they agree."""


def made(result: Result) -> Tensor:
    """A meta tensor as the operator returned it."""
    storage = torch.UntypedStorage(result.storage_bytes, device="meta")
    shell = torch.empty(0, dtype=getattr(torch, result.dtype), device="meta")
    return shell.set_(storage, result.offset, result.shape, result.stride)


# Functions that tests compare with measurements in many shapes and layouts: with plain operands they need no check.
PLAIN_NAMES = """
    __array__ __getitem__ _assert_async _make_dual _unpack_dual add alias arange cat chunk clone contiguous cos detach
    div dropout empty_like eq exp expand expand_as flatten float full full_like ge gt le linear log lt matmul mean mul
    ne neg numpy ones ones_like permute pow relu reshape rsqrt scalar_tensor scaled_dot_product_attention sigmoid silu
    sin size softmax split sqrt squeeze stack sub sum t tanh tensor to tolist transpose type_as unbind unsqueeze
    untyped_storage view where zeros zeros_like
    """
PLAIN = frozenset(PLAIN_NAMES.split())
# Functions that fail unless a mask has as many True elements as another operand has elements.
NEED_MASKS = frozenset(["__setitem__", "index_put", "index_put_"])
FEW = 64  # Numbers that a key lists.


@dataclass(frozen=True)
class Layout:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    contents: Tensor | None = None
    offset: int = 0
    conjugated: bool = False
    negated: bool = False

    @classmethod
    def of(cls, tensor: Tensor, contents: Tensor | None) -> Layout:
        flags = (int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg())
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, contents, *flags)

    def __repr__(self) -> str:
        known = None if self.contents is None else in_short(self.contents.flatten().tolist())
        flags = f"{' conjugated' * self.conjugated}{' negated' * self.negated}"
        return f"{self.dtype}{self.shape}{self.stride}+{self.offset}{flags}{self.requires_grad}{known}"

    def on_meta(self) -> Tensor:
        """A tensor of this layout on meta that requires no gradient."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        shell = torch.empty(self.offset + last + 1 if 0 not in self.shape else 0, dtype=self.dtype, device="meta")
        tensor = shell.as_strided(self.shape, self.stride, self.offset if shell.numel() else 0)
        tensor = tensor.conj() if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


def is_layout(part: Any) -> bool:
    return isinstance(part, Layout)


def in_short(numbers: list[Any]) -> Any:
    """The numbers, or a hash of many."""
    return numbers if len(numbers) <= FEW else hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function, with layouts for tensors."""

    function: Any
    args: Any
    kwargs: Any
    grad: bool  # Whether gradients were wanted.
    autocast: torch.dtype | None = None  # On the CPU, the only device that is checked.

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", str(self.function))

    @property
    def key(self) -> str:
        path = f"{getattr(self.function, '__module__', '')}.{getattr(self.function, '__qualname__', self.name)}"
        words = f"{path} {self.args!r} {self.kwargs!r} {self.grad}"
        return f"{words} {self.autocast}" if self.autocast else words

    def run(self, *tensors: Tensor) -> Any:
        """Calls the function with these tensors in place of its layouts.

        If it writes into its first tensor, it gets a copy, which is returned.
        """
        given = iter(tensors)
        args, kwargs = tree_map(
            lambda part: next(given) if is_layout(part) else part, (self.args, self.kwargs), is_leaf=is_layout
        )
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            if not self.writes:
                return self.function(*args, **kwargs)
            first = args[0].clone()
            self.function(first, *args[1:], **kwargs)
            return first

    @property
    def writes(self) -> bool:
        return self.name == "__setitem__" or (self.name.endswith("_") and not self.name.endswith("__"))

    @property
    def layouts(self) -> list[Layout]:
        return list(filter(is_layout, tree_leaves((self.args, self.kwargs), is_leaf=is_layout)))


def call_to_check(func: Any, args: Any, kwargs: Any, contents: KnownContents) -> FunctionCall | None:
    """The call, if a check can repeat it: its arguments are tensors and plain values. Else None."""
    name = getattr(func, "__name__", "")
    if getattr(func, "namespace", "") == "prims" or name in ("__get__", "__set__", "__delete__"):
        return None
    if name in PLAIN and are_usual(args, kwargs):
        return None
    if name.startswith(("_foreach_", "_fused_")):  # Optimizers in hooks call them. Tests compare those optimizers.
        return None
    if kwargs.get("out") is not None:
        return None

    def layout(part: Any) -> Any:
        if not isinstance(part, Tensor) or part.layout != torch.strided:
            return part
        read = contents.read if name in NEED_MASKS and part.dtype == torch.bool else contents.of
        known = None if part.is_floating_point() or part.is_complex() else read(part)
        return Layout.of(part, None if known is None else known.clone())

    args_, kwargs_ = tree_map(layout, (args, kwargs))
    call = FunctionCall(func, args_, kwargs_, torch.is_grad_enabled(), dtype_in_use("cpu"))
    return call if call.layouts and all(map(is_plain, tree_leaves((args, kwargs)))) else None


def are_usual(args: Any, kwargs: Any) -> bool:
    """Whether the operands are plain, and those of floating point have one dtype."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    floating = {x.dtype for x in tensors if x.is_floating_point()}
    return are_plain(tensors) and len(floating) <= 1 and not any(isinstance(leaf, complex) for leaf in leaves)


def is_plain(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not is_wrapped(leaf) and leaf.layout == torch.strided and is_meta(leaf)
    plain = (bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return leaf is None or leaf is Ellipsis or isinstance(leaf, plain)


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

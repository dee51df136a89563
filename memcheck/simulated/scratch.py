"""Scratch, which kernels allocate besides their outputs and no dispatcher sees, and the table of facts on operators.

The modules of memcheck.simulated.facts fill the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memcheck.core import devices
from memcheck.core.tensors import tensors_in


@dataclass(frozen=True)
class Target:
    """The device and software for which kernels are predicted."""

    kind: str  # "cpu" or "cuda".
    threads: int = 1
    architecture: tuple[int, int] | None = None  # Compute capability of a GPU: (8, 0).
    torch_version: devices.Version = devices.NEWEST_TRIED
    has_workspaces: bool = True  # False: cuBLAS's workspaces are left out.
    multiprocessors: int | None = None  # Of a GPU; None: unknown.
    searches: bool = False  # As torch.backends.cudnn.benchmark: cuDNN tries all algorithms of a new convolution.

    def has(self, change: devices.TorchChange) -> bool:
        return change.is_in(self.torch_version)

    @property
    def cublas_workspace_bytes(self) -> int:
        """The default of CUBLAS_WORKSPACE_CONFIG: :4096:2:16:8, or 32 MiB on newer GPUs."""
        major = self.architecture[0] if self.architecture else 0
        large = {9}
        if self.has(devices.WORKSPACES_ON_BLACKWELL):
            large |= {10, 12}
        if self.has(devices.WORKSPACES_ON_THOR):
            large |= {11}
        return 32 * 2**20 if major in large else (2 * 4096 + 8 * 16) * 2**10


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator on meta tensors, with its result."""

    name: str  # "aten::bmm"
    arguments: dict[str, Any]  # By name.
    outputs: tuple[Tensor, ...]
    target: Target
    is_view: bool = False  # By the schema: every result is a view of an operand that is not modified.
    contents: Callable[[Tensor], Tensor | None] = lambda x: None if x.is_meta else x  # None: they are not known.

    def __getattr__(self, name: str) -> Any:
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Scratch:
    """Memory that a kernel allocates and frees.

    first: it is allocated before the outputs.
    search: names the search for the fastest algorithm that comes before it, the first time that this is wanted. After
        a search the allocator's cache is emptied.
    kept: a library keeps it for the later calls of the thread.
    """

    name: str
    bytes: int
    first: bool = False
    search: str = ""
    kept: bool = False


class Unknown(str):
    """A sentence about an allocation that shapes do not determine."""


class Unlisted(Unknown):
    """A sentence about an operator without a rule: neither its scratch nor the sizes of its results are known."""


class RunDependent(Unknown):
    """A sentence about an allocation that differs from run to run."""


class FreedLate(RunDependent):
    """A sentence about an allocation that another thread may free only after the operator, even after the phase."""


@functools.cache
def defaults_of(func: Any) -> dict[str, Any]:
    """The names of the operator's arguments, in order, with the values that they have if they are left out."""
    return {argument.name: argument.default_value for argument in func._schema.arguments}


def call_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, target: Target, **more: Any
) -> OperatorCall:
    defaults = defaults_of(func)
    outputs = output if isinstance(output, tuple | list) else (output,)
    tensors = tuple(tensor for tensor in outputs if isinstance(tensor, Tensor))
    arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    return OperatorCall(func._schema.name, arguments, tensors, target, is_view(func), **more)


@functools.cache
def is_view(func: Any) -> bool:
    """Whether every result is a view of an operand that is not modified."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether the CPU's rules hold for the operands: real numbers as they lie in memory.

    Kernels copy complex numbers and lazily conjugated or negated ones in ways of their own.
    """
    return not any(x.is_complex() or x.is_neg() for x in tensors)


Rule = Callable[[OperatorCall], Iterator[Scratch | Unknown]]
Facts = dict[str, Any]  # Fields of OperatorFacts.
MASKS = ("mask", "condition")  # Operands of masked_fill and where.


@dataclass(frozen=True)
class OperatorFacts:
    """The facts about an operator.

    name: "mul" for aten::mul; operators of other libraries with their namespace.
    example: Python text that runs the operator, itself or in its backward; tests/predict/test_operator_facts.py runs it
        and says what its names mean.
    cpu, cuda: yields what the kernel allocates besides its outputs on such a device. None: unknown.
    operands: those for which the CPU's rule holds: "plain"; "one dtype", also of results, masks excepted; "contiguous".
    source: the files that have the kernels, in torch's aten/src/ATen/native, or from the root of torch or memcheck.
    measured_in: the test that compares the rule for the CPU with measurements.
    versions: the oldest and the newest release of torch that tests of predictions ran with.
    sparse: "nothing": it takes nothing besides its outputs if operands are sparse.
    on_host: positions of results that are CPU tensors on CUDA.
    uses_cublas: it is a matrix product, which needs a cuBLAS workspace on CUDA.
    """

    name: str
    example: str = ""
    cpu: Rule | None = None
    cuda: Rule | None = None
    operands: str = "plain"
    source: str = ""
    measured_in: str = "tests/predict/test_operator_facts.py"
    versions: tuple[devices.Version, devices.Version] = (devices.OLDEST_TRIED, devices.NEWEST_TRIED)
    sparse: str = ""
    on_host: tuple[int, ...] = ()
    uses_cublas: bool = False

    def holds_on_cpu(self, call: OperatorCall) -> bool:
        """Whether the CPU's rule holds for the operands of the call."""
        tensors = list(tensors_in(call.arguments))
        if not are_plain(tensors):
            return False
        if self.operands == "one dtype":
            masks = list(tensors_in([call.arguments.get(mask) for mask in MASKS]))
            tensors += call.outputs
            return len({x.dtype for x in tensors if all(x is not mask for mask in masks)}) <= 1
        return self.operands == "plain" or all(x.is_contiguous() for x in tensors)


TABLE: dict[str, OperatorFacts] = {}


def add(names: str, example: str, *, everywhere: Rule | None = None, **facts: Any) -> None:
    """Adds operators of which the same is known.

    example: {name} stands for an operator's name, {forward} for that without "_backward".
    everywhere: the rule for cpu and cuda.
    """
    if everywhere is not None:
        facts |= {"cpu": everywhere, "cuda": everywhere}
    for name in names.split():
        assert name not in TABLE, name
        text = example.replace("{name}", name).replace("{forward}", name.removesuffix("_backward"))
        TABLE[name] = OperatorFacts(name, text, **facts)


@functools.lru_cache(maxsize=10_000)
def facts_of(name: str) -> OperatorFacts:
    """The facts of an operator such as "aten::mul"; empty ones if nothing is known."""
    name = name.removeprefix("aten::")
    return TABLE.get(name) or OperatorFacts(name)


def scratch_of(call: OperatorCall) -> list[Scratch | Unknown]:
    """The scratch that is alive at the highest sum of the call, and what is unknown about it."""
    facts, is_for_cpu = facts_of(call.name), call.target.kind == "cpu"
    if not call.is_view and any(x.layout != torch.strided for x in tensors_in(call.arguments)):
        return [] if facts.sparse else [unlisted(call)]
    rule = facts.cpu if is_for_cpu else facts.cuda
    if rule is not None and (not is_for_cpu or facts.holds_on_cpu(call)):
        return [part for part in rule(call) if isinstance(part, Unknown) or part.bytes or part.search]
    return [] if call.is_view else [unlisted(call)]


def unlisted(call: OperatorCall) -> Unlisted:
    return Unlisted(f"what {call.name} takes beside its outputs")


def doubt(unknown: Unknown, when: Callable[[OperatorCall], bool] = lambda call: True) -> Rule:
    """A rule that allocates nothing, except unknown scratch in some calls. {} in the words is the operator's name."""

    def rule(call: OperatorCall) -> Iterator[Scratch | Unknown]:
        if when(call):
            yield type(unknown)(unknown.format(call.name))

    return rule


def nothing(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """The rule of an operator that allocates nothing but its outputs."""
    yield from ()

"""Calls of operators, and scratch: what kernels allocate besides their outputs, which no dispatcher sees.

memcheck.predict.operators has the rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memcheck.core.torch_versions import (
    NEWEST_TRIED,
    WORKSPACES_ON_BLACKWELL,
    WORKSPACES_ON_THOR,
    TorchChange,
    Version,
)


@dataclass(frozen=True)
class Target:
    """The device and software for which kernels are predicted."""

    kind: str  # "cpu" or "cuda".
    threads: int = 1
    architecture: tuple[int, int] | None = None  # Compute capability of a GPU: (8, 0).
    torch_version: Version = NEWEST_TRIED
    has_workspaces: bool = True  # False: cuBLAS's workspaces are left out.
    multiprocessors: int | None = None  # Of a GPU; None: unknown.
    searches: bool = False  # As torch.backends.cudnn.benchmark: cuDNN tries all algorithms of a new convolution.

    def has(self, change: TorchChange) -> bool:
        return change.is_in(self.torch_version)

    @property
    def cublas_workspace_bytes(self) -> int:
        """The default of CUBLAS_WORKSPACE_CONFIG: :4096:2:16:8, or 32 MiB on newer GPUs."""
        major = self.architecture[0] if self.architecture else 0
        large = {9}
        if self.has(WORKSPACES_ON_BLACKWELL):
            large |= {10, 12}
        if self.has(WORKSPACES_ON_THOR):
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

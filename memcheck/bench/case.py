"""A case: one shape of one operator, which makes the step that is measured or predicted."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from memcheck.bench.predict import predict_memory_of
from memcheck.core.converters import SHORT_DTYPES
from memcheck.core.errors import UnsupportedError, UsageError
from memcheck.core.record import Record
from memcheck.core.step import Step
from memcheck.core.tensors import named_tensors_in, overflow_as_out_of_memory, storages_of
from memcheck.core.units import Style
from memcheck.measure.compile import compiled
from memcheck.measure.sdpa_backend import fused_backend
from memcheck.predict.api import INSTEAD

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODES = ("train", "inference", "decode")
DEFAULT_FACTOR = 8  # Positions per block of compressed attention.

Operator = Callable[..., Any]  # Called with a case's inputs.


@dataclass(frozen=True)
class Case:
    """One shape of one contender. kv_len, heads, core_dim, factor, window and causal are None where there is none.

    dtype: its name, long or short, or a torch.dtype.

    In decode mode kv_len is the number of tokens that the state or cache holds before the step, and query_len is 1.
    """

    operator: str
    bsz: int = 1
    query_len: int = 1024
    kv_len: int | None = 1024
    dim: int = 256
    heads: int | None = None
    core_dim: int | None = None
    factor: int | None = None
    window: int | None = None
    dtype: str = "float32"
    causal: bool | None = True
    mode: str = "train"
    compiled: bool = False
    device: str = "cpu"
    timing_seconds: ClassVar[float] = 3.0  # Timed passes end then, unless their number was requested.

    def __post_init__(self) -> None:
        given = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(given, given))

    def fields(self) -> dict[str, Any]:
        """The fields that a record of the case has, too. A record's device is the machine's."""
        return {name: value for name, value in vars(self).items() if name != "device"}

    def size(self, name: str) -> int:
        """The size with that name. UsageError if the case has none."""
        size: int | None = getattr(self, name)
        if size is None:
            raise UsageError(f"{self.operator}: {name} must be given, got None")
        return size

    @property
    def contender(self) -> Contender:
        return CONTENDERS[self.operator]

    @property
    def name(self) -> str:
        return self.operator

    @property
    def maker(self) -> Callable[[Case], Step]:
        """What makes the step of such a case, also in a process where the operator is not registered."""
        return self.contender.step

    def step(self) -> Step:
        """The step on the case's device."""
        return self.contender.step(self)

    def backend(self, operators: Iterable[str] | None) -> str | None:
        """The implementation that runs, by the names of the operators that ran, if any did."""
        if self.compiled:
            return "inductor"
        if self.contender.backend is not None or operators is None:
            return self.contender.backend and self.contender.backend(self)
        return next(filter(None, map(fused_backend, operators)), self.contender.unfused)

    def note(self, step: Step, record: Record) -> Record:
        """The record of the step with what a step does not know: the case, and in decode mode the size of its state."""
        record = dataclasses.replace(record, **self.fields())
        if self.mode == "decode":
            named = named_tensors_in({"state": step.inputs[-1]})
            sizes = {name: sum(storages_of([tensor], tensor.device).values()) for name, tensor in named}
            record.note_state(sum(sizes.values()), self.bsz, self.kv_len)
            if record.terms is not None:
                record.terms["state_bytes"] = sizes
        return record


@dataclass(frozen=True)
class Decoding:
    """How a contender decodes."""

    step: Callable[[Case], Operator]  # Called with q, k, v of one position, and the state.
    state: Callable[[Case], Any]


@dataclass(frozen=True)
class Contender:
    """An operator under its name, with what makes its inputs and what its cases have."""

    name: str
    title: str
    build: Callable[[Case], Operator]
    inputs: Callable[[Case], tuple[Tensor, ...]]
    style: Style
    # The backend's name if it is known in advance; None if only the run can tell.
    backend: Callable[[Case], str] | None = None
    # The backend's name if the run shows no fused attention.
    unfused: str = "math"
    # Set if the operator is always, or never, causal.
    causal: bool | None = None
    # False if the operator has no causal option, or if it is unknown.
    has_mask: bool = True
    has_heads: bool = False
    has_core_dim: bool = False
    has_factor: bool = False
    has_window: bool = False  # Whether it takes a window.
    # Tensors handed to the operator after the inputs and counted as parameters. A module's own parameters need not
    # be listed.
    parameters: Callable[[Case], tuple[Tensor, ...]] = lambda case: ()
    compiled: bool = False  # Always under torch.compile.
    decode: Decoding | None = None
    # "attention", or "combinator" for profile-combinator.
    kind: str = "attention"

    @overflow_as_out_of_memory()
    def step(self, case: Case) -> Step:
        """The step of a case, with random inputs. In decode mode the state is the last of them.

        UnsupportedError: the operator has no decoding step.
        """
        backward, parameters = case.mode == "train", tuple[Tensor, ...]()
        if case.mode == "decode":
            if self.decode is None:
                raise UnsupportedError(f"{case.operator} has no decoding step")
            one = self.inputs(dataclasses.replace(case, query_len=1, kv_len=1))
            operator, inputs = self.decode.step(case), (*one, self.decode.state(case))
        else:
            parameters = self.parameters(case)
            operator, inputs = self.build(case), self.inputs(case)
        # A module's own parameters count, even if it is wrapped.
        owner = operator if any(True for _ in named_tensors_in(operator)) else ()
        names = argument_names(operator)[len(inputs) :]
        named = dict(zip(names, parameters, strict=True)) if len(names) == len(parameters) else parameters
        call = bind(operator, parameters)
        return Step(compiled(call) if case.compiled else call, inputs, parameters=(named, owner), backward=backward)


# The contenders by name: those of the catalog, and those that were registered.
CONTENDERS: dict[str, Contender] = {}


def bind(operator: Operator, parameters: tuple[Tensor, ...]) -> Operator:
    """The operator as a function of its inputs alone, with the parameters bound and the names that the inputs have."""
    if not parameters:
        return operator

    def call(*inputs: Any) -> Any:
        return operator(*inputs, *parameters)

    names = argument_names(operator)[: -len(parameters)]
    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    call.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return call


def argument_names(operator: Operator) -> list[str]:
    """The names of its positional arguments that have no default; empty if it has no signature."""
    try:
        signature = inspect.signature(operator.forward if isinstance(operator, torch.nn.Module) else operator)
    except (TypeError, ValueError):  # C functions have no signature.
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


INSTEAD[Case] = predict_memory_of

"""What a case runs: its operator as a function of its inputs, and what those and its parameters are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memcheck.bench.catalog import CONTENDERS
from memcheck.bench.decode import one_token
from memcheck.bench.operators import overflow_as_out_of_memory
from memcheck.core.case import Case, Operator
from memcheck.core.errors import UnsupportedError
from memcheck.core.tensors import named_tensors_in
from memcheck.measure.compile import compiled


@dataclass
class Subject:
    """An operator, what it is called with, and the parameters that it owns."""

    case: Any  # a Case, or a ModelCase
    operator: Operator
    inputs: tuple[Any, ...]
    parameters: Any
    names: tuple[str, ...]  # of the operator's arguments, as far as they have any
    state: Any = None  # in decode mode; the last of the inputs
    optimizer_step: Callable[[], Any] | None = None  # after the backward

    @property
    def backward(self) -> bool:
        return self.case.mode in ("train", "backward")

    def named_inputs(self) -> Iterator[tuple[str, Tensor]]:
        """ "q", and "state.0" where an argument holds several."""
        for index, argument in enumerate(self.inputs):
            yield from named_tensors_in(argument, self._name(index))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        handed, operator = self.parameters
        for index, tensor in enumerate(handed, len(self.inputs)):
            yield self._name(index), tensor
        yield from named_tensors_in(operator)

    def _name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"argument {index}"


@overflow_as_out_of_memory()
def prepare(case: Case) -> Subject:
    contender = CONTENDERS[case.operator]
    if case.mode == "decode":
        if contender.decode is None:
            raise UnsupportedError(f"{case.operator} has no decoding step")
        state = contender.decode.state(case)
        return finish(case, contender.decode.step(case), (*contender.inputs(one_token(case)), state), (), state)
    parameters = contender.parameters(case)
    return finish(case, contender.build(case), contender.inputs(case), parameters)


def finish(
    case: Case, operator: Operator, inputs: tuple[Any, ...], parameters: tuple[Tensor, ...], state: Any = None
) -> Subject:
    call = bind(operator, parameters)
    # A module's own parameters count, too, whatever is wrapped around it.
    owned = (parameters, operator if any(True for _ in named_tensors_in(operator)) else ())
    return Subject(case, compiled(call) if case.compiled else call, inputs, owned, argument_names(operator), state)


def bind(operator: Operator, parameters: tuple[Tensor, ...]) -> Operator:
    """The operator as a function of its inputs alone, as a module is that owns its parameters."""
    return (lambda *inputs: operator(*inputs, *parameters)) if parameters else operator


def argument_names(operator: Operator) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(
            operator.forward if isinstance(operator, torch.nn.Module) else operator
        ).parameters
    except (TypeError, ValueError):  # C functions have no signature
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in parameters.items() if parameter.kind in named)

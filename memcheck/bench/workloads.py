"""Turns a case into a workload: builds what its catalog entry names, and adds the names of arguments and parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from memcheck.bench.catalog import CONTENDERS
from memcheck.bench.decode import one_token
from memcheck.core.case import Case, Operator
from memcheck.core.errors import UnsupportedError
from memcheck.core.tensors import named_tensors_in, overflow_as_out_of_memory
from memcheck.core.workload import Workload
from memcheck.measure.compile import compiled


@overflow_as_out_of_memory()
def prepare(case: Case) -> Workload:
    """The workload of the case. UnsupportedError if the operator has no decoding step."""
    contender = CONTENDERS[case.operator]
    state: Any = None
    parameters: tuple[Tensor, ...] = ()
    if case.mode == "decode":
        if contender.decode is None:
            raise UnsupportedError(f"{case.operator} has no decoding step")
        state = contender.decode.state(case)
        operator, inputs = contender.decode.step(case), (*contender.inputs(one_token(case)), state)
    else:
        parameters = contender.parameters(case)
        operator, inputs = contender.build(case), contender.inputs(case)
    call = bind(operator, parameters)
    # A module's own parameters count, even if it is wrapped.
    owned = (parameters, operator if any(True for _ in named_tensors_in(operator)) else ())
    return Workload(case, compiled(call) if case.compiled else call, inputs, owned, argument_names(operator), state)


def bind(operator: Operator, parameters: tuple[Tensor, ...]) -> Operator:
    """The operator as a function of its inputs alone, with the parameters bound."""
    return (lambda *inputs: operator(*inputs, *parameters)) if parameters else operator


def argument_names(operator: Operator) -> tuple[str, ...]:
    """The names of its positional arguments; empty if it has no signature."""
    try:
        parameters = inspect.signature(
            operator.forward if isinstance(operator, torch.nn.Module) else operator
        ).parameters
    except (TypeError, ValueError):  # C functions have no signature.
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in parameters.items() if parameter.kind in named)

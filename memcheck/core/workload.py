"""A workload: an operator, its inputs and parameters, and whether a backward and an optimizer step follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memcheck.core.case import Operator
from memcheck.core.tensors import named_tensors_in


@dataclass
class Workload:
    """An operator with its inputs, parameters, state and optimizer step: everything that a run or a trace needs."""

    case: Any  # Case or ModelCase
    operator: Operator
    inputs: tuple[Any, ...]
    parameters: Any
    names: tuple[str, ...]  # names of the operator's arguments, if known
    state: Any = None  # decode mode: the state, which is also the last input
    optimizer_step: Callable[[], Any] | None = None  # called after the backward

    @property
    def backward(self) -> bool:
        return self.case.mode in ("train", "backward")

    def named_inputs(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the inputs with their names: "q", or "state.0" if an argument holds several."""
        for index, argument in enumerate(self.inputs):
            yield from named_tensors_in(argument, self._name(index))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        handed, operator = self.parameters
        for index, tensor in enumerate(handed, len(self.inputs)):
            yield self._name(index), tensor
        yield from named_tensors_in(operator)

    def _name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"argument {index}"

"""A workload: what is measured or predicted, as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module

from memcheck.core.case import Operator
from memcheck.core.outputs import ForwardOptions, Left, Outputs
from memcheck.core.step import Step
from memcheck.core.tensors import named_tensors_in


@dataclass
class Workload:
    """An operator with its inputs, parameters, state and optimizer step: everything that a run or a trace needs."""

    case: Any  # Case, ModelCase or Step.
    operator: Operator
    inputs: tuple[Any, ...]
    parameters: Any  # A pair: the tensors that follow the inputs, and containers that own the other tensors.
    names: tuple[str, ...]  # Names of the operator's arguments, if known.
    state: Any = None  # In decode mode: the state, which is also the last input.
    optimizer_step: Callable[[], Any] | None = None  # Called after the backward.
    optimizers: tuple[Any, ...] = ()  # Those of which that is the step, as far as they are found.
    warm_up: bool = False  # A step runs before, in which optimizers make their state.
    may_warm_up: bool = False  # Nobody decided whether a step runs before, or that this is the first one.
    accumulate: int = 1  # Backwards of a step.
    retain_graph: bool = False  # As in Tensor.backward.
    set_to_none: bool = True  # As in Optimizer.zero_grad.
    module: Any = None  # The model whose modules are told apart.
    forward_options: ForwardOptions = field(default_factory=ForwardOptions)
    earlier: tuple[Workload, ...] = ()  # Steps of a program that run before.
    outputs_stay: bool = False  # What a step returned is alive until the next step has returned it.
    inputs_stay: bool = True  # Inputs of all steps are alive from the start. Else each pass has new ones.

    @property
    def backward(self) -> bool:
        return self.case.mode in ("train", "backward")

    def step(self, operator: Operator | None = None) -> Step:
        """The step that a measurement runs. operator: replaces the workload's."""
        options = {"parameters": self.parameters, "backward": self.backward, "optimizer_step": self.optimizer_step}
        return Step(operator or self.operator, self.inputs, **options)

    def forward(self, kind: str, left: Left | None = None) -> Outputs:
        """Runs the operator and the loss on a kind of device. left: as of ForwardOptions.run."""
        return self.forward_options.run(kind, self.operator, self.inputs, left)

    def named_inputs(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the inputs with their names: "q", or "state.0" if an argument holds several."""
        for index, argument in enumerate(self.inputs):
            yield from named_tensors_in(argument, self._name(index))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters with their names: those of arguments, of the owners, "layers.0.weight", and of optimizers.

        An optimizer owns settings that are tensors, such as a learning rate, and parameters that only it has.
        """
        arguments, owners = self.parameters
        owned = [(self._name(index), tensor) for index, tensor in enumerate(arguments, len(self.inputs))]
        owned += named_tensors_in(owners)
        yield from owned
        known = {id(tensor) for _, tensor in owned}
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            others = [tensor for tensor in group["params"] if id(tensor) not in known]
            yield from named_tensors_in({**group, "params": others})

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the optimizer's state: "exp_avg of layers.0.weight"."""
        names = {id(tensor): name for name, tensor in self.named_parameters()}
        states = (item for optimizer in self.optimizers for item in optimizer.state.items())
        for parameter, state in states:
            owner = names.get(id(parameter), "parameter")
            yield from ((f"{name} of {owner}", tensor) for name, tensor in named_tensors_in(state))

    def _name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"argument {index}"


def owner_of(model: Any) -> Any:
    """What is called, or whose method is called: a module, or another object; for a function, the function."""
    while isinstance(model, functools.partial):
        model = model.func
    return getattr(model, "__self__", model)


def module_called(model: Any) -> Module | None:
    """The module that is called, or whose method is called; None for any other callable."""
    owner = owner_of(model)
    return owner if isinstance(owner, Module) else None

"""What is measured or predicted as one value: a case or a workload, and what its forward returns and leaves alive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from memcheck.core.converters import SHORT_DTYPES as SHORT_DTYPES
from memcheck.core.errors import UsageError
from memcheck.core.record import layout_of
from memcheck.core.step import Step
from memcheck.core.tensors import named_tensors_in, parts_of, roots_of, tensors_in

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODES = ("train", "inference", "decode")

DEFAULT_FACTOR = 8  # Positions per block of compressed attention.

Operator = Callable[..., Any]  # Called with a case's inputs.
# Record field -> the bytes alive at that moment: name -> bytes.
Terms = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Case:
    """One shape of one contender. kv_len, heads, core_dim, factor, window and causal are None where there is none.

    dtype: its name, long or short, or a torch.dtype.

    In decode mode kv_len is the number of tokens that the state or cache holds before the step, and query_len is 1.

    lengths: the positions of each sequence, if they are packed or padded. Packed: bsz is 1, and query_len = kv_len is
    their sum. Padded: bsz is their number, and query_len = kv_len that of the longest, or more.
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
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(given, given))
        if self.lengths is not None:  # JSON has lists.
            object.__setattr__(self, "lengths", tuple(self.lengths))

    @property
    def layout(self) -> str | None:
        """ "packed" or "padded"; None for a batch without lengths."""
        return layout_of(self.bsz, self.lengths)

    def fields(self) -> dict[str, Any]:
        """The fields that a record of the case has, too. A record's device is the machine's."""
        return {name: value for name, value in vars(self).items() if name != "device"}

    def size(self, name: str) -> int:
        """The size with that name. UsageError if the case has none."""
        size: int | None = getattr(self, name)
        if size is None:
            raise UsageError(f"{self.operator}: {name} must be given, got None")
        return size


NamedTensors = list[tuple[str, Tensor]]
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True)
class Outputs:
    """The outputs of a forward that stay alive until the step ends.

    held: the objects that stay alive.
    named: the tensors in them with their paths: "0", "logits", "" for a single one.
    roots: the tensors that the backward starts from; empty if none requires grad.
    words: "the second output, a scalar; the first stays alive"; None without roots.
    """

    held: Left
    named: NamedTensors
    roots: list[Tensor]
    words: str | None


@dataclass
class Left:
    """The outputs of a forward while the next one runs."""

    output: Any = None
    loss: Any = None


@dataclass(frozen=True)
class ForwardOptions:
    """Loss, autocast and lifetime of outputs in a forward.

    loss: makes the tensor that the backward starts from out of the model's output. None: start_of chooses it.
    autocast: the dtype of a torch.autocast around model and loss.
    keep_outputs: what the model and the loss return stays alive until the step ends, as in
        `logits, loss = model(x)`. With False only the tensors that the backward starts from do.
    """

    loss: Callable[[Any], Any] | None = None
    autocast: torch.dtype | None = None
    keep_outputs: bool = True

    def run(
        self, kind: str, model: Callable[..., Any], inputs: Sequence[Any] = (), left: Left | None = None
    ) -> Outputs:
        """Runs the model and the loss on a kind of device, and returns what stays alive.

        left: what the forward before returned, which goes as the variables of a loop are set again.
        """
        # A disabled autocast would still keep the casts of an autocast inside the model alive until after the loss.
        with nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast):
            output = model(*inputs)
            if left is not None:
                left.output = None
            loss = output if self.loss is None else self.loss(output)
            if left is not None:
                left.loss = None
        return self._outputs(output, loss)

    def _outputs(self, output: Any, loss: Any) -> Outputs:
        roots = start_of(loss)
        named = list(named_tensors_in(output))
        words = f"{_start_words(named, roots)}{_rest_words(output, roots, self.keep_outputs)}" if roots else None
        known = {id(tensor) for _, tensor in named}
        more = [*named_tensors_in(loss), *(("", root) for root in roots)]  # An unknown object may have an output.loss.
        named += {
            id(tensor): (f"loss {name}".rstrip(), tensor) for name, tensor in more if id(tensor) not in known
        }.values()
        if self.keep_outputs or not roots:
            return Outputs(Left(output, loss), named, roots, words)
        starts = {id(root) for root in roots}
        return Outputs(
            Left(None, roots), [(name, tensor) for name, tensor in named if id(tensor) in starts], roots, words
        )


def start_of(output: Any) -> list[Tensor]:
    """The tensors from which a backward starts.

    They are those of output.loss or output["loss"]; else the only scalar that requires grad; else every tensor that
    requires grad. A scalar has no dimension.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found := roots_of(tensors_in(loss)):
        return found
    every = roots_of(tensors_in(output))
    scalars = [tensor for tensor in every if _is_scalar(tensor)]
    return scalars if len(scalars) == 1 else every


def why_no_backward(outputs: NamedTensors, leaf: str | None) -> str:
    """Why no backward ran, although one was asked for. leaf: the first input or parameter that requires grad."""
    if not outputs:
        return "no backward ran: fn returned no tensor"
    if leaf is None:
        return "no backward ran: no input or parameter requires grad"
    return f"no backward ran: no output requires grad, though {leaf} does"


def _start_words(named: NamedTensors, roots: Sequence[Tensor]) -> str:
    """ "the second output, a scalar" """
    names = {id(tensor): name for name, tensor in reversed(named)}
    found = [names.get(id(root)) for root in roots]
    if None in found:
        words = "the loss"
    elif len(roots) == 1:
        words = _title(found[0] or "")
    elif {str(name).partition(".")[0] for name in found} == {"loss"}:
        words = "output.loss"
    elif len(roots) == len(names):
        words = "every output"
    elif len(roots) == len(roots_of(tensor for _, tensor in named)):
        words = "every output that requires grad"
    else:
        words = f"{len(roots)} outputs"
    return f"{words}, a scalar" if len(roots) == 1 and _is_scalar(roots[0]) else words


def _is_scalar(tensor: Tensor) -> bool:
    return not tensor.shape  # A trace of the model would take tensor.dim() for a call of its own.


def _rest_words(output: Any, roots: Sequence[Tensor], keeps: bool) -> str:
    """ "; the first stays alive", about the parts of the output from which no backward starts; "" if there are none."""
    starts = {id(root) for root in roots}
    parts = list(parts_of(output))
    inside = {name: [id(tensor) in starts for tensor in tensors_in(part)] for name, part in parts}
    rest = [name for name, part in parts if not all(inside[name]) or (not inside[name] and _is_object(part))]
    if not any(map(any, inside.values())):  # The loss is none of them.
        words = "" if isinstance(output, Tensor) and id(output) in starts else "the output"
    elif any(any(inside[name]) for name in rest):
        words = "the rest"
    elif len(rest) == 1:
        words = _title(str(rest[0])).removesuffix(" output")
    else:
        words = "the others" if rest else ""
    does = ("stay" if keeps else "are dropped", "stays" if keeps else "is dropped")[words != "the others"]
    return f"; {words} {does}{' alive' if keeps else ''}" if words else ""


def _is_object(part: Any) -> bool:
    """Whether a part without known tensors may hold memory: anything but a number, a string and an empty container."""
    return not isinstance(part, bool | int | float | str | None) and (not isinstance(part, Sized) or len(part) > 0)


def _title(name: str) -> str:
    """ "the second output" for "1", "output.logits" for "logits", and "the output" for a single tensor."""
    if not name:
        return "the output"
    if name.isdigit() and int(name) < len(ORDINALS):
        return f"the {ORDINALS[int(name)]} output"
    return f"output.{name}"


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

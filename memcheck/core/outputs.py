"""What a forward returns: the tensors that the backward starts from, and what stays alive until the step ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memcheck.core.tensors import named_tensors_in, parts_of, roots_of, tensors_in

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

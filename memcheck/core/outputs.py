"""What the forward of a step returns, what of it stays alive, and what a backward starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memcheck.core.tensors import named_tensors_in, roots_of, tensors_in

NamedTensors = list[tuple[str, Tensor]]
MOST_STARTS = 3  # That are named.


@dataclass(frozen=True)
class Outputs:
    """The outputs of a forward that stay alive until the step ends.

    held: the objects that stay alive.
    named: the tensors in them with their paths: "0", "logits", "" for a single one.
    roots: the tensors that the backward starts from; empty if none requires grad.
    start: the paths of the roots, such as "output[1]"; None without roots.
    """

    held: Left
    named: NamedTensors
    roots: list[Tensor]
    start: str | None


@dataclass(frozen=True)
class Left:
    """What is alive of a forward until the step ends."""

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

    def run(self, kind: str, model: Callable[[], Any]) -> Outputs:
        """Runs the model and the loss on a kind of device, and returns what stays alive."""
        # A disabled autocast would still keep the casts of an autocast inside the model alive until after the loss.
        with nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast):
            output = model()
            loss = output if self.loss is None else self.loss(output)
        return self._outputs(output, loss)

    def _outputs(self, output: Any, loss: Any) -> Outputs:
        roots = start_of(loss)
        named = list(named_tensors_in(output))
        start = start_path(named, roots) if roots else None
        known = {id(tensor) for _, tensor in named}
        more = [*named_tensors_in(loss), *(("", root) for root in roots)]  # An unknown object may have an output.loss.
        named += {
            id(tensor): (f"loss {name}".rstrip(), tensor) for name, tensor in more if id(tensor) not in known
        }.values()
        if self.keep_outputs or not roots:
            return Outputs(Left(output, loss), named, roots, start)
        starts = {id(root) for root in roots}
        return Outputs(
            Left(None, roots), [(name, tensor) for name, tensor in named if id(tensor) in starts], roots, start
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
    # A trace of the model would take tensor.dim() for a call of its own.
    scalars = [tensor for tensor in every if not tensor.shape]
    return scalars if len(scalars) == 1 else every


def why_no_backward(outputs: NamedTensors, leaf: str | None) -> str:
    """Why no backward ran, although one was asked for. leaf: the first input or parameter that requires grad."""
    if not outputs:
        return "no backward ran: fn returned no tensor"
    if leaf is None:
        return "no backward ran: no input or parameter requires grad"
    return f"no backward ran: no output requires grad, though {leaf} does"


def start_path(named: NamedTensors, roots: Sequence[Tensor]) -> str:
    """Where the roots are: "output[1]"; "output[0], output[2]"; "loss" of what is in no output."""
    names = {id(tensor): name for name, tensor in reversed(named)}
    paths = []
    for root in roots:
        parts = [part for part in names.get(id(root), "").split(".") if part]
        steps = (f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)
        paths.append(f"output{''.join(steps)}" if id(root) in names else "loss")
    more = [f"{len(paths) - MOST_STARTS} more"] if len(paths) > MOST_STARTS else []
    return ", ".join([*paths[:MOST_STARTS], *more])

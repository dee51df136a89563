"""Causal attention of one slice: the state before it comes from the rank before, that behind it goes to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.distributed.slices import Part, Ranks, State

Inputs = Sequence[Any]  # tensors, or None


@dataclass(frozen=True)
class Operator:
    """An operator on one slice, with a state of one or two tensors."""

    ranks: Ranks
    part: Part
    same_bits: bool  # the ranks go one after another
    return_state: bool
    rows: ClassVar[int]  # the dimension of rows of a state
    differentiable: ClassVar[int]  # how many tensors of the state have a gradient

    def empty_state(self, inputs: Inputs) -> State:
        """A state as it travels, uninitialised."""
        raise NotImplementedError

    def combined(self, inputs: Inputs, before: State, own: State) -> State:
        """The state after the slice, from that before it and that of the slice alone."""
        return tuple(x + y for x, y in zip(before, own, strict=True))

    def run(self, inputs: Inputs, state: State, keep: bool, **sequences: Any) -> tuple[Tensor, State, Inputs]:
        """y, the state behind the slice, and if `keep` what the backward reads beside the inputs."""
        raise NotImplementedError

    def pull(
        self, grad_y: Tensor, inputs: Inputs, kept: Inputs, of_end: State, wanted: list[bool], **sequences: Any
    ) -> Inputs:
        """The gradients of the inputs and of the two tensors of the state before the slice. of_end: of that behind."""
        raise NotImplementedError


class Causal(torch.autograd.Function):
    """y, and if it is wanted the state behind the slice, packed of the slice's own sequences.

    tensors: `count` inputs of the operator, and the two tensors of the initial state of the whole, or None.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, count: int, *tensors: Any) -> State:
        part, rows = operator.part, operator.rows
        q, *others = inputs = tensors[:count]
        initial = tuple(x for x in tensors[count:] if x is not None) or None

        def after(came: State | None) -> State:
            state = part.entered(initial, came, rows) or ()
            no_queries = (q.narrow(q.dim() - 2, 0, 0), *others)
            return part.sent(operator.run(no_queries, state, False, **part.without_queries)[1], rows, True)

        ctx.operator, ctx.count = operator, count
        combine = None if operator.same_bits else partial(operator.combined, inputs)
        came = operator.ranks.scan(
            after, operator.empty_state(inputs), combine, receives=part.enters, sends=part.leaves
        )
        y, behind, kept = operator.run(inputs, part.entered(initial, came, rows) or (), True, **part.arguments)
        ctx.save_for_backward(*inputs, *kept)
        if not operator.return_state:
            return (y,)
        ctx.mark_non_differentiable(*behind[operator.differentiable :])
        return y, *behind

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *of_state: Tensor) -> tuple[Any, ...]:
        operator, count = ctx.operator, ctx.count
        saved = ctx.saved_tensors  # checkpointing unpacks them once
        inputs, kept = saved[:count], saved[count:]
        part, rows, like = operator.part, operator.rows, operator.empty_state(inputs)

        def gradients(behind: State | None, wanted: Sequence[bool]) -> Inputs:
            of_end = part.left(of_state or None, behind, rows) or ()
            return operator.pull(grad_y, inputs, kept, of_end, list(wanted), **part.arguments)

        def before(behind: State | None) -> State:
            found = gradients(behind, [False] * count + [True, len(like) == 2])[count:]
            return part.sent(tuple(found[: len(like)]), rows, False)

        combine = None if operator.same_bits else partial(operator.combined, inputs)
        behind = operator.ranks.scan(before, like, combine, backwards=True, receives=part.leaves, sends=part.enters)
        wanted = ctx.needs_input_grad[2:]
        found = gradients(behind, wanted)
        of_initial = [
            part.of_whole(x, rows, begun=True) if has else None
            for x, has in zip(found[count:], wanted[count:], strict=True)
        ]
        return None, None, *found[:count], *of_initial

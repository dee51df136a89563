"""The gradients of a measured run: put aside, cleared between steps, and the leaves that a backward reaches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcheck.core.step import Step


def gradients_of(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def clear_gradients(leaves: list[torch.Tensor], given: list[torch.Tensor], step: Step) -> None:
    """Clears gradients as zero_grad does; those of given inputs are dropped, because the next inputs are others.

    If an optimizer_step itself set all gradients to zero in place, they stay.
    """
    values = (gradient._values() if gradient.is_sparse else gradient for gradient in gradients_of(leaves))
    if step.optimizer is None and not any(map(torch.any, values)):
        return
    if step.set_to_none:
        drop_gradients(leaves)
        return
    drop_gradients(given)
    for gradient in gradients_of(leaves):
        gradient.zero_()


def drop_gradients(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_leaf:
            tensor.grad = None


class Aside:
    """Tensors as they were: their .grad, which they have not inside, and whether they require grad."""

    def __init__(self) -> None:
        self.before: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None, bool]] = []

    def put(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_leaf:
                self.before.append((weakref.ref(tensor), tensor.grad, tensor.requires_grad))
                tensor.grad = None

    def restore(self) -> None:
        for reference, gradient, required in self.before:
            if (tensor := reference()) is not None and tensor.is_leaf:
                tensor.grad = gradient
                if tensor.requires_grad != required:
                    tensor.requires_grad_(required)


@contextmanager
def gradients_aside(tensors: list[torch.Tensor]) -> Iterator[Aside]:
    """Inside, leaves have no .grad; afterwards they have their own again, and require grad if they did before."""
    aside = Aside()
    aside.put(tensors)
    try:
        yield aside
    finally:
        aside.restore()


def leaves_below(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from the roots reaches."""
    nodes = [root.grad_fn for root in roots]
    found: dict[Any, torch.Tensor | None] = {}  # Each node is alive, and so the only one with its identity.
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found[node] = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
            nodes += [after for after, _ in node.next_functions]
    return [leaf for leaf in found.values() if leaf is not None]

"""The second step of a training, whose events are those of the first one if nothing that its code reads has changed.

A prediction with an optimizer traces two steps: in the first one the optimizer makes its state. The forward and the
backward of the second one are copied from the first, unless that left or changed something that may make a difference.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memcheck.core.workload import Workload
from memcheck.predict.allocation_log import EMPTY_CACHE, Allocation
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.held_state import HeldState
from memcheck.predict.known_contents import is_meta

MOST_OBJECTS = 50_000
# With this variable of the environment set to 1, both steps are traced.
TRACE_ALL = "MEMCHECK_TRACE_ALL"

NamedAllocations = list[tuple[str, list[Allocation]]]


def may_be_copied(workload: Workload) -> bool:
    """Whether the options of the step let the second one run as the first does, on the same inputs."""
    plain = workload.inputs_stay and workload.set_to_none and not (workload.outputs_stay or workload.retain_graph)
    once = workload.accumulate == 1 and not workload.earlier
    return plain and once and workload.backward and os.environ.get(TRACE_ALL) != "1"


class FirstStep:
    """The events of a first step, and what its code may read, as it was before.

    leaves: the inputs and the parameters.
    outputs: what the forward returned: the names and the allocations.
    words: what the backward began from.
    incoming: the gradients that it began with.
    """

    def __init__(self, mode: AllocationMode, workload: Workload, leaves: list[Tensor]) -> None:
        self.mode = mode
        self.leaves = leaves
        self.outputs: NamedAllocations = []
        self.incoming: list[Allocation] = []
        self.words: str | None = None
        self._random = generator_states()
        self._roots = workload.operator, workload.forward_options.loss, workload.inputs
        self._contents = mode.contents.now()
        self._real_written = len(mode.copies.written)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._held = self._held_values()
            self._layouts = list(map(layout_of, leaves))
        self._copies: dict[Allocation, Allocation] = {}
        self._moments: dict[str, int] = {}
        self._workspaces: dict[Allocation, tuple[str, bool]] = {}

    def note(self, moment: str) -> None:
        """Notes when the step "began", and when its "forward", "backward" and "optimizer" ended."""
        self.mode.numbers.note()
        self._moments[moment] = len(self.mode.log.events)
        self._workspaces |= {workspace: key for key, workspace in self.mode.workspaces.items()}
        if moment == "backward":
            self._contents = self.mode.contents.read_of(self._contents)

    def note_forward(self, outputs: NamedAllocations, words: str | None) -> None:
        """Notes the end of the forward. words: what the backward begins from."""
        self.outputs, self.words = outputs, words
        self.note("forward")

    def is_repeated(self) -> bool:
        """Whether the second step does the same. Asked before the gradients of the first are cleared."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._is_repeated()

    def _is_repeated(self) -> bool:
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        if not all(type(one) is Tensor and one.layout == torch.strided and is_meta(one) for one in gradients):
            return False
        if not gradients or self.mode.saw_transforms or len(self.mode.copies.written) != self._real_written:
            return False
        return (
            self._has_plain_events({one for gradient in gradients for one in self._allocations_of(gradient)})
            and list(map(layout_of, self.leaves)) == self._layouts
            and self._contents.items() <= self.mode.contents.now().items()
            and generator_states() == self._random
            and self._held is not None
            and self._held_values() == self._held
        )

    def _held_values(self) -> list[Any] | None:
        return HeldState(*self._roots, most=MOST_OBJECTS, to_compare=True).values

    def _has_plain_events(self, gradients: set[Allocation]) -> bool:
        """Whether only gradients and workspaces outlive the step, and everything else dies in it or at its end."""
        ends = self._moments
        made: set[Allocation] = set()
        for number, (allocation, taken) in enumerate(self.mode.log.events[ends["began"] :], ends["began"]):
            if number >= ends["backward"]:
                if number < ends["optimizer"] and allocation in made:
                    return False
            elif taken:
                made.add(allocation)
                # The workspaces of autograd's thread are allocated in the backward, and others in the forward.
                if allocation in self._workspaces and self._workspaces[allocation][1] != (number >= ends["forward"]):
                    return False
            elif allocation not in made:
                return False
        left = {one for one in made if one.died is None}
        return gradients <= made and left <= {*gradients, *self._workspaces}

    def make_gradients(self) -> None:
        """Makes tensors like the gradients of the leaves, which count from the end of the copied backward."""
        old = [leaf.grad for leaf in self.leaves]
        self._old = [[] if gradient is None else self._allocations_of(gradient) for gradient in old]
        self._gradients: list[Tensor | None] = self.mode.renewed(old)

    def copy_forward(self) -> None:
        """Logs the forward again. Then outputs has what it returned."""
        self._copy("began", "forward")
        known = self._copies
        self.outputs = [(name, [known.get(one, one) for one in made]) for name, made in self.outputs]

    def copy_backward(self) -> None:
        """Logs the backward again, and gives the leaves their gradients."""
        self._copy("forward", "backward")
        self.incoming = [self._copies[one] for one in self.incoming]
        for leaf, gradient, allocations in zip(self.leaves, self._gradients, self._old, strict=True):
            leaf.grad = gradient
            if gradient is not None and gradient.untyped_storage() not in self.mode.storages:
                for allocation in allocations:
                    self.mode.storages.keep(gradient.untyped_storage(), self._copies[allocation])

    def end(self) -> None:
        """Frees what the copied forward returned."""
        gradients = {one for allocations in self._old for one in allocations}
        for allocation, copy in self._copies.items():
            if allocation not in gradients:
                self.mode.log.free(copy)

    def _copy(self, since: str, until: str) -> None:
        log, mode = self.mode.log, self.mode
        for allocation, taken in log.events[self._moments[since] : self._moments[until]]:
            if (key := self._workspaces.get(allocation)) is not None:
                if taken and key not in mode.workspaces:
                    mode.workspaces[key] = log.repeat(allocation)
            elif allocation.name == EMPTY_CACHE:  # A search for an algorithm, which is not repeated.
                continue
            elif taken:
                self._copies[allocation] = log.repeat(allocation)
            else:
                log.free(self._copies[allocation])

    def _allocations_of(self, tensor: Tensor) -> list[Allocation]:
        return self.mode.storages.allocations_of(tensor)


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The tensor, its storage and how it lies in it."""
    storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None
    return id(tensor), storage, tensor.shape, tensor.dtype, tensor.requires_grad, storage and tensor.stride()


def generator_states() -> list[Any]:
    """The states of the random generators of torch, Python and NumPy, as values that can be compared."""
    states = [torch.default_generator.get_state().tolist(), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append(repr(numpy.random.get_state()))
    return states

"""Follows a run on a simulated device by its log: the phases, and what each allocation is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memcheck.core.options import named
from memcheck.core.outputs import why_no_backward
from memcheck.core.tensors import named_tensors_in
from memcheck.core.trace import WARM_UP, Allocation, AllocationLog, Trace
from memcheck.core.units import format_bytes
from memcheck.measure.machine import CudaMachine
from memcheck.measure.run import MeasuredCall, MeasuredRun
from memcheck.predict.ranks import FOLLOWED
from memcheck.simulated.log import DeviceLog

NamedTensors = list[tuple[str, Tensor]]


class KeepingMachine(CudaMachine):
    """A GPU on which library workspaces stay, as they do in programs. Those from before the measured pass are held."""

    def __init__(self, index: int, log: DeviceLog) -> None:
        super().__init__(index)
        self.log = log
        self.held_bytes = 0

    def library_bytes(self) -> int:
        self.log.read()
        return sum(one.bytes for one in self.log.at.values() if one.is_library)

    def drop_library_workspaces(self) -> int:
        return self.library_bytes() - self.held_bytes


class Watch:
    """Follows a run by the log: phases, and the roles of allocations."""

    run: MeasuredRun

    def __init__(self, call: MeasuredCall, log: DeviceLog, hear: Callable[[str], Any]) -> None:
        self.call, self.log, self.hear = call, log, hear
        self.trace = trace = Trace(log)
        self.ran_before = False
        owned = owned_by(call)
        for name, tensor in (*owned, *inputs_of(call), *state_of(call)):
            log.note(tensor, name)
        trace.inputs, trace.parameters = self._titled(inputs_of(call)), self._titled(owned, owned=True)
        trace.optimizer = trace.carried_over = self._titled(state_of(call), owned=True)
        trace.preexisting = log.note_rest()
        trace.has_optimizer = bool(call.optimizer_step or call.optimizers)
        trace.passes.append(len(log.events))
        self._end("inputs")

    @contextmanager
    def earlier(self, phase: str) -> Iterator[None]:
        """Around a phase of a pass before the measured one."""
        if phase == "forward" and self.ran_before:
            self.trace.passes.append(len(self.log.events))
        self.ran_before = True
        self._begin(phase)
        try:
            with self._modes(phase):
                yield
        finally:
            self.log.read()
        if phase == "backward":
            self.trace.first_gradients += self._gradients()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Around a phase of the measured pass."""
        if phase == "forward":
            self._begin_measured()
        self._begin(phase)
        if phase == "optimizer":  # The backward's own gradients were let go meanwhile.
            self.trace.phases["backward"] = self.trace.phases["backward"][0], len(self.log.events)
        began = len(self.log.events)
        try:
            with self._modes(phase):
                yield
        finally:
            self._end(phase)
        if phase == "forward":
            self._note_outputs(began)
        elif phase == "backward":
            incoming = "grad y" if self.call.step.dense_grad else "grad y, expanded"
            self.trace.incoming = self._titled([(incoming, tensor) for tensor in self.run.output_gradients])
            self.trace.gradients = self._gradients()
            self.trace.backward_from = self.run.record.backward_from

    def finish(self) -> Trace:
        """The trace, once the run has ended."""
        call, trace, log = self.call, self.trace, self.log
        if call.step.backward and self.run.record.status == "ok" and not self.run.returned.roots:
            leaf = next((name for name, _ in call.named_leaves), None)
            trace.no_backward = why_no_backward(self.run.returned.named, leaf)
        if call.step.backward and not call.step.has_optimizer and call.step.steps is None:
            self._note_state_of_hooks()
        trace.modules, trace.operators = log.modules.traced, log.operators()
        trace.log = AllocationLog(log.allocations, log.events, log.begun, log.phase, closed=True)
        return trace

    @staticmethod
    def _modes(phase: str) -> AbstractContextManager[Any]:
        """Without Collectives in an optimizer, which calls none: under a mode, numbers become tensors twice."""
        return _disable_current_modes() if phase == "optimizer" and FOLLOWED else nullcontext()

    def _begin(self, phase: str) -> None:
        self.log.read()
        self.log.begin(phase)

    def _begin_measured(self) -> None:
        log, trace, call = self.log, self.trace, self.call
        if self.ran_before:
            trace.passes.append(len(log.events))
            self._end(WARM_UP)
            held = set(trace.held)
            trace.carried_over = [one for one in log.alive() if one not in held and not one.is_library]
            trace.optimizer = self._titled(state_of(call), owned=True)
            if not call.optimizers:  # Like a measurement, counts everything but gradients as the state.
                gradients = set(self._gradients())
                trace.optimizer = [one for one in trace.carried_over if one not in gradients]
        log.modules.begin_pass()
        if isinstance(call.machine, KeepingMachine):
            call.machine.held_bytes = call.machine.library_bytes()

    def _end(self, phase: str) -> None:
        self.log.read()
        first = max((last for _, last in self.trace.phases.values()), default=0)
        self.trace.phases[phase] = first, len(self.log.events)

    def _note_outputs(self, began: int) -> None:
        """Names what the forward made and left: outputs, buffers in place of others, and what is saved."""
        trace, log = self.trace, self.log
        known = {*trace.held, *trace.carried_over}
        made = [one for one in log.alive() if one.born > began and one not in known and not one.is_library]
        returned = self.run.returned.named
        names = ["y", *(f"output {name}" for name, _ in returned[1:])]
        outputs = [(name, tensor) for name, (_, tensor) in zip(names, returned, strict=False)]
        outputs = [named for named in outputs if not set(made).isdisjoint(log.allocations_of([named[1]]))]
        trace.outputs = self._titled(outputs)
        owned = (tensor for _, tensor in owned_by(self.call))
        renewed = [one for one in log.allocations_of(owned) if one in made and one not in trace.outputs]
        trace.carried_over = [one for one in trace.carried_over if one.died is None] + renewed
        known = {*trace.carried_over, *trace.outputs}
        trace.saved = [one for one in made if one not in known]

    def _gradients(self) -> list[Allocation]:
        """Names the allocations of the gradients. They belong to the modules of their tensors."""
        reached = [(f"tensor of a closure {tuple(leaf.shape)}", leaf) for leaf in self.call.reached]
        named = (*inputs_of(self.call), *owned_by(self.call), *reached)
        leaves = [(name, leaf) for name, leaf in named if leaf.is_leaf and leaf.grad is not None]
        found = self._titled([(f"d{name}", leaf.grad) for name, leaf in leaves if leaf.grad is not None])
        for name, leaf in leaves:
            for one in self.log.allocations_of([leaf.grad] if leaf.grad is not None else []):
                one.module = module_of(name)
        return found

    def _titled(self, tensors: NamedTensors, owned: bool = False) -> list[Allocation]:
        """Gives the allocations of the tensors these names, the first if there are several. Returns each once.

        owned: the names are paths of parameters, which include the module.
        """
        self.log.read()
        found: dict[Allocation, None] = {}
        for name, tensor in tensors:
            for one in self.log.allocations_of([tensor]):
                if one not in found:
                    one.name, one.module = name, module_of(name) if owned else one.module
                    found[one] = None
        return list(found)

    def _note_state_of_hooks(self) -> None:
        """Names the state that optimizers made in the backward, of which a later step has more than the first."""
        state = self.log.allocations_of(tensor for _, tensor in state_of(self.call))
        if size := sum(one.bytes for one in state if one not in self.trace.optimizer):
            words = f"a later step, which begins with {format_bytes(size)} of state that optimizers made in this"
            for self.log.phase in ("forward", "backward"):
                self.hear(f"{words} backward: predict it with {named('steps')} 2")


def inputs_of(call: MeasuredCall) -> NamedTensors:
    return [(name.partition(" ")[2], tensor) for name, tensor in call.named_given]


def owned_by(call: MeasuredCall) -> NamedTensors:
    """Parameters and buffers by their paths, and parameters and settings that optimizers alone have."""
    owner, parameters, *_ = call.owners
    named = [*named_tensors_in(owner)]
    known = {id(tensor) for _, tensor in (*named, *state_of(call))}
    named += [(name, tensor) for name, tensor in named_tensors_in(parameters) if id(tensor) not in known]
    known |= {id(tensor) for _, tensor in named}
    for group in (group for optimizer in call.optimizers for group in optimizer.param_groups):
        named += [(name, tensor) for name, tensor in named_tensors_in(group) if id(tensor) not in known]
    return named


def state_of(call: MeasuredCall) -> NamedTensors:
    """The tensors of the optimizers' state: "exp_avg of layers.0.weight"."""
    names = {id(tensor): name for name, tensor in named_tensors_in(call.owners[0])}
    states = (item for optimizer in call.optimizers for item in list(optimizer.state.items()))
    return [
        (f"{name} of {names.get(id(parameter), 'parameter')}", tensor)
        for parameter, state in states
        for name, tensor in named_tensors_in(state)
    ]


def module_of(name: str) -> str:
    """The module of a parameter "layers.0.weight", or of its state "exp_avg of layers.0.weight"."""
    return name.rpartition(" of ")[2].rpartition(".")[0]

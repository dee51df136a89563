"""Runs the steps of a measurement on meta tensors, in the same order, and logs what a device would allocate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from memcheck.core.devices import untried
from memcheck.core.options import named
from memcheck.core.prediction import ANY_PHASE, WARM_UP, Allocation, AllocationLog, Trace
from memcheck.core.tensors import gradients_for, tensors_in
from memcheck.core.units import format_bytes
from memcheck.core.workload import Left, Workload, why_no_backward
from memcheck.predict import process
from memcheck.predict.allocation_mode import AllocationMode, counts_of_the_last
from memcheck.predict.autocast import autocast_followed, run_backward
from memcheck.predict.device_functions import DeviceFunctions, functions_followed
from memcheck.predict.known_contents import KnownContents
from memcheck.predict.probed import Probe
from memcheck.predict.ranks import distributed_followed
from memcheck.predict.scratch import Target, Unlisted

NamedAllocations = list[tuple[str, list[Allocation]]]
# Size assumed for a storage that 64 bits cannot count; the run ends there.
BEYOND = 2**63


class TraceRunner:
    """Runs the steps of a measurement on meta tensors, in the same order.

    drop_workspaces: frees cuBLAS's workspaces after each phase, as a measurement does.
    contents: known contents of small inputs.
    probe: runs operators without a rule.
    checks: the probe compares functions that no test compares with measurements; without a probe, a doubt names them.
    is_split: the model is one rank's part of a split one.
    infers: the model runs in inference mode.
    mode: what logs, in place of an AllocationMode.
    """

    def __init__(
        self,
        target: Target,
        *,
        dense_grad: bool = False,
        drop_workspaces: bool = True,
        contents: KnownContents | None = None,
        probe: Probe | None = None,
        checks: bool = False,
        is_split: bool = False,
        infers: bool = False,
        mode: Any = None,
    ) -> None:
        if mode is None:
            counts_of_the_last()  # Collected before a mode is active that would record the search.
            mode = AllocationMode(AllocationLog(), target, contents, probe)
        self.mode = mode
        self.dense_grad = dense_grad
        self.mode.follows_calls = checks and target.kind == "cpu"  # On others, nothing is claimed to be exact.
        self.drop_workspaces = drop_workspaces
        self.is_split = is_split
        self.mode.infers = infers
        self.result = Trace(self.mode.log)
        self._loaded: Any = None  # Inputs of the pass that runs, if each has its own.
        self._stepped: Workload | None = None  # Its gradients are cleared when the next pass begins.

    def trace(self, workload: Workload) -> Trace:
        """Runs the workload and returns its trace. For a single use of this object."""
        if process.IS_CHILD:
            from memcheck.predict.compiled import compile_before

            compile_before(workload, self.dense_grad)
        if words := untried(self.mode.target.torch_version):
            self.mode.note_unknown(words, ANY_PHASE)
        with (
            self.mode,
            DeviceFunctions(self.mode),
            autocast_followed(self.mode.target.kind, self.mode.target.torch_version),
            functions_followed(self.mode),
            distributed_followed(self.mode) if self.is_split else nullcontext(),
            self.mode.modules.of(workload.module),
        ):
            try:
                self._run(workload)
                if workload.may_warm_up:
                    self._note_state_of_hooks(workload)
            except RuntimeError as error:
                if "overflow" not in str(error):
                    raise
                self.result.beyond = self.mode.phase
                self.result.log.allocate("a tensor beyond 64 bits", BEYOND)
                self._end(self.mode.phase)
            finally:
                self.result.log.closed = True
                self.result.begin_with([allocation for allocation in self.mode.storages.held if not allocation.born])
        self._check_calls()
        self.result.modules = self.mode.modules.traced
        self.result.operators = tuple(self.mode.operators)
        self.result.unknown = {phase: tuple(words) for phase, words in self.mode.unknown.items()}
        return self.result

    def _note_state_of_hooks(self, workload: Workload) -> None:
        """Names the state that optimizers made in the backward, of which a later step has more than the first."""
        state = self._allocations(tensor for _, tensor in workload.named_state())
        if size := sum(allocation.bytes for allocation in state if allocation not in self.result.optimizer):
            words = (
                f"a later step, which begins with {format_bytes(size)} of state that optimizers made in this backward"
            )
            for phase in ("forward", "backward"):
                self.mode.note_unknown(f"{words}: predict it with {named('steps')} 2", phase)

    def _check_calls(self) -> None:
        """Names the functions that take something else than predicted when they run alone."""
        for call in self.mode.calls.values():
            probe = self.mode.probe
            doubt = probe.check(call) if probe is not None else f"{call.name} was not compared with its prediction"
            if doubt is not None:
                self.mode.note_unknown(Unlisted(doubt), "forward")

    def _run(self, workload: Workload) -> None:
        given, owned = list(workload.named_inputs()), list(workload.named_parameters())
        if not self.is_split:
            owned = self.mode.copies.owned(owned)
        made = self.result.log.alive()
        inputs = (*given, *(named for step in workload.earlier for named in step.named_inputs()))
        for name, tensor in (*owned, *(inputs if workload.inputs_stay else ())):
            self.mode.storages.note(tensor, name)
        for _, tensor in () if workload.inputs_stay else inputs:
            self.mode.storages.note_not_torchs(tensor)  # They are copied for each pass.
        self.result.inputs, self.result.parameters = self._named(given), self._named(owned, owned=True)
        self.result.preexisting = self.mode.storages.held
        self.result.preexisting += [allocation for allocation in made if allocation not in self.result.held]
        self.result.state = self._allocations(tensors_in(workload.state))
        for name, tensor in workload.named_state():
            self.mode.storages.note(tensor, name)
        if not self.is_split:
            self.mode.storages.note_copies(self.mode.copies.storages())
        self.result.has_optimizer = bool(workload.optimizer_step or workload.optimizers or workload.warm_up)
        self.result.carried_over = self.result.optimizer = self._named(workload.named_state(), owned=True)
        left = Left()
        if workload.warm_up or workload.accumulate > 1 or workload.earlier:
            self._end("inputs", next_phase="forward")
            left, workload = self._before(workload, given, owned)
        else:
            workload = self._begin(workload)
            self._end("inputs", next_phase="forward")
        given = list(workload.named_inputs())
        began = len(self.result.log.events)
        with torch.set_grad_enabled(workload.backward):
            returned = workload.forward(self.mode.target.kind, left)  # Alive until the step ends.
        leaves = [(name, leaf) for name, leaf in (*given, *owned) if leaf.requires_grad]
        if workload.backward and leaves and not returned.roots and self.mode.saw_transforms:
            self.mode.note_unknown(Unlisted("when torch frees what a transform of a function made"), "forward")
        self._renew_parameters(owned)
        self._note_outputs(self._with_allocations(returned.named), workload, began)
        self._end("forward", next_phase="backward")
        if returned.roots and workload.backward:
            self.result.backward_from = returned.words
            self._backward(returned.roots, leaves, workload.retain_graph)
            self._end("backward", next_phase="optimizer")
            if workload.optimizer_step is not None:
                workload.optimizer_step()
                self._end("optimizer")
        elif workload.backward:
            named = [
                *((f"input {name}", leaf) for name, leaf in given),
                *((f"parameter {name}", leaf) for name, leaf in owned),
            ]
            leaf = next((name for name, leaf in named if leaf.requires_grad), None)
            self.result.no_backward = why_no_backward(returned.named, leaf)

    def _before(
        self, workload: Workload, given: list[tuple[str, Tensor]], owned: list[tuple[str, Tensor]]
    ) -> tuple[Left, Workload]:
        """Runs a program's earlier steps, one in which an optimizer makes its state, and the step's earlier passes.

        What they leave is held in the measured pass. Returns the outputs that are still alive, and the workload of the
        measured pass. Later passes are like the second one, unless gradients are sparse, which grow.
        """
        inputs, parameters = ([tensor for _, tensor in named] for named in (given, owned))
        left = Left()
        for step in (*workload.earlier, workload):
            if step.warm_up:
                left = self._pass(step, step.optimizer_step, left)
                self._stepped = step
            ends = step is not workload
            for number in range(1, step.accumulate + ends):
                if number > 1 and not ends and not any(x.grad is not None and x.grad.is_sparse for x in parameters):
                    break
                left = self._pass(step, step.optimizer_step if ends and number == step.accumulate else None, left)
            if ends and step.optimizer_step is not None:
                self._stepped = step
        if not workload.outputs_stay:
            left = Left()
        workload = self._begin(workload)
        given = list(workload.named_inputs())
        self._end(WARM_UP, next_phase="forward")
        self._renew_parameters(owned)
        held = set(self.result.held)
        self.result.carried_over = [
            allocation for allocation in self.result.log.alive() if allocation not in held and not allocation.is_library
        ]
        self.result.optimizer = self._named(workload.named_state(), owned=True)
        if not workload.optimizers:  # Like a measurement, counts everything but gradients as the state.
            gradients = self._allocations(leaf.grad for leaf in (*inputs, *parameters) if leaf.grad is not None)
            self.result.optimizer = [
                allocation for allocation in self.result.carried_over if allocation not in gradients
            ]
        return left, workload

    def _begin(self, workload: Workload) -> Workload:
        """The workload of the next pass. If inputs do not stay, it has new ones. Then gradients are cleared."""
        self.result.passes.append(len(self.result.log.events))
        self.mode.modules.begin_pass()
        if not workload.inputs_stay:
            self._loaded = None
            self._loaded = self.mode.renewed(workload.inputs)
            workload = dataclasses.replace(workload, inputs=self._loaded)
            for name, tensor in workload.named_inputs():
                self.mode.storages.note(tensor, name)
            self.result.inputs = self._named(workload.named_inputs())
        if (stepped := self._stepped) is not None:
            clear_gradients([tensor for step in (workload, stepped) for _, tensor in step.named_inputs()], True)
            clear_gradients([tensor for _, tensor in stepped.named_parameters()], stepped.set_to_none)
            self._stepped = None
        return workload

    def _renew_parameters(self, owned: list[tuple[str, Tensor]]) -> None:
        """Notes the storages that FSDP2 gives to some parameters in the first forward."""
        if self.is_split:
            self.result.parameters = self._named(owned, owned=True)

    def _pass(self, workload: Workload, optimizer_step: Callable[[], Any] | None, left: Left) -> Left:
        """Runs a forward, a backward, and the optimizer's step if it is given. Returns what stays of its outputs."""
        workload = self._begin(workload)
        self.mode.phase = "forward"
        with torch.set_grad_enabled(workload.backward):
            returned = workload.forward(self.mode.target.kind, left)  # Alive until the pass ends.
        if workload.backward and not returned.roots:  # A measurement makes no step of the optimizer either.
            optimizer_step = None
        if returned.roots and workload.backward:
            self.mode.phase = "backward"
            incoming = gradients_for(returned.roots, self.dense_grad)
            run_backward(returned.roots, incoming, workload.retain_graph)
            self.mode.works.clear()  # No collective is asked after the backward.
            del incoming
            leaves = [*workload.named_inputs(), *workload.named_parameters()]
            self.result.first_gradients += self._gradients(leaves)
        if optimizer_step is not None:
            self.mode.phase = "optimizer"
            optimizer_step()
        return returned.held if workload.outputs_stay else Left()

    def _note_outputs(self, outputs: NamedAllocations, workload: Workload, began: int) -> None:
        """Names what the forward made and left: outputs, buffers in place of others, and what is saved.

        outputs: what it returned. began: the last event before the forward.
        """
        self.mode.numbers.note()
        held, log = self.result.held, self.result.log
        names = ["y", *(f"output {name}" for name, _ in outputs[1:])]
        titled = [(name, output) for name, (_, output) in zip(names, outputs, strict=False)]
        made = {
            allocation
            for allocation in log.alive()
            if allocation.born > began and allocation not in held and not allocation.is_library
        }
        self.result.outputs = self._titled([(name, output) for name, output in titled if not made.isdisjoint(output)])
        made -= {*self.result.outputs}
        owned = [] if self.is_split else [tensor for _, tensor in workload.named_parameters()]  # FSDP2 gathers them.
        renewed = [allocation for allocation in self._allocations(owned) if allocation in made]
        self.result.carried_over = [
            allocation for allocation in self.result.carried_over if allocation.died is None
        ] + renewed
        known = {*self.result.carried_over, *self.result.outputs}
        self.result.saved = [allocation for allocation in log.alive() if allocation in made and allocation not in known]

    def _backward(self, roots: list[Tensor], leaves: list[tuple[str, Tensor]], retain_graph: bool) -> None:
        incoming = gradients_for(roots, self.dense_grad)
        self.result.incoming = self._titled([(self._incoming_name, self._allocations(incoming))])
        run_backward(roots, incoming, retain_graph)
        self.mode.works.clear()
        self.result.gradients = self._gradients(leaves)

    def _gradients(self, leaves: list[tuple[str, Tensor]]) -> list[Allocation]:
        """Names the allocations of the gradients. They belong to the modules of their tensors."""
        gradients = [(name, leaf.grad) for name, leaf in leaves if leaf.grad is not None]
        found = self._named([(f"d{name}", gradient) for name, gradient in gradients])
        for name, gradient in gradients:
            for allocation in self._allocations([gradient]):
                allocation.module = module_of(name)
        return found

    def _end(self, phase: str, next_phase: str | None = None) -> None:
        self.mode.storages.note_sizes()
        if self.drop_workspaces:
            self.mode.drop_library_workspaces()
        first = max((last for _, last in self.result.phases.values()), default=0)
        self.result.phases[phase] = first, len(self.result.log.events)
        self.mode.phase = next_phase or phase

    def _named(self, named: Iterable[tuple[str, Tensor]], owned: bool = False) -> list[Allocation]:
        """Names the allocations of the tensors. If two tensors share a storage, the first name counts.

        owned: the names are paths of parameters, which include the module.
        """
        return self._titled(self._with_allocations(named), owned)

    def _titled(self, named: NamedAllocations, owned: bool = False) -> list[Allocation]:
        """Gives the allocations these names, the first if there are several. Returns each once."""
        found: dict[Allocation, None] = {}
        for name, allocations in named:
            for allocation in allocations:
                if allocation not in found:
                    allocation.name = name
                    allocation.module = module_of(name) if owned else allocation.module
                    found[allocation] = None
        return list(found)

    def _with_allocations(self, named: Iterable[tuple[str, Tensor]]) -> NamedAllocations:
        return [(name, self._allocations([tensor])) for name, tensor in named]

    @property
    def _incoming_name(self) -> str:
        return "grad y" if self.dense_grad else "grad y, expanded"

    def _allocations(self, tensors: Iterable[Tensor]) -> list[Allocation]:
        found = (allocation for tensor in tensors for allocation in self.mode.storages.allocations_of(tensor))
        return list({id(allocation): allocation for allocation in found}.values())


def clear_gradients(tensors: list[Tensor], set_to_none: bool) -> None:
    for tensor in tensors:
        if set_to_none:
            tensor.grad = None
        elif tensor.grad is not None:
            tensor.grad.zero_()


def module_of(name: str) -> str:
    """The module of a parameter "layers.0.weight", or of its state "exp_avg of layers.0.weight"."""
    return name.rpartition(" of ")[2].rpartition(".")[0]

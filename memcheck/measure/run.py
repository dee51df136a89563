"""Runs a callable once, forward, backward and optimizer step, and records the bytes: the core of every measurement."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.optim import Optimizer

from memcheck.core import optimizers, tensors
from memcheck.core.devices import Device
from memcheck.core.outputs import ForwardOptions, Left, NamedTensors, Outputs, why_no_backward
from memcheck.core.record import Doubt, Record
from memcheck.core.step import Step
from memcheck.measure import gradients, machine
from memcheck.measure.tracker import MemoryTracker, SavedTensor

Phase = Callable[[str], AbstractContextManager[Any]]

# Entered around each forward, backward and pass with its name; for example, an NVTX range.
range_around: ContextVar[Phase] = ContextVar("range_around", default=nullcontext)


class MeasuredCall:
    """A callable with its arguments: the tensors given to it, the tensors it owns, and the machine it runs on."""

    def __init__(self, step: Step, device: Device | torch.device | str | None = None) -> None:
        fn, inputs, kwargs = step.model, step.inputs, step.kwargs
        step.check_inference_mode()
        self.step = step
        self._function = functools.partial(fn, *inputs, **kwargs)
        self.forward_options = ForwardOptions(step.loss, step.autocast, step.keep_outputs)
        self.parameters, self.optimizer_step = step.parameters, step.optimizer_step
        if isinstance(self.parameters, Iterator):
            self.parameters = list(self.parameters)
        if (makes := optimizers.optimizer_factory(step.optimizer)) is not None:
            if (module := tensors.module_called(fn)) is None:
                raise ValueError(f"optimizer needs a module with parameters, got {fn!r}")
            made = optimizers.optimizer_made(makes, module)
            self.parameters = (tensors.owner_of(fn), optimizers.optimizers_in(made), self.parameters)
            self.optimizer_step = optimizers.clipped_step(made, step.clip_grad_norm)
        stepped = getattr(self.optimizer_step, "__self__", None)
        self.stepped = stepped if isinstance(stepped, Optimizer) else None
        self.optimizers = _optimizers_of(self.parameters, self.stepped)
        known = set(map(id, self.optimizers))
        hooked = [one for one in optimizers.optimizers_in_hooks(tensors.module_called(fn)) if id(one) not in known]
        self.optimizers += hooked
        given = _titled("input", tensors.named_tensors_in(_arguments(fn, inputs, kwargs)))
        self.named_given = list(tensors.with_data(given))
        # Parameters of a module, of a bound method's module, those that the caller names, and those of optimizers.
        self.owners = (tensors.owner_of(fn), self.parameters, self.stepped, hooked)
        self.named_owned = self.named_owned_now()
        self.given = [tensor for _, tensor in self.named_given]
        self.owned = [tensor for _, tensor in self.named_owned]
        for tensor in self.given if step.backward else ():
            if tensor.requires_grad and not tensor.is_leaf:
                rule = "inputs must be leaves, or backward runs on through their history"
                raise ValueError(f"{rule}: got {tensor.grad_fn}")
        self._reached: list[weakref.ref[torch.Tensor]] = []
        kind = device.kind if isinstance(device, Device) else device
        self.device = tensors.resolve_device(kind, [*self.given, *self.owned])
        # Bytes that the first step left alive: caches, or the state of an optimizer that was not given.
        self.unseen_bytes = 0
        self.machine = machine.machine_of(self.device)

    def forward(self) -> Outputs:
        """Runs the callable once, and its loss, and returns what stays alive until the step ends."""
        with torch.set_grad_enabled(self.step.backward or self.step.enable_grad):
            return self.forward_options.run(self.device.type, self._function)

    def arranged(self) -> AbstractContextManager[None]:
        """Inside, the module has the checkpoints and is in the mode that the step asks for."""
        return optimizers.arranged(self.step.model, self.step.checkpointing, self.step.training)

    @property
    def named_leaves(self) -> NamedTensors:
        """The tensors whose .grad a backward fills: also inputs that began to require grad in the forward."""
        named = [*self.named_given, *self.named_owned]
        return [(name, tensor) for name, tensor in named if tensor.requires_grad and tensor.is_leaf]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Those of named_leaves, and what else the backward reaches, such as a closure's weights."""
        return [*(tensor for _, tensor in self.named_leaves), *self.reached]

    @property
    def reached(self) -> list[torch.Tensor]:
        """Leaves that note_reached found, as far as they are alive."""
        return [tensor for found in self._reached if (tensor := found()) is not None]

    def note_reached(self, roots: list[torch.Tensor], aside: gradients.Aside) -> None:
        """Finds the leaves that a backward from the roots reaches, and puts their gradients aside."""
        known = set(map(id, self.leaves))
        new = [leaf for leaf in gradients.leaves_below(roots) if id(leaf) not in known]
        aside.put(new)
        self._reached += map(weakref.ref, new)

    def named_owned_now(self) -> NamedTensors:
        """The tensors that the callable owns. A forward may replace buffers by new ones."""
        owned = itertools.chain.from_iterable(map(tensors.named_tensors_in, self.owners))
        return list(tensors.with_data(_titled("parameter", owned)))

    @property
    def named_state(self) -> NamedTensors:
        """The optimizers' current state, without the parameters."""
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return _titled("optimizer state", tensors.named_tensors_in(states[0] if len(states) == 1 else states))

    @property
    def state(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.named_state]

    @property
    def has_state(self) -> bool:
        """Whether the step is that of an optimizer that already has the state of every parameter."""
        if self.stepped is None:
            return False
        parameters = (parameter for group in self.stepped.param_groups for parameter in group["params"])
        return all(self.stepped.state.get(parameter) for parameter in parameters if parameter.requires_grad)


class MeasuredRun:
    """One run: a forward, a backward, an optimizer step if there is one, and the record that they fill.

    hooks: also record the tensors that autograd's hooks see. Hooks can change what is alive, and torch.func.grad
        refuses to run under any, so figures come from runs without them.
    phase: a context entered around the forward, the backward and the optimizer's step.
    earlier: the same for those of the passes before.
    beside_bytes: of tensors from before, besides the call's, that count in the peaks, too.
    """

    def __init__(
        self,
        call: MeasuredCall,
        limit_bytes: int | None = None,
        hooks: bool = False,
        phase: Phase | None = None,
        earlier: Phase = nullcontext,
        beside_bytes: int = 0,
    ) -> None:
        self.call = call
        self.machine = call.machine
        if limit_bytes is not None and call.unseen_bytes:
            limit_bytes = max(limit_bytes - call.unseen_bytes, 1)
        held = (call.given, call.owned, call.state)
        self.memory = MemoryTracker(*held, device=call.device, memory_limit=limit_bytes, saved=hooks)
        self._held_bytes = self.memory.held_bytes + call.unseen_bytes + beside_bytes
        self._left_bytes = 0  # By the first step.
        self._older: set[tensors.StorageWeakRef] = set()
        self._left_gradients: tensors.Storages = {}
        self.hooks = hooks
        self.phase, self.earlier = phase or range_around.get(), earlier
        self.returned = Outputs(Left(), [], [], None)  # Stays alive until the step ends.
        self.output_gradients: list[torch.Tensor] = []
        self.saved_by_hooks: int | None = None  # saved_bytes as the hooks count it.
        self.saved_tensors: list[SavedTensor] = []
        self.record = Record(
            mode=call.step.mode,
            input_bytes=sum(tensors.storages_of(call.given, call.device).values()),
            **self.machine.facts(),
        )
        self._note_held()

    @property
    def standing_bytes(self) -> int:
        """Bytes alive before the forward and after the run: inputs, parameters, and the state of an optimizer."""
        return self._held_bytes + self._left_bytes

    @property
    def named_outputs(self) -> NamedTensors:
        return _titled("output", self.returned.named)

    def measure(self) -> Record:
        """Runs everything once and returns the record."""
        self.machine.drop_library_workspaces()
        # Attributes that the forward replaces stay: their release would count if an earlier measurement saw them made.
        attributes = list(tensors.attributes_of(self.call.owners))
        with (
            self.call.arranged(),
            optimizers.collector_at_rest(),
            gradients.gradients_aside([*self.call.given, *self.call.owned]) as self._aside,
            self.memory,
        ):
            self._older = set(map(tensors.StorageWeakRef, tensors.storages_alive(self.call.device)))
            if self._before() and self._attempt("forward", self._forward):
                if not (self.call.step.backward and self.returned.roots):
                    leaf = next((name for name, _ in self.call.named_leaves), None)
                    if self.call.step.backward:
                        self.record.doubts += (Doubt(why_no_backward(self.returned.named, leaf)),)
                elif self._attempt("backward", self._backward):
                    self._let_go_of_output_gradients()
                    if self.call.optimizer_step is not None:
                        self._attempt("optimizer", self._optimizer)
        attributes.clear()
        self.record.reserved_bytes = self.machine.reserved_bytes()
        return self.record

    def _before(self) -> bool:
        """Runs what precedes the measured pass. False if out of memory.

        That is a step in which the optimizer makes its state, and the step's other passes. They are not part of a
        timeline.
        """
        call = self.call
        state_bytes = sum(tensors.storages_of(call.state, call.device).values())
        first_step = call.step.warms_up and not call.has_state
        if first_step:
            if (ran := self._pass(call.optimizer_step)) is not True:
                return ran is None
            gradients.clear_gradients(call.leaves, call.given, call.step)
        for _ in range(call.step.accumulate - 1):
            if (ran := self._pass()) is not True:
                return ran is None
        if first_step or call.step.accumulate > 1:
            self._note_left(state_bytes)
        return True

    def _pass(self, optimizer_step: Callable[[], Any] | None = None) -> bool | None:
        """Runs a forward, a backward, and the optimizer's step if it is given.

        False if out of memory; None if there is nothing to run a backward from.
        """
        returned: list[Outputs] = []  # Alive until the pass ends.
        if not self._attempt("forward", lambda: returned.append(self.call.forward()), self.earlier):
            return False
        self.call.note_reached(returned[0].roots, self._aside)
        if not (roots := returned[0].roots):
            return None
        backward = functools.partial(torch.autograd.backward, roots, retain_graph=self.call.step.retain_graph)
        if not self._attempt("backward", lambda: backward(self._gradients_for(roots)), self.earlier):
            return False
        return optimizer_step is None or self._attempt("optimizer", optimizer_step, self.earlier)

    def _gradients_for(self, roots: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors.gradients_for(roots, self.call.step.dense_grad)

    def _note_left(self, state_bytes: int) -> None:
        """Records what earlier passes left behind, where the optimizer had state_bytes before."""
        call = self.call
        self.machine.drop_library_workspaces()
        self._left_bytes = self.memory.current_bytes
        self._left_gradients = tensors.storages_of(gradients.gradients_of(call.leaves), call.device)
        seen = sum(tensors.storages_of(call.state, call.device).values()) - state_bytes
        call.unseen_bytes += self._left_bytes - sum(self._left_gradients.values()) - seen
        self.memory.reset_peak()
        self.memory.forget_saved()
        self._note_held()
        if call.optimizer_step is not None and not call.optimizers and not self.record.optimizer_bytes:
            self.record.doubts += (NO_STATE,)

    def _attempt(self, phase: str, run: Callable[[], Any], around: Phase | None = None) -> bool:
        try:
            with (around or self.phase)(phase):
                run()
        except torch.OutOfMemoryError as error:
            self.record.reason = str(error).partition("\n")[0]
        else:
            return True
        # Outside of the except block: the traceback holds the tensors of the frames that it passed.
        self.record.status, self.record.oom_phase = "oom", phase
        if self.memory.refusal is not None:
            self.record.oom_requested_bytes, self.record.oom_in_use_bytes = self.memory.refusal
        if phase == "backward":
            # A small backward frees the gradients that the failed one left in autograd's queue.
            torch.ones((), device=self.call.device, requires_grad=True).clone().backward()
        return False

    def _forward(self) -> None:
        record, memory, device = self.record, self.memory, self.call.device
        held = tensors.storages_of([*self.call.given, *self.call.owned, *self.call.state], device)
        young = tensors.storages_alive(device, generation=0)
        younger = {tensors.StorageWeakRef(storage): storage.nbytes() for storage in young}
        before = {*self._older, *held, *younger}
        self.returned = self.call.forward()
        self.call.note_reached(self.returned.roots, self._aside)
        returned = [tensor for _, tensor in tensors.with_data(self.named_outputs)]
        record.forward_peak_bytes = self._held_bytes + memory.peak_bytes
        record.forward_max_allocated_bytes = self.machine.max_allocated_bytes()
        record.forward_end_allocated_bytes = self._allocated_bytes()
        alive = memory.current_bytes - self._left_bytes
        record.library_workspace_bytes = self.machine.drop_library_workspaces()
        # Buffers and attributes of modules that the forward replaced: the old ones are gone, the new ones are there.
        gone_bytes = sum(size for storage, size in younger.items() if storage.expired())
        owned = [tensor for _, tensor in self.call.named_owned_now()]
        outputs, renewed = (
            {key: size for key, size in tensors.storages_of(part, device).items() if key not in before}
            for part in (returned, owned)
        )
        renewed_bytes = sum(size for key, size in renewed.items() if key not in outputs)
        memory.hold(returned, owned)
        record.output_bytes = sum(outputs.values())
        parts = (record.library_workspace_bytes or 0, record.output_bytes, renewed_bytes)
        # Gradients of a backward within the forward are part of saved_bytes.
        self._left_gradients |= tensors.storages_of(gradients.gradients_of(self.call.leaves), device)
        record.saved_bytes = max(0, alive + gone_bytes - sum(parts))
        self._left_bytes += renewed_bytes - gone_bytes
        if self.hooks:
            self.saved_by_hooks, self.saved_tensors = memory.saved_bytes, memory.saved_tensors
        self._note_workspace(record.forward_peak_bytes, record.library_workspace_bytes)

    def _backward(self) -> None:
        record, memory, roots = self.record, self.memory, self.returned.roots
        memory.reset_peak()
        record.backward_from = self.returned.start
        self.output_gradients = self._gradients_for(roots)
        incoming = tensors.storages_of(self.output_gradients, self.call.device)
        torch.autograd.backward(roots, self.output_gradients, retain_graph=self.call.step.retain_graph)
        record.backward_peak_bytes = self._held_bytes + memory.peak_bytes
        record.backward_max_allocated_bytes = self.machine.max_allocated_bytes(record.forward_max_allocated_bytes)
        record.backward_end_allocated_bytes = self._allocated_bytes()
        library_bytes = self.machine.drop_library_workspaces()
        grads = tensors.storages_of(gradients.gradients_of(self.call.leaves), self.call.device)
        record.gradient_bytes = sum(grads.values())
        # A union, because a gradient may be the same tensor as an output's gradient.
        appeared = {key: size for key, size in (grads | incoming).items() if key not in self._left_gradients}
        self._note_workspace(record.backward_peak_bytes, library_bytes, sum(appeared.values()))
        if library_bytes is not None:
            record.library_workspace_bytes = max(library_bytes, record.library_workspace_bytes or 0)

    def _let_go_of_output_gradients(self) -> None:
        """As loss.backward() does, so that the end of the backward is without them."""
        end, before = self.record.backward_end_allocated_bytes or 0, self._allocated_bytes()
        self.output_gradients.clear()
        self.record.backward_end_allocated_bytes = end + self._allocated_bytes() - before

    def _allocated_bytes(self) -> int:
        return self.machine.allocated_bytes(self._held_bytes + self.memory.current_bytes)

    def _optimizer(self) -> None:
        self.memory.reset_peak()
        if self.call.optimizer_step is not None:
            self.call.optimizer_step()
        self.record.optimizer_peak_bytes = self._held_bytes + self.memory.peak_bytes

    def _note_held(self) -> None:
        """Records the bytes of parameters and of optimizers. Unknown optimizers have what the first step left."""
        record, call = self.record, self.call
        state = tensors.storages_of(call.state, call.device)
        if call.optimizers:
            record.optimizer_bytes = sum(state.values())
        elif call.optimizer_step is not None or call.step.warms_up:
            record.optimizer_bytes = call.unseen_bytes
        parameters = tensors.storages_of(call.owned, call.device)
        for other in (*state, *tensors.storages_of(call.given, call.device)):
            parameters.pop(other, None)
        record.parameter_bytes = sum(parameters.values())

    def _note_workspace(self, peak_bytes: int, library_bytes: int | None, more_bytes: int = 0) -> None:
        record = self.record
        parts = (self.standing_bytes, record.output_bytes, record.saved_bytes, library_bytes)
        scratch = peak_bytes - sum(part or 0 for part in parts) - more_bytes
        record.workspace_bytes = max(record.workspace_bytes or 0, scratch)


NO_STATE = Doubt(
    "optimizer_step is not the step of a torch.optim.Optimizer, and made no state when it first ran: state that it had "
    "before counts only where parameters names it, or its optimizer",
    fields=("optimizer_bytes",),
)


def _arguments(fn: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names in the signature (of a module's forward); those without a name by number, from 0."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        bound = signature.bind(*inputs, **kwargs).arguments
    except (TypeError, ValueError):  # C functions have no signature; a call that does not fit fails later.
        return {**{str(index): thing for index, thing in enumerate(inputs)}, **kwargs}
    named: dict[str, Any] = {}
    for name, thing in bound.items():
        if kinds[name] == inspect.Parameter.VAR_POSITIONAL:
            named |= {str(index): part for index, part in enumerate(thing, len(named))}
        else:
            named |= thing if kinds[name] == inspect.Parameter.VAR_KEYWORD else {name: thing}
    return named


def _titled(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    return [(f"{kind} {name}".rstrip(), tensor) for name, tensor in named]


def _optimizers_of(parameters: Any, stepped: Optimizer | None) -> list[Optimizer]:
    """The stepped optimizer and those among the parameters. ValueError if a parameter is none."""
    found = [] if stepped is None else [stepped]
    for name, thing in _named_parts(parameters, "parameters"):
        if isinstance(thing, Optimizer):
            found += [thing] if thing is not stepped else []
        elif not isinstance(thing, torch.nn.Module) and not any(True for _ in tensors.tensors_in(thing)):
            raise ValueError(
                f"{name} must be a tensor, a module, an optimizer or a container of these, got {thing!r}, "
                "in which no tensor was found"
            )
    return found


def _named_parts(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping | list | tuple | set | frozenset):
        for part, inner in thing.items() if isinstance(thing, Mapping) else enumerate(thing):
            yield from _named_parts(inner, f"{name}.{part}")
    elif thing is not None:
        yield name, thing

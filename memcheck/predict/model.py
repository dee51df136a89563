"""Predicts a call of any model: its forward, its backward and its optimizer's step, from shapes alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memcheck.core.devices import Device
from memcheck.core.outputs import ForwardOptions
from memcheck.core.record import Record
from memcheck.core.step import INSTEAD_OF_A_CLOSURE, clipped_step, needs_closure, optimizers_in
from memcheck.core.tensors import dtype_name, named_tensors_in, tensors_in
from memcheck.core.workload import Workload, module_called, owner_of
from memcheck.predict.allocation_log import AllocationLog, Trace
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.device_functions import DeviceFunctions
from memcheck.predict.known_contents import KnownContents, is_meta
from memcheck.predict.left_behind import LeftBehind, nothing_left_behind
from memcheck.predict.meta_copy import NESTED, MetaCopies, refuse_unknown_sizes
from memcheck.predict.probed import Probe
from memcheck.predict.ranks import OF_NCCL, OF_STREAMS, Ranks, distributed_followed, pretended
from memcheck.predict.replay import Prediction, Replay, basis_of, blank_record
from memcheck.predict.scratch import Target, Unlisted
from memcheck.predict.trace_runner import TraceRunner


@dataclass(frozen=True)
class Call:
    """A call of a model, and what follows it.

    loss, autocast, keeps_outputs: as in memcheck.core.outputs.ForwardOptions.
    optimizer: makes the optimizer of the parameters.
    steps: 1 is the very first step, in which the optimizer makes its state; 2 and more a step in the steady state.
    accumulate, clip_grad_norm, set_to_none: as in memcheck.measure_memory.
    """

    model: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    backward: bool = True
    optimizer: Callable[[Any], Any] | None = None
    autocast: torch.dtype | None = None
    steps: int = 2
    accumulate: int = 1
    clip_grad_norm: float | None = None
    set_to_none: bool = True
    keeps_outputs: bool = True
    bsz: int | None = None  # Not known of any model.
    kv_len: int | None = None
    ranks: Ranks | None = None  # Of which process the call is.

    @property
    def mode(self) -> str:
        return "train" if self.backward else "inference"

    @property
    def name(self) -> str:
        owner = module_called(self.model)
        return type(owner).__name__ if owner is not None else getattr(self.model, "__name__", repr(self.model))

    @property
    def dtype(self) -> str | None:
        """The parameters' dtype, if they have one; else that of the inputs."""
        for things in (owner_of(self.model), (self.inputs, self.kwargs)):
            dtypes = {dtype_name(tensor) for tensor in tensors_in(things) if tensor.is_floating_point()}
            if dtypes:
                return dtypes.pop() if len(dtypes) == 1 else None
        return None


def predict_call(
    call: Call,
    device: Device,
    target: Target,
    *,
    limit_bytes: int | None = None,
    dense_grad: bool = False,
    expandable_segments: bool = False,
    drops_workspaces: bool = True,
    probe: Probe | None = None,
) -> Prediction:
    """The record that measuring the call on the device would give.

    A model that cannot be traced without data is "skipped", and the reason says why.
    """
    record = blank_record(Record, device, target)
    record.operator, record.mode, record.dtype = call.name, call.mode, call.dtype
    how: dict[str, Any] = {"dense_grad": dense_grad, "drops_workspaces": drops_workspaces, "contents": KnownContents()}
    how |= {"probe": probe, "checks": True, "is_split": call.ranks is not None}
    with nothing_left_behind(call.model, call.loss, call.optimizer, call.inputs, call.kwargs) as left:
        run = TraceRunner(target, **how)
        for name in left.before.scripted:
            run.mode.note_unknown(Unlisted(f"what {name} allocates, which TorchScript decides"), "forward")
        try:
            if is_compiled(call.model):
                raise NotImplementedError("the compiler decides what is allocated")
            if (module := module_called(call.model)) is not None:
                refuse_unknown_sizes(module)
            trace = traced(call, target, run, left)
        except Exception as error:
            if not is_for_lack_of_data(error) and not is_of_the_target(call, target, left):
                raise
            return stopped(call, device, record, error, run)
    basis = basis_of(trace, record.dtype or "", device, target, expandable_segments)
    return Replay(trace, call, device, record, limit_bytes, expandable_segments, basis=basis).prediction()


def traced(call: Call, target: Target, run: TraceRunner, left: LeftBehind) -> Trace:
    """The trace of the call, whose tensors the run then lets go."""
    left.alive.append(run.mode.storages.identities)
    try:
        with pretended(call.ranks, target.kind) as mesh:
            return run.trace(workload_of(call, target, run.mode, mesh))
    finally:
        run.mode.release()


def workload_of(call: Call, target: Target, mode: AllocationMode, mesh: Any = None) -> Workload:
    """The call on meta copies of everything that it is given. mesh: the model is split over it."""
    # A method is copied with its object, which may be that of the loss.
    method = call.optimizer if inspect.ismethod(call.optimizer) else None
    given = (call.model, call.inputs, call.kwargs, call.loss, method)
    model, inputs, kwargs, loss, method = mode.copies.copy(given)
    for words in mode.copies.doubts:
        mode.note_unknown(Unlisted(words), "backward")
    if call.ranks is not None:
        # Splitting the model frees what the copies hold.
        mode.copies = MetaCopies(mode.contents, mode.copies.stand)
        with mode, DeviceFunctions(mode), distributed_followed(mode):
            model = call.ranks.split(model, mesh)
        mode.forget_the_past()
        for words in (OF_NCCL, OF_STREAMS) if target.kind == "cuda" else ():
            mode.note_unknown(words, "inputs")
    module = module_called(model)
    parameters = list(module.parameters()) if module is not None else []
    if call.ranks is None:
        mode.copies.owned(named_tensors_in(module))  # Before the optimizer takes them for standing tensors.
    optimizer = None
    if call.optimizer is not None and call.backward:
        with AllocationMode(AllocationLog(), target, mode.contents) as aside, DeviceFunctions(aside):
            aside.copies = mode.copies
            optimizer = (method or call.optimizer)(parameters)
        mode.storages.set_aside(aside.storages)
        if needs_closure(optimizer):
            raise NotImplementedError(f"{type(optimizer).__name__}.step needs a closure: {INSTEAD_OF_A_CLOSURE}")
        if target.kind == "cpu":
            move_settings(optimizers_in(optimizer), mode)

    def run(*given: Any) -> Any:
        *positional, named = given
        return model(*positional, **named)

    return Workload(
        call,
        run,
        (*inputs, kwargs),
        ((), owner_of(model)),
        (*argument_names(model, len(inputs)), ""),
        optimizer_step=None if optimizer is None else clipped_step(optimizer, call.clip_grad_norm),
        optimizers=tuple(optimizers_in(optimizer)),
        warm_up=optimizer is not None and call.steps > 1,
        accumulate=call.accumulate,
        set_to_none=call.set_to_none,
        module=module,
        forward_options=ForwardOptions(loss, call.autocast, call.keeps_outputs),
    )


def move_settings(optimizers: list[torch.optim.Optimizer], mode: AllocationMode) -> None:
    """Replaces tensors among the settings of optimizers, such as a learning rate, by tensors on meta."""

    def moved(part: Any) -> Any:
        return mode.known_on_meta(part) if isinstance(part, torch.Tensor) and not is_meta(part) else part

    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group.update({name: tree_map(moved, setting) for name, setting in group.items() if name != "params"})


def is_compiled(model: Any) -> bool:
    return any("OptimizedModule" in kind.__name__ for kind in type(model).__mro__) or hasattr(
        model, "_torchdynamo_orig_callable"
    )


def argument_names(model: Any, count: int) -> list[str]:
    """Names of the first positional arguments."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):  # C functions have no signature.
        return [f"argument {index}" for index in range(count)]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    return [*names, *(f"argument {index}" for index in range(len(names), count))][:count]


# Parts of messages of torch that do not say what to do, and what is said instead. {} is the operator that it names.
INSTEAD = {
    # Of a tensor with data that reaches autograd where no function mode sees it.
    "expected device cpu but got meta": (
        "a compiled or autograd function takes a parameter that the model does not own; give it to the model"
    ),
    "NestedTensor": NESTED,
    "for HigherOrderOperator": (
        "torch's higher-order operator {} is not predicted; measure the model, or call the functions that it is given"
    ),
    "Cannot copy out of meta tensor": "a tensor moves to cpu, as by save_on_cpu: that is not predicted; measure it",
    "attempted to run this operator with Meta": "{} needs values that are not known on meta; measure the model",
}
# Parts of torch's messages when contents of a tensor without data, or properties of a missing GPU, are needed.
LACKS = ("meta", "Meta", "data-dependent", "data is not allocated", "not compiled with CUDA", "NestedTensor")


def is_for_lack_of_data(error: Exception) -> bool:
    lacking = isinstance(error, (RuntimeError, AssertionError)) and any(word in str(error) for word in LACKS)
    return isinstance(error, NotImplementedError) or lacking


def is_of_the_target(call: Call, target: Target, left: LeftBehind) -> bool:
    """Whether an error came of predicting for a GPU: the same call can be traced for the CPU."""
    if target.kind == "cpu":
        return False
    target = Target("cpu", target.threads)
    run = TraceRunner(target, contents=KnownContents(), is_split=call.ranks is not None)
    try:
        traced(call, target, run, left)
    except Exception:
        return False
    return True


def stopped(call: Call, device: Device, record: Record, error: Exception, run: TraceRunner) -> Prediction:
    """The prediction of a model that could not be traced."""
    where = run.mode.modules.path_of(None)
    reason = str(error).strip().partition("\n")[0]
    if (instead := next((words for part, words in INSTEAD.items() if part in reason), None)) is not None:
        operator = re.search(r"HigherOrderOperator (\w+)|(\w+::\w+)", reason)
        reason = instead.format(next(filter(None, operator.groups())) if operator else "")
    why = f"{reason} (in {where})" if where else reason
    record.status, record.reason, record.exact, record.basis = "skipped", f"not predicted: {why}", False, None
    record.doubts = (why,)
    return Prediction(call, device, record, {}, False, (why,))

"""Predicts steps of any model: a forward, its backward and the optimizer's step, from shapes alone."""

from __future__ import annotations

import dataclasses
import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memcheck.core.errors import UsageError, failed_line, frames_of
from memcheck.core.optimizers import (
    INSTEAD_OF_A_CLOSURE,
    arrange,
    clipped_step,
    needs_closure,
    optimizer_factory,
    optimizer_made,
    optimizers_in,
    optimizers_in_hooks,
)
from memcheck.core.options import named
from memcheck.core.prediction import AllocationLog, Prediction, Trace
from memcheck.core.ranks import Ranks
from memcheck.core.record import PHASES, UNKNOWN, Doubt, Record
from memcheck.core.step import Place, Program, Step
from memcheck.core.tensors import named_tensors_in
from memcheck.core.workload import ForwardOptions, Workload, module_called, owner_of
from memcheck.predict import process
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.device_functions import DeviceFunctions, answers_about_the_gpu
from memcheck.predict.device_kinds import MIXES
from memcheck.predict.known_contents import KnownContents, is_meta
from memcheck.predict.meta_copy import NESTED, MetaCopies, refuse_unknown_sizes
from memcheck.predict.operators.value_shapes import AssumedValues
from memcheck.predict.probed import Probe
from memcheck.predict.python_functions import CompiledCodeError, ElsewhereError, answered
from memcheck.predict.ranks import OF_FSDP, OF_NCCL, WAITING, distributed_followed, pretended
from memcheck.predict.reached import Alive, left_behind_named, scripted_in
from memcheck.predict.replay import Replay, blank_record, certainty_of, target_at
from memcheck.predict.scratch import Target, Unlisted
from memcheck.predict.trace_runner import TraceRunner


def highest_bytes(prediction: Prediction) -> int:
    """The highest sum alive during the phases that the record is about."""
    return max(getattr(prediction.record, f"{phase}_peak_bytes") or 0 for phase in PHASES)


def check_predictable(step: Step) -> None:
    """UsageError: the step has what only a measurement takes, or a backward under torch.inference_mode()."""
    if step.optimizer_step is not None or step.has_parameters:
        name = named("optimizer_step" if step.optimizer_step is not None else "parameters")
        raise UsageError(f"{name} is for measurements: a prediction takes an optimizer, and a module's parameters")
    step.check_inference_mode()


def predict_last(program: Program, place: Place, probe: Probe | None = None) -> Prediction:
    """The prediction of the program's last step, after the others.

    A model that cannot be traced without data is "skipped", and the reason says why.
    """
    for step in program.steps:
        check_predictable(step)
    # Only the model runs in the caller's inference mode: copies of its tensors cannot be made in it.
    infers = torch.is_inference_mode_enabled()
    # inference_mode(False) also turns gradients on, so it is not entered without need.
    with torch.inference_mode(False) if infers else nullcontext():
        return predict_prepared(program, place, probe, infers)


def predict_prepared(program: Program, place: Place, probe: Probe | None, infers: bool) -> Prediction:
    """The prediction of the program's last step. infers: the model runs in inference mode."""
    step, target = program.steps[-1], target_at(place)
    record = blank_record(Record, place, target)
    record.operator, record.mode, record.dtype = step.name, step.mode, step.dtype
    how: dict[str, Any] = {"dense_grad": step.dense_grad, "drop_workspaces": bool(place.drop_workspaces)}
    how |= {"probe": probe, "checks": True, "is_split": place.ranks is not None, "infers": infers}
    assumed = AssumedValues()
    named: AbstractContextManager[Alive] = nullcontext([]) if process.IS_CHILD else left_behind_named()
    with named as alive:
        while True:
            run = TraceRunner(target, contents=KnownContents(), **how)
            run.mode.assumed = assumed
            for name in scripted_in(*(part for one in program.steps for part in (one.model, one.loss, one.optimizer))):
                run.mode.note_unknown(Unlisted(f"what {name} allocates, which TorchScript decides"), "forward")
            try:
                if (module := module_called(step.model)) is not None:
                    refuse_unknown_sizes(module)
                trace = traced(program, place.ranks, target, run, alive)
                break
            except Exception as error:
                if isinstance(error, ElsewhereError):
                    words = process.missing(target.kind)
                    if place.ranks is not None and isinstance(error, CompiledCodeError):
                        words = "that is not predicted for a model that is split over processes"
                    if words is None:
                        raise
                    error = NotImplementedError(f"{error}; {words}")
                lacks_data = is_for_lack_of_data(error)
                if not lacks_data and assumed.turn_last():
                    continue
                if not lacks_data and not is_of_the_target(program, place.ranks, target, alive):
                    raise
                return stopped(step, place, record, error, run)
    certainty = certainty_of(trace, record.dtype or "", place, target)
    return Replay(trace, step, place, record, certainty=certainty).prediction()


def traced(program: Program, ranks: Ranks | None, target: Target, run: TraceRunner, alive: Alive) -> Trace:
    """The trace of the last step, whose tensors the run then lets go. alive: as left_behind_named yields it."""
    alive.append(run.mode.storages.identities)
    try:
        about_the_gpu = answers_about_the_gpu(run.mode) if target.kind == "cuda" else {}
        with pretended(ranks, target.kind) as mesh, answered(about_the_gpu):
            return run.trace(workload_of(program, ranks, target, run.mode, mesh))
    finally:
        run.mode.release()


def maker_of(program: Program) -> Step:
    """The first step with an optimizer, else the last one: its model and optimizer are the program's."""
    return next((step for step in program.steps if step.optimizer is not None), program.steps[-1])


def workload_of(
    program: Program, ranks: Ranks | None, target: Target, mode: AllocationMode, mesh: Any = None
) -> Workload:
    """The last step on meta copies of everything that the program is given. mesh: the model is split over it."""
    maker = maker_of(program)
    # Tensor parallelism leaves some parameters whole, and functions of lists take no DTensors among other tensors.
    one_by_one = {"foreach": False} if ranks is not None and ranks.kind == "tp" else {}
    makes = optimizer_factory(maker.optimizer, **one_by_one)
    given = [(step.inputs, step.kwargs, step.loss) for step in program.steps]
    model, given, makes = mode.copies.copy((maker.model, given, makes))
    for words in mode.copies.doubts:
        mode.note_unknown(Unlisted(words), "backward")
    # It is a copy, so nothing is undone.
    arrange(model, any(step.checkpointing for step in program.steps), None)
    if ranks is not None:
        model = split_on_meta(model, ranks, mesh, target, mode)
    module = module_called(model)
    if ranks is None:
        mode.copies.owned(named_tensors_in(module))  # Before the optimizer takes them for standing tensors.
    optimizer = optimizer_on_meta(makes, module, target, mode) if makes is not None else None
    return workload_with(program, model, optimizer, given, mode.infers)


def workload_with(program: Program, model: Any, optimizer: Any, given: Any, infers: bool) -> Workload:
    """The last step, with the others before it.

    model, optimizer: those that run. given: the inputs, keywords and loss of each step. infers: it runs in inference
    mode.
    """
    maker = maker_of(program)
    module, owner = module_called(model), owner_of(model)
    stepped = optimizers_in([optimizer, optimizers_in_hooks(module)])

    if any(step.compile for step in program.steps):
        model = torch.compile(model, dynamic=False)

    # Set before each forward if a step asks for a mode. Else they are those that the forwards themselves leave.
    asked = any(step.training is not None for step in program.steps)
    modes = {part: part.training for part in module.modules()} if module is not None and asked else {}

    def work(step: Step, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> Workload:
        def run(*given: Any) -> Any:
            for part, training in modes.items():
                part.training = training if step.training is None else step.training
            *positional, named = given
            with torch.inference_mode() if infers else nullcontext():
                return model(*positional, **named)

        stepping = optimizer is not None and step.optimizer is not None
        return Workload(
            step,
            run,
            (*inputs, kwargs),
            ((), owner),
            (*argument_names(model, len(inputs)), ""),
            optimizer_step=clipped_step(optimizer, step.clip_grad_norm) if stepping else None,
            optimizers=tuple(stepped),
            warm_up=step.warms_up and (step is maker or not step.has_optimizer),
            may_warm_up=step.backward and not step.has_optimizer and step.steps is None,
            accumulate=step.accumulate,
            retain_graph=step.retain_graph,
            set_to_none=step.set_to_none,
            module=module,
            forward_options=ForwardOptions(loss, step.autocast, step.keep_outputs),
            outputs_stay=program.outputs_stay,
            inputs_stay=program.inputs_stay,
        )

    *earlier, last = (work(step, *parts) for step, parts in zip(program.steps, given, strict=True))
    return dataclasses.replace(last, earlier=tuple(earlier))


def split_on_meta(model: Any, ranks: Ranks, mesh: Any, target: Target, mode: AllocationMode) -> Any:
    """The copied model, split over the ranks. What splitting allocates and frees is over before the step."""
    mode.copies = MetaCopies(mode.contents, mode.copies.stand)  # Splitting the model frees what the copies hold.
    with mode, DeviceFunctions(mode), distributed_followed(mode):
        model = ranks.split(model, mesh)
    mode.forget_the_past()
    of_kind = OF_FSDP if ranks.kind == "fsdp" else WAITING
    for words in (OF_NCCL, of_kind) if target.kind == "cuda" else ():
        mode.note_unknown(words, "inputs")
    return model


def optimizer_on_meta(makes: Any, module: Any, target: Target, mode: AllocationMode) -> Any:
    """The optimizer of the copied model. What making it allocates is there before the step.

    NotImplementedError: its step needs a closure.
    """
    with AllocationMode(AllocationLog(), target, mode.contents) as aside, DeviceFunctions(aside):
        aside.copies = mode.copies
        stood = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]()
        stand, mode.copies.stand = mode.copies.stand, lambda *copied: stood.append(copied)
        optimizer = optimizer_made(makes, module)
    if not all(map(is_meta, stepped_by(optimizer))):  # It found the model where no copy replaces it.
        mode.copies.memo |= {id(tensor): tensor for tensor in stepped_by(optimizer) if is_meta(tensor)}
        (optimizer,) = mode.copies.copy((optimizer,))
    mode.copies.stand = stand
    own = {parameter.untyped_storage()._cdata for parameter in stepped_by(optimizer)}
    for original, copied in stood:
        if copied._cdata not in own:  # Parameters that the optimizer alone has are not the model's, but count.
            stand(original, copied)
    mode.storages.set_aside(aside.storages)
    if needs_closure(optimizer):
        raise NotImplementedError(f"{type(optimizer).__name__}.step needs a closure: {INSTEAD_OF_A_CLOSURE}")
    if target.kind == "cpu":
        move_settings(optimizers_in(optimizer), mode)
    return optimizer


def stepped_by(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of the optimizers that an object holds."""
    groups = (group for found in optimizers_in(optimizer) for group in found.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def move_settings(optimizers: list[torch.optim.Optimizer], mode: AllocationMode) -> None:
    """Replaces tensors among the settings of optimizers, such as a learning rate, by tensors on meta."""

    def moved(part: Any) -> Any:
        return mode.known_on_meta(part) if isinstance(part, torch.Tensor) and not is_meta(part) else part

    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group.update({name: tree_map(moved, setting) for name, setting in group.items() if name != "params"})


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
    # A tensor with data reaches autograd where no function mode sees it.
    "expected device cpu but got meta": (
        "a compiled or autograd function takes a parameter that the model does not own; give it to the model"
    ),
    "NestedTensor": NESTED,
    "for HigherOrderOperator": (
        "torch's higher-order operator {} is not predicted; measure the model, or call the functions that it is given"
    ),
    "opt_ready_stream": "compiled code takes a view of a tensor that requires grad, which is not predicted for a GPU",
    "making fake tensor call": "an operator of the compiled code refuses its operands",
    "Cannot copy out of meta tensor": "a tensor moves to cpu, as by save_on_cpu: that is not predicted; measure it",
    "attempted to run this operator with Meta": "{} needs values that are not known on meta; measure the model",
}
# Parts of torch's messages when contents of a tensor without data, or properties of a missing GPU, are needed.
LACKS = (
    "INTERNAL ASSERT",
    "meta",
    "Meta",
    "data-dependent",
    "data is not allocated",
    "not compiled with CUDA",
    "NestedTensor",
)


def is_for_lack_of_data(error: Exception) -> bool:
    lacking = isinstance(error, (RuntimeError, AssertionError)) and any(word in str(error) for word in LACKS)
    return isinstance(error, NotImplementedError) or lacking


def is_of_the_target(program: Program, ranks: Ranks | None, target: Target, alive: Alive) -> bool:
    """Whether an error came of predicting for a GPU: the same step can be traced for the CPU."""
    if target.kind == "cpu":
        return False
    target = Target("cpu", target.threads)
    run = TraceRunner(target, contents=KnownContents(), is_split=ranks is not None)
    try:
        traced(program, ranks, target, run, alive)
    except Exception:
        return False
    return True


def stopped(step: Step, place: Place, record: Record, error: Exception, run: TraceRunner) -> Prediction:
    """The prediction of a model that could not be traced."""
    where = run.mode.modules.path_of(None)
    reason = str(error).strip().partition("\n")[0]
    if (instead := next((words for part, words in INSTEAD.items() if part in reason), None)) is not None:
        operator = re.search(r"HigherOrderOperator (\w+)|(\w+::\w+)", reason)
        reason = instead.format(next(filter(None, operator.groups())) if operator else "")
    elif run.mode.target.kind == "cuda" and (MIXES in reason or {"cpu", "meta"} <= set(re.findall(r"\w+", reason))):
        line = failed_line(list(frames_of(error)))
        reason = f"{run.mode.phase} {MIXES}{f', at {line}' if line else ''}"
    why = f"{reason} (in {where})" if where else reason
    record.status, record.reason, record.doubts = "skipped", f"not predicted: {why}", (Doubt(why, UNKNOWN),)
    return Prediction(step, place, record, {})

"""Predictions of steps on a simulated GPU, in a process of its own: torch runs the step, and its log is the trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck.core.devices import untried
from memcheck.core.optimizers import INSTEAD_OF_A_CLOSURE, arrange, needs_closure, optimizer_factory, optimizer_made
from memcheck.core.prediction import ANY_PHASE, AllocationLog, Prediction, Trace
from memcheck.core.record import UNKNOWN, Doubt, Record
from memcheck.core.step import Place, Program
from memcheck.core.tensors import tensors_in
from memcheck.core.workload import Workload, module_called, owner_of
from memcheck.predict.model import check_predictable, maker_of, workload_with
from memcheck.predict.replay import Replay, blank_record, certainty_of, target_at
from memcheck.predict.scratch import Target, Unlisted
from memcheck.predict.trace_runner import TraceRunner
from memcheck.simulated import doubts, rules
from memcheck.simulated.library import library
from memcheck.simulated.log import MarkedModules, SimulatedLog, SimulatedStorages, operators_called

# Part of torch's message, where code uses a tensor that it has made on the CPU, or that was not sent with the model.
MIXED = "Expected all tensors to be on the same device"


class SimulatedGpu:
    """What TraceRunner asks of an AllocationMode, answered by the simulated GPU of this process."""

    follows_calls = saw_transforms = infers = False

    class Standing:
        """What the model owns is on the GPU already, and torch itself keeps its numbers."""

        def note(self) -> None: ...

        def owned(self, named: Iterable[Any]) -> list[Any]:
            return list(named)

        def storages(self) -> list[Any]:
            return []

    def __init__(self, target: Target) -> None:
        self.target = target
        self.modules = MarkedModules()
        self.log = SimulatedLog(self.modules)
        self.storages = SimulatedStorages(self.log)
        self.unknown: dict[str, dict[str, None]] = {}
        self.calls: dict[str, Any] = {}
        self.works: list[Any] = []
        self.numbers = self.copies = self.Standing()

    @property
    def phase(self) -> str:
        return self.log.phase

    @phase.setter
    def phase(self, name: str) -> None:
        library().forget_plans(0)  # What is not known of a kernel is said in each phase.
        self.log.begin(name)

    def note_unknown(self, words: str, phase: str) -> None:
        self.unknown.setdefault(phase, {}).setdefault(words)

    def hear(self, words: str) -> None:
        self.note_unknown(rules.UNKNOWN.get(words) or Unlisted(words), self.phase)

    def drop_library_workspaces(self) -> None:
        library().drop_workspaces()

    def renewed(self, thing: Any) -> Any:
        """The thing with other tensors in place of its own."""

        def new(part: Any) -> Any:
            if not isinstance(part, Tensor) or not part.is_cuda:
                return part
            return part.detach().clone().requires_grad_(part.requires_grad)

        return tree_map(new, thing)


def predict_simulated(program: Program, place: Place) -> Prediction:
    """The prediction of the program's last step, after the others. Its tensors are on the GPU that this process
    simulates."""
    for step in program.steps:
        check_predictable(step)
    step, target = program.steps[-1], target_at(place)
    record = blank_record(Record, place, target)
    record.operator, record.mode, record.dtype = step.name, step.mode, step.dtype
    gpu = SimulatedGpu(target)
    run = TraceRunner(target, dense_grad=step.dense_grad, drop_workspaces=bool(place.drop_workspaces), mode=gpu)
    library().drop_workspaces()
    library().forget_plans(1)
    rules.SEARCHED.clear()
    try:
        with doubts.heard_by(gpu.hear):
            trace = traced(program, run, gpu)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and MIXED not in str(error):
            raise
        return not_predicted(step, place, record, error, gpu)
    certainty = certainty_of(trace, record.dtype or "", place, target)
    return Replay(trace, step, place, record, certainty=certainty).prediction()


def traced(program: Program, run: TraceRunner, gpu: SimulatedGpu) -> Trace:
    """The trace of the last step."""
    workload = workload_on_gpu(program)
    library().drop_workspaces()
    gpu.log.start()
    if words := untried(gpu.target.torch_version):
        gpu.note_unknown(words, ANY_PHASE)
    with gpu.modules.of(workload.module):
        try:
            run._run(workload)
            if workload.may_warm_up:
                run._note_state_of_hooks(workload)
        finally:
            gpu.log.read()
            gpu.log.closed = True
            run.result.begin_with([one for one in gpu.storages.held if not one.born])
    trace = run.result
    trace.modules, trace.operators = gpu.modules.traced, tuple(map(rules.known_name, operators_called()))
    trace.unknown = {phase: tuple(words) for phase, words in gpu.unknown.items()}
    trace.log = AllocationLog(gpu.log.allocations, gpu.log.events, gpu.log.begun, gpu.log.phase, closed=True)
    return trace


def workload_on_gpu(program: Program) -> Workload:
    """The last step, on what the program is given.

    NotImplementedError: the optimizer's step needs a closure.
    """
    maker = maker_of(program)
    for tensor in tensors_in((owner_of(maker.model), [(step.inputs, step.kwargs) for step in program.steps])):
        tensor.grad = None  # Of the prediction of an earlier step.
    makes = optimizer_factory(maker.optimizer)
    given = [(step.inputs, step.kwargs, step.loss) for step in program.steps]
    module = module_called(maker.model)
    for part in module.modules() if module is not None else ():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # As module.cuda() does.
    arrange(maker.model, any(step.checkpointing for step in program.steps), None)
    optimizer = optimizer_made(makes, module) if makes is not None else None
    if optimizer is not None and needs_closure(optimizer):
        raise NotImplementedError(f"{type(optimizer).__name__}.step needs a closure: {INSTEAD_OF_A_CLOSURE}")
    return workload_with(program, maker.model, optimizer, given, infers=False)


def not_predicted(step: Any, place: Place, record: Record, error: Exception, gpu: SimulatedGpu) -> Prediction:
    """The prediction of a step that the simulated GPU cannot run."""
    where = gpu.modules.path_of(None)
    reason = str(error).strip().partition("\n")[0]
    why = f"{reason} (in {where})" if where else reason
    record.status, record.reason, record.doubts = "skipped", f"not predicted: {why}", (Doubt(why, UNKNOWN),)
    return Prediction(step, place, record, {})

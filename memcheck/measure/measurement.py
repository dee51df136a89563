"""Measures one callable: the bytes of a forward and a backward, and in separate passes the milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memcheck.core.arguments import autocast_given, bytes_given, callable_given, optimizer_given, takes_inputs
from memcheck.core.outputs import ForwardOptions
from memcheck.core.record import PHASES, Record
from memcheck.core.step import check_step, clipped_step, number_of_steps, optimizers_in
from memcheck.core.tensors import resolve_device
from memcheck.core.workload import module_called, owner_of
from memcheck.measure import timing
from memcheck.measure.explain import explain
from memcheck.measure.machine import load, machine_of
from memcheck.measure.run import MeasuredCall, MeasuredRun, timed_pass


@takes_inputs
def measure_memory(
    fn: Callable[..., Any],
    *inputs: Any,
    kwargs: dict[str, Any] | None = None,
    backward: bool = True,
    dense_grad: bool = False,
    device: torch.device | str | None = None,
    limit_bytes: int | str | None = None,
    parameters: Any = (),
    optimizer_step: Callable[[], Any] | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    keeps_outputs: bool = True,
    autocast: torch.dtype | str | None = None,
    steps: int | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    set_to_none: bool = True,
    details: bool = False,
    **keywords: Any,
) -> Record:
    """Runs fn(*inputs, **keywords) and its backward once, and returns the memory that they took, to the byte.

    With optimizer_step, the record is of a step in the steady state. The very first step, which makes the optimizer's
    state, runs before it and is not part of the record.

    fn: a callable or a module. The parameters and buffers of a module, or of one whose method or functools.partial fn
        is, are counted separately, as parameter_bytes.
    kwargs: further keyword inputs of fn, whatever their names. A keyword that fn has, too, must be given here; with
        kwargs={} such a keyword is the one described here.
    backward: with False the forward runs under no_grad and the record's mode is "inference".
    dense_grad: the gradient of each output is a full tensor of ones, instead of one element expanded.
    device: where to measure; by default the CUDA device of the given tensors, else the CPU.
    limit_bytes: a budget for inputs, parameters and everything allocated; see memcheck.track. Or a text, "40GiB".
    parameters: tensors, modules, optimizers (their parameters and state) or containers of these that fn uses without
        being given them (a closure's weights). Anything else is a ValueError.
    optimizer_step: called after the backward: an optimizer's own `optimizer.step` or any callable. The highest sum
        alive meanwhile is optimizer_peak_bytes. The state is alive in every phase and is optimizer_bytes. An
        optimizer's own step also provides its parameters and state. For another callable, the state is what its first
        call allocates; older state counts only if `parameters` has the optimizer, and a doubt says if none is found.
        The step does change the parameters. It runs once if it is an optimizer's own and every parameter has its
        state, else twice, with a forward and a backward before each. In between, gradients are set to None, as
        zero_grad() does, unless optimizer_step itself set all of them to zero in place.
    optimizer: instead of optimizer_step: makes the optimizer of the module's parameters, whose step is then measured:
        lambda parameters: torch.optim.AdamW(parameters). Or a name of the command line's: "adamw". It may
        also return another object with a step(), such as one that steps by a torch.amp.GradScaler. The optimizers that
        this object, its methods and their closures hold provide the state.
    loss: makes the tensor that the backward starts from out of fn's output. By default it starts from output.loss, or
        output["loss"]; else from the only scalar that requires grad; else from every output that does. The record's
        backward_from says which it is.
    keeps_outputs: what fn and loss return stays alive until the step ends, as in `logits, loss = model(x)`. With
        False only the tensors that the backward starts from do, as in the Trainer of transformers.
    autocast: the dtype of a torch.autocast around fn and loss, or its name, "bf16".
    steps: 1 measures the very first step, in which the optimizer makes its state; 2 and more a step in the steady
        state. 2 by default with an optimizer. Without one, every step is like the first.
    accumulate: backwards of a step, each after a forward on the same inputs. The last one is measured, in which the
        gradients of the others are alive, also those of inputs that require grad. If each pass of a loop has new
        inputs, give inputs that do not require grad.
    clip_grad_norm: the norm to which torch.nn.utils.clip_grad_norm_ clips the gradients of the optimizer's parameters
        before its step. What it takes is part of optimizer_peak_bytes.
    set_to_none: with False the optimizer's zero_grad keeps the gradients, as zeros, so that they are alive in the
        forward of a step in the steady state.
    details: two more passes, each with its steps, fill saved_tensors and alive_at_peak, and count saved_bytes by
        another method; disagreements are in doubts.

    ValueError: an input, parameter or output is a meta or fake tensor, which has no data to measure; clip_grad_norm or
    set_to_none=False is given without `optimizer`; or another argument is wrong. If no output requires grad there is no
    backward, and a doubt says why.
    memcheck.track lists what is counted on the CPU and what is not.

    Running out of memory is a result: status "oom", with the figures known until then. Any other error of fn is
    raised. The .grad of inputs and parameters is restored. The garbage collector is disabled meanwhile, so that
    figures do not depend on when it runs. Outputs are found in containers and dataclasses; tensors in other objects
    that fn returns, and caches that fn fills, count as saved. So does, with 8 bytes on the CPU, a Python number that
    autograd keeps as an operand. TypeError: a keyword belongs to fn as well as to this function, or to neither.
    """
    limit_bytes, autocast = bytes_given("limit_bytes", limit_bytes), autocast_given(autocast)
    callable_given("loss", loss)
    optimizer, kwargs = optimizer_given(optimizer), {**keywords, **(kwargs or {})}
    if dense_grad and not backward:
        raise ValueError("dense_grad needs a backward, got backward=False")
    check_step(accumulate, backward, optimizer, clip_grad_norm, set_to_none, keeps_outputs)
    count = number_of_steps(steps, optimizer is not None or optimizer_step is not None)
    if optimizer is not None:
        if optimizer_step is not None:
            raise ValueError("optimizer and optimizer_step exclude each other: each is the step that is measured")
        made = optimizer(parameters_of(fn))
        parameters, optimizer_step = (owner_of(fn), optimizers_in(made), parameters), clipped_step(made, clip_grad_norm)
    call = MeasuredCall(fn, inputs, kwargs, parameters, backward, device, optimizer_step)
    call.warm_up, call.accumulate, call.set_to_none = count > 1, accumulate, set_to_none
    call.forward_options = ForwardOptions(loss, autocast, keeps_outputs)
    record = MeasuredRun(call, limit_bytes).measure(dense_grad)
    record.doubts += call.machine.sharing()
    # A case that exhausted the machine's memory is not repeated; one that exceeded a budget can be.
    if details and (record.status == "ok" or limit_bytes is not None):
        explain(record, call, limit_bytes, dense_grad)
    return record


def parameters_of(fn: Any) -> list[torch.nn.Parameter]:
    """The parameters of a module, or of the module that owns a method."""
    owner = module_called(fn)
    if owner is None:
        raise ValueError(f"optimizer needs a module with parameters, got {fn!r}")
    return list(owner.parameters())


@takes_inputs
def measure_time(
    fn: Callable[..., Any],
    *inputs: Any,
    kwargs: dict[str, Any] | None = None,
    backward: bool = True,
    dense_grad: bool = False,
    device: torch.device | str | None = None,
    parameters: Any = (),
    optimizer_step: Callable[[], Any] | None = None,
    warmup: int = 2,
    passes: int = 10,
    max_seconds: float | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """Median and quartiles in milliseconds of fn's forward, backward and optimizer_step, under a record's field names.

    Arguments are those of measure_memory. Each pass runs the phases once, without tracking memory.
    warmup, passes: the numbers of passes that do not count, and that do.
    max_seconds: no pass begins that would end later if it took as long as the one before. One pass always runs and
        counts; "passes" is the number of those that did. "doubts" are reasons why the times may be off: too few
        passes, scatter, drift, or other processes.
    """
    times = time_passes(
        MeasuredCall(fn, inputs, {**keywords, **(kwargs or {})}, parameters, backward, device, optimizer_step),
        dense_grad=dense_grad,
        warmup=warmup,
        passes=passes,
        max_seconds=max_seconds,
    )
    fields: dict[str, Any] = {"passes": len(times.passes), "doubts": times.doubts}
    for phase in PHASES:
        fields |= timing.summary(f"{phase}_ms", times.of(phase))
    return fields


@dataclass(frozen=True)
class Times:
    """Milliseconds of the phases of each counted pass, and the doubts about them."""

    passes: list[dict[str, float]]
    doubts: tuple[str, ...]

    def of(self, phase: str) -> list[float]:
        """Milliseconds of every pass; empty if the phase did not run."""
        return [times[phase] for times in self.passes if phase in times]


def time_passes(
    call: MeasuredCall, *, dense_grad: bool = False, warmup: int, passes: int, max_seconds: float | None
) -> Times:
    """The times of passes, as measure_time takes them."""
    for name, value, least in (("warmup", warmup, 0), ("passes", passes, 1), ("max_seconds", max_seconds, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    disturbed = (*load(), *call.machine.sharing())
    results = _timed_passes(call, dense_grad, warmup + passes, max_seconds)
    # If time was short, the first passes count as well, and at least one always does.
    warm = min(warmup, len(results) - 1)
    times = Times(results[warm:], ())
    few = timing.doubts_of_passes(len(times.passes), passes, warmed_up=warm > 0 or warmup == 0)
    scattered = (doubt for phase in PHASES for doubt in timing.doubts_of_times(phase, times.of(phase)))
    return replace(times, doubts=(*disturbed, *few, *scattered))


def machine_facts(device: torch.device | str) -> dict[str, Any]:
    """Record fields that describe where it was measured."""
    return machine_of(resolve_device(device, ())).facts()


def _timed_passes(
    call: MeasuredCall, dense_grad: bool, count: int, max_seconds: float | None
) -> list[dict[str, float]]:
    """Runs up to that many passes, the first ones as warm-up, and stops before one that would end too late."""
    begin = previous = time.perf_counter()
    deadline = begin + (float("inf") if max_seconds is None else max_seconds)
    results = [timed_pass(call, dense_grad)]
    while len(results) < count:
        now = time.perf_counter()
        if now + (now - previous) > deadline:
            break
        previous = now
        results.append(timed_pass(call, dense_grad))
    return results

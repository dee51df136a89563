"""Measures one callable: the bytes of a forward and a backward, and in passes of their own the milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memcheck.core.record import PHASES, Record
from memcheck.core.tensors import resolve_device
from memcheck.measure import timing
from memcheck.measure.explain import explain
from memcheck.measure.machine import load, machine_of
from memcheck.measure.run import Run, Subject, timed_pass


def measure_memory(
    fn: Callable[..., Any],
    *inputs: Any,
    backward: bool = True,
    dense_grad: bool = False,
    device: torch.device | str | None = None,
    limit_bytes: int | None = None,
    parameters: Any = (),
    optimizer_step: Callable[[], Any] | None = None,
    details: bool = False,
    **kwargs: Any,
) -> Record:
    """Runs fn(*inputs, **kwargs) once, and its backward, and says to the byte what memory they took.

    With optimizer_step, what is measured is a step of the steady state: the first step of all, which makes the
    optimizer's state, runs before it and is not part of the record.

    fn: a callable or a module; a module's parameters and buffers are counted by themselves, as parameter_bytes.
    backward: with False the forward runs under no_grad and the record's mode is "inference".
    dense_grad: the gradient of each output is a full tensor of ones, instead of one element expanded.
    device: where to measure; the CPU, or the CUDA device of the tensors given, unless given.
    limit_bytes: a budget for inputs, parameters and everything allocated; see memcheck.track.
    parameters: tensors, modules, optimizers (their parameters and state) or containers of these that fn uses without
    being given them (a closure's weights). Anything else is a ValueError.
    optimizer_step: called after the backward, an optimizer's own `optimizer.step` or any callable; the highest sum
    alive meanwhile is optimizer_peak_bytes. The state is alive in every phase and is optimizer_bytes. An optimizer's
    own step names its parameters and state, too. Of another callable the state counts that its first call makes;
    state from before counts where `parameters` names the optimizer, and a doubt says so where none is found.
    It really moves the parameters: it runs once where it is an optimizer's own step and every parameter has its state,
    else twice, with a forward and a backward before each. Between the two, gradients are None, as zero_grad() leaves
    them, but stay where optimizer_step itself set all of them to zero in place.
    details: two more passes, each with its steps, fill saved_tensors and alive_at_peak, and check saved_bytes by
    another road; what they find amiss is in doubts.

    ValueError: an input, parameter or output is a meta or fake tensor, which has no data to measure, or another
    argument is wrong. Where no output requires grad there is no backward, and a doubt says why.
    What is counted on the CPU, and what is not, is listed under memcheck.track.

    Running out of memory is a result: status "oom", with what was known until then. Any other error of fn is raised.
    The .grad of inputs and parameters is put back as it was. The garbage collector rests meanwhile, so that figures
    do not depend on when it runs. Outputs are looked for in containers and dataclasses; tensors in other objects that
    fn returns, and caches that fn fills, count as saved. So does, with 8 bytes on the CPU, a Python number that
    autograd keeps as an operand. A keyword of fn that has the name of one here is bound with functools.partial.
    """
    subject = Subject(fn, inputs, kwargs, parameters, backward, device, optimizer_step)
    record = Run(subject, limit_bytes).measure(dense_grad)
    record.doubts += subject.machine.sharing()
    # A case that exhausted the machine's memory is not repeated; one that exceeded a budget can be.
    if details and (record.status == "ok" or limit_bytes is not None):
        explain(record, subject, limit_bytes, dense_grad)
    return record


def measure_time(
    fn: Callable[..., Any],
    *inputs: Any,
    backward: bool = True,
    dense_grad: bool = False,
    device: torch.device | str | None = None,
    parameters: Any = (),
    optimizer_step: Callable[[], Any] | None = None,
    warmup: int = 2,
    passes: int = 10,
    max_seconds: float | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Median and quartiles, in milliseconds, of fn's forward, backward and optimizer_step, by the names of a record.

    Arguments are those of measure_memory. No pass begins that would not end within max_seconds, going by the one
    before it, but one is always run and counted; "passes" says how many were. "doubts" says in sentences why the times
    may be off: too few, scattered, drifting, or taken beside others. Nothing is tracked.
    """
    times = time_passes(
        Subject(fn, inputs, kwargs, parameters, backward, device, optimizer_step),
        dense_grad=dense_grad,
        warmup=warmup,
        passes=passes,
        max_seconds=max_seconds,
    )
    summaries = (timing.summary(f"{phase}_ms", times.of(phase)) for phase in PHASES)
    return {
        **{name: value for summary in summaries for name, value in summary.items()},
        "passes": len(times.passes),
        "doubts": times.doubts,
    }


@dataclass(frozen=True)
class Times:
    """Milliseconds of the phases of each counted pass, and the doubts about them."""

    passes: list[dict[str, float]]
    doubts: tuple[str, ...]

    def of(self, phase: str) -> list[float]:
        """Milliseconds of every pass; empty if the phase did not run."""
        return [times[phase] for times in self.passes if phase in times]


def time_passes(
    subject: Subject, *, dense_grad: bool = False, warmup: int, passes: int, max_seconds: float | None
) -> Times:
    """Times passes as measure_time does."""
    _check_passes(warmup, passes, max_seconds)
    disturbed = (*load(), *subject.machine.sharing())
    results = _timed_passes(subject, dense_grad, warmup + passes, max_seconds)
    # If time was short, the first passes count as well, and at least one always does.
    warm = min(warmup, len(results) - 1)
    times = Times(results[warm:], ())
    few = timing.doubts_of_passes(len(times.passes), passes, warmed_up=warm > 0 or warmup == 0)
    scattered = (doubt for phase in PHASES for doubt in timing.doubts(phase, times.of(phase)))
    return replace(times, doubts=(*disturbed, *few, *scattered))


def machine_facts(device: torch.device | str) -> dict[str, Any]:
    """Record fields that describe where it was measured."""
    return machine_of(resolve_device(device, ())).facts()


def _timed_passes(subject: Subject, dense_grad: bool, count: int, max_seconds: float | None) -> list[dict[str, float]]:
    """Runs up to that many passes, the first ones as warm-up, and stops before one that would end too late."""
    begin = previous = time.perf_counter()
    deadline = begin + (float("inf") if max_seconds is None else max_seconds)
    results = [timed_pass(subject, dense_grad)]
    while len(results) < count:
        now = time.perf_counter()
        if now + (now - previous) > deadline:
            break
        previous = now
        results.append(timed_pass(subject, dense_grad))
    return results


def _check_passes(warmup: int, passes: int, max_seconds: float | None) -> None:
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    if max_seconds is not None and max_seconds < 0:
        raise ValueError(f"max_seconds must be at least 0, got {max_seconds}")

"""Measures one callable: the bytes of a forward and a backward, and in other passes milliseconds with statistics."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memcheck.core import arguments, tensors, units
from memcheck.core.outputs import Outputs
from memcheck.core.record import FEW_PASSES, PHASES, Doubt, Record
from memcheck.core.step import HERE, Place, Step
from memcheck.measure import machine
from memcheck.measure.compile import compiled
from memcheck.measure.explain import explain
from memcheck.measure.gradients import gradients_aside
from memcheck.measure.run import MeasuredCall, MeasuredRun, range_around

# A doubt is noted if the middle half of the passes spreads over more than this share of the median, ...
WIDE = 0.20
# ... or if the medians of the first and second half differ by more than this share.
DRIFT = 0.10


def summary(name: str, times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles under a record's field names; None without passes."""
    if not times:
        return {name: None, f"{name}_quartiles": None}
    low, middle, high = _quartiles(times)
    return {name: middle, f"{name}_quartiles": (low, high)}


def doubts_of_times(phase: str, times: Sequence[float]) -> tuple[Doubt, ...]:
    """Reasons why the median of these times may be off, as sentences."""
    if len(times) < FEW_PASSES:
        return ()  # Too few passes are a doubt of their own.
    low, middle, high = _quartiles(times)
    early, late = (statistics.median(half) for half in (times[: len(times) // 2], times[(len(times) + 1) // 2 :]))
    doubts = []
    if high - low > WIDE * middle:
        words = f"{phase} times scatter: the middle half of them spans {(high - low) / middle:.0%} of the median"
        doubts.append(Doubt(words, "scatter", (f"{phase}_ms",)))
    if abs(late - early) > DRIFT * early:
        halves = f"{units.format_time(early)} in the first half of the passes, {units.format_time(late)} in the second"
        doubts.append(Doubt(f"{phase} times drift: median {halves}", "drift", (f"{phase}_ms",)))
    return tuple(doubts)


def doubts_of_passes(passes: int, asked: int, warmed_up: bool) -> tuple[Doubt, ...]:
    """Doubts about the number of passes."""
    doubts = []
    if not warmed_up:
        words = "the time limit left no pass to warm up: the times include what a first call does once"
        doubts.append(Doubt(words, "cold"))
    if passes < FEW_PASSES:
        cut = f" of the {asked} asked for" if passes < asked else ""
        doubts.append(Doubt(f"times of only {passes} pass{'es' if passes > 1 else ''}{cut}", "few passes"))
    return tuple(doubts)


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


@arguments.takes_step(places=HERE)
def measure_memory(step: Step, place: Place, *, details: bool = False) -> Record:
    """Runs a step once, and returns the memory that it took, to the byte.

    Examples:
        >>> memcheck.measure_memory(model, x, optimizer="adamw", loss=lambda y: y.mean())
        >>> memcheck.measure_memory(Step(model, x), Place("cpu", memory_limit="1GiB"))

    Args:
        model: a callable or a module. The parameters and buffers of a module, or of the one whose method or
            functools.partial it is, are counted separately, as parameter_bytes.
        inputs: its positional inputs.
        kwargs, keywords: its keyword inputs, as a dict or one by one. One with the name of an argument of this function
            must be given in kwargs; with kwargs={} the name is this function's.
        device: where to measure; by default the CUDA device of the given tensors, else the CPU.
        details: two more passes, each with its steps, fill saved_tensors and alive_at_peak, and count saved_bytes by
            another method; disagreements are in doubts.

    With an optimizer the record is of a step in the steady state, unless steps=1: a step before it, in which the
    optimizer makes its state, is not part of the record. The state is alive in every phase and is optimizer_bytes. The
    highest sum alive while the optimizer steps is optimizer_peak_bytes, and includes what clipping takes. The step does
    change the parameters. In between, gradients are set to None, as by zero_grad(), unless optimizer_step itself set
    all of them to zero in place. The state of an optimizer_step that is no optimizer's own is what its first call
    allocates; older state counts only if `parameters` has the optimizer, and a doubt says if none is found.
    Gradients that accumulate include those of inputs that require grad. If each pass of a loop has new inputs, give
    inputs that do not require grad.

    If no output requires grad there is no backward, and a doubt says why. memcheck.track lists what is counted on the
    CPU and what is not.

    Running out of memory is a result: status "oom", with the figures known until then. Any other error of the model is
    raised. The .grad of inputs and parameters is restored. The garbage collector is disabled meanwhile, so that figures
    do not depend on when it runs. Outputs are found in containers and dataclasses; tensors in other objects that the
    model returns, and caches that it fills, count as saved. So does, with 8 bytes on the CPU, a Python number that
    autograd keeps as an operand. The record's backward_from says which tensor the backward starts from.

    Raises:
        ValueError: an input, parameter or output is a meta or fake tensor, which has no data to measure; or an argument
            breaks its rule.
        TypeError: a keyword belongs to the model as well as to this function, or to neither.
    """
    call = MeasuredCall(step, place.device)
    if step.compile:
        call = MeasuredCall(replace(step, model=compiled(step.model)), place.device)
        MeasuredRun(call, place.limit_bytes).measure()  # Compiles, under the hooks that compiled code depends on.
    record = MeasuredRun(call, place.limit_bytes).measure()
    record.doubts += call.machine.sharing()
    # A case that exhausted the machine's memory is not repeated; one that exceeded a budget can be.
    if details and (record.status == "ok" or place.limit_bytes is not None):
        explain(record, call, place.limit_bytes)
    return record


@arguments.takes_step(places=HERE[:1])
def measure_time(
    step: Step, place: Place, *, warmup: int = 2, passes: int = 10, max_seconds: float | None = None
) -> dict[str, Any]:
    """Median and quartiles in milliseconds of a step's forward, backward and optimizer, under a record's field names.

        measure_time(model, x, passes=100)

    Arguments are those of measure_memory. Each pass runs the phases once, without tracking memory.
    warmup, passes: the numbers of passes that do not count, and that do.
    max_seconds: no pass begins that would end later if it took as long as the one before. One pass always runs and
        counts; "passes" is the number of those that did. "doubts" are reasons why the times may be off: too few
        passes, scatter, drift, or other processes.
    """
    times = time_passes(MeasuredCall(step, place.device), warmup=warmup, passes=passes, max_seconds=max_seconds)
    fields: dict[str, Any] = {"passes": len(times.passes), "doubts": times.doubts}
    for phase in PHASES:
        fields |= summary(f"{phase}_ms", times.of(phase))
    return fields


@dataclass(frozen=True)
class Times:
    """Milliseconds of the phases of each counted pass, and the doubts about them."""

    passes: list[dict[str, float]]
    doubts: tuple[Doubt, ...]

    def of(self, phase: str) -> list[float]:
        """Milliseconds of every pass; empty if the phase did not run."""
        return [times[phase] for times in self.passes if phase in times]


def time_passes(call: MeasuredCall, *, warmup: int, passes: int, max_seconds: float | None) -> Times:
    """The times of passes, as measure_time takes them."""
    for name, value, least in (("warmup", warmup, 0), ("passes", passes, 1), ("max_seconds", max_seconds, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    disturbed = (*machine.load(), *call.machine.sharing())
    results = _timed_passes(call, warmup + passes, max_seconds)
    # If time was short, the first passes count as well, and at least one always does.
    warm = min(warmup, len(results) - 1)
    times = Times(results[warm:], ())
    few = doubts_of_passes(len(times.passes), passes, warmed_up=warm > 0 or warmup == 0)
    scattered = (doubt for phase in PHASES for doubt in doubts_of_times(phase, times.of(phase)))
    return replace(times, doubts=(*disturbed, *few, *scattered))


def machine_facts(device: torch.device | str) -> dict[str, Any]:
    """Record fields that describe where it was measured."""
    return machine.machine_of(tensors.resolve_device(device, ())).facts()


def _timed_passes(call: MeasuredCall, count: int, max_seconds: float | None) -> list[dict[str, float]]:
    """Runs up to that many passes, the first ones as warm-up, and stops before one that would end too late."""
    begin = previous = time.perf_counter()
    deadline = begin + (float("inf") if max_seconds is None else max_seconds)
    results = [timed_pass(call)]
    while len(results) < count:
        now = time.perf_counter()
        if now + (now - previous) > deadline:
            break
        previous = now
        results.append(timed_pass(call))
    return results


def timed_pass(call: MeasuredCall) -> dict[str, float]:
    """The milliseconds of each phase that runs: "forward", "backward", "optimizer"."""
    returned: list[Outputs] = []
    times: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> None:
        with range_around.get()(name):
            times[name] = call.machine.milliseconds(run)

    with range_around.get()("pass"), call.arranged(), gradients_aside([*call.given, *call.owned]):
        timed("forward", lambda: returned.append(call.forward()))
        if call.step.backward and (roots := returned[0].roots):
            gradients = tensors.gradients_for(roots, call.step.dense_grad)
            timed("backward", lambda: torch.autograd.backward(roots, gradients))
            if call.optimizer_step is not None:
                timed("optimizer", call.optimizer_step)
    return times

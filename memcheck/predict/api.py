"""The functions that predict: a step of any model or a case of the catalog, and the largest size that fits.

Doubling finds a size that does not fit, and bisection the last size before it that does. A larger size does not always
need more memory: allocators round, products copy operands of odd lengths, backends change. So the search also predicts
larger sizes, mainly round ones, and continues from any that fits. The result and the next size were both predicted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memcheck.core.arguments import argument, place_of, takes_step
from memcheck.core.converters import count
from memcheck.core.devices import Device, running
from memcheck.core.errors import UnsupportedError, UsageError, unknown_name
from memcheck.core.optimizers import collector_at_rest
from memcheck.core.options import named, options_of
from memcheck.core.prediction import COMPILED_BUFFER, AllocationLog, Largest, Prediction, Trace
from memcheck.core.step import MEASURED_ONLY, Place, Program, Step
from memcheck.core.workload import Case
from memcheck.predict import process
from memcheck.predict.probed import Probe
from memcheck.predict.replay import Replay

# Whether a step on a GPU is predicted by running it on a simulated one. Else it is traced on meta tensors.
SIMULATES = os.environ.get("MEMCHECK_PREDICTS_BY") == "simulation"
# Factors beyond the answer at which larger sizes are tried.
FURTHER = (1.02, 1.1, 1.25, 1.5, 2)

Guess = Callable[[dict[int, Prediction], int], bool | None]


class Search:
    """Searches for the largest multiple of a step that fits. No size is predicted twice.

    guess: interpolates whether a size fits from up to three predictions; None if it cannot tell. Guesses save
        predictions. The answer and the next size are always predicted.
    """

    def __init__(self, predict: Callable[[int], Prediction], step: int, most: int, guess: Guess | None = None) -> None:
        self.predict = predict
        self.step = step
        self.top = most // step
        self.guess = guess
        self.found: dict[int, Prediction] = {}
        self.known: dict[int, Prediction] = {}  # What the guess interpolates.

    def fits(self, size: int) -> bool:
        """Whether the predicted status of the size is "ok"."""
        if size not in self.found:
            self.found[size] = self.predict(size)
        return self.found[size].record.status == "ok"

    def largest(self, start: int) -> Largest:
        """The largest size that fits. start: the first size that is tried."""
        low = self.edge(min(max(start // self.step, 1), self.top))
        while True:
            further = (count for count in self.further(low) if self.guessed(count) is not False)
            again = next((count for count in further if self.fits(count * self.step)), None)
            if again is None:
                return self.found_at(low)
            low = self.edge(again)

    def nearest(self, start: int) -> Largest:
        """A size that fits, if the next one does not; larger ones are not tried."""
        return self.found_at(self.edge(min(max(start // self.step, 1), self.top)))

    def found_at(self, count: int) -> Largest:
        """The result, if so many steps are the most that fit."""
        size = count * self.step
        return Largest(size, self.step, self.found.get(size), self.found.get(size + self.step), len(self.found))

    def edge(self, count: int) -> int:
        """A number of steps that fits, the next of which does not, both predicted; 0 if none fits.

        It tries `count`, then twice or half as many until some fit and others do not, then those between. With a guess,
        it tries the guessed edge instead.
        """
        low, high = 0, self.top + 1
        while True:
            if self.fits(count * self.step):
                low = count
            else:
                high = count
            if high - low < 2:
                return low
            if (guessed := self.guessed_edge(low, high)) is not None:
                count = max(guessed, low + 1)
            elif self.guess is not None and len(self.found) == 1 and low:
                count = max(min(self.in_proportion(low), self.top), low + 1)
            elif low == 0:
                count = max(high // 2, 1)
            else:
                count = min(2 * low, self.top) if high > self.top else (low + high) // 2

    def in_proportion(self, count: int) -> int:
        """The number of steps that would fit if all but parameters and the optimizer's state grew in proportion."""
        one = self.found[count * self.step]
        held = (one.record.parameter_bytes or 0) + (one.record.optimizer_bytes or 0)
        used, room = one.record.reserved_bytes or one.record.max_allocated_bytes or 0, one.place.room_bytes or 0
        return count * (room - held) // (used - held) if used > held else 2 * count

    def guessed_edge(self, low: int, high: int) -> int | None:
        """The last number of steps of a range that fits, interpolated from two or three; None if that cannot tell."""
        if self.guess is None or len(self.found) < 2:
            return None
        near = sorted(self.found, key=lambda size: abs(math.log(size / (max(low, 1) * self.step))))[:3]
        self.known = {size: self.found[size] for size in near}
        if low and self.guessed(low + 1) is False:  # Mostly so, as the last one was guessed, too.
            return low
        while high - low > 1:
            middle = min(2 * low, self.top) if high > self.top and low else (low + high) // 2
            if (verdict := self.guessed(middle)) is None:
                return None
            low, high = (middle, high) if verdict else (low, middle)
        return low

    def guessed(self, count: int) -> bool | None:
        """Whether interpolation says that `count` steps fit; None without a guess."""
        return None if self.guess is None else self.guess(self.known, count * self.step)

    def further(self, low: int) -> Iterator[int]:
        """Larger numbers of steps that might still fit: round ones nearby, and some far away."""
        if low == 0 and all(prediction.record.status != "oom" for prediction in self.found.values()):
            return  # The case failed for another reason than memory.
        round_ones = ((low // unit + 1) * unit for unit in (2**power for power in range(1, 13)))
        counts = {low + 2, *round_ones, *(math.ceil(share * low) for share in FURTHER)}
        yield from (count for count in sorted(counts) if low + 1 < count <= self.top)


def fits_by_interpolation(predicted: Mapping[int, Prediction], size: int) -> bool | None:
    """Whether the size fits, if the bytes of each allocation are a polynomial of the size.

    predicted: the predictions of up to three other sizes.

    Returns None if these differ in more than bytes, so that nothing can be guessed, except for compiled programs.
    """
    traces = {each: prediction.trace for each, prediction in predicted.items() if prediction.trace is not None}
    with collector_at_rest(generation=0):  # It would look through all traces for each of the many allocations.
        trace = interpolated(traces, size) if len(traces) == len(predicted) else None
        if trace is None:
            named = (allocation.name for trace in traces.values() for allocation in trace.log.allocations)
            return fits_by_peaks(predicted, size) if COMPILED_BUFFER in named else None
        one = next(iter(predicted.values()))
        return Replay(trace, one.case, one.place, one.record).fits()


def fits_by_peaks(predicted: Mapping[int, Prediction], size: int) -> bool | None:
    """Whether the size fits, if what the two largest sizes that fit take of the allocator lies on a straight line.

    For compiled programs, whose allocations differ between sizes. None with fewer than two such sizes.
    """
    fitting = [(each, found.record) for each, found in sorted(predicted.items()) if found.record.status == "ok"]
    room = next(iter(predicted.values())).place.room_bytes
    if len(fitting) < 2 or room is None:
        return None
    (x, low), (y, high) = ((each, one.reserved_bytes or one.max_allocated_bytes or 0) for each, one in fitting[-2:])
    return low + (high - low) / (y - x) * (size - x) <= room


def interpolated(traces: Mapping[int, Trace], size: int) -> Trace | None:
    """The events of the size, without roles of allocations. None if the traces differ in more than bytes."""
    first, *others = traces.values()
    shape = shape_of(first)
    if any(shape_of(other) != shape for other in others):
        return None
    weights = [math.prod((size - y) / (x - y) for y in traces if y != x) for x in traces]
    log = AllocationLog(begun=first.log.begun)
    for allocations in zip(*(trace.log.allocations for trace in traces.values()), strict=True):
        found = sum(weight * allocation.bytes for weight, allocation in zip(weights, allocations, strict=True))
        log.allocations.append(allocations[0].resized(max(0, round(found))))
    new = dict(zip(map(id, first.log.allocations), log.allocations, strict=True))
    log.events = [(new[id(allocation)], taken) for allocation, taken in first.log.events]
    return Trace(log, first.phases)


def shape_of(trace: Trace) -> tuple[object, ...]:
    """Everything about the events that does not depend on bytes."""
    return trace.phases, trace.beyond, [(allocation.born, allocation.died) for allocation in trace.log.allocations]


def predicted_of_case(case: Case, *places: Any, **options: Any) -> Prediction:
    """predict_memory of a case. The catalog is above this package, so the function is found by its name."""
    function = pkgutil.resolve_name("memcheck.bench.case_predictions:predicted_of_case")
    prediction: Prediction = function(case, *places, **options)
    return prediction


@takes_step(without=MEASURED_ONLY, instead={Case: predicted_of_case})
def predict_memory(step: Step, place: Place, *, probes: Path | str | Probe | bool = True) -> Prediction:
    """The record that measuring the step at the place would give. Nothing of its size is allocated.

    Examples:
        >>> memcheck.predict_memory(model, x, optimizer="adamw", device="A100-40GB")
        >>> memcheck.predict_memory(Step(model, x), Place("A100-40GB", torch_version="2.13"))
        >>> memcheck.predict_memory(model, x, probes="cpu.jsonl")

    Args:
        model: a module, a method of one, or another callable; or a case of the catalog, with the device as its only
            input. Model and inputs may be real or on meta. They are copied to meta and are not modified. Side effects
            of the model's code are named in a warning, with the line that clears them.
        inputs: its positional inputs.
        kwargs, keywords: its keyword inputs, as a dict or one by one. One with the name of an argument of this function
            must be given in kwargs; with kwargs={} the name is this function's.
        probes: on the CPU, runs each operator without a rule once, alone, and stores what it allocates, in memory and
            in a table on disk (memcheck.predict.probed.table_path). With a file, that is the table: the prediction
            is for the CPU whose rows it has, and if that is this one, or there are no rows, what it lacks is run and
            added. With False these operators are unknown. A Probe replaces it.

    Running out of memory is a result: status "oom", the phase, the request and the bytes in use. A model that reads
    values which do not follow from inputs and parameters is "skipped", and so are compiled models without cloudpickle
    and triton. Allocations that shapes do not determine are named in `unknown` and in the record's doubts. On CUDA the
    allocator of the process has cached nothing yet. If the version to predict for, or the installed one, is newer than
    the newest that predictions were compared with, no figure is exact. The record's backward_from says which tensor the
    backward starts from.

    Raises:
        UsageError: an option breaks its rule or does not fit the others.
        TypeError: a keyword belongs to the model as well as to this function, or to neither; or a case is given what it
            says itself.
    """
    if not isinstance(probes, bool | str | Path | None) and not hasattr(probes, "check"):
        raise ValueError(f"probes must be a file, True, False or a Probe, got {probes!r}")
    from memcheck.predict.model import predict_last  # Loaded with the first prediction.
    from memcheck.predict.probe import probe_for
    from memcheck.predict.python_functions import CompiledCodeError, ElsewhereError

    place = place.resolved()
    if step.compile and not process.IS_CHILD:
        if place.ranks is not None:
            raise UsageError(f"{named('compile')} is not predicted for a model that is split over processes")
        return predicted_elsewhere(step, place, probes)
    if SIMULATES and is_simulated_at(place):
        return predicted_elsewhere(step, place, probes, simulates=True)
    probe, place = probe_for(probes, place)
    predict = functools.partial(predict_last, Program([step], outputs_stay=False), place, probe)
    try:
        return predict()
    except CompiledCodeError:
        return predicted_elsewhere(step, place, probes)
    except ElsewhereError:
        with contextlib.suppress(UnsupportedError):
            if place.ranks is None:
                return predicted_elsewhere(step, place, probes)
    process.STAYS.append(True)  # What the model asks is answered for this machine, with a doubt.
    try:
        return predict()
    finally:
        process.STAYS.clear()


def is_simulated_at(place: Place) -> bool:
    """Whether the GPU of the place can be simulated with the installed torch."""
    if torch.is_inference_mode_enabled() or process.IS_CHILD:
        return False
    device = place.for_device
    is_known = device.kind == "cuda" and device.usable_bytes is not None
    return is_known and place.ranks is None and place.torch_version in (None, running())


def predicted_elsewhere(step: Step, place: Place, probes: Any, simulates: bool = False) -> Prediction:
    """predict_memory in a process of its own. simulates: which simulates the GPU."""
    prediction: Prediction = process.predicted(
        place.for_device, predicted_to_send, step, place, probes, simulates=simulates
    )
    return dataclasses.replace(prediction, case=step)


def predicted_to_send(step: Step, place: Place, probes: Any) -> Prediction:
    """predict_memory, called in that process. The step itself is not sent back."""
    if process.HOME:
        from memcheck.predict.simulated import predict_simulated

        prediction = predict_simulated(Program([step], outputs_stay=False), place)
    else:
        prediction = predict_memory(step, place, probes=probes)
    return dataclasses.replace(prediction, case=None)


# Sizes that `largest` finds by the inputs of a model: the dimension of a tensor.
DIMENSIONS = {"bsz": 0, "seq_len": 1}


def resized_inputs(inputs: Any, find: str) -> Callable[[int], Any]:
    """A function that returns the inputs with another size, on meta.

    Every tensor changes whose dimension is as large as that of the first tensor that has it.

    UsageError: no tensor has the dimension.
    """
    at = DIMENSIONS[find]

    def sizes() -> Iterator[int]:
        return (part.shape[at] for part in tree_leaves(inputs) if isinstance(part, torch.Tensor) and part.dim() > at)

    if (given := next(sizes(), None)) is None:
        raise UsageError(f"{named('find')} {find} needs an input with dimension {at}, got none")

    def resized(part: Any, size: int) -> Any:
        if not isinstance(part, torch.Tensor) or part.dim() <= at or part.shape[at] != given:
            return part
        shape = [*part.shape[:at], size, *part.shape[at + 1 :]]
        return torch.empty(shape, dtype=part.dtype, device="meta", requires_grad=part.requires_grad)

    return lambda size: tree_map(functools.partial(resized, size=size), inputs)


def largest(
    make: Callable[..., Any],
    model: Any = None,
    device: Place | Device | torch.device | str | None = None,
    *,
    find: str | None = None,
    step: int = 1,
    up_to: int = 2**30,
    start: int = 256,
    **options: Any,
) -> Largest:
    """The largest size n that fits the device: of make(n), a Step, of model(*make(n)), or of a model and its inputs.

    Examples:
        >>> memcheck.largest(lambda n: Step(model, torch.empty(n, 512), optimizer="adamw"), device="A100-40GB")
        >>> memcheck.largest(lambda n: torch.empty(n, 512), model, "A100-40GB", optimizer="adamw")
        >>> memcheck.largest(model, x, "A100-40GB", find="bsz", optimizer="adamw")

    Args:
        make: returns the step of a size, or its inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
            It is called with meta as the default device, so that factories allocate nothing.
        model, options: as of predict_memory.
        find: "bsz" or "seq_len". Then the first argument is the model and the second one its inputs. The size is the
            first or the second dimension of the first tensor that has it, and of each other one that is as large there.
        device: also a Place, alone or as place=.
        step: sizes are its multiples.
        up_to: the largest size that is tried.
        start: the first size that is tried.

    Raises:
        UsageError: the place has no limit; step, up_to or start is below 1, or up_to is below step.
        TypeError: make returns a Step, and a model is given, too.
    """
    step, start = argument("step", step, count), argument("start", start, count)
    most = argument("up_to", up_to, functools.partial(count, least=step))
    if find is not None:
        if (found := find.replace("-", "_")) not in DIMENSIONS:
            raise unknown_name(named("find"), find, DIMENSIONS)
        make, model = resized_inputs(model, found), make
    elif isinstance(make, torch.nn.Module):
        raise TypeError("largest takes a function of the size first; for a model and its inputs say find='bsz'")
    if isinstance(model, Case):
        raise TypeError("largest takes a model; memcheck.bench.capacity.find_capacity and memcheck fit take a case")
    of_place = {name: options.pop(name) for name in (*options_of(Place), "place") if name in options}
    place = place_of("largest", [] if device is None else [device], of_place).resolved()
    if place.room_bytes is None:
        raise UsageError(f"{place.for_device.name} has no limit; set one, such as memory_limit='16GiB'")

    def predict(size: int) -> Prediction:
        with torch.device("meta"):
            made = make(size)
        if isinstance(made, Step):
            if model is not None:
                raise TypeError("largest takes a model or a function that makes Steps, got both")
            return predict_memory(made, place, **options)
        keywords = {**(options.get("kwargs") or {}), **made} if isinstance(made, dict) else options.get("kwargs")
        inputs = () if isinstance(made, dict) else tuple(made) if isinstance(made, tuple | list) else (made,)
        return predict_memory(model, *inputs, **{**options, "place": place, "kwargs": keywords})

    return Search(predict, step, most, fits_by_interpolation).largest(start)

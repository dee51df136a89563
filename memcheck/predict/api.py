"""The functions that predict: a step of any model or a case of the catalog, and the largest size that fits."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memcheck.core.arguments import argument, place_of, takes_step
from memcheck.core.case import Case
from memcheck.core.converters import count
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named, options_of
from memcheck.core.place import Place
from memcheck.core.step import MEASURED_ONLY, Program, Step
from memcheck.predict import process
from memcheck.predict.interpolate import fits_by_interpolation
from memcheck.predict.probed import Probe
from memcheck.predict.replay import Prediction
from memcheck.predict.search import Largest, Search


def predicted_of_case(case: Case, *places: Any, **options: Any) -> Prediction:
    """predict_memory of a case. The catalog is above this package, so the function is found by its name."""
    function = pkgutil.resolve_name("memcheck.bench.case_predictions:predicted_of_case")
    prediction: Prediction = function(case, *places, **options)
    return prediction


@takes_step(without=MEASURED_ONLY, instead={Case: predicted_of_case}, programs=True)
def predict_memory(step: Step | Program, place: Place, *, probes: Path | str | Probe | bool = True) -> Prediction:
    """The record that measuring the step at the place would give. Nothing of its size is allocated.

    Examples:
        >>> memcheck.predict_memory(model, x, optimizer="adamw", device="A100-40GB")
        >>> memcheck.predict_memory(Step(model, x), Place("A100-40GB", torch_version="2.13"))
        >>> last = Step(model, x[:3], optimizer="adamw")
        >>> memcheck.predict_memory(Program([Step(model, x, optimizer="adamw"), last]))
        >>> memcheck.predict_memory(model, x, probes="cpu.jsonl")

    Args:
        model: a module, a method of one, or another callable; or a case of the catalog, with the device as its only
            input. Model and inputs may be real or on meta. They are copied to meta and are not modified. What the
            model's functions store elsewhere stays there: a warning names it, with the line that clears it.
        inputs: its positional inputs.
        kwargs: its keyword inputs, whatever their names. A keyword that this function lacks is one of them, too; one
            that both have must be given in kwargs, and with kwargs={} it is this function's.
        probes: on the CPU, runs each operator without a rule once, alone, and stores what it allocates, in memory and
            in a table on disk (memcheck.predict.probe_table.table_path). With a file, that is the table: the prediction
            is for the CPU whose rows it has, and if that is this one, or there are no rows, what it lacks is run and
            added. With False these operators are unknown. A Probe replaces it.

    The prediction of a Program has that of every step, and is itself that of the first step which does not fit, else
    that of the step with the highest peak.

    Running out of memory is a result: status "oom", the phase, the request and the bytes in use. Compiled models are
    "skipped", and so is a model that reads values which do not follow from inputs and parameters. Allocations that
    shapes do not determine are named in `unknown` and in the record's doubts. On CUDA the allocator of the process has
    cached nothing yet. If the version to predict for, or the installed one, is newer than the newest that predictions
    were compared with, no figure is exact. The record's backward_from says which tensor the backward starts from.

    Raises:
        UsageError: an option breaks its rule or does not fit the others.
        TypeError: a keyword belongs to the model as well as to this function, or to neither; or a case is given what it
            says itself.
    """
    if not isinstance(probes, bool | str | Path | None) and not hasattr(probes, "check"):
        raise ValueError(f"probes must be a file, True, False or a Probe, got {probes!r}")
    from memcheck.predict.model import predict_last, predict_program  # Loaded with the first prediction.
    from memcheck.predict.probe import probe_for
    from memcheck.predict.python_functions import CompiledCodeError

    place = place.resolved()
    program = step if isinstance(step, Program) else Program([step], outputs_stay=False)
    if any(one.compile for one in program.steps) and not process.IS_CHILD:
        return predicted_elsewhere(step, place, probes)
    probe, place = probe_for(probes, place)
    try:
        return (predict_program if isinstance(step, Program) else predict_last)(program, place, probe)
    except CompiledCodeError:
        return predicted_elsewhere(step, place, probes)


def predicted_elsewhere(step: Step | Program, place: Place, probes: Any) -> Prediction:
    """predict_memory in a process of its own."""
    prediction: Prediction = process.predicted(place.for_device, predicted_to_send, step, place, probes)
    if not isinstance(step, Program):
        return dataclasses.replace(prediction, case=step)
    each = [dataclasses.replace(part, case=case) for part, case in zip(prediction.steps, step.steps, strict=False)]
    return dataclasses.replace(next(part for part in each if part.record is prediction.record), steps=tuple(each))


def predicted_to_send(step: Step | Program, place: Place, probes: Any) -> Prediction:
    """predict_memory, called in that process. The steps themselves are not sent back."""
    prediction = predict_memory(step, place, probes=probes)
    steps = tuple(dataclasses.replace(part, case=None) for part in prediction.steps)
    return dataclasses.replace(prediction, case=None, steps=steps)


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
        if isinstance(made, Step | Program):
            if model is not None:
                raise TypeError("largest takes a model or a function that makes Steps, got both")
            return predict_memory(made, place, **options)
        keywords = {**(options.get("kwargs") or {}), **made} if isinstance(made, dict) else options.get("kwargs")
        inputs = () if isinstance(made, dict) else tuple(made) if isinstance(made, tuple | list) else (made,)
        return predict_memory(model, *inputs, **{**options, "place": place, "kwargs": keywords})

    return Search(predict, step, most, fits_by_interpolation).largest(start)

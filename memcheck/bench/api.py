"""The public functions that predict: a case of the catalog, any model with its inputs, and the largest that fits; and
the one that writes a record.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memcheck._extension import MISSING
from memcheck.bench.case_predictions import predict_case
from memcheck.core.arguments import argument, place_of, takes_step
from memcheck.core.case import Case
from memcheck.core.converters import count
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named, options_of
from memcheck.core.place import Place
from memcheck.core.record import Record
from memcheck.core.step import MEASURED_ONLY, Program, Step
from memcheck.core.torch_versions import running
from memcheck.core.verdict import few_lines, largest_words
from memcheck.predict.probed import Probe
from memcheck.predict.replay import Prediction, target_at

if TYPE_CHECKING:
    from memcheck.bench.capacity import Search
    from memcheck.bench.probe import CpuProbe


def predicted_of_case(
    case: Case, *places: Place | Device | torch.device | str, dense_grad: bool = False, **options: Any
) -> Prediction:
    """predict_memory of a case of the catalog, at a place or at a device with the options of a Place."""
    known = [*(name for name in options_of(Place) if name != "ranks"), "place", "dense_grad"]
    if wrong := [name for name in options if name not in known]:
        raise TypeError(f"predict_memory of a Case takes {', '.join(known)}, not {wrong[0]}: the Case says all else")
    return predict_case(case, place_of("predict_memory", places, options), dense_grad=dense_grad)


@takes_step(without=MEASURED_ONLY, instead={Case: predicted_of_case}, programs=True)
def predict_memory(step: Step | Program, place: Place, *, probe: Probe | bool = True) -> Prediction:
    """The record that measuring the step at the place would give. Nothing of its size is allocated.

    Examples:
        >>> memcheck.predict_memory(model, x, optimizer="adamw", device="A100-40GB")
        >>> memcheck.predict_memory(Step(model, x), Place("A100-40GB", torch_version="2.13"))
        >>> last = Step(model, x[:3], optimizer="adamw")
        >>> memcheck.predict_memory(Program([Step(model, x, optimizer="adamw"), last]))

    Args:
        model: a module, a method of one, or another callable; or a case of the catalog, with the device as its only
            input. Model and inputs may be real or on meta. They are copied to meta and are not modified, and what the
            model stores elsewhere is put back.
        inputs: its positional inputs.
        kwargs: its keyword inputs, whatever their names. A keyword that this function lacks is one of them, too; one
            that both have must be given in kwargs, and with kwargs={} it is this function's.
        probe: on the CPU, runs each operator without a rule once, alone, and stores what it allocates, in memory and in
            a table on disk (memcheck.bench.probe.table_path). With False these operators are unknown. A Probe replaces
            it.

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
    if not isinstance(probe, bool | None) and not hasattr(probe, "check"):
        raise ValueError(f"probe must be True, False or a Probe, got {probe!r}")
    place = place.resolved()
    target = target_at(place)
    here = target.kind == "cpu" and (target.threads, target.torch_version) == (torch.get_num_threads(), running())
    chosen = (default_probe() if here else None) if probe is True else probe or None
    from memcheck.predict.model import predict_program, predict_step

    if isinstance(step, Program):
        return predict_program(step, place, chosen)
    return predict_step(step, place, chosen)


PROBES: dict[str, CpuProbe] = {}


def default_probe() -> CpuProbe:
    """The probe of this process, with the table on disk. Without the extension it only looks there."""
    from memcheck.bench.probe import CarriedProbe, CpuProbe, Table, environment, table_path

    path = table_path()
    if MISSING is not None:
        return PROBES.setdefault(str(path), CarriedProbe(Table(path), environment()))
    return PROBES.setdefault(str(path), CpuProbe(Table(path)))


@takes_step(without=MEASURED_ONLY, places=())
def calibrate(step: Step, place: Place, *, path: Path | str) -> Prediction:
    """Probes the operators of a step on this machine's CPU and adds them to the table at `path`.

    Examples:
        >>> memcheck.calibrate(model, x, path="cpu.jsonl")

    Another machine can use the table: MEMCHECK_PROBES=path. Other arguments and the result are those of predict_memory.
    Operators run on this machine, in as many threads as torch.set_num_threads says.
    """
    from memcheck.bench.probe import CpuProbe, Table

    return predict_memory(step, probe=CpuProbe(Table(Path(path))))


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the predictions for it and for the next size.

    Attributes:
        size: 0 if nothing fits.
        at: the prediction at that size.
        beyond: the prediction at the next size, which does not fit; None if every size that was allowed fits.
        tried: the number of sizes that were predicted.
    """

    size: int
    step: int
    at: Prediction | None
    beyond: Prediction | None
    tried: int

    def __repr__(self) -> str:
        return few_lines([largest_words("size", self.size, self.step, self.at, self.beyond)])

    @classmethod
    def of(cls, search: Search, start: int) -> Largest:
        """The result of the search, begun at that size."""
        size, found = search.largest(start), search.found
        return cls(size, search.step, found.get(size), found.get(size + search.step), len(found))


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

    from memcheck.bench.capacity import Search
    from memcheck.predict.interpolate import fits_by_interpolation

    return Largest.of(Search(predict, step, most, fits_by_interpolation), start)


def write_record(folder: Path | str, record: Record, *, name: str) -> Path:
    """Writes the record to folder/records.jsonl as the case `name`, for memcheck compare, report and plot.

    A measured record replaces the measured one of that name, and a predicted record the predicted one; all other lines
    stay as they are. Processes may write to a folder at the same time. The folder is created if needed.

    Returns the path of the file.

    Raises:
        TypeError: it is no record; that of a prediction is prediction.record.
        ValueError: the name is empty or longer than a line.
    """
    if not isinstance(record, Record):
        raise TypeError(f"write_record takes a Record, such as prediction.record, got {type(record).__name__}")
    if len(name.splitlines()) != 1 or not name.strip():
        raise ValueError(f"name must be one line of text, got {name!r}")
    from memcheck.bench.sweep.store import Store

    return Store(folder).replace(f"{record.source}: {name}", dataclasses.replace(record, operator=name))

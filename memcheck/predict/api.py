"""The functions that predict: a step of any model or a case of the catalog, and the largest size that fits.

Doubling finds a size that does not fit, and bisection the last size before it that does. A larger size does not always
need more memory: allocators round, products copy operands of odd lengths, backends change. So the search also predicts
larger sizes, mainly round ones, and continues from any that fits. The result and the next size were both predicted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memcheck.core.arguments import argument, place_of, takes_step
from memcheck.core.converters import count
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named, options_of
from memcheck.core.prediction import Largest, Prediction
from memcheck.core.step import MEASURED_ONLY, Place, Step
from memcheck.predict.replay import MORE_THAN_ROOM, ONLY_FITS, refusal

# Factors beyond the answer at which larger sizes are tried.
FURTHER = (1.02, 1.1, 1.25, 1.5, 2)
# After so many guesses every other size is bisected.
MOST_GUESSES = 6

Guess = Callable[[dict[int, Prediction], int], bool | None]


class Search:
    """Searches for the largest multiple of a step that fits. No size is predicted twice.

    guess: interpolates whether a size fits from up to three predictions; None if it cannot tell. Guesses save
        predictions. The answer and the next size are always predicted.
    """

    def __init__(self, predict: Callable[[int], Prediction], step: int, most: int, guess: Guess | None = None) -> None:
        if most < step:
            raise UsageError(f"{named('up_to')} must be at least the step of {step}, got {most}")
        self.predict = predict
        self.step = step
        self.top = most // step
        self.guess = guess
        self.found: dict[int, Prediction] = {}
        self.known: dict[int, Prediction] = {}  # What the guess interpolates.

    def fits(self, size: int) -> bool:
        """Whether the predicted status of the size is "ok"."""
        if size not in self.found:
            self.found[size] = copy_context().run(self._predict_quickly, size)
        return self.found[size].record.status == "ok"

    def _predict_quickly(self, size: int) -> Prediction:
        ONLY_FITS.set(True)
        return self.predict(size)

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
        beyond = self.found.get(size + self.step)
        if beyond is not None and beyond.record.reason == MORE_THAN_ROOM:
            beyond = self.predict(size + self.step)  # With the place where it runs out.
        gaps = tuple(one for one in sorted(self.found) if one < size and not self.fits(one))
        return Largest(size, self.step, self.found.get(size), beyond, len(self.found), gaps)

    def edge(self, count: int) -> int:
        """A number of steps that fits, the next of which does not, both predicted; 0 if none fits.

        It tries `count`, then twice or half as many until some fit and others do not, then those between. With a guess,
        it tries the guessed edge instead.
        """
        low, high, turn = 0, self.top + 1, 0
        while True:
            if self.fits(count * self.step):
                low = count
            else:
                high = count
            if high - low < 2:
                return low
            turn += 1
            trusts = turn < MOST_GUESSES or turn % 2  # Wrong guesses alone could narrow the range step by step.
            if trusts and (guessed := self.guessed_edge(low, high)) is not None:
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

    predicted: the predictions of up to three other sizes. If their allocations differ in more than bytes, those of
    compiled code for example, what the two largest take that fit lies on a straight line. None if it cannot tell.
    """
    one = next(iter(predicted.values()), None)
    if len(predicted) < 2 or one is None or one.place.room_bytes is None:
        return None
    traces = {each: found.trace for each, found in predicted.items() if found.trace is not None}
    shapes = [[(one.born, one.died) for one in trace.log.allocations] for trace in traces.values()]
    if len(traces) < len(predicted) or any(shape != shapes[0] for shape in shapes):
        return fits_by_line(predicted, size, one.place.room_bytes)
    weights = [math.prod((size - y) / (x - y) for y in traces if y != x) for x in traces]
    each = zip(*(trace.log.allocations for trace in traces.values()), strict=True)
    sizes = [max(0, round(sum(weight * one.bytes for weight, one in zip(weights, ones, strict=True)))) for ones in each]
    return refusal(next(iter(traces.values())).log, one.place, sizes) is None


def fits_by_line(predicted: Mapping[int, Prediction], size: int, room: int) -> bool | None:
    """Whether the size fits by a straight line through the two largest that fit; None if there are not two."""
    known = [(each, it.record) for each, it in sorted(predicted.items()) if it.record.status == "ok"]
    if len(known) < 2:
        return None
    (x, low), (y, high) = ((each, it.reserved_bytes or max(it.peaks.values(), default=0)) for each, it in known[-2:])
    return low + (high - low) / (y - x) * (size - x) <= room


# What predicts first arguments that are no model, by their class. Cases, which are above this package, add theirs.
INSTEAD: dict[type, Callable[..., Prediction]] = {}


@takes_step(without=MEASURED_ONLY, instead=INSTEAD)
def predict_memory(step: Step, place: Place, *, probes: Path | str | bool = True) -> Prediction:
    """The record that measuring the step at the place would give. Nothing of its size is allocated.

    Examples:
        >>> memcheck.predict_memory(model, x, optimizer="adamw", device="A100-40GB")
        >>> memcheck.predict_memory(Step(model, x), Place("cpu", memory_limit="16GiB"))
        >>> memcheck.predict_memory(model, x, probes="cpu.jsonl")

    The step is measured on a device that is simulated: PyTorch itself runs it there, without memory and kernels. A GPU
    has a process of its own, to which the step is sent; the CPU is simulated in the calling thread.

    Args:
        model: a module, a method of one, or another callable; or a case of the catalog, with the device as its only
            input. Model and inputs may be real or on meta. They are copied and are not modified.
        inputs: its positional inputs.
        kwargs, keywords: its keyword inputs, as a dict or one by one. One with the name of an argument of this function
            must be given in kwargs; with kwargs={} the name is this function's.
        probes: on the CPU, kernels run once, alone, where they are small or no rule knows their scratch, and a table on
            disk keeps what they allocate (memcheck.simulated.probes.table_path). With a file, that is the table: the
            prediction is for the CPU whose rows it has; if it has none, or those of this CPU, what it lacks is run and
            added. With False no kernel runs, and what no rule knows is a doubt; a step may be "skipped".

    Running out of memory is a result: status "oom", the phase, the request and the bytes in use. A step that the
    simulated device cannot run is "skipped". Allocations that shapes do not determine are named in `unknown` and in the
    record's doubts. On CUDA the allocator of the process has cached nothing yet. If the version of torch is newer than
    the newest that predictions were compared with, no figure is exact. The record's backward_from says which tensor the
    backward starts from. Errors of the model itself are raised here.

    Raises:
        UsageError: an option breaks its rule or does not fit the others.
        UnsupportedError: the model cannot be sent to the GPU's process; the message says what works instead.
        TypeError: a keyword belongs to the model as well as to this function, or to neither; or a case is given what it
            says itself.
    """
    from memcheck.predict.targets import predicted_at  # Loaded with the first prediction.

    if not isinstance(probes, bool | str | Path):
        raise ValueError(f"probes must be a file, True or False, got {probes!r}")
    step.check_inference_mode()
    if place.ranks is not None and step.compile:
        raise UsageError(f"{named('compile')} is not predicted for a model that is split over processes")
    return predicted_at(place.resolved(), step, probes=probes)


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
    """The largest size n that fits the device: of the step make(n), of model(*make(n)), or of a model and its inputs.

    Examples:
        >>> memcheck.largest(lambda n: Step(model, torch.empty(n, 512), optimizer="adamw"), device="A100-40GB")
        >>> memcheck.largest(lambda n: torch.empty(n, 512), model, "A100-40GB", optimizer="adamw")
        >>> memcheck.largest(model, x, "A100-40GB", find="bsz", optimizer="adamw")

    Args:
        make: returns the step or the case of a size, or its inputs: a tensor, a tuple of arguments, or a dict of
            keyword arguments. It is called with meta as the default device, so that factories allocate nothing.
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
    most = argument("up_to", up_to, count)
    if find is not None:
        if (found := find.replace("-", "_")) not in DIMENSIONS:
            raise unknown_name(named("find"), find, DIMENSIONS)
        make, model = resized_inputs(model, found), make
    elif isinstance(make, torch.nn.Module):
        raise TypeError("largest takes a function of the size first; for a model and its inputs say find='bsz'")
    of_place = {name: options.pop(name) for name in (*options_of(Place), "place") if name in options}
    place = place_of("largest", [] if device is None else [device], of_place).resolved()
    if place.room_bytes is None:
        raise UsageError(f"{place.for_device.name} has no limit; set one, such as memory_limit='16GiB'")

    def predict(size: int) -> Prediction:
        with torch.device("meta"):
            made = make(size)
        if isinstance(made, (Step, *INSTEAD)):
            if model is not None:
                raise TypeError("largest takes a model or a function that makes Steps, got both")
            return predict_memory(made, place, **options)
        keywords = {**(options.get("kwargs") or {}), **made} if isinstance(made, dict) else options.get("kwargs")
        inputs = () if isinstance(made, dict) else tuple(made) if isinstance(made, tuple | list) else (made,)
        return predict_memory(model, *inputs, **{**options, "place": place, "kwargs": keywords})

    return Search(predict, step, most, fits_by_interpolation).largest(start)

"""The capacity of a device: the largest length, batch or dimension that fits, by prediction alone.

Doubling finds a size that does not fit, and bisection the last size before it that does. A larger size does not always
need more memory: allocators round, products copy operands of odd lengths, backends change. So the search also predicts
larger sizes, mainly round ones, and continues from any that fits. The result and the next size were both predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memcheck.bench.case_predictions import predicted_or_skipped
from memcheck.bench.catalog import Case, batch_of, check_case
from memcheck.core.arguments import argument
from memcheck.core.converters import count
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.place import Place, as_place
from memcheck.core.verdict import few_lines, largest_words, size_words
from memcheck.predict.replay import Prediction

AXES = ("seq_len", "bsz", "dim")
# Upper end of a search that finds no limit.
MOST = 2**30
MOST_SEQUENCES = 2**16
FIRST = 256
# Factors beyond the answer at which larger sizes are tried.
FURTHER = (1.02, 1.1, 1.25, 1.5, 2)

Predict = Callable[[Case], Prediction]
Guess = Callable[[dict[int, Prediction], int], bool | None]


@dataclass(frozen=True)
class Capacity:
    """The largest size of one axis at which a case fits, and why the next size does not.

    case: the case at that size, or at the smallest size if none fits.
    largest: 0 if no size fits.
    at, beyond: the predictions for that size and for the next. `at` is None if no size fits, `beyond` if the search
        ended without finding a limit.
    gaps: smaller sizes that were predicted and do not fit.
    tried: the number of predicted sizes.
    """

    axis: str
    case: Case
    device: Device
    largest: int
    step: int
    at: Prediction | None
    beyond: Prediction | None
    gaps: tuple[int, ...] = ()
    tried: int = 0

    def __repr__(self) -> str:
        return few_lines(
            [largest_words(size_words(self.axis, self.case), self.largest, self.step, self.at, self.beyond)]
        )

    @property
    def next_size(self) -> int:
        return self.largest + self.step

    @property
    def unpredicted(self) -> str | None:
        """The reason if the case cannot be predicted."""
        if self.at is None and self.beyond is not None and self.beyond.record.status != "oom":
            return self.beyond.record.reason or self.beyond.record.status
        return None


def find_capacity(
    case: Case,
    find: str,
    place: Place | Device | str,
    *,
    step: int = 1,
    up_to: int = MOST,
    start: int | None = None,
    predict: Predict | None = None,
) -> Capacity:
    """The largest size of an axis at which the case fits the device. Its other sizes stay.

    find: "seq_len" (S and T at once; in decode mode the tokens of the state), "bsz" or "dim". For packed and
        padded batches, "seq_len" is the length of the longest sequence, to which the others keep their proportion, and
        "bsz" the number of sequences, which repeat the case's lengths.
    place: the device, or a Place with a limit below its memory.
    step: only its multiples are sizes; a dimension is also a multiple of the heads, and a number of sequences one of
        the number of the case's lengths.
    up_to: the largest size of the search.
    start: the size to begin with, ideally near the result.
    predict: replaces the prediction of a case there.

    UsageError: the axis is unknown, or the device has no limit.
    """
    place = as_place(place).resolved()
    device = place.for_device
    step, most, start = argument("step", step, count), argument("up_to", up_to, count), argument("start", start, count)
    if find not in AXES:
        raise unknown_name(named("find"), find.replace("_", "-"), known_axes())
    check_has_limit(place)
    if find == "dim":
        step = math.lcm(step, case.heads or 1)
    if find == "bsz" and case.lengths is not None:
        step, most = math.lcm(step, len(case.lengths)), min(most, MOST_SEQUENCES)
    if most < step:
        raise UsageError(f"{named('up_to')} must be at least the step of {step}, got {most}")
    predict = predict or (lambda case: predicted_or_skipped(case, place))
    search = Search(lambda size: predict(check_case(resized(case, find, size))), step, most)
    largest = search.largest(start or FIRST)
    if largest > step:
        search.fits(largest - step)  # Sizes that barely fit may leave a gap below them.
    at, beyond = search.found.get(largest), search.found.get(largest + step)
    gaps = tuple(size for size in sorted(search.found) if size < largest and not search.fits(size))
    return Capacity(
        find, resized(case, find, largest or step), device, largest, step, at, beyond, gaps, len(search.found)
    )


def check_has_limit(place: Place) -> None:
    """UsageError: neither the place nor its device has a limit."""
    if place.room_bytes is None:
        name, limit = f"{named('device')} {place.for_device.name}", f"{named('memory_limit')} 16GiB"
        raise UsageError(f"{name} has no limit to find: give it one, as {limit}")


def known_axes() -> list[str]:
    """The values of --find."""
    return [axis.replace("_", "-") for axis in AXES]


def resized(case: Case, axis: str, size: int) -> Case:
    """The case with another size. A core dimension equal to the old dimension follows it."""
    if case.lengths is not None and axis != "dim":
        lengths = repeated(case.lengths, size) if axis == "bsz" else scaled(case.lengths, size)
        return dataclasses.replace(case, **batch_of(lengths, case.layout or ""))
    if axis == "bsz":
        return dataclasses.replace(case, bsz=size)
    if axis == "dim":
        return dataclasses.replace(case, dim=size, core_dim=size if case.core_dim == case.dim else case.core_dim)
    keys = None if case.kv_len is None else size
    return dataclasses.replace(case, query_len=1 if case.mode == "decode" else size, kv_len=keys)


def repeated(lengths: Sequence[int], count: int) -> list[int]:
    """`count` lengths: the given ones, repeated."""
    return list(itertools.islice(itertools.cycle(lengths), count))


def scaled(lengths: Sequence[int], longest: int) -> list[int]:
    """The lengths in the same proportions, the longest as given; at least 1."""
    return [max(1, round(length * longest / max(lengths))) for length in lengths]


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

    def largest(self, start: int) -> int:
        """The largest size that fits; 0 if none does."""
        low = self.edge(min(max(start // self.step, 1), self.top))
        while True:
            further = (count for count in self.further(low) if self.guessed(count) is not False)
            again = next((count for count in further if self.fits(count * self.step)), None)
            if again is None:
                return low * self.step
            low = self.edge(again)

    def nearest(self, start: int) -> int:
        """A size that fits, if the next one does not; larger ones are not tried. 0 if none fits."""
        return self.edge(min(max(start // self.step, 1), self.top)) * self.step

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


def capacity_curve(
    case: Case,
    axis: str,
    along: str,
    sizes: Sequence[int],
    place: Place | Device | str,
    *,
    step: int = 1,
    up_to: int = MOST,
    predict: Predict | None = None,
) -> list[tuple[int, Capacity]]:
    """(size, capacity) for each size along another axis. Each search starts at the previous result."""
    curve: list[tuple[int, Capacity]] = []
    limits: dict[str, Any] = {"step": step, "up_to": up_to, "predict": predict}
    for size in sorted(sizes):
        start = curve[-1][1].largest or None if curve else None
        curve.append((size, find_capacity(resized(case, along, size), axis, place, start=start, **limits)))
    return curve


def capacity_object(capacity: Capacity) -> dict[str, object]:
    """The capacity for JSON: the sizes, and the verdict and the record of the largest that fits and of the next."""
    beyond, at = capacity.beyond, capacity.at
    return {
        "operator": capacity.case.operator,
        "find": capacity.axis.replace("_", "-"),
        "largest": None if capacity.unpredicted else capacity.largest,
        "step": capacity.step,
        "next": capacity.next_size if beyond else None,
        "runs_out_in": beyond.record.oom_phase if beyond else None,  # None with a reason: the inputs alone do not fit.
        "reason": beyond.record.reason if beyond else None,
        "gaps": list(capacity.gaps),
        "tried": capacity.tried,
        "exact": at.exact if at else None,
        "basis": at.basis if at else None,
        "unknown": list(at.unknown if at else beyond.unknown if beyond else ()),
        "record": dataclasses.asdict(at.record) if at else None,
        "next_record": dataclasses.asdict(beyond.record) if beyond else None,
    }

"""Searches for the largest size that fits, by predictions alone.

Doubling finds a size that does not fit, and bisection the last size before it that does. A larger size does not always
need more memory: allocators round, products copy operands of odd lengths, backends change. So the search also predicts
larger sizes, mainly round ones, and continues from any that fits. The result and the next size were both predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memcheck.core.verdict import few_lines, largest_words
from memcheck.predict.replay import Prediction

# Factors beyond the answer at which larger sizes are tried.
FURTHER = (1.02, 1.1, 1.25, 1.5, 2)

Guess = Callable[[dict[int, Prediction], int], bool | None]


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the predictions for it and for the next size.

    Attributes:
        size: 0 if nothing fits.
        step: sizes are its multiples.
        at: the prediction at that size; None if nothing fits.
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

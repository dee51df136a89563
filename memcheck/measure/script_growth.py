"""Samples what is alive at the same point of each step of a script, and finds what grows from step to step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from memcheck.core.script_record import Growth, Origin, StepEnd
from memcheck.measure.machine import proc_field

if TYPE_CHECKING:
    from memcheck.measure.recorders import Recorder

T = TypeVar("T")
Ints = npt.NDArray[np.int64]

# Samples that are compared, and the share of them that must have more than the one before.
LEAST_SAMPLES, MOST_SAMPLES, GROWING_SHARE = 4, 8, 0.75
# Growth below this, or that takes more steps than this to double the peak, is no growth: a list of losses, a counter.
LEAST_BYTES_PER_STEP, MOST_STEPS_TO_DOUBLE = 4096, 100_000
# The process's memory is less exact: pages, pools of freed memory, libraries that load late.
LEAST_PROCESS_BYTES = 16 * 2**20


def growing_places(sizes: Ints, blocks: Ints, inputs: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
    """The places whose memory grows from sample to sample, of arrays (samples, places) of bytes and of blocks.

    Each sample has as many blocks as the one before, and three in four and the last have more. Blocks that are as many
    throughout may differ in size with the batch: only if each of eight samples has more bytes, they grow, unless the
    inputs of the modules do so as well.
    """
    if len(sizes) < LEAST_SAMPLES:
        return np.zeros(sizes.shape[1], np.bool_)
    change, more = np.diff(sizes, axis=0), np.diff(blocks, axis=0)
    by_blocks = (more >= 0).all(axis=0) & (more[-1] > 0) & ((more > 0).mean(axis=0) >= GROWING_SHARE)
    longer = len(inputs) > 0 and bool((np.diff(inputs) > 0).all())
    by_size = (change > 0).all(axis=0) & (len(sizes) >= MOST_SAMPLES) & (not longer)
    return (by_blocks & (sizes[-1] > sizes[0])) | by_size


class Sample(NamedTuple):
    step: int  # From 1.
    process_bytes: int | None  # The resident memory of the process.
    cpu_bytes: int  # Of tensors on the CPU.
    counts: bytes  # See PeakLedger.counts().
    input_size: int = 0  # Numbers in the inputs of the outermost module in its last call.


class StepSamples:
    """Samples at evenly spaced steps, at most MOST of them however many steps there are."""

    MOST = 32

    def __init__(
        self, recorder: Recorder, cpu_bytes: Callable[[], int], warm_up: int, input_size: Callable[[], int] = int
    ) -> None:
        """warm_up: the number of first steps that have no sample."""
        self._input_size = input_size
        self.samples: list[Sample] = []
        self._recorder, self._cpu_bytes, self._warm_up = recorder, cpu_bytes, warm_up
        self.steps, self._every = 0, 1

    @property
    def are_enough(self) -> bool:
        return len(self.samples) >= LEAST_SAMPLES

    def end_step(self) -> None:
        self.steps += 1
        if len(self.samples) == self.MOST:
            self._every *= 2
            self.samples = [sample for sample in self.samples if sample.step % self._every == 0]
        if self.steps > self._warm_up and self.steps % self._every == 0:
            counts = self._recorder.counts()
            now = Sample(self.steps, resident_bytes(), self._cpu_bytes(), counts, self._input_size())
            self.samples.append(now)

    def growing(self, peak_bytes: int, places: Sequence[Origin]) -> list[Growth]:
        """The lines and modules whose bytes grow, largest first: over all samples, else over the last half or quarter.

        places: of the recorder's sites.
        """
        for first in (0, len(self.samples) // 2, 3 * len(self.samples) // 4):
            if found := self._growing_since(first, peak_bytes, places):
                return found
        return []

    def _growing_since(self, first: int, peak_bytes: int, places: Sequence[Origin]) -> list[Growth]:
        """What grows from that sample on, and had no more before: what is emptied in each epoch has."""
        samples = spread(self.samples[first:])
        if len(samples) < LEAST_SAMPLES:
            return []
        highest = np.zeros((1 + first, len(places)), np.int64)
        for row, sample in zip(highest, self.samples[:first], strict=False):
            row[: len(sample.counts) // 16] = counts_of(sample)[:, 0]
        counts = np.zeros((len(samples), len(places), 2), np.int64)
        for row, sample in zip(counts, samples, strict=True):
            row[: len(sample.counts) // 16] = counts_of(sample)
        sizes, blocks = counts[:, :, 0], counts[:, :, 1]
        grows = growing_places(sizes, blocks, [sample.input_size for sample in samples])
        grows &= highest.max(axis=0) <= sizes[0]
        if first:  # From where it begins.
            begin = int((np.diff(sizes[:, grows].sum(axis=1)) > 0).argmax())
            samples, sizes, blocks = samples[begin:], sizes[begin:], blocks[begin:]
        grown = np.where(grows, sizes[-1] - sizes[0], 0)
        if rise(sizes.sum(axis=1)) < rise(sizes[:, grows].sum(axis=1)) / 2:
            return []  # What some places have more, others have less.
        steps = samples[-1].step - samples[0].step
        if grown.sum() < steps * max(LEAST_BYTES_PER_STEP, peak_bytes / MOST_STEPS_TO_DOUBLE):
            return []
        together: dict[str, list[int]] = defaultdict(list)
        for number in np.flatnonzero(grows).tolist():
            together[places[number].where].append(number)
        found = [
            Growth(
                place_of([places[number] for number in members], grown[members].tolist()),
                int(grown[members].sum()) // steps,
                float((blocks[-1] - blocks[0])[members].sum()) / steps,
                int(sizes[-1][members].sum()),
                samples[0].step if first else None,
            )
            for members in together.values()
            if grown[members].sum() >= grown.sum() / 100
        ]
        return sorted(found, key=lambda growth: -growth.bytes_per_step)

    def ends(self) -> list[StepEnd]:
        return [StepEnd(each.step, int(counts_of(each)[:, 0].sum()), each.process_bytes) for each in self.samples]

    def process_growth(self) -> int:
        """The bytes by which the process grows each step beside its tensors on the CPU; 0 if it does not.

        Tensors that grow take up to twice their bytes in whole pages: less than that is no growth of anything else.
        """
        known = [
            (each.step, each.process_bytes - each.cpu_bytes, each.cpu_bytes)
            for each in self.samples
            if each.process_bytes is not None
        ]
        known = known[-(-len(known) // 4) :]  # Libraries load and caches fill in the first steps.
        if len(known) <= LEAST_SAMPLES:
            return 0
        steps, sizes, tensors = np.array(spread(known)).T
        rates, whole = np.diff(sizes) / np.diff(steps), int(sizes[-1] - sizes[0])
        rate = whole / int(steps[-1] - steps[0])
        grows = whole >= max(LEAST_PROCESS_BYTES, tensors[-1] - tensors[0]) and (rates > rate / 4).all()
        return int(rate) if grows else 0


def spread(things: Sequence[T]) -> list[T]:
    """At most MOST_SAMPLES of them, evenly spaced, with the first and the last: growth may be in some steps alone."""
    places = np.linspace(0, len(things) - 1, min(MOST_SAMPLES, len(things))).astype(int)
    return [things[place] for place in places]


def counts_of(sample: Sample) -> Ints:
    return np.frombuffer(sample.counts, np.int64).reshape(-1, 2)


def place_of(places: Sequence[Origin], sizes: Sequence[int]) -> Origin:
    """The place with the most bytes, without a module unless its module has more than half of them all."""
    most = places[sizes.index(max(sizes))]
    of_module = sum(size for place, size in zip(places, sizes, strict=True) if place.module == most.module)
    return most if 2 * of_module > sum(sizes) else replace(most, module=None)


def rise(levels: Ints) -> float:
    """How much higher the later half of the levels is than the earlier one, whatever single ones are."""
    return float(np.median(levels[len(levels) // 2 :]) - np.median(levels[: len(levels) // 2]))


def resident_bytes(field: str = "VmRSS") -> int | None:
    """The memory of the process that is in RAM, as Linux tells it: of tensors and all else. "VmHWM": its highest."""
    value = None
    with suppress(OSError):  # A script may have all the files open that it can.
        value = proc_field("/proc/self/status", field)  # "16000 kB"
    return int(value.split()[0]) * 1024 if value else None

"""A prediction: the record of a run with how its figures are known, and its verdict in sentences."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memcheck.core import html, options
from memcheck.core.devices import Device
from memcheck.core.layers import Layers, layers_of
from memcheck.core.ranks import RESERVED_MORE
from memcheck.core.record import UNKNOWN, Certainty, Doubt, Record, Terms
from memcheck.core.step import Place
from memcheck.core.trace import ANY_PHASE, BUFFER_NAMES, Allocation, Peak, Trace, place_words
from memcheck.core.units import alive_words, counted, few_lines, format_bytes

STEPS = {"train": "a training step", "inference": "a forward", "decode": "a step of decoding"}
CONTEXT = "for the CUDA context"
FREE = "free in the segments of torch's allocator"
EXPANDABLE = "--expandable-segments"
# Letters whose names begin with a vowel: "an RTX-4090".
SPOKEN_WITH_A_VOWEL = "AEFHILMNORSX"
SIZES = {"seq_len": "sequence length", "bsz": "batch size", "dim": "dimension"}


@dataclass(frozen=True)
class Evidence:
    """How far off predictions of measured programs like a predicted one were.

    gpus, sources: name -> its rows. median, most, largest: of the errors without their sign; 95 % do not exceed `most`.
    missing: operators of the prediction that no measured program ran on a GPU of its kind.
    """

    rows: int
    gpus: dict[str, int]
    sources: dict[str, int]
    median: float | None
    most: float | None
    largest: float | None
    missing: tuple[str, ...]

    @property
    def covers(self) -> bool:
        """Whether programs like it ran, and all its operators did on such a GPU."""
        return self.rows > 0 and not self.missing

    def __str__(self) -> str:
        if self.median is None or self.most is None:
            return "No published run is like it"
        runs = f"{counted(self.rows, 'published run')} of such programs on {', '.join(self.gpus)}"
        words = f"{runs} were predicted with a median error of {self.median:.1%}, 95 % of them within {self.most:.1%}"
        if not self.missing:
            return words
        more = f" and {len(self.missing) - 3} more operators" if len(self.missing) > 3 else ""
        return f"{words}; none of them has {', '.join(self.missing[:3])}{more}"


@dataclass(frozen=True)
class Prediction:
    """The record that a measurement would give, and how its figures are known.

    Attributes:
        terms: field of the record -> its summands: name -> bytes.
        segments: what the segments of the GPU's allocator take without a limit, if it does not fit.
    """

    case: Any = field(repr=False)  # The case of a catalog, or the Step.
    place: Place
    record: Record
    terms: Terms
    trace: Trace | None = field(default=None, repr=False, compare=False)
    split: str = field(default="", repr=False)  # Over which processes the model is split, in words.
    refused: Allocation | None = field(default=None, repr=False, compare=False)  # What there was no room for.
    # Published measurements of programs like this one on such a GPU. None for a CPU, or if nothing was traced.
    evidence: Evidence | None = field(default=None, repr=False, compare=False)
    segments: int | None = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> Device:
        """The device that the prediction is for."""
        return self.place.for_device

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if unknown."""
        if self.record.status not in ("ok", "oom"):
            return None
        return self.record.status == "ok"

    @property
    def certainty(self) -> Certainty | None:
        """How the figures are known; None if there are none."""
        return self.record.certainty

    @property
    def exact(self) -> bool:
        """Whether every figure equals the measured one."""
        return self.record.exact

    @property
    def unknown(self) -> tuple[Doubt, ...]:
        """The doubts about allocations that are not known."""
        return tuple(doubt for doubt in self.record.doubts if doubt.kind == UNKNOWN)

    @property
    def bounds(self) -> frozenset[str]:
        """The fields that are not known to the byte.

        They are lower bounds; upper bounds if the number of concurrent threads is unknown; estimates if sizes or
        branches that depend on values are assumed.
        """
        return frozenset(self.record.bounds)

    @functools.cached_property
    def segments_bytes(self) -> int | None:
        """What the segments of the GPU's allocator take; without a limit, if it does not fit. None if unknown."""
        return self.record.reserved_bytes if self.segments is None else self.segments

    @property
    def timeline(self) -> list[tuple[str, int]]:
        """(phase, bytes alive) after each allocation and release."""
        if self.trace is None:
            return []
        phases = [(last, name) for name, (_, last) in self.trace.phases.items()]
        return list(timeline_of(self.trace.log.events, sorted(phases)))

    @property
    def peak(self) -> Peak | None:
        """The moment of all phases when most is alive, whether it fits or not. None if nothing was traced."""
        if self.trace is None:
            return None
        sums = [size for _, size in self.timeline]
        top = max(sums, default=0)
        event = len(sums) - sums[::-1].index(top) if sums else 0
        last = self.trace.log.events[event - 1][0] if sums else Allocation("", 0, 0)
        phase = self.trace.phase_of(event)
        is_bound = not {phase, ANY_PHASE}.isdisjoint(self.trace.unknown)
        return Peak(phase, top, last.module, last.operator, self.trace.log.alive(event), is_bound)

    @property
    def by_module(self) -> dict[str, dict[str, int]]:
        """Path of a module -> its bytes "saved" for backward, and those alive at the highest "peak".

        The path "" has what belongs to no module.
        """
        peak = self.peak
        if self.trace is None or peak is None:
            return {}
        found: dict[str, dict[str, int]] = {}
        for kind, allocations in {"saved": self.trace.saved, "peak": peak.alive}.items():
            for allocation in allocations:
                sums = found.setdefault(allocation.module, {"saved": 0, "peak": 0})
                sums[kind] += allocation.bytes
        return found

    @functools.cached_property
    def layers(self) -> Layers:
        """The modules as a tree: shapes of outputs, parameters, bytes kept for backward, and alive at the peak."""
        peak, name = self.peak, self.record.operator or ""
        return Layers() if self.trace is None or peak is None else layers_of(self.trace, peak, name)

    @property
    def buffers(self) -> dict[str, int]:
        """Buffer of a collective -> its bytes at the peak; empty unless the model is split over processes."""
        sums: Counter[str] = Counter()
        for allocation in self.peak.alive if self.peak is not None else ():
            if allocation.name in BUFFER_NAMES:
                sums[allocation.name] += allocation.bytes
        return dict(sums)

    def __repr__(self) -> str:
        return few_lines(self.sentences())

    def sentences(self) -> list[str]:
        """Whether it fits, how that is known, and what is alive at the peak."""
        words = [verdict(self), certainty(self)]
        if alive := self.alive_at_peak():
            words.append(f"Alive at the peak: {alive_words(alive)}.")
        return list(filter(None, words))

    def alive_at_peak(self) -> list[tuple[str, int]]:
        """(name, bytes) of what is alive at the peak. Of a model, sums by operator."""
        if self.trace is None or (peak := self.peak) is None:
            return []
        if not self.trace.modules:
            return [(one.name, one.bytes) for one in peak.alive]
        sums = Counter[str]()
        for name, one in self.trace.named_by_operator(peak.alive):
            sums[name] += one.bytes
        return sums.most_common()

    def _repr_html_(self) -> str:
        return html.html_of(self)

    @property
    def known_terms(self) -> Terms:
        """The terms of the fields that are not bounds."""
        return {name: terms for name, terms in self.terms.items() if name not in self.bounds}


def timeline_of(events: list[tuple[Allocation, bool]], phases: list[tuple[int, str]]) -> Iterator[tuple[str, int]]:
    alive, index = 0, 0
    for number, (allocation, taken) in enumerate(events, 1):
        alive += allocation.bytes if taken else -allocation.bytes
        while index < len(phases) - 1 and number > phases[index][0]:
            index += 1
        yield phases[index][1] if phases else "", alive


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the predictions for it and for the next size.

    Attributes:
        size: 0 if nothing fits.
        step: sizes are its multiples.
        at: the prediction at that size; None if nothing fits.
        beyond: the prediction at the next size, which does not fit; None if every size that was allowed fits.
        tried: the number of sizes that were predicted.
        gaps: those of them that are smaller and do not fit.
    """

    size: int
    step: int
    at: Prediction | None
    beyond: Prediction | None
    tried: int
    gaps: tuple[int, ...] = ()

    @property
    def edge(self) -> Prediction:
        """The prediction at that size, or at the smallest size if none fits."""
        edge = self.at or self.beyond
        assert edge is not None
        return edge

    @property
    def unpredicted(self) -> str | None:
        """The reason if it cannot be predicted."""
        if self.at is None and self.beyond is not None and self.beyond.record.status != "oom":
            return self.beyond.record.reason or self.beyond.record.status
        return None

    def __repr__(self) -> str:
        return few_lines([largest_words("size", self.size, self.step, self.at, self.beyond)])


# The sentences of a prediction.


@dataclass(frozen=True)
class Need:
    """The bytes that must fit, as the sum of parts: name -> bytes. is_bound: they may be more."""

    parts: dict[str, int]
    is_bound: bool

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """ "12.3 GiB", or "at least 12.3 GiB" if that is a bound."""
        return f"{'at least ' if self.is_bound else ''}{format_bytes(self.bytes)}"


def has_own_limit(place: Place) -> bool:
    """Whether the place's limit leaves less than its device has. It is a limit of the allocator alone."""
    usable, limit = place.for_device.usable_bytes, place.limit_bytes
    return limit is not None and (usable is None or limit < usable)


def need_of(prediction: Prediction) -> Need | None:
    """The bytes that must fit: tensors, on a GPU also the rest of the allocator's segments and CUDA's context."""
    peak, device = prediction.peak, prediction.device
    if peak is None or prediction.fits is None:
        return None
    parts = {"of tensors at the peak": peak.bytes}
    if (segments := prediction.segments_bytes) is not None:
        parts[FREE] = max(segments - peak.bytes, 0)
    if device.context_bytes and not has_own_limit(prediction.place):
        parts[CONTEXT] = device.context_bytes
    return Need(parts, peak.is_bound or "reserved_bytes" in prediction.bounds)


def has_fragments(prediction: Prediction) -> bool:
    """Whether more than a tenth of what it needs is free in segments, and could be used if these were expandable."""
    need = need_of(prediction)
    if need is None or prediction.place.expandable_segments:
        return False
    return 10 * need.parts.get(FREE, 0) > need.bytes


def verdict(prediction: Prediction) -> str:
    """Whether it fits, what it needs of what there is, where the peak is, and what the backward starts from."""
    record, device = prediction.record, prediction.device
    if prediction.fits is None:
        reason = (record.reason or record.status).removeprefix("not predicted: ")
        return f"{record.operator} is not predicted: {reason}."
    if (need := need_of(prediction)) is None:
        return f"{record.operator} {fits_words(prediction)} {device.name}: {record.reason or 'memory runs out'}."
    if prediction.place.room_bytes is None:
        place = f"{record.operator} on the {device.name}, which has no limit"
    else:
        place = f"{record.operator} {fits_words(prediction)} {device.name}"
    return f"{place}: {step_words(prediction)} {claim(prediction, need)}{start_words(prediction)}"


def fits_words(prediction: Prediction) -> str:
    return "fits" if prediction.fits else "does not fit"


def claim(prediction: Prediction, need: Need) -> str:
    """ "needs 12 GiB of 40 GiB: 10 GiB of ..., 2 GiB of ... . The peak is in the backward, in layers.3 (aten::mm)." """
    parts = [f"{format_bytes(size)} {name}" for name, size in need.parts.items() if size]
    if CONTEXT in need.parts and prediction.place.cuda_context is None:
        parts[-1] += f" (an estimate: see {options.named('cuda_context')})"
    consists = f": {', '.join(parts)}" if len(parts) > 1 else ""
    ranks = prediction.place.ranks
    if ranks is not None and ranks.kind == "fsdp" and len(need.parts) > 1:
        consists += f". Published runs of FSDP2 reserved up to {RESERVED_MORE:.0%} more"
    return f"needs {need}{room_words(prediction.place)}{consists}. {place_of_peak(prediction)}"


def room_words(place: Place) -> str:
    """ " of 40 GiB", or " of the limit of 8 GiB"; "" without a limit."""
    if has_own_limit(place):
        return f" of the limit of {format_bytes(place.limit_bytes or 0)}"
    usable = place.for_device.usable_bytes
    return "" if usable is None else f" of {format_bytes(usable + (place.for_device.context_bytes or 0))}"


def place_of_peak(prediction: Prediction) -> str:
    """Where the peak is, or where memory runs out."""
    record, peak, refused = prediction.record, prediction.peak, prediction.refused
    assert peak is not None
    has_modules = any(allocation.module for allocation in peak.alive)
    at_peak = place_words(peak.phase, peak.module, peak.operator, has_modules)
    if record.status == "ok":
        return f"The peak is {at_peak}."
    if not record.oom_phase or refused is None:
        return f"Its inputs alone do not fit. The peak would be {at_peak}."
    runs_out = place_words(record.oom_phase, refused.module, refused.operator, has_modules)
    if runs_out == at_peak:
        return f"Memory runs out at the peak, {at_peak}."
    return f"Memory runs out {runs_out}. The peak would be {at_peak}."


def step_words(prediction: Prediction) -> str:
    """What the figures are of: of a step in which no backward ran, only "a forward"."""
    has_none = prediction.trace is not None and prediction.trace.no_backward is not None
    return STEPS["inference" if has_none else prediction.record.mode or "train"]


def start_words(prediction: Prediction) -> str:
    """ " Backward from output[1]."; "" if there is but one way.

    If no backward ran, " No backward ran: no output requires grad, ...".
    """
    record, trace = prediction.record, prediction.trace
    if trace is not None and trace.no_backward is not None:
        return f" {trace.no_backward[0].upper()}{trace.no_backward[1:]}."
    return f" {start}" if (start := record.start_sentence()) else ""


def certainty(prediction: Prediction) -> str:
    """How the figures are known, in sentences; "" without figures."""
    if not prediction.terms:
        return ""
    words = f"{how_known(prediction)}."
    evidence, doubts = prediction.evidence, len(prediction.record.doubts)
    words += f" {evidence}." if evidence is not None and evidence.rows else ""
    if doubts:
        words += f" {counted(doubts, 'point')} {'is' if doubts == 1 else 'are'} uncertain ({options.named('doubts')})."
    return words


def how_known(prediction: Prediction) -> str:
    device, verified = prediction.device, prediction.certainty in ("exact", "verified")
    if device.kind == "cpu":
        how = "by rules that tests compare with measurements on CPUs" if verified else "from PyTorch's source"
        unlike = "" if verified else ", not compared with measurements of this version of torch"
        return f"Calculated{' to the byte' if prediction.exact else ''} {how}{unlike}"
    target = f"Calculated{' to the byte' if prediction.exact else ''} for {with_article(device.name)}"
    if verified:
        return f"{target} by rules that published runs confirm"
    like = prediction.evidence
    return f"{target} from PyTorch's source{'' if like and like.rows else ', not measured on one'}"


def with_article(name: str) -> str:
    """ "an RTX-4090", "a T4", or "a GPU with 40GiB" for a size."""
    if name[:1].isdigit():
        return f"a GPU with {name}"
    spelled = not name[1:2].islower()
    return f"{'an' if name[:1].upper() in (SPOKEN_WITH_A_VOWEL if spelled else 'AEIO') else 'a'} {name}"


def largest_words(word: str, size: int, step: int, at: Prediction | None, beyond: Prediction | None) -> str:
    """The largest size that fits, what it needs, and why the next size does not fit. word: "batch"."""
    after = f"{word} {size + step:,}"
    if beyond is not None and beyond.fits is None:
        return verdict(beyond)
    needed = need_of(beyond) if beyond is not None else None
    if at is None:
        if beyond is None:
            return f"No {word} was tried."
        why = f"it {claim(beyond, needed)}{start_words(beyond)}" if needed else f"{beyond.record.reason}."
        return f"Not even {after} fits {beyond.device.name}: {why}"
    past = "The search ended there: more may fit."
    if beyond is not None:
        past = f"{after.capitalize()} needs {needed}. {place_of_peak(beyond)}" if needed else f"{after} does not fit."
    need = need_of(at)
    claimed = f": {step_words(at)} {claim(at, need)}" if need else "."
    return f"The largest {word} that fits {at.device.name} is {size:,}{claimed} {past}{start_words(at)}"

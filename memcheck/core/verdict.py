"""Predictions in sentences: whether it fits, what must fit, what that consists of, and how it is known."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcheck.core.options import named
from memcheck.core.ranks import RESERVED_MORE
from memcheck.core.units import counted, format_bytes, largest_first

if TYPE_CHECKING:
    from memcheck.core.prediction import Prediction
    from memcheck.core.step import Place
    from memcheck.core.workload import Case

OUTSIDE = "outside of submodules"
STEPS = {"train": "a training step", "inference": "a forward", "decode": "a step of decoding"}
CONTEXT = "for the CUDA context"
# Letters whose names begin with a vowel: "an RTX-4090".
SPOKEN_WITH_A_VOWEL = "AEFHILMNORSX"
LINE_WIDTH, MOST_LINES = 120, 8
SIZES = {"seq_len": "sequence length", "bsz": "batch size", "dim": "dimension"}
SIZES_OF_SEQUENCES = {"seq_len": "length of the longest sequence", "bsz": "number of sequences"}


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
        parts["free in the segments of torch's allocator"] = max(segments - peak.bytes, 0)
    if device.context_bytes and not has_own_limit(prediction.place):
        parts[CONTEXT] = device.context_bytes
    return Need(parts, peak.is_bound or "reserved_bytes" in prediction.bounds)


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
        parts[-1] += f" (an estimate: see {named('cuda_context')})"
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
    runs_out = place_words(record.oom_phase, refused.module, refused.name, has_modules)
    if runs_out == at_peak:
        return f"Memory runs out at the peak, {at_peak}."
    return f"Memory runs out {runs_out}. The peak would be {at_peak}."


def place_words(phase: str, module: str, operator: str, has_modules: bool = True) -> str:
    """ "in the backward, in layers.3.mlp (GeluBackward0)"."""
    where = f", {f'in {module}' if module else OUTSIDE}" if has_modules else ""
    return f"in the {phase}{where} ({operator})"


def step_words(prediction: Prediction) -> str:
    """What the figures are of: of a step in which no backward ran, only "a forward"."""
    has_none = prediction.trace is not None and prediction.trace.no_backward is not None
    return STEPS["inference" if has_none else prediction.record.mode or "train"]


def start_words(prediction: Prediction) -> str:
    """ " Backward from the second output, a scalar; the first stays alive."; "" if there is but one way.

    If no backward ran, " No backward ran: no output requires grad, ...".
    """
    record, trace = prediction.record, prediction.trace
    if trace is not None and trace.no_backward is not None:
        return f" {trace.no_backward[0].upper()}{trace.no_backward[1:]}."
    return f" Backward from {record.backward_from}." if record.backward_from not in (None, "the output") else ""


def certainty(prediction: Prediction) -> str:
    """How the figures are known, in sentences; "" without figures."""
    if not prediction.terms:
        return ""
    words = f"{how_known(prediction)}."
    evidence, doubts = prediction.evidence, len(prediction.record.doubts)
    words += f" {evidence}." if evidence is not None and evidence.rows else ""
    if doubts:
        words += f" {counted(doubts, 'point')} {'is' if doubts == 1 else 'are'} uncertain ({named('doubts')})."
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


def size_words(axis: str, case: Case) -> str:
    """The size in words: "batch size", or "number of sequences" for padded and packed batches."""
    return SIZES[axis] if case.lengths is None else SIZES_OF_SEQUENCES.get(axis, SIZES[axis])


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


def alive_words(sizes: Iterable[tuple[str, int]], most: int = 6) -> str:
    """The largest of (name, bytes): "q 32 MiB, k 32 MiB, 7 more 1.5 MiB"."""
    rows = largest_first(((size, name) for name, size in sizes), most)
    return ", ".join(f"{name} {format_bytes(size)}" for size, name in rows)


def few_lines(sentences: Iterable[str]) -> str:
    """The sentences, wrapped, in at most eight lines: what print() shows of a result."""
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, LINE_WIDTH)]
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "..."])

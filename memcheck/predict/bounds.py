"""Which fields of a predicted record are bounds, and why."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from memcheck.core.devices import Device
from memcheck.core.doubts import UNKNOWN, Doubt
from memcheck.core.place import Place
from memcheck.core.record import Record
from memcheck.predict.allocation_log import Trace
from memcheck.predict.scratch import FreedLate, Unlisted

# Fields that become lower bounds when a phase has unknown allocations.
FIELDS_OF = {
    "inputs": ("reserved_bytes",),
    "forward": (
        *("forward_peak_bytes", "workspace_bytes", "forward_max_allocated_bytes"),
        *("backward_max_allocated_bytes", "max_allocated_bytes"),
    ),
    "backward": ("backward_peak_bytes", "workspace_bytes", "backward_max_allocated_bytes", "max_allocated_bytes"),
    "optimizer": ("optimizer_peak_bytes", "max_allocated_bytes"),
}
# Further fields that are uncertain if not even the sizes of results are known.
ALSO_FIELDS_OF = {
    "forward": ("output_bytes", "saved_bytes", "gradient_bytes", *FIELDS_OF["backward"], *FIELDS_OF["optimizer"]),
    "backward": ("gradient_bytes", *FIELDS_OF["optimizer"]),
}
# Further fields that are uncertain if allocations may outlive their phase.
LATER_FIELDS_OF = {"forward": ("saved_bytes", *FIELDS_OF["backward"]), "backward": FIELDS_OF["optimizer"]}
# Fields that are no sums of terms.
MORE_FIELDS = ("workspace_bytes", "oom_requested_bytes", "max_allocated_bytes")
# Fields that an untried torch version may change: all that the caller does not provide.
COMPUTED = ("output_bytes", "saved_bytes", "gradient_bytes", *itertools.chain.from_iterable(FIELDS_OF.values()))


def unknown_allocations(trace: Trace, record: Record, played: Collection[str], device: Device) -> Iterator[Doubt]:
    """A doubt for each unknown allocation, with the fields that it affects. The record has all terms.

    played: the phases up to the refused request.
    """
    fields: dict[str, set[str]] = {}
    for phase, found in trace.unknown.items():
        for words in found:
            affected = fields.setdefault(words, set())
            affected.update(FIELDS_OF.get(phase, COMPUTED))
            affected.update(ALSO_FIELDS_OF.get(phase, ()) if isinstance(words, Unlisted) else ())
            affected.update(LATER_FIELDS_OF.get(phase, ()) if isinstance(words, FreedLate) else ())
    if any(allocation.is_library for allocation in trace.log.allocations) and device.architecture is None:
        words = "cuBLAS's workspace, as the GPU's architecture is not known"
        fields[words] = set(itertools.chain.from_iterable(FIELDS_OF.values()))
    for affected in filter(None, fields.values()):
        affected |= {"reserved_bytes", "process_bytes"}
        if record.status == "oom" and not trace.unknown.keys().isdisjoint(played):
            affected |= {"oom_in_use_bytes", "oom_requested_bytes"}
    terms = (record.terms or {}).keys()
    if trace.beyond is not None:
        words = f"what comes after a tensor beyond 64 bits, in the {trace.beyond}"
        fields[words] = {name for name in terms if name.startswith(trace.beyond)}
    filled = terms | {name for name in MORE_FIELDS if getattr(record, name) is not None}
    for words, affected in fields.items():
        yield Doubt(words, UNKNOWN, tuple(sorted(affected & filled)))


def doubts_of_verdict(trace: Trace, record: Record, played: Collection[str], place: Place) -> Iterator[Doubt]:
    """A doubt about the verdict, if there is a limit and a phase's figures are bounds."""
    if place.room_bytes is None or trace.unknown.keys().isdisjoint(played):
        return
    verdict = "ok" if record.status == "ok" else f"{record.status} in the {record.oom_phase}"
    guessed = any(isinstance(words, Unlisted) for found in trace.unknown.values() for words in found)
    yield Doubt(f"{verdict} is the verdict of what is known: the run may need more{', or less' if guessed else ''}")

"""Which fields of a predicted record are bounds, and why."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from memcheck.core.case import Terms
from memcheck.core.devices import Device
from memcheck.core.place import Place
from memcheck.core.record import Record
from memcheck.predict.allocation_log import Trace

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


def unknown_and_bounds(
    trace: Trace, record: Record, terms: Terms, played: Collection[str], device: Device
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Descriptions of what is unknown, and the fields that it affects. played: the phases up to the refused request."""
    words = list(itertools.chain.from_iterable(trace.unknown.values()))
    bounds = {name for phase in trace.unknown for name in FIELDS_OF.get(phase, COMPUTED)}
    bounds |= {name for phase in trace.guessed for name in ALSO_FIELDS_OF.get(phase, ())}
    bounds |= {name for phase in trace.freed_late for name in LATER_FIELDS_OF.get(phase, ())}
    if any(allocation.is_library for allocation in trace.log.allocations) and device.architecture is None:
        words.append("cuBLAS's workspace, as the GPU's architecture is not known")
        bounds |= {name for names in FIELDS_OF.values() for name in names}
    if bounds:
        bounds |= {"reserved_bytes", "process_bytes"}
    if record.status == "oom" and not trace.unknown.keys().isdisjoint(played):
        bounds |= {"oom_in_use_bytes", "oom_requested_bytes"}
    if trace.beyond is not None:
        words.append(f"what comes after a tensor beyond 64 bits, in the {trace.beyond}")
        bounds |= {name for name in terms if name.startswith(trace.beyond)}
    filled = {name for name in MORE_FIELDS if getattr(record, name) is not None}
    return tuple(dict.fromkeys(words)), frozenset(bounds & (terms.keys() | filled))


def doubts_of_verdict(trace: Trace, record: Record, played: Collection[str], place: Place) -> Iterator[str]:
    """A doubt about the verdict, if there is a limit and a phase's figures are bounds."""
    if place.room_bytes is None or trace.unknown.keys().isdisjoint(played):
        return
    verdict = "ok" if record.status == "ok" else f"{record.status} in the {record.oom_phase}"
    less = ", or less" if trace.guessed else ""
    yield f"{verdict} is the verdict of what is known: the run may need more{less}"

"""Which fields of a predicted record are bounds and why, and how far off like predictions of other programs were.

`memcheck/data/evidence_NAME.json` has, for each source, GPU and set of operators of the study NAME, how far off the
predictions of its rows were.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memcheck.core.devices import DEVICES, Device
from memcheck.core.prediction import Evidence, Trace
from memcheck.core.record import UNKNOWN, Doubt, Record
from memcheck.core.step import Place
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


DATA = Path(__file__).parents[1] / "data"
# A measured program is like a predicted one if it runs this share of its operators.
SHARE = 0.5


@dataclass(frozen=True)
class Measured:
    """Rows of one source, measured on one GPU, whose programs run the same operators.

    errors: predicted / published - 1 of each row.
    """

    source: str
    gpu: str
    operators: frozenset[str]
    errors: tuple[float, ...]


@functools.cache
def measured() -> tuple[Measured, ...]:
    """All that was measured and predicted."""
    found = (entry for path in sorted(DATA.glob("evidence_*.json")) for entry in json.loads(path.read_text("utf-8")))
    return tuple(
        Measured(entry["source"], entry["gpu"], frozenset(entry["operators"]), tuple(entry["errors"]))
        for entry in found
    )


def operators_of_equal_rows(architecture: tuple[int, int] | None) -> frozenset[str]:
    """Operators of programs whose every row on a GPU of the architecture was predicted as printed."""
    here = (it for it in measured() if DEVICES[it.gpu].architecture == architecture)
    return frozenset[str]().union(*(it.operators for it in here if not any(it.errors)))


def evidence_of(operators: Iterable[str], architecture: tuple[int, int] | None) -> Evidence:
    """What was measured of programs like one with these operators, on GPUs of the architecture."""
    wanted = frozenset(operators)
    here = [it for it in measured() if architecture is not None and DEVICES[it.gpu].architecture == architecture]
    like = [it for it in here if wanted and len(it.operators & wanted) >= SHARE * len(wanted)]
    errors = sorted(abs(error) for it in like for error in it.errors)
    gpus, sources = Counter[str](), Counter[str]()
    for it in like:
        gpus[it.gpu] += len(it.errors)
        sources[it.source] += len(it.errors)
    known = frozenset[str]().union(*(it.operators for it in here))
    return Evidence(
        len(errors),
        dict(gpus),
        dict(sources),
        statistics.median(errors) if errors else None,
        errors[math.ceil(0.95 * len(errors)) - 1] if errors else None,
        errors[-1] if errors else None,
        tuple(sorted(wanted - known)),
    )

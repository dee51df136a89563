"""How a prediction's figures are known: what is unknown, what published measurements of like programs say, and where.

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
from typing import cast

import torch

from memcheck.core.devices import DEVICES, OLDEST_TRIED, Device, Version, running, untried, version_name
from memcheck.core.prediction import Evidence
from memcheck.core.record import UNKNOWN, Certainty, Doubt, Record
from memcheck.core.step import Place
from memcheck.core.trace import Trace
from memcheck.core.version import __version__
from memcheck.simulated.scratch import FreedLate, Target, Unlisted

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
ENDS = ("forward_end_allocated_bytes", "backward_end_allocated_bytes")
# Further fields that are uncertain if not even the sizes of results are known.
ALSO_FIELDS_OF = {
    "forward": (
        *("output_bytes", "saved_bytes", "gradient_bytes", *ENDS),
        *(*FIELDS_OF["backward"], *FIELDS_OF["optimizer"]),
    ),
    "backward": ("gradient_bytes", ENDS[1], *FIELDS_OF["optimizer"]),
}
# Further fields that are uncertain if allocations may outlive their phase.
LATER_FIELDS_OF = {
    "forward": ("saved_bytes", *ENDS, *FIELDS_OF["backward"]),
    "backward": (ENDS[1], *FIELDS_OF["optimizer"]),
}
# Fields that are no sums of terms.
MORE_FIELDS = ("workspace_bytes", "oom_requested_bytes", "max_allocated_bytes", *ENDS)
# Fields that an untried torch version may change: all that the caller does not provide.
COMPUTED = ("output_bytes", "saved_bytes", "gradient_bytes", *ENDS, *itertools.chain.from_iterable(FIELDS_OF.values()))


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
        if device.kind == "cuda":  # Which blocks are free decides which larger ones are taken whole.
            affected |= {end for end in ENDS if end.replace("end", "max") in affected}
        affected |= {"reserved_bytes", "process_bytes"}
        if record.status == "oom" and not trace.unknown.keys().isdisjoint(played):
            affected |= {"oom_in_use_bytes", "oom_requested_bytes"}
    terms = (record.terms or {}).keys()
    filled = terms | {name for name in MORE_FIELDS if getattr(record, name) is not None}
    for words, affected in fields.items():
        yield Doubt(words, UNKNOWN, tuple(sorted(affected & filled)))


def doubts_of_verdict(trace: Trace, record: Record, played: Collection[str], place: Place) -> Iterator[Doubt]:
    """A doubt about the verdict, if there is a limit and a phase's figures are bounds."""
    if place.room_bytes is None or trace.unknown.keys().isdisjoint(played):
        return
    verdict = "It fits" if record.status == "ok" else f"It runs out of memory in the {record.oom_phase}"
    guessed = any(isinstance(words, Unlisted) for found in trace.unknown.values() for words in found)
    yield Doubt(f"{verdict}, as far as known: the run may need more{', or less' if guessed else ''}")


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
        tuple(sorted(name for name in wanted - known if name.removesuffix("_") not in known)),  # In place or not.
    )


# The torch version of the published A100 rows whose figures are all predicted as printed.
PUBLISHED_TORCH = (2, 7)


def certainty_of(trace: Trace, dtype: str, place: Place, target: Target) -> Certainty:
    """How the figures of the trace's replay are known, as far as nothing is unknown."""
    device = place.for_device
    if device.kind == "cpu":
        tried = target.torch_version >= OLDEST_TRIED and untried(target.torch_version) is None
        return Certainty.EXACT if tried else Certainty.DERIVED
    if not evidence_of(trace.operators, device.architecture).covers:
        return Certainty.DERIVED
    like_equal_rows = (
        "A100" in device.name
        and target.torch_version == PUBLISHED_TORCH
        and dtype == "float32"
        and not place.expandable_segments
        and operators_of_equal_rows(device.architecture).issuperset(trace.operators)
    )
    return Certainty.EXACT if like_equal_rows else Certainty.VERIFIED


def target_at(place: Place) -> Target:
    """The target of predictions for the place; by default with this process's threads and torch version."""
    device, version = place.for_device, cast(Version | None, place.torch_version)
    threads, searches = place.threads or torch.get_num_threads(), torch.backends.cudnn.benchmark
    return Target(
        device.kind,
        threads,
        device.architecture,
        version or running(),
        multiprocessors=device.multiprocessors,
        searches=searches,
    )


def blank_record(place: Place, target: Target) -> Record:
    """A predicted record with the environment's fields filled in."""
    device = place.for_device
    return Record(
        source="predicted",
        device=device.kind,
        device_name=None if device.kind == "cpu" else device.name,
        device_total_bytes=device.total_bytes,
        torch_version=str(torch.__version__)
        if target.torch_version == running()
        else version_name(target.torch_version),
        memcheck_version=__version__,
        allocator="memcheck tracking allocator" if device.kind == "cpu" else "default",
        threads=target.threads,
    )

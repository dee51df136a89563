"""What a program has reserved after many steps: passes of its trace, replayed again and again.

The caching allocator's segments depend on what the steps before left free, so that reserved memory may grow for several
steps though all of them allocate the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memcheck.allocator import CachingAllocator
from memcheck.core.prediction import Trace
from memcheck.core.step import Place
from memcheck.predict.replay import allocator_at


@dataclass(frozen=True)
class Pass:
    """The events of a pass.

    made: the bytes of what it allocates, in order, and the stream.
    frees: for each event, None if it allocates; else how many passes ago the freed allocation was made, and its number
        in that pass.
    """

    made: list[tuple[int, int]]
    frees: list[tuple[int, int] | None]


def passes_of(trace: Trace) -> list[Pass]:
    """The passes of the trace; the first has what was there before, too."""
    bounds = [0, *trace.passes[1:], max(last for _, last in trace.phases.values())]
    made: dict[int, tuple[int, int]] = {}  # By identity: the pass that made an allocation, and its number there.
    found = []
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        now = Pass([], [])
        for allocation, taken in trace.log.events[first:last]:
            if taken:
                made[id(allocation)] = number, len(now.made)
                now.made.append((allocation.bytes, allocation.stream))
                now.frees.append(None)
            else:
                maker, index = made[id(allocation)]
                now.frees.append((number - maker, index))
        found.append(now)
    return found


def reserved_after(trace: Trace, place: Place, more: Iterable[int]) -> int:
    """The bytes of the allocator's segments after the trace, and after more of its passes, given by their numbers.

    A pass that is repeated must come after the same kind of pass as it did in the trace.
    """
    passes = passes_of(trace)
    allocator = allocator_at(place)
    blocks: list[list[Any]] = []  # Of each pass that ran.
    for number in [*range(len(passes)), *more]:
        made = iter(passes[number].made)
        blocks.append([])
        for freed in passes[number].frees:
            if freed is None:
                blocks[-1].append(allocator.malloc(*next(made)))
            else:
                age, index = freed
                allocator.free(blocks[-1 - age][index])
    return allocator.reserved.current if isinstance(allocator, CachingAllocator) else allocator.requested.current

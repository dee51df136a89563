"""Finds what a recording says: peaks, what was alive at them, holes, and what grows from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memcheck.allocator import history as codes
from memcheck.allocator.caching import Ints, Order
from memcheck.allocator.history import History, Replayed, replay_history
from memcheck.core.script_record import PHASES, Alive, Course, Origin
from memcheck.core.snapshot_record import Growth, Holes, Moment, OutOfMemory, Replay, SnapshotRecord, WhatIf
from memcheck.core.units import highest
from memcheck.measure.script_growth import growing_places
from memcheck.snapshot.recording import BEFORE, NO_PLACE, Recording

ADDRESS = np.arange(4) == 2  # The column of rows.
STEP_PHASES = ("backward", "optimizer step")
SIZES = (0, 2**20, 10 * 2**20, 100 * 2**20, 2**30)  # The least bytes of each group of blocks.
MOST_POINTS = 500  # Of the course.
MOST_ENDS = 12  # Steps whose ends are compared.


@dataclass(frozen=True)
class Blocks:
    """Every block of a recording: the events of its life, its bytes and its place.

    begin: -1: before the first event. freed: its release was requested; ended: it could be used again. Both are the
    number of events if that never happened.
    """

    begin: Ints
    freed: Ints
    ended: Ints
    addresses: Ints
    sizes: Ints
    places: Ints

    def alive_at(self, state: int, ends: Ints) -> npt.NDArray[np.bool_]:
        """The blocks alive just before the event of this number. ends: freed or ended."""
        return (self.begin < state) & (ends >= state)

    def sums(self, chosen: Any, events: int) -> Ints:
        """The bytes alive in each state, of the chosen blocks."""
        begin, freed, sizes = self.begin[chosen] + 1, self.freed[chosen] + 1, self.sizes[chosen]
        change = np.bincount(begin, sizes, events + 2) - np.bincount(freed, sizes, events + 2)
        return np.cumsum(change).astype(np.int64)[: events + 1]


def analyse(
    recording: Recording, file: str, what_if: Callable[[History], list[WhatIf]] = lambda history: []
) -> SnapshotRecord:
    """The record of a recording. what_if: replays it under other settings."""
    doubts = list(recording.doubts)
    replay, replayed = replay_of(recording)
    blocks = blocks_of(recording, replayed)
    allocated = blocks.sums(slice(None), len(recording))
    reserved = reserved_bytes(recording)
    find = _Finder(recording, blocks, allocated, reserved)
    peak = find.moment(int(np.argmax(allocated)))
    refused = sorted(recording.free_bytes)
    oom = None
    if refused:
        last = refused[-1]
        oom = OutOfMemory(int(recording.sizes[last]), recording.free_bytes[last], find.moment(last, at_event=last))
    ends = steps_of(recording)
    before = blocks.alive_at(0, blocks.ended)
    cases = what_if(recording.history) if replay.reason is None else []
    return SnapshotRecord(
        file=file,
        device=recording.device,
        settings=str(recording.settings),
        events=len(recording),
        allocations=int(np.count_nonzero(recording.actions == codes.ALLOC)),
        seconds=find.seconds(len(recording) - 1),
        before=(int(blocks.sizes[before].sum()), int(np.count_nonzero(before))),
        peak=peak,
        peak_reserved_bytes=int(reserved.max()),
        reserved_bytes=int(reserved[-1]),
        allocated_bytes=int(allocated[-1]),
        oom=oom,
        ooms=len(refused),
        replay=replay,
        steps=len(ends) + any(place.phase in STEP_PHASES for place in recording.places),
        growing=growing(recording, blocks, ends),
        what_if=[find.placed(case) for case in cases],
        course=find.course([peak.event + 1, *refused[-1:]]),
        source=recording.source,
        doubts=doubts,
    )


def replay_of(recording: Recording) -> tuple[Replay, Replayed | None]:
    """The recorded requests in the model of the allocator, with the recorded settings and addresses of segments.

    The recording gets the order of torch's versions under which most is as recorded.
    """
    if not len(recording):
        return Replay(0, 0, 0, False, "it has no events"), None
    found = dict[Order, tuple[Replay, Replayed | None]]()
    history = recording.history
    for order in Order:
        found[order] = replay_in(replace(history, order=order))
        if found[order][0].exact or found[order][0].reason is not None:
            break
    recording.order = max(found, key=lambda order: (found[order][0].exact, found[order][0].at_recorded_address))
    vars(recording).pop("history")
    return found[recording.order]


def replay_in(history: History) -> tuple[Replay, Replayed | None]:
    """The replay of a history, and whether all of it is as recorded."""
    allocations = int(np.count_nonzero(history.rows[:, 0] == codes.ALLOC))
    try:
        replayed = replay_history(history, at_recorded_addresses=True)
    except ValueError as error:
        return Replay(allocations, 0, 0, False, str(error)), None
    # The memory that was left when there was no room is no address.
    both = replayed.rows(), history.rows
    made, recorded = (np.where((rows[:, :1] == codes.OOM) & ADDRESS, 0, rows) for rows in both)
    exact = np.array_equal(made, recorded[recorded[:, 0] != codes.IGNORED])
    return Replay(allocations, replayed.equal_addresses, replayed.peak_reserved_bytes, exact), replayed


def blocks_of(recording: Recording, replayed: Replayed | None) -> Blocks:
    """The blocks of a recording. Their bytes are the model's where the replay reached, else the rounded request."""
    events = len(recording)
    used = np.flatnonzero(np.isin(recording.actions, (codes.ALLOC, codes.FREE_REQUESTED, codes.FREE_COMPLETED)))
    order = used[np.lexsort((used, recording.addresses[used]))]
    addresses, actions = recording.addresses[order], recording.actions[order]
    # A life begins with an allocation, or with the first event of an address.
    starts = np.flatnonzero((actions == codes.ALLOC) | np.r_[True, addresses[1:] != addresses[:-1]][: len(order)])
    freed = ended = np.zeros(0, np.int64)
    if len(starts):
        freed, ended = (
            np.minimum.reduceat(np.where(actions == action, order, events), starts)
            for action in (codes.FREE_REQUESTED, codes.FREE_COMPLETED)
        )
        freed = np.minimum(freed, ended)
    first, addresses, is_new = order[starts], addresses[starts], actions[starts] == codes.ALLOC
    # Blocks of the segments at the end that no event names were there before the first one.
    at_end = {address: size for segment in recording.segments for address, (size, _) in segment.blocks.items()}
    living = set(addresses[ended == events].tolist())
    rest = [address for address in at_end if address not in living]
    numbers = (recording.place_of_block[address] for address in rest)
    unknown = len(recording.places)  # The number of BEFORE.
    blocks = Blocks(
        begin=np.append(np.where(is_new, first, -1), np.full(len(rest), -1)),
        freed=np.append(freed, np.full(len(rest), events)),
        ended=np.append(ended, np.full(len(rest), events)),
        addresses=np.append(addresses, np.array(rest, np.int64)),
        sizes=np.append(recording.sizes[first], np.zeros(len(rest), np.int64)),
        places=np.append(
            np.where(is_new, recording.stacks[first], unknown),
            np.array([unknown if number == NO_PLACE else number for number in numbers], np.int64),
        ),
    )
    return replace(blocks, sizes=_sizes(recording, replayed, blocks, at_end))


def _sizes(recording: Recording, replayed: Replayed | None, blocks: Blocks, at_end: dict[int, int]) -> Ints:
    """The bytes of the blocks, whose sizes so far are as requested."""
    requested, places = np.unique(blocks.sizes, return_inverse=True)
    rounded = np.array([recording.settings.rounded(int(size)) for size in requested], np.int64)
    sizes = rounded[places] if len(requested) else blocks.sizes
    if replayed is not None:
        of_event = np.zeros(len(recording) + 1, np.int64)
        of_event[np.flatnonzero(recording.actions == codes.ALLOC)[: len(replayed.sizes)]] = replayed.sizes
        known = of_event[blocks.begin]  # The last entry is that of blocks from before the first event: 0.
        sizes = np.where(known > 0, known, sizes)
        early = {
            address: size for segment in recording.history.at_begin for address, (size, _) in segment.blocks.items()
        }
        for index in np.flatnonzero(blocks.begin < 0).tolist():
            sizes[index] = early.get(int(blocks.addresses[index]), sizes[index])
    for index in np.flatnonzero(blocks.ended == len(recording)).tolist():
        sizes[index] = at_end.get(int(blocks.addresses[index]), sizes[index])
    return sizes


def reserved_bytes(recording: Recording) -> Ints:
    """The reserved bytes in each state."""
    change = np.zeros(len(recording) + 1, np.int64)
    change[1:] = recording.history.changes
    sums = np.cumsum(change)
    at_end = sum(segment.bytes for segment in recording.segments)
    return sums + max(at_end - int(sums[-1]), -int(sums.min()))


def steps_of(recording: Recording) -> Ints:
    """The events that begin a step other than the first: a forward after a backward or an optimizer step."""
    known = np.array([PHASES.index(place.phase) for place in recording.places])
    events = np.flatnonzero(recording.actions == codes.ALLOC)
    phases = known[recording.stacks[events]]
    events, phases = events[phases > 0], phases[phases > 0]
    return events[1:][(phases[1:] == 1) & (phases[:-1] > 1)]


def growing(recording: Recording, blocks: Blocks, ends: Ints) -> list[Growth]:
    """Places whose bytes grow from step to step after the first two; largest first."""
    ends = ends[2:]
    if not len(ends):
        return []
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(MOST_ENDS, len(ends))).astype(int))
    count, places = len(recording.places) + 1, first_equal(recording)[blocks.places]
    sizes, numbers = [], []
    for end in ends[chosen]:
        alive = blocks.alive_at(int(end), blocks.freed)
        sizes.append(np.bincount(places[alive], blocks.sizes[alive], count))
        numbers.append(np.bincount(places[alive], minlength=count))
    grows = growing_places(np.array(sizes), np.array(numbers))
    steps = int(chosen[-1] - chosen[0])
    found = [
        Growth(
            _place(recording, int(place)),
            int(sizes[-1][place] - sizes[0][place]) // steps,
            float(numbers[-1][place] - numbers[0][place]) / steps,
            int(sizes[-1][place]),
        )
        for place in np.flatnonzero(grows)
    ]
    return sorted(found, key=lambda growth: -growth.bytes_per_step)


def _place(recording: Recording, number: int) -> Origin:
    return recording.places[number] if number < len(recording.places) else BEFORE


def first_equal(recording: Recording) -> Ints:
    """The first place with the same origin as each, whatever called it."""
    first: dict[Origin, int] = {}
    places = enumerate([*recording.places, BEFORE])
    return np.array([first.setdefault(origin, number) for number, origin in places])


class _Finder:
    """Looks up states of a recording."""

    def __init__(self, recording: Recording, blocks: Blocks, allocated: Ints, reserved: Ints) -> None:
        self.recording, self.blocks, self.allocated, self.reserved = recording, blocks, allocated, reserved

    def seconds(self, event: int) -> float | None:
        times = self.recording.microseconds
        return float(times[max(event, 0)] - times[0]) / 1e6 if len(times) and times[0] else None

    def place(self, event: int) -> Origin | None:
        if event < 0 or self.recording.actions[event] not in (codes.ALLOC, codes.OOM):
            return None
        return self.recording.places[int(self.recording.stacks[event])]

    def moment(self, state: int, at_event: int | None = None) -> Moment:
        """The state before an event. at_event: the event that it is named by; default: the one that led to it."""
        event = state - 1 if at_event is None else at_event
        return Moment(
            event,
            self.seconds(event),
            int(self.allocated[state]),
            int(self.reserved[state]),
            self.place(event),
            self.alive(state),
            self.sizes(state),
            self.holes(state),
        )

    def alive(self, state: int) -> list[Alive]:
        """Bytes alive by place, largest first."""
        alive = self.blocks.alive_at(state, self.blocks.freed)
        places = first_equal(self.recording)[self.blocks.places[alive]]
        sizes, numbers = np.bincount(places, self.blocks.sizes[alive]), np.bincount(places)
        found = [
            Alive(_place(self.recording, int(place)), int(sizes[place]), int(numbers[place]))
            for place in np.flatnonzero(numbers)
        ]
        return sorted(found, key=lambda alive: -alive.bytes)

    def sizes(self, state: int) -> list[tuple[int, int, int]]:
        """Bytes alive by the size of their blocks."""
        sizes = self.blocks.sizes[self.blocks.alive_at(state, self.blocks.freed)]
        groups = np.searchsorted(SIZES, sizes, side="right") - 1
        sums, numbers = np.bincount(groups, sizes, len(SIZES)), np.bincount(groups, minlength=len(SIZES))
        found = zip(SIZES, sums.tolist(), numbers.tolist(), strict=True)
        return [(least, int(size), number) for least, size, number in found if number]

    def holes(self, state: int) -> list[Holes]:
        """The free memory in the segments, by pool."""
        recording = self.recording
        empty = [segment._replace(blocks={}) for segment in recording.segments]
        rows = recording.history.rows[state:]
        rows = rows[np.isin(rows[:, 0], (*codes.NEW_MEMORY, *codes.RELEASES))]
        segments = sorted(History(rows, empty, recording.settings).at_begin)
        used = self.blocks.alive_at(state, self.blocks.ended)
        order = np.argsort(self.blocks.addresses[used])
        begins = self.blocks.addresses[used][order]
        ends = begins + self.blocks.sizes[used][order]
        pools: dict[str, list[int]] = {}
        reserved: dict[str, int] = {}
        for segment in segments:
            name = "small" if segment.small else "large"
            name += f", stream {segment.stream}" if segment.stream else ""
            reserved[name] = reserved.get(name, 0) + segment.bytes
            inside = slice(*np.searchsorted(begins, (segment.address, segment.address + segment.bytes)))
            from_here = np.r_[segment.address, ends[inside]]
            to_there = np.r_[begins[inside], segment.address + segment.bytes]
            gaps = to_there - from_here
            pools.setdefault(name, []).extend(gaps[gaps > 0].tolist())
        return [Holes(name, reserved[name], sum(gaps), max(gaps, default=0), len(gaps)) for name, gaps in pools.items()]

    def placed(self, case: WhatIf) -> WhatIf:
        return case if case.failing_event is None else replace(case, failing_place=self.place(case.failing_event))

    def course(self, kept: Sequence[int]) -> Course:
        """What was alive over time by place and calls. kept: states to have in any case."""
        recording, blocks = self.recording, self.blocks
        states = np.array(highest(self.allocated, MOST_POINTS, kept))
        count = len(recording.places) + 1
        changes = np.zeros((len(states) + 1) * count)
        for events, sign in ((blocks.begin, 1), (blocks.freed, -1)):
            cells = np.searchsorted(states, events + 1) * count + blocks.places
            changes += sign * np.bincount(cells, blocks.sizes, len(changes))
        sizes = np.cumsum(changes.reshape(-1, count), axis=0).astype(np.int64)
        rows = (
            (state - 1, self.seconds(state - 1), row.tolist())
            for state, row in zip(states.tolist(), sizes, strict=False)
        )
        course = Course.of([*recording.places, BEFORE], rows, [*recording.calls, ()])
        return replace(course, reserved=self.reserved[states].tolist())

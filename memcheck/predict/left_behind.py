"""Puts back what a prediction left behind in caches, globals, classes, objects, lists and closures.

A prediction runs the user's own functions. What they store outside of the model's copy would hold tensors without data,
and the model itself would fail afterwards. A traced run knows the storages that it made. Only if one of them outlives
the run, its holders are searched. They get back what a shallow copy from before the run has, else they lose the
entry.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcheck.core.collector import collector_at_rest
from memcheck.core.tensors import storages_in
from memcheck.predict.held_state import UNSET, HeldState, is_plain, slots_of
from memcheck.predict.python_functions import EMPTY

# Levels of objects between a tensor and the holder that is older than the prediction.
MOST_LEVELS = 12
LRU_CACHE = type(functools.lru_cache(len))
# What may hold a tensor for a moment, and is no place where a function stores one.
PASSING = (types.FrameType, types.TracebackType, BaseException)


class LeftBehind:
    """What was there before a prediction, and the storages that its runs made.

    alive: functions that return the identities of the storages of a run that are alive.
    """

    def __init__(self, *roots: Any) -> None:
        self.before = HeldState(*roots)
        self.alive: list[Callable[[], set[int]]] = []

    def put_back(self) -> list[str]:
        """Puts everything back. Returns the names of the places where that is not possible."""
        if not self._storages():
            return []
        young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
        gc.collect(0)
        if not (storages := self._storages()):
            return []
        return Search(self.before, young, storages).put_back()

    def _storages(self) -> set[int]:
        return set().union(*(alive() for alive in self.alive))


@contextmanager
def nothing_left_behind(*roots: Any) -> Iterator[LeftBehind]:
    """Inside, a prediction may run functions of the user. Afterwards they find what they left before it.

    The garbage collector is disabled meanwhile, as in measurements: cycles of references stay alive, and all objects
    that are made are in its two young generations.
    """
    states = random_states()
    with collector_at_rest(generation=1):
        left = LeftBehind(*roots)
        try:
            yield left
        finally:
            try:
                places = left.put_back()
            finally:
                put_back_states(states)
            if places:
                words = (
                    f"the prediction left a tensor without data in {', '.join(places)}; take it out before you go on"
                )
                warnings.warn(words, stacklevel=7)


def random_states() -> list[tuple[Callable[[Any], None], Any]]:
    """The states of the random generators that probes and the user's functions use, with what sets them."""
    found: list[tuple[Callable[[Any], None], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    found.append((random.setstate, random.getstate()))
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    return found


def put_back_states(states: list[tuple[Callable[[Any], None], Any]]) -> None:
    for set_state, state in states:
        set_state(state)


class Search:
    """Finds the holders of tensors, and puts back what they held before.

    young: identities of the objects that the prediction made.
    """

    def __init__(self, before: HeldState, young: set[int], storages: set[int]) -> None:
        self.before = before
        self.young = young
        self.lost: set[int] = set()  # Identities of tensors without data, and of new objects that hold them.
        self.level = [thing for thing in gc.get_objects() if is_of(thing, storages)]
        self.old: dict[int, Any] = {}
        self.places: list[str] = []
        self.restored: set[int] = set()  # Identities of dicts.

    def put_back(self) -> list[str]:
        for _ in range(MOST_LEVELS):
            if not self.level:
                break
            self._look_up()
        for holder in list(self.old.values()):
            self._restore(holder)
        self.before.restore_plain_values(self.restored)
        return sorted(set(self.places))

    def _look_up(self) -> None:
        """Goes from the objects of this level to those that hold them."""
        ours = {id(self.level), id(self.old), id(vars(self)), id(self)}
        self.lost |= {id(thing) for thing in self.level}
        referrers = gc.get_referrers(*self.level)
        ours |= {id(referrers), *self.lost}
        holders = [it for it in referrers if id(it) not in ours and not isinstance(it, PASSING)]
        old = [holder for holder in holders if not self._is_young(holder)]
        for thing in self.level:
            if type(thing) is dict and any(self._held_before(thing, holder) for holder in old):
                self.lost.discard(id(thing))
                self.old[id(thing)] = thing
        self.old |= {id(holder): holder for holder in old if any(map(self.is_lost, gc.get_referents(holder)))}
        self.level = [holder for holder in holders if self._is_young(holder)]

    def _is_young(self, thing: Any) -> bool:
        return id(thing) in self.young and self.before.of(thing) is None

    def _held_before(self, thing: dict[Any, Any], holder: Any) -> bool:
        """Whether an old holder held a dict before the prediction, as far as that is known.

        Python adds a dict to the young generation only when its first entry comes that may be part of a cycle.
        """
        if not holds(holder, thing):
            return False
        known = self.before.of(holder)
        if known is None or not isinstance(holder, dict | list | set | deque | types.CellType):
            return True
        return any(part is thing for part in (known.values() if isinstance(known, dict) else known))

    def _restore(self, holder: Any) -> None:
        restore = next((restore for kinds, restore in RESTORERS if isinstance(holder, kinds)), None)
        try:
            if restore is not None:
                restore(self, holder)
            if not self._restore_attributes(holder) and restore is None:
                self.places.append(f"a {type(holder).__name__}")
        except Exception:
            self.places.append(f"a {type(holder).__name__}")

    def is_lost(self, thing: Any) -> bool:
        return id(thing) in self.lost

    def restore_dict(self, holder: dict[Any, Any]) -> None:
        lost = [key for key, value in holder.items() if self.is_lost(value) or self.is_lost(key)]
        if not lost:
            return
        self.restored.add(id(holder))
        owners: list[Any] = gc.get_referrers(holder)
        owners = [owner for owner in owners if isinstance(owner, LRU_CACHE | type) and holds(owner, holder)]
        if caches := [owner for owner in owners if isinstance(owner, LRU_CACHE)]:
            caches[0].cache_clear()
            return
        gone = (self.before.of(holder) or {}).keys() - holder.keys()
        for key in (*lost, *gone):
            self.before.put(holder, key, next(iter(owners), None))

    def restore_list(self, holder: list[Any] | deque[Any]) -> None:
        known = list(self.before.of(holder) or ())
        kept = [part for part in holder if not self.is_lost(part)]
        identities = {id(part) for part in known}
        if any(id(part) not in identities for part in kept):  # Somebody else added to it.
            old = known + [EMPTY] * len(holder)
            new = [old[place] if self.is_lost(part) else part for place, part in enumerate(holder)]
            new = [part for part in new if part is not EMPTY]
        else:
            new = known if known else kept
        holder.clear()
        holder.extend(new)

    def restore_set(self, holder: set[Any]) -> None:
        for part in [part for part in holder if self.is_lost(part)]:
            holder.discard(part)
        holder |= self.before.of(holder) or set()

    def restore_cell(self, cell: types.CellType) -> None:
        known = self.before.of(cell)
        if known is None:
            self.places.append("a variable of a closure")
        else:
            cell.cell_contents = known[0]

    def _restore_attributes(self, holder: Any) -> bool:
        """Puts back the attributes of an object. False if none of them holds a lost tensor."""
        found = False
        if isinstance(getattr(holder, "__dict__", None), dict):
            found = any(map(self.is_lost, vars(holder).values()))
            self.restore_dict(vars(holder))
        return self._restore_slots(holder) or found

    def _restore_slots(self, holder: Any) -> bool:
        now = slots_of(holder)
        if not any(map(self.is_lost, now.values())):
            return False
        before = self.before.slots_of(holder)
        for slot, value in now.items():
            known = before.get(slot, UNSET)
            if self.is_lost(value) and known is UNSET:
                slot.__delete__(holder)
            elif self.is_lost(value) or (value is not known and is_plain(value) and is_plain(known)):
                slot.__set__(holder, known)
        return True


RESTORERS: list[tuple[Any, Callable[[Search, Any], None]]] = [
    (LRU_CACHE, lambda search, holder: holder.cache_clear()),
    (dict, Search.restore_dict),
    ((list, deque), Search.restore_list),
    (set, Search.restore_set),
    (types.CellType, Search.restore_cell),
]


def holds(holder: Any, thing: Any) -> bool:
    return any(part is thing for part in gc.get_referents(holder))


def is_of(thing: Any, storages: set[int]) -> bool:
    """Whether it is a tensor or a storage of these."""
    kind = type(thing)
    if issubclass(kind, torch.UntypedStorage):
        return thing._cdata in storages
    if not issubclass(kind, torch.Tensor):
        return False
    try:
        return any(storage._cdata in storages for storage in storages_in(thing))
    except Exception:  # Tensors of functorch, lazy ones and others have no storage.
        return False

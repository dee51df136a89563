"""Names the places where a prediction left tensors without data, with the lines that clear them.

A prediction runs the user's own functions with a copy of the model. What they store elsewhere, in globals, caches,
closures and objects, stays there, and the model itself would fail on it. A traced run knows the storages that it made:
if one of them outlives the run, its holders are searched, and a warning names them. Nothing of them is changed.
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

from memcheck.core.optimizers import collector_at_rest
from memcheck.core.tensors import storages_in

# Levels of objects between a tensor and the holder that is older than the prediction, and from there to a name.
MOST_LEVELS, MOST_NAMES = 12, 4
LRU_CACHE = type(functools.lru_cache(len))
CONTAINERS = (dict, list, deque, set)
# What may hold a tensor for a moment, and is no place where a function stores one.
PASSING = (types.FrameType, types.TracebackType, BaseException)

Alive = list[Callable[[], set[int]]]  # Functions that return the identities of the storages of a run that are alive.


@contextmanager
def left_behind_named() -> Iterator[Alive]:
    """Inside, a prediction may run functions of the user. Afterwards random states are as before it.

    Yields a list, to which each run adds its storages.
    The garbage collector is disabled meanwhile, as in measurements: cycles of references stay alive, and all objects
    that are made are in its two young generations.
    """
    states = random_states()
    alive: Alive = []
    with collector_at_rest(generation=1):
        try:
            yield alive
        finally:
            for set_state, state in states:
                set_state(state)
            if any(identities() for identities in alive):
                gc.collect(0)
            storages = set[int]().union(*(identities() for identities in alive))
            if storages and (lines := Holders(storages).clearing_lines()):
                words = "the prediction left tensors without data, on which the model will fail; clear them by"
                warnings.warn(f"{words} {'; '.join(lines)}", stacklevel=7)


def random_states() -> list[tuple[Callable[[Any], None], Any]]:
    """The states of the random generators that probes and the user's functions use, with what sets them."""
    found: list[tuple[Callable[[Any], None], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    found.append((random.setstate, random.getstate()))
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    return found


class Holders:
    """Finds the objects from before a prediction that hold tensors of these storages, which it left behind.

    Objects from before it are in the oldest generation of the garbage collector. A dict is new with its first entry.
    """

    def __init__(self, storages: set[int]) -> None:
        self.old = {id(thing) for thing in gc.get_objects(2)}
        self.new = [thing for thing in gc.get_objects() if is_of(thing, storages)]
        self.lost: set[int] = set()  # Identities of the tensors and of new objects that hold them.

    def clearing_lines(self) -> list[str]:
        """The lines that take the tensors out of the objects from before."""
        lines, level = set[str](), self.new
        young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
        for _ in range(MOST_LEVELS):
            self.lost |= set(map(id, level))
            holders = gc.get_referrers(*level) if level else []
            for holder in holders:
                if id(holder) in self.old and not isinstance(holder, PASSING):
                    lines |= {
                        self.clearing_line(holder, part) for part in gc.get_referents(holder) if id(part) in self.lost
                    }
            level = [
                it for it in holders if id(it) in young and id(it) not in self.lost and not isinstance(it, PASSING)
            ]
        # DTensor keeps what it computed of a mesh by the mesh, and those of a prediction are made anew.
        return sorted(line for line in lines if "torch.distributed." not in line)

    def clearing_line(self, holder: Any, thing: Any) -> str:
        """The line that takes a new thing out of an old object."""
        if isinstance(holder, LRU_CACHE):
            return f"{self.written(holder)}.cache_clear()"
        attributes: Any = getattr(holder, "__dict__", None)
        if thing is attributes:
            thing = next(value for value in attributes.values() if id(value) in self.lost)
        if isinstance(thing, CONTAINERS):
            return f"{self.written(thing)}.clear()"
        if isinstance(holder, (list, deque, set)):
            return f"{self.written(holder)}.clear()"
        place = self.written(thing)
        if place.startswith("<"):
            return f"dropping {self.written(holder)}"
        return f"del {place}" if place.endswith("]") else f"{place} = None"

    def written(self, thing: Any, depth: int = MOST_NAMES) -> str:
        """How code names an object: by the global, class, attribute, entry or variable that holds it; else its type."""
        if isinstance(thing, (type, types.FunctionType, LRU_CACHE)):
            return f"{thing.__module__}.{thing.__qualname__}"
        holders = gc.get_referrers(thing) if depth else []
        names = (name for holder in holders if (name := self.name_in(holder, thing, depth - 1)))
        return next(names, f"<{type(thing).__qualname__}>")

    def name_in(self, holder: Any, thing: Any, depth: int) -> str:
        """How code names an object that the holder holds; empty if this is no place of the user's code."""
        if isinstance(holder, dict):
            key = next((key for key, value in holder.items() if value is thing), None)
            file = sys.modules.get(str(holder.get("__name__")))
            if file is not None and vars(file) is holder:
                return f"{file.__name__}.{key}"
            for owner in gc.get_referrers(holder):
                if isinstance(owner, LRU_CACHE):
                    return self.written(owner)
                if isinstance(owner, type) or getattr(owner, "__dict__", None) is holder:
                    return f"{self.written(owner, depth)}.{key}"
            return f"{self.written(holder, depth)}[{key!r}]" if isinstance(key, str | int | tuple) else ""
        if id(holder) not in self.old or isinstance(holder, PASSING):
            return ""
        if isinstance(holder, types.CellType):
            functions = (it for closure in gc.get_referrers(holder) for it in gc.get_referrers(closure))
            for function in (it for it in functions if isinstance(it, types.FunctionType)):
                cells = dict(zip(map(id, function.__closure__ or ()), function.__code__.co_freevars, strict=True))
                if id(holder) in cells:
                    return f"({cells[id(holder)]} of {self.written(function)})"
            return ""
        if isinstance(holder, list | tuple | deque):
            return f"{self.written(holder, depth)}[{[part is thing for part in holder].index(True)}]"
        name = next((name for name in attributes_of(holder) if getattr(holder, name, None) is thing), None)
        return "" if name is None else f"{self.written(holder, depth)}.{name}"


def attributes_of(thing: Any) -> list[str]:
    """The names of the attributes and the slots of an object."""
    slots = (name for base in type(thing).__mro__ for name in vars(base).get("__slots__", ()))
    return [*getattr(thing, "__dict__", ()), *slots, "__defaults__", "__kwdefaults__"]


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

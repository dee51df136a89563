"""What a model's functions reach: copies that call meta copies of modules, and where a prediction left tensors.

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
from torch.autograd.graph import Node, get_gradient_edge

from memcheck.core.optimizers import collector_at_rest
from memcheck.core.tensors import HOOKS, storages_in
from memcheck.predict.python_functions import EMPTY, contents_of, names_in

# Packages whose functions reach no module of the user by themselves.
LIBRARIES = frozenset(["torch", "numpy", "builtins", "functools", "memcheck", "copy", "math", "itertools", "typing"])
DEEPEST = 6
MOST_ITEMS = 10_000
PARTS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.Tensor)


class Reaching:
    """Copies what reaches a module, an optimizer, a scaler or a tensor that has a copy, and nothing else.

    copied_part: returns the copy of such a part; a tensor without one itself.
    """

    def __init__(self, copied_part: Callable[[Any], Any]) -> None:
        self.copied_part = copied_part
        self._reaches: dict[int, bool] = {}
        self._copies: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}  # Functions of a file share its globals, and so do their copies.
        self._cells: dict[int, types.CellType] = {}  # Copies of the variables of closures.
        self._kept: list[Any] = []  # Keeps the identities valid.

    def copied(self, thing: Any) -> Any:
        """The thing with copies for the parts that it reaches; itself if there are none."""
        if isinstance(thing, PARTS):
            return self.copied_part(thing)
        if id(thing) in self._copies:
            return self._copies[id(thing)]
        if not self.reaches(thing):
            return thing
        if is_accumulator(thing):
            return get_gradient_edge(self.copied_part(thing.variable)).node
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        made = self._made(thing)
        self._copies[id(thing)] = made
        return made

    def replace_functions(self, module: torch.nn.Module) -> None:
        """Replaces the functions that a copied module has as attributes and hooks."""
        for named in (vars(module), *(part for part in vars(module).values() if isinstance(part, dict))):
            for name, part in list(named.items()):
                if isinstance(part, types.FunctionType) and (new := self.copied(part)) is not part:
                    named[name] = new

    def reaches(self, thing: Any, depth: int = 0) -> bool:
        if isinstance(thing, torch.Tensor) or is_accumulator(thing):
            tensor = thing if isinstance(thing, torch.Tensor) else thing.variable
            return self.copied_part(tensor) is not tensor
        if isinstance(thing, PARTS):
            return True
        if depth > DEEPEST or isinstance(thing, type | types.ModuleType | str | bytes | int | float):
            return False
        if id(thing) not in self._reaches:
            self._kept.append(thing)
            self._reaches[id(thing)] = False  # For a cycle.
            self._reaches[id(thing)] = any(self.reaches(part, depth + 1) for part in parts_of(thing))
        return self._reaches[id(thing)]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        before = function.__globals__
        known = self._globals.setdefault(id(before), {**before})
        fresh = [cell for cell in function.__closure__ or () if id(cell) not in self._cells]
        self._cells |= {id(cell): types.CellType() for cell in fresh}  # Functions may share a variable.
        cells = tuple(self._cells[id(cell)] for cell in function.__closure__ or ())
        new = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, cells)
        self._copies[id(function)] = new
        functools.update_wrapper(new, function, functools.WRAPPER_ASSIGNMENTS)
        vars(new).pop("__wrapped__", None)
        vars(new).update(vars(function))
        new.__kwdefaults__ = function.__kwdefaults__ and self.copied(function.__kwdefaults__)
        new.__defaults__ = function.__defaults__ and self.copied(function.__defaults__)
        for name in names_in(function.__code__):
            if name in before and self.reaches(before[name]):
                known[name] = self.copied(before[name])
        for cell in fresh:
            if (held := contents_of(cell)) is not EMPTY:
                self._cells[id(cell)].cell_contents = self.copied(held)
        return new

    def _made(self, thing: Any) -> Any:
        if isinstance(thing, functools.partial):
            arguments = map(self.copied, thing.args)
            return type(thing)(self.copied(thing.func), *arguments, **self.copied(thing.keywords))
        if isinstance(thing, types.MethodType):
            return types.MethodType(thing.__func__, self.copied(thing.__self__))
        if isinstance(thing, dict):
            new = thing.copy()
            new.clear()
            new.update((self.copied(name), self.copied(part)) for name, part in thing.items())
            return new
        if type(thing) in (list, tuple, set):
            return type(thing)(map(self.copied, thing))
        new = object.__new__(type(thing))
        self._copies[id(thing)] = new  # Its parts may hold it.
        vars(new).update((name, self.copied(part)) for name, part in vars(thing).items())
        return new


def parts_of(thing: Any) -> Iterator[Any]:
    """The objects in a function, a partial, a method, a container or a plain object."""
    if isinstance(thing, types.FunctionType):
        if (thing.__module__ or "").partition(".")[0] in LIBRARIES and not thing.__closure__:
            return
        yield from thing.__defaults__ or ()
        yield from (thing.__kwdefaults__ or {}).values()
        yield from (held for cell in thing.__closure__ or () if (held := contents_of(cell)) is not EMPTY)
        yield from (thing.__globals__[name] for name in names_in(thing.__code__) if name in thing.__globals__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield thing.__self__
    elif isinstance(thing, dict) and len(thing) <= MOST_ITEMS:
        yield from (*thing, *thing.values())
    elif type(thing) in (list, tuple, set) and len(thing) <= MOST_ITEMS:
        yield from thing
    elif is_plain_object(thing):
        yield from list(vars(thing).values())


def scripted_in(*things: Any) -> list[str]:
    """Names of functions compiled by TorchScript that the things, or functions that they reach, name or hold."""
    found, seen, waiting = list[str](), set[int](), list(things)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.jit.ScriptFunction):
            found.append(getattr(thing, "name", "a function"))
        elif id(thing) not in seen and not isinstance(thing, torch.Tensor):
            seen.add(id(thing))
            waiting += parts_of(thing)
            if isinstance(thing, types.FunctionType):
                names = set(names_in(thing.__code__))
                for module in filter(is_of_user, map(thing.__globals__.get, names)):
                    waiting += [vars(module)[name] for name in names & vars(module).keys()]
            if isinstance(thing, torch.nn.Module) and not isinstance(thing, torch.jit.ScriptModule):
                waiting += [type(thing).forward, *thing.children()]
    return found


def is_of_user(thing: Any) -> bool:
    """Whether it is a Python module outside of the libraries."""
    return isinstance(thing, types.ModuleType) and thing.__name__.partition(".")[0] not in LIBRARIES


def is_accumulator(thing: Any) -> bool:
    """Whether it is the node of autograd that adds to a tensor's .grad."""
    return type(thing).__name__ == "AccumulateGrad" and isinstance(thing, Node)


def has_hooks_of_accumulator(tensor: torch.Tensor) -> bool:
    """Whether functions run before or after autograd adds to the tensor's .grad, besides its own hooks."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    own = [id(hooks.__get__(tensor)) for hooks in HOOKS]
    held = gc.get_referents(get_gradient_edge(tensor).node)
    return any(isinstance(part, dict) and part and id(part) not in own for part in held)


def is_plain_object(thing: Any) -> bool:
    """Whether its attributes are all that it holds, so that a copy can be made of them."""
    kind = type(thing)
    return (
        kind.__module__.partition(".")[0] not in LIBRARIES
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__basicsize__ <= object.__basicsize__ + 16
        and hasattr(thing, "__dict__")
    )


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

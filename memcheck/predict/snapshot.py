"""A shallow copy of what the functions of a model can reach and may change."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from memcheck.predict.reached import EMPTY, LIBRARIES, contents_of, is_plain_object, names_in

# Objects that are looked at, nearest first, and entries of a container up to which it is copied.
MOST_OBJECTS = 5_000
MOST_ENTRIES = 20_000
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Snapshot:
    """What namespaces and containers hold: globals, attributes of classes and objects, cells, and their containers.

    They are those that functions of the roots name, and functions that these name. Modules in the roots are copied by
    a prediction, so their own attributes are not part of it.
    """

    def __init__(self, *roots: Any) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # By identity: the object, and a copy of what it holds.
        self.scripted: list[str] = []  # Names of functions that TorchScript compiled.
        self.classes: dict[int, type] = {}  # By the identity of the dict of their attributes.
        self._names: set[str] = set()  # That the functions use.
        self._seen: set[int] = set()
        self._queue: deque[Any] = deque()
        for root in roots:
            modules = list(modules_in(root))
            self._seen |= set(map(id, modules))
            for module in modules:
                self._visit_module(module)
            self._add(root)
        while self._queue and len(self._seen) < MOST_OBJECTS:
            self._visit(self._queue.popleft())
        self._queue.clear()

    def of(self, holder: Any) -> Any:
        """What the object held; None if it is not known."""
        found = self._known.get(id(holder))
        return None if found is None else found[1]

    def restore_plain_values(self) -> None:
        """Gives numbers, strings and the like that functions have changed their values from before.

        A cache that is emptied again must not remember the size that it had.
        """
        for holder, before in list(self._known.values()):
            for name in before.keys() & holder.keys() & self._names if isinstance(before, dict) else ():
                value, found = before[name], holder[name]
                if found is not value and isinstance(found, PLAIN) and isinstance(value, PLAIN):
                    self.put(holder, name)

    def put(self, holder: dict[Any, Any], key: Any, owner: type | None = None) -> None:
        """Gives an entry of a dict, or an attribute of the class that owns it, its value from before, or removes it."""
        known, owner = self.of(holder) or {}, owner or self.classes.get(id(holder))
        if owner is not None:
            setattr(owner, key, known[key]) if key in known else delattr(owner, key)
        elif key in known:
            holder[key] = known[key]
        else:
            del holder[key]

    def _visit_module(self, module: torch.nn.Module) -> None:
        """Adds the class of a module that is copied, and its functions and hooks."""
        self._add(type(module))
        for part in vars(module).values():
            for function in part.values() if isinstance(part, dict) else (part,):
                if isinstance(function, types.FunctionType | types.MethodType | functools.partial):
                    self._add(function)

    def _add(self, *things: Any) -> None:
        for thing in things:
            if id(thing) not in self._seen and not isinstance(thing, PLAIN) and not isinstance(thing, torch.Tensor):
                self._seen.add(id(thing))
                self._queue.append(thing)

    def _save(self, holder: Any, held: Any) -> None:
        if id(holder) not in self._known and (not hasattr(held, "__len__") or len(held) <= MOST_ENTRIES):
            self._known[id(holder)] = holder, held.copy() if isinstance(held, dict | list | set | deque) else held

    def _visit(self, thing: Any) -> None:
        if isinstance(thing, types.FunctionType):
            self._visit_function(thing)
        elif isinstance(thing, type):
            self._visit_class(thing)
        elif isinstance(thing, types.MethodType):
            self._add(thing.__func__, thing.__self__)
        elif isinstance(thing, functools.partial):
            self._add(thing.func, *thing.args, *thing.keywords.values())
        elif isinstance(thing, classmethod | staticmethod):
            self._add(thing.__func__)
        elif isinstance(thing, property):
            self._add(thing.fget, thing.fset)
        elif isinstance(thing, dict):
            self._save(thing, thing)
            self._add(*list(thing.values())[:MOST_OBJECTS])
        elif isinstance(thing, list | deque | set):
            self._save(thing, thing)
            self._add(*list(thing)[:MOST_OBJECTS])
        elif isinstance(thing, tuple):
            self._add(*thing)
        elif isinstance(thing, torch.nn.Module) or is_plain_object(thing):
            self._save(vars(thing), vars(thing))
            self._add(type(thing), *vars(thing).values())
        elif isinstance(thing, torch.jit.ScriptFunction):
            self.scripted.append(getattr(thing, "name", "a function"))
        else:
            self._add(getattr(thing, "__wrapped__", None))  # Of functools.lru_cache.

    def _visit_function(self, function: types.FunctionType) -> None:
        self._add(getattr(function, "__wrapped__", None), *(function.__defaults__ or ()))
        self._add(*(function.__kwdefaults__ or {}).values())
        for cell in function.__closure__ or ():
            if (held := contents_of(cell)) is not EMPTY:
                self._save(cell, (held,))
                self._add(held)
        if is_of_library(function.__module__):
            return
        if vars(function):
            self._save(vars(function), vars(function))
        names = names_of(function.__code__)
        self._names |= names
        self._save(function.__globals__, function.__globals__)
        found = [function.__globals__[name] for name in names if name in function.__globals__]
        self._add(*found)
        for file in found:
            if isinstance(file, types.ModuleType) and not is_of_library(file.__name__):
                self._save(vars(file), vars(file))
                self._add(*(vars(file)[name] for name in names if name in vars(file)))

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not is_of_library(base.__module__):
                (namespace,) = gc.get_referents(vars(base))
                self._save(namespace, namespace)
                self.classes[id(namespace)] = base
                self._add(*vars(base).values())


def modules_in(thing: Any) -> Iterator[torch.nn.Module]:
    """The modules that a copy replaces."""
    while isinstance(thing, functools.partial | types.MethodType):
        thing = thing.func if isinstance(thing, functools.partial) else thing.__self__
    if isinstance(thing, torch.nn.Module):
        yield from thing.modules()


def is_of_library(name: str | None) -> bool:
    root = (name or "").partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names


@functools.lru_cache(maxsize=20_000)
def names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(names_in(code))

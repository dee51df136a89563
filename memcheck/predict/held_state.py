"""A shallow copy of what the functions of a model can reach and may change."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch

from memcheck.predict.python_functions import EMPTY, contents_of, names_in
from memcheck.predict.reached import LIBRARIES, hooks_of

# Objects that are looked at, nearest first; parts of a container that are; entries up to which it is copied.
MOST_OBJECTS = 5_000
MOST_PARTS = 1_000
MOST_ENTRIES = 20_000
UNSET = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
NO_HOLDERS = (*PLAIN, torch.Tensor, types.ModuleType)
CONTAINERS = (dict, list, deque, set, tuple, frozenset)


class HeldState:
    """Contents of namespaces and containers: globals, attributes of classes and objects, cells, and their containers.

    They are those that functions of the roots name or hold, and functions that these name, with the attributes of all
    objects on the way, of libraries too. Modules in the roots are copied by a prediction, so their own attributes are
    not part of it.
    """

    def __init__(self, *roots: Any) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # By identity: the object, and a copy of what it holds.
        self._slots: dict[int, tuple[Any, dict[Any, Any]]] = {}  # By identity: the object, and its slots.
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
        for _ in range(MOST_OBJECTS):
            if not self._queue:
                break
            self._visit(self._queue.popleft())
        self._queue.clear()

    def of(self, holder: Any) -> Any:
        """The contents of the object; None if they are not known."""
        found = self._known.get(id(holder))
        return None if found is None else found[1]

    def slots_of(self, holder: Any) -> dict[Any, Any]:
        """The contents of the object's slots."""
        return self._slots.get(id(holder), (None, {}))[1]

    def restore_plain_values(self, dicts: Collection[int]) -> None:
        """Gives numbers, strings and the like that functions have changed their values from before.

        A cache that is emptied again must not remember the size that it had.

        dicts: the identities of those in which all values are restored. In others, those whose names the functions use.
        """
        for holder, before in list(self._known.values()):
            if not isinstance(before, dict):
                continue
            names = before.keys() & holder.keys()
            for name in names if id(holder) in dicts else names & self._names:
                value, found = before[name], holder[name]
                if found is not value and is_plain(found) and is_plain(value):
                    self.put(holder, name)

    def put(self, holder: dict[Any, Any], key: Any, owner: type | None = None) -> None:
        """Gives an entry of a dict, or an attribute of the class that owns it, its value from before, or removes it."""
        known, owner = self.of(holder) or {}, owner or self.classes.get(id(holder))
        if owner is not None:
            setattr(owner, key, known[key]) if key in known else delattr(owner, key)
        elif key in known:
            holder[key] = known[key]
        elif self.of(holder) is None and (value := first_value(holder, key)) is not UNSET:
            holder[key] = value
        else:
            del holder[key]

    def _visit_module(self, module: torch.nn.Module) -> None:
        """Adds the class of a module that is copied, its functions and hooks, and the hooks of its tensors."""
        self._add(type(module))
        for part in vars(module).values():
            for held in part.values() if isinstance(part, dict) else (part,):
                if isinstance(held, types.FunctionType | types.MethodType | functools.partial | torch.Tensor):
                    self._add(held)

    def _add(self, *things: Any) -> None:
        for thing in things:
            if isinstance(thing, torch.Tensor):
                self._add(*hooks_of(thing))
            elif id(thing) not in self._seen and not isinstance(thing, NO_HOLDERS):
                self._seen.add(id(thing))
                self._queue.append(thing)

    def _save(self, holder: Any, held: Any) -> None:
        if id(holder) not in self._known and (not hasattr(held, "__len__") or len(held) <= MOST_ENTRIES):
            self._known[id(holder)] = holder, copied(held)

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
        elif isinstance(thing, types.BuiltinMethodType):
            self._add(thing.__self__)
        elif isinstance(thing, torch.jit.ScriptFunction):
            self.scripted.append(getattr(thing, "name", "a function"))
        else:
            self._visit_object(thing)

    def _visit_object(self, thing: Any) -> None:
        """Saves the parts of a container, and the attributes of an object."""
        if isinstance(thing, dict | list | deque | set):
            self._save(thing, thing)
            parts = list(dict.values(thing) if isinstance(thing, dict) else thing)
            self._add(*parts[:MOST_PARTS])
        elif isinstance(thing, tuple | frozenset):
            self._add(*itertools.islice(thing, MOST_PARTS))
        if type(thing) in CONTAINERS:
            return
        self._add(type(thing))
        attributes, slots = attributes_of(thing), slots_of(thing)
        if attributes is not None:
            self._save(attributes, attributes)
            self._add(*attributes.values())
        if slots:
            self._slots[id(thing)] = thing, slots
            self._add(*slots.values())

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


def first_value(namespace: dict[Any, Any], name: str) -> Any:
    """The constant that a file gives its global of that name, such as None for a cache; UNSET if it gives none."""
    file = sys.modules.get(namespace.get("__name__", ""))
    if file is None or vars(file) is not namespace:
        return UNSET
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        for line in ast.parse(inspect.getsource(file)).body:
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return ast.literal_eval(line.value)  # type: ignore[attr-defined]
    return UNSET


def modules_in(thing: Any) -> Iterator[torch.nn.Module]:
    """The modules that a copy replaces."""
    while isinstance(thing, functools.partial | types.MethodType):
        thing = thing.func if isinstance(thing, functools.partial) else thing.__self__
    if isinstance(thing, torch.nn.Module):
        yield from thing.modules()


def is_plain(thing: Any) -> bool:
    return isinstance(thing, PLAIN)


def copied(held: Any) -> Any:
    """A copy of a container, for which no function of the user runs."""
    if isinstance(held, dict):
        return dict.copy(held)
    if isinstance(held, list | deque):
        return list(held)
    return set(held) if isinstance(held, set) else held


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; None if it has none."""
    try:
        found = getattr(thing, "__dict__", None)
    except Exception:  # Some objects stand for others, which may be missing.
        return None
    return found if isinstance(found, dict) else None


def slots_of(thing: Any) -> dict[Any, Any]:
    """What the slots that are set hold, by their descriptors, which ignore what the class does in __setattr__."""
    found = {}
    for slot in slots_in(type(thing)):
        with suppress(AttributeError):
            found[slot] = slot.__get__(thing)
    return found


def slots_in(kind: type) -> list[Any]:
    """The descriptors of the slots of a class."""
    spaces = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [part for space in spaces for part in space.values() if isinstance(part, types.MemberDescriptorType)]


def is_of_library(name: str | None) -> bool:
    root = (name or "").partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names


@functools.lru_cache(maxsize=20_000)
def names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(names_in(code))

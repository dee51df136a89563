"""A shallow copy of what the functions of a model can reach and may change."""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import inspect
import io
import itertools
import logging
import random
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch

from memcheck.core.tensors import hooks_of
from memcheck.predict.python_functions import EMPTY, contents_of, names_in
from memcheck.predict.reached import LIBRARIES

# Objects that are looked at, nearest first; parts of a container that are; entries up to which it is copied.
MOST_OBJECTS = 5_000
MOST_PARTS = 1_000
MOST_ENTRIES = 20_000
UNSET = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
NO_HOLDERS = (*PLAIN, torch.Tensor, types.ModuleType)
CONTAINERS = (dict, list, deque, set, tuple, frozenset)
# Containers that need no look while they are empty.
EMPTIABLE = (dict, OrderedDict, list, deque, set)
# Objects whose state decides nothing that a model allocates.
OF_NO_MODEL = (logging.Filterer, logging.Manager, re.Pattern, dataclasses.Field, io.IOBase, types.GetSetDescriptorType)
# Objects whose state only C can see, and the modules of such classes.
HIDDEN = (Iterator, bytearray, memoryview, random.Random, torch.Generator)
HIDDEN_OF = ("numpy", "numpy.random._generator", "numpy.random.mtrand", "array", "_ctypes")


class HeldState:
    """Contents of namespaces and containers: globals, attributes of classes and objects, cells, and their containers.

    They are those that functions of the roots name or hold, and functions that these name, with the attributes of all
    objects on the way, of libraries too. Modules in the roots are copied by a prediction, so their own attributes are
    not part of it.

    most: objects that are looked at, nearest first.
    to_compare: look only at what `values` compares. Methods of classes are looked at if a function that is looked at
        names them; one that is called by a computed name is missed.
    is_whole: nothing was left out.
    """

    def __init__(self, *roots: Any, most: int = MOST_OBJECTS, to_compare: bool = False) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # By identity: the object, and a copy of what it holds.
        self._slots: dict[int, tuple[Any, dict[Any, Any]]] = {}  # By identity: the object, and its slots.
        self.scripted: list[str] = []  # Names of functions that TorchScript compiled.
        self.classes: dict[int, type] = {}  # By the identity of the dict of their attributes.
        self._names: set[str] = {"forward"} if to_compare else set()  # That the functions use.
        self._waiting: dict[str, list[Any]] | None = {} if to_compare else None  # Functions of classes by name.
        self._seen: set[int] = set()
        self._queue: deque[Any] = deque()
        for root in roots:
            modules = list(modules_in(root))
            self._seen |= set(map(id, modules))
            for module in modules:
                self._visit_module(module)
            self._add(root)
        self.is_whole = True
        for _ in range(most):
            if not self._queue:
                break
            self._visit(self._queue.popleft())
        self.is_whole &= not self._queue
        self._queue.clear()

    @property
    def values(self) -> list[Any] | None:
        """All that is held, as values that keep nothing alive: numbers and strings as they are, else identities.

        None: something was left out.
        """
        held = [(key, tokens_of(before)) for key, (_, before) in self._known.items()]
        slots = [(key, tokens_of(before)) for key, (_, before) in self._slots.items()]
        return held + slots if self.is_whole else None

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
            elif id(thing) not in self._seen and not isinstance(thing, NO_HOLDERS) and not is_ours(thing):
                if self._waiting is not None and is_left_out(thing):
                    continue
                self._seen.add(id(thing))
                self._queue.append(thing)

    def _save(self, holder: Any, held: Any) -> None:
        if id(holder) in self._known:
            return
        if hasattr(held, "__len__") and len(held) > MOST_ENTRIES:
            self.is_whole = False
        else:
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
        elif isinstance(thing, types.GeneratorType):
            self._known[id(thing)] = thing, [thing.gi_frame.f_lasti if thing.gi_frame else None]
        elif isinstance(thing, itertools.count):
            self._known[id(thing)] = thing, [repr(thing)]
        elif isinstance(thing, torch.jit.ScriptFunction):
            self.scripted.append(getattr(thing, "name", "a function"))
        else:
            self._visit_object(thing)

    def _visit_object(self, thing: Any) -> None:
        """Saves the parts of a container, and the attributes of an object."""
        self.is_whole &= not isinstance(thing, HIDDEN) and type(thing).__module__ not in HIDDEN_OF
        if isinstance(thing, dict | list | deque | set):
            self._save(thing, thing)
            parts = list(dict.values(thing) if isinstance(thing, dict) else thing)
            self._add(*parts[:MOST_PARTS])
            self.is_whole &= all(map(is_plain, parts[MOST_PARTS:]))
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
        if self._waiting:
            self._add(*(part for name in names for part in self._waiting.pop(name, ())))
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
                for name, part in vars(base).items():
                    if self._waiting is None or not is_function(part) or name in self._names or name.startswith("__"):
                        self._add(part)
                    else:
                        self._waiting.setdefault(name, []).append(part)


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


def tokens_of(held: Any) -> Any:
    """What a copy of a container holds, as values that can be compared."""
    if isinstance(held, set):
        return set(map(token_of, held))
    if isinstance(held, dict):
        return [(token_of(key), token_of(value)) for key, value in held.items()]
    return list(map(token_of, held))


def token_of(thing: Any) -> Any:
    """A value that stands for the object, and keeps nothing alive."""
    if isinstance(thing, int):
        return type(thing), thing
    if isinstance(thing, torch.Tensor):
        return id(thing), thing.shape, thing.dtype, thing.requires_grad
    if type(thing) in EMPTIABLE and not thing:
        return id(thing), None
    return thing if is_plain(thing) else id(thing)


def is_left_out(thing: Any) -> bool:
    """Whether a comparison needs no look at it: token_of tells whether it is still empty, or it steers no model."""
    return (type(thing) in EMPTIABLE and not thing) or isinstance(thing, OF_NO_MODEL) or thing is sys.modules


def is_function(thing: Any) -> bool:
    return isinstance(thing, types.FunctionType | classmethod | staticmethod | property)


def is_plain(thing: Any) -> bool:
    return isinstance(thing, PLAIN)


def copied(held: Any) -> Any:
    """A copy of a container, for which no function of the user runs."""
    if isinstance(held, dict):
        return dict(dict.items(held))
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


def is_ours(thing: Any) -> bool:
    """Whether it is a part of the prediction itself."""
    return type(thing).__module__.startswith(("memcheck.core.", "memcheck.predict."))


@functools.lru_cache(maxsize=20_000)
def names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(names_in(code))

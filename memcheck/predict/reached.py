"""Copies of functions whose closures, globals or bound arguments reach modules: they call meta copies of these."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Packages whose functions reach no module of the user by themselves.
LIBRARIES = frozenset(["torch", "numpy", "builtins", "functools", "memcheck", "copy", "math", "itertools", "typing"])
DEEPEST = 6
MOST_ITEMS = 10_000
EMPTY = object()


class Reaching:
    """Copies what reaches a module, and nothing else.

    copied_module: returns the copy of a module.
    """

    def __init__(self, copied_module: Callable[[torch.nn.Module], Any]) -> None:
        self.copied_module = copied_module
        self._reaches: dict[int, bool] = {}
        self._copies: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}  # Functions of a file share its globals, and so do their copies.
        self._kept: list[Any] = []  # Keeps the identities valid.

    def copied(self, thing: Any) -> Any:
        """The thing with copies for the modules that it reaches; itself if there are none."""
        if isinstance(thing, torch.nn.Module):
            return self.copied_module(thing)
        if id(thing) in self._copies:
            return self._copies[id(thing)]
        if not self.reaches(thing):
            return thing
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
        if isinstance(thing, torch.nn.Module):
            return True
        if depth > DEEPEST or isinstance(thing, torch.Tensor | type | types.ModuleType | str | bytes | int | float):
            return False
        if id(thing) not in self._reaches:
            self._kept.append(thing)
            self._reaches[id(thing)] = False  # For a cycle.
            self._reaches[id(thing)] = any(self.reaches(part, depth + 1) for part in parts_of(thing))
        return self._reaches[id(thing)]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        before = function.__globals__
        known = self._globals.setdefault(id(before), {**before})
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
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
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if (held := contents_of(old)) is not EMPTY:
                cell.cell_contents = self.copied(held)
        return new

    def _made(self, thing: Any) -> Any:
        if isinstance(thing, functools.partial):
            arguments = map(self.copied, thing.args)
            return type(thing)(self.copied(thing.func), *arguments, **self.copied(thing.keywords))
        if isinstance(thing, types.MethodType):
            return types.MethodType(thing.__func__, self.copied(thing.__self__))
        if isinstance(thing, dict):
            new = thing.copy()
            new.update((name, self.copied(part)) for name, part in thing.items())
            return new
        if type(thing) in (list, tuple, set):
            return type(thing)(map(self.copied, thing))
        new = object.__new__(type(thing))
        self._copies[id(thing)] = new  # Its parts may hold it.
        vars(new).update((name, self.copied(part)) for name, part in vars(thing).items())
        return new


def parts_of(thing: Any) -> Iterator[Any]:
    """What a function, a partial, a method, a container or a plain object holds."""
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
        yield from list(thing.values())
    elif type(thing) in (list, tuple, set) and len(thing) <= MOST_ITEMS:
        yield from thing
    elif is_plain_object(thing):
        yield from list(vars(thing).values())


def is_plain_object(thing: Any) -> bool:
    """Whether its attributes are all that it holds, so that a copy can be made of them."""
    kind = type(thing)
    return (
        kind.__module__.partition(".")[0] not in LIBRARIES
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__basicsize__ <= object.__basicsize__ + 16
        and hasattr(thing, "__dict__")
    )


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in the code, and in the functions inside."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from names_in(part)


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is empty.
        return EMPTY

"""Calls a function when a module has been imported, by whatever code and in whatever thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import dropwhile
from types import ModuleType
from typing import Any


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls the function once, as soon as the module, which is not imported yet, has been executed without an error."""
    sys.meta_path.insert(0, Finder(name, function))


class Finder:
    """An entry of sys.meta_path that finds one module as the entries behind it do, until that module is imported."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        behind = [*dropwhile(lambda finder: finder is not self, [*sys.meta_path])][1:]
        specs = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, self)
        return spec


class Loader:
    """The module's own loader, which calls the finder's function in the end."""

    def __init__(self, loader: Any, finder: Finder) -> None:
        self.loader, self.finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            self.finder.function()

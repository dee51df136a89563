"""benchmarks/zoo.py, which is no part of the package, as a module for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def loaded() -> ModuleType:
    """The module, which is loaded once: it defines operators of torch."""
    name = "benchmarks_zoo"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "benchmarks" / "zoo.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]

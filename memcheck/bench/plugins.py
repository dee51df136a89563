"""Loads the user's files and modules that register contenders."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.failures import failure
from memcheck.core.options import named


def load_plugin(name: str) -> str:
    """Imports a file NAME.py or a module, once a process, and returns the name; what it registers is in the catalog.

    UsageError: there is no such thing, or its code fails.
    """
    if not name:
        raise UsageError(f"{named('plugin')} must name a file FILE.py or a module, got ''")
    try:
        with redirect_stdout(sys.stderr):  # stdout may be JSON that another program reads.
            if name.endswith(".py") or os.sep in name:
                import_file(Path(name))
            else:
                importlib.import_module(name)
    except MemcheckError as error:
        raise UsageError(f"{named('plugin')} {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{named('plugin')} {name} cannot be imported: {failure(error)}") from error
    return name


def import_file(path: Path) -> ModuleType:
    """The module of a file, which is loaded once. UsageError: it is no file of Python."""
    if not path.is_file():
        raise UsageError("there is no such file")
    if path.suffix != ".py":
        raise UsageError("a file must end in .py")
    # The module is named by its path, so that two files of the same name are two modules, and one file is loaded
    # once.
    name = f"memcheck plugin {path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

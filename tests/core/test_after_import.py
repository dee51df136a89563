"""A function is called once a module has been imported, and the module does not notice."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from memcheck.core.after_import import after_import

NAME = "imported_late"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that is not imported yet."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"{NAME}.py"
    file.write_text("loader = type(__loader__), type(__spec__.loader)\nlines = [1]\n")
    yield file
    sys.modules.pop(NAME, None)


def test_it_is_called_once_at_the_end_of_the_import(module: Path) -> None:
    finders, lines = [*sys.meta_path], []
    after_import(NAME, lambda: lines.append(sys.modules[NAME].lines))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader.get_filename() == str(module)
    importlib.import_module("json")
    assert lines == []
    loaded: Any = importlib.import_module(NAME)
    assert lines == [[1]]
    assert sys.meta_path == finders
    assert loaded.loader == (SourceFileLoader, SourceFileLoader)
    assert type(loaded.__spec__.loader) is SourceFileLoader
    importlib.reload(loaded)
    spec.loader.exec_module(loaded)
    assert len(lines) == 1


def test_a_failed_import_is_none(module: Path) -> None:
    called: list[int] = []
    after_import(NAME, lambda: called.append(1))
    source = module.read_text()
    module.write_text("raise ImportError('not yet')")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(NAME)
    module.unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    assert called == []
    module.write_text(source)
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert called == [1]


def test_other_finders_find_and_functions_are_called(module: Path) -> None:
    class Other:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return PathFinder.find_spec(name, [str(module.parent / "elsewhere")]) if name == NAME else None

    (module.parent / "elsewhere").mkdir()
    (module.parent / "elsewhere" / module.name).write_text("lines = [2]")
    called: list[int] = []
    after_import(NAME, lambda: called.append(1))
    sys.meta_path[:0] = [object(), Other()]  # what Python itself passes over, and a finder
    after_import(NAME, lambda: called.append(2))
    assert importlib.import_module(NAME).lines == [2]
    assert called == [2]
    sys.modules.pop(NAME)
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder) is not Other]
    after_import(NAME, lambda: called.append(3))
    assert importlib.import_module(NAME).lines == [1]
    assert called == [2, 1, 3]

"""Each notebook runs; what is committed of it is what a run gives, and the documentation shows the way there."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MOST_BYTES = 600_000
EXACT = ("7_mixed_precision",)  # Its numbers are the same in every run.

every_notebook = pytest.mark.parametrize("name", NAMES)


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def tagged(path):
    return [cell for cell in code_cells(path) if "picture" in cell["metadata"].get("tags", ())]


def images(cell):
    found = (output.get("data", {}).get("image/png") for output in cell["outputs"])
    return [base64.b64decode(image) for image in found if image]


def kinds(cell):
    """What a cell shows: streams by name, displays by their types."""
    return [output.get("name") or sorted(output.get("data", ())) or output["output_type"] for output in cell["outputs"]]


def texts(cells):
    return [output.get("data", {}).get("text/plain") for cell in cells for output in cell["outputs"]]


def execute(*arguments):
    command = [sys.executable, FOLDER / "execute.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def workplace(folder):
    """A copy of what notebooks may read."""
    shutil.copytree(FOLDER, folder / "notebooks", ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("results", "published"):
        shutil.copytree(ROOT / "benchmarks" / name, folder / "benchmarks" / name)
    return folder / "notebooks"


def files_below(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_is_committed(name, tmp_path):
    pytest.importorskip("nbclient")
    folder = workplace(tmp_path)
    files = files_below(tmp_path)
    done = execute(name, "--folder", folder)
    assert done.returncode == 0, done.stderr
    assert files_below(tmp_path) == files
    fresh, committed = code_cells(folder / f"{name}.ipynb"), code_cells(FOLDER / f"{name}.ipynb")
    assert [kinds(cell) for cell in fresh] == [kinds(cell) for cell in committed]
    assert name not in EXACT or texts(fresh) == texts(committed)
    assert images(tagged(folder / f"{name}.ipynb")[0])[0] == (folder / f"pictures/{name}.png").read_bytes()


@every_notebook
def test_what_is_committed_was_run_from_the_top(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES
    assert [cell["execution_count"] for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    shown = [kind for cell in code_cells(path) for kind in kinds(cell)]
    assert shown
    assert not {"stderr", "error"} & {kind for kind in shown if isinstance(kind, str)}


@every_notebook
def test_no_output_depends_on_when_and_where_it_ran(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert {key for cell in notebook["cells"] for key in cell["metadata"]} <= {"tags"}
    outputs = [output for cell in code_cells(FOLDER / f"{name}.ipynb") for output in cell["outputs"]]
    assert not any(output.get("metadata") for output in outputs)
    assert " at 0x" not in json.dumps(outputs)


@every_notebook
def test_the_documentation_shows_the_picture_that_the_notebook_drew(name):
    (cell,) = tagged(FOLDER / f"{name}.ipynb")
    is_same = images(cell)[0] == (FOLDER / f"pictures/{name}.png").read_bytes()  # pytest would look for differences.
    assert is_same
    text = (ROOT / "docs" / "notebooks.md").read_text()
    assert f"](../notebooks/{name}.ipynb)" in text
    assert f"](../notebooks/pictures/{name}.png)" in text


def test_every_picture_is_of_a_notebook():
    assert {path.stem for path in (FOLDER / "pictures").iterdir()} == set(NAMES)


CELLS = {
    "good": ("1 + 1", 0),
    "failing": ("1 / 0", 1),
    "warning": ("import warnings; warnings.warn('look')", 1),
    "endless": ("while True: pass", 1),
    "elsewhere": ("import sys, memcheck; print(sys.executable, memcheck.__file__)", 0),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_notebook_of_one_cell(name, tmp_path):
    """One that ends in an error, hangs or warns stays as it was, and says so."""
    nbformat = pytest.importorskip("nbformat")
    source, code = CELLS[name]
    path = tmp_path / f"{name}.ipynb"
    cell = nbformat.v4.new_code_cell(source, metadata={"execution": {"begin": "now"}})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    before = path.read_text()
    done = execute(name, "--folder", tmp_path, "--seconds", "20")
    assert done.returncode == code
    assert (path.read_text() == before) == bool(code)
    assert (f"{name}.ipynb" in done.stderr) == bool(code)
    if name == "elsewhere":
        (output,) = code_cells(path)[0]["outputs"]
        assert "".join(output["text"]).split() == [sys.executable, str(ROOT / "memcheck/__init__.py")]


def test_a_name_that_is_no_notebook_is_one_line(tmp_path):
    pytest.importorskip("nbformat")
    done = execute("6_none")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"execute.py: no notebook 6_none; there are {', '.join(NAMES)}"]

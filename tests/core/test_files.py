"""Files are whole or as they were."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from forked import run_python

from memcheck.core.files import whole_file, write_text


def test_a_file_takes_its_place_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with whole_file(path) as file:
        file.write(b"now")
        assert path.read_text() == "before"
    assert path.read_text() == "now"
    with suppress(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "now")]


def test_a_link_stays_a_link_and_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    write_text(link, "ä")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == "ä".encode()
    os.mkfifo(pipe)
    thread = threading.Thread(target=write_text, args=(pipe, "through"), daemon=True)
    thread.start()
    assert pipe.read_text() == "through"
    thread.join(10)
    assert pipe.is_fifo()


def test_an_error_names_the_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(OSError, match=r"such file|directory") as raised:
            write_text(path, "")
        assert raised.value.filename == str(path)


WRITERS = """
import json, resource
from pathlib import Path
from matplotlib.figure import Figure
from memcheck.bench.sweep.run import write_manifest
from memcheck.bench.sweep.store import Store
from memcheck.core.record import Record, write_csv
from memcheck.report.plots.style import save
from memcheck.report.tables import Column, Table, write_files

records = [Record(operator="x" * 5000, device="cpu")]
table = Table("table", "Table", [Column("x", "x")], [["x" * 5000]])
figure = Figure()
here, found = Path.cwd(), {}
store = Store(here)
store.begin()
store.append(records[0], key="one")
writers = {
    "sweep.json": lambda: write_manifest(here, "x" * 5000, {}),
    "records.csv": lambda: write_csv(records, here / "records.csv"),
    "tables.md": lambda: write_files([table], here),
    "picture.png": lambda: save(figure, here / "picture.png"),
    "records.jsonl": lambda: store._rewrite([b"x" * 5000]),
}
for name in writers:
    if name != "records.jsonl":
        Path(name).write_text("before")
before = {name: Path(name).read_bytes() for name in writers}
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for name, write in writers.items():
    try:
        write()
    except Exception as error:
        found[name] = [str(error), Path(name).read_bytes() == before[name]]
print(json.dumps([found, sorted(path.name for path in here.iterdir())]))
"""


def test_a_full_disk_tears_no_file_of_results(tmp_path: Path) -> None:
    done = run_python("-c", WRITERS, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    found, names = json.loads(done.stdout)
    assert found.keys() == {"sweep.json", "records.csv", "tables.md", "picture.png", "records.jsonl"}
    for name, (error, unchanged) in found.items():
        assert unchanged, name
        assert name in error
        assert "File too large" in error
    assert not [name for name in names if name.endswith(".part")]

"""Runs of tests on a GPU go on where they stopped, and a failure shows what the allocator did: seen without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import allocator_report

TESTS = """
import pytest
@pytest.mark.parametrize("n", [1, 2, 3])
def test_numbers(n):
    assert n != 2
def test_skipped():
    pytest.skip("for no reason")
"""
# The folder of tests is the project's, as far as names go.
CONFTEST = """
from pathlib import Path
def pytest_addoption(parser):
    parser.addoption("--again", action="store_true")
def pytest_configure(config):
    from outcomes import Outcomes
    file = Path("results/a-gpu/tests.txt")
    config.pluginmanager.register(Outcomes(file, config.getoption("again"), hasattr(config, "workerinput")))
"""


def run(folder: Path, sources: str, *flags: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "MEMCHECK_SOURCES": sources}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *flags]
    ended = subprocess.run(
        command, cwd=folder, env={**environment, "PYTEST_ADDOPTS": ""}, capture_output=True, text=True, timeout=100
    )
    return ended.stdout.splitlines()[-1]


def test_tests_that_passed_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results/a-gpu/tests.txt"
    file.parent.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    (tmp_path / "tests/test_it.py").write_text(TESTS)
    assert re.match(r"1 passed", run(tmp_path, "old", "tests/test_it.py::test_numbers[1]"))
    assert file.read_text() == "old passed tests/test_it.py::test_numbers[1]\n"
    # The others, by two workers.
    assert re.match(r"1 failed, 1 passed, 1 skipped", run(tmp_path, "old", "tests", "-n2"))
    lines = sorted(file.read_text().splitlines())
    assert lines == [
        "old failed tests/test_it.py::test_numbers[2]",
        *(f"old passed tests/test_it.py::test_numbers[{n}]" for n in (1, 3)),
        "old skipped tests/test_it.py::test_skipped",
    ]
    assert re.match(r"1 failed, 3 deselected", run(tmp_path, "old", "tests"))
    assert re.match(r"4 deselected", run(tmp_path, "old", "tests", "--deselect=tests/test_it.py::test_numbers[2]"))
    # Of other sources, what failed before, here or on another GPU, in a file that has failed tests alone.
    (tmp_path / "results/h200").mkdir()
    (tmp_path / "results/h200/tests.txt").write_text("Failed:\n  tests/test_it.py::test_skipped\n")
    assert re.match(r"1 failed, 1 skipped, 2 deselected", run(tmp_path, "new", "tests", "--again"))
    assert re.match(r"1 failed, 2 passed, 1 deselected", run(tmp_path, "new", "tests"))


def test_a_failure_shows_the_bytes_between_and_the_allocators_events() -> None:
    def of(action: str, size: int) -> dict[str, object]:
        return {"action": action, "size": size, "addr": 1, "stream": 0}

    trace = [of("alloc", 4096), of("free_requested", 4096), of("free_completed", 4096), of("alloc", 8 << 20)]
    kept, planned = 0, {"bytes": 600, "chunk": 40}
    with pytest.raises(AssertionError) as failure:
        assert planned["bytes"] + 8392704 == planned["bytes"] + (kept or planned["chunk"])
    report = allocator_report(failure.exconly(), trace).splitlines()
    assert report[0] == "off by +8,392,664 bytes"
    assert [line.split()[0] for line in report[1:]] == ["alloc", "free_requested", "free_completed", "alloc"]
    assert [line.split()[2] for line in report[1:]] == ["4,096", "4,096", "0", "8,388,608"]
    assert allocator_report("AssertionError: assert False", []) == ""

"""Outcomes of tests in a file, so that a run on a GPU goes on where it was stopped: pytest --outcomes FILE. And what
the allocator did, for the report of a failure.

A line is SOURCES OUTCOME TEST; SOURCES is MEMCHECK_SOURCES, which names the sources that were tested. Each test's line
is written as it ends. A test is left out if it passed or was skipped with the same sources; one that failed runs again.
With --failed only those run whose last line, in FILE or in the tests.txt of a folder beside FILE's, says that they
failed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

# A list of failed tests alone has them indented.
LINE = re.compile(r"(?:(?P<sources>\w+) (?P<outcome>\w+)| ) (?P<test>tests/.*)")
SOURCES = os.environ.get("MEMCHECK_SOURCES", "unknown")


def lines_of(path: Path) -> list[re.Match[str]]:
    return [found for line in path.read_text().splitlines() if (found := LINE.fullmatch(line))]


class Outcomes:
    """The plugin of pytest that writes the file, and leaves tests out."""

    def __init__(self, path: Path, failed_alone: bool, is_worker: bool) -> None:
        path.touch()
        self.path, self.is_worker = path, is_worker
        if not is_worker:
            # Workers of pytest-xdist must collect the same tests at any time.
            os.environ["MEMCHECK_OUTCOMES"] = str(len(lines_of(path)))
        known = lines_of(path)[: int(os.environ["MEMCHECK_OUTCOMES"])]
        ended = {line["test"]: line["outcome"] for line in known if line["sources"] == SOURCES}
        self.passed = {test for test, outcome in ended.items() if outcome != "failed"}
        self.failed: set[str] | None = None
        if failed_alone:
            last = [
                {x["test"]: x["outcome"] for x in lines_of(file)} for file in path.parent.parent.glob("*/tests.txt")
            ]
            self.failed = {test for of in last for test, outcome in of.items() if outcome in (None, "failed")}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [x for x in items if x.nodeid not in self.passed and (self.failed is None or x.nodeid in self.failed)]
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.is_worker and (report.when == "call" or report.outcome != "passed"):
            with self.path.open("a") as file:
                file.write(f"{SOURCES} {report.outcome} {report.nodeid}\n")


def allocator_report(error: str, trace: list[dict[str, Any]]) -> str:
    """Returns by how many bytes a comparison of an assertion failed, and the allocator's last events."""
    lines = []
    if compared := re.search(r"assert ([\d+*()or -]+) == ([\d+*()or -]+)$", error, re.MULTILINE):
        actual, expected = (eval(text) for text in compared.groups())
        lines.append(f"off by {actual - expected:+,} bytes")
    bytes_since = 0
    for event in trace:
        bytes_since += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        lines.append(f"{event['action']:16}{event['size']:>14,}{bytes_since:>14,} since the test began")
    return "\n".join([*lines[:1], *lines[1:][-100:]])

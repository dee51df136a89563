"""Seconds that the compiler takes for each file of the extensions, into docs/contributing.md.

make build-times      after a build; it compiles every file of a copy, one at a time
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from memcheck._build import COMPILER
from memcheck.measure.measurement import machine_facts

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing.md"
BEGIN, END = "<!-- build-times -->\n", "<!-- end of build-times -->\n"


def seconds_of_files() -> dict[str, float]:
    """Seconds of each object file, from ninja's log of a build of a copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "memcheck"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.so"))
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=copy, env={**os.environ, "MAX_JOBS": "1"}, stdout=subprocess.DEVNULL, check=True)
        (log,) = copy.glob("build/*/.ninja_log")
        _, *lines = log.read_text().splitlines()
        rows = [line.split("\t") for line in lines]  # begin and end in ms, the time of the file, its path
        return {
            source_of(os.path.relpath(made, log.parent)): (int(end) - int(begin)) / 1000
            for begin, end, _, made, *_ in rows
        }


def source_of(made: str) -> str:
    cuda = Path(made).with_suffix(".cu")
    return str(cuda if (ROOT / cuda).is_file() else cuda.with_suffix(".cpp"))


def table(seconds: dict[str, float]) -> str:
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    named = [f"| `{name}` | {value:.0f} |" for name, value in rows if value >= 2]
    others = [value for _, value in rows if value < 2]
    head = f"{date.today()}, {machine_facts('cpu')['device_name']}, {COMPILER}:"
    rest = f"| {len(others)} others | {sum(others):.0f} |"
    return "\n".join(
        [head, "", "| file | s |", "| --- | --- |", *named, rest, f"| all | {sum(seconds.values()):.0f} |", ""]
    )


def main() -> None:
    text = table(seconds_of_files())
    print(text)
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + "\n" + text + "\n" + page[end:])


if __name__ == "__main__":
    main()

"""Seconds of processor time that the compiler takes for each file of the extension, into docs/contributing.md.

make build-times      after a build; it compiles every file again, one at a time
"""

from __future__ import annotations

import os
import shlex
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


def compile_commands() -> list[list[str]]:
    """The compiler's commands of the newest build, as words."""
    files = [path for path in ROOT.glob("build/*/build.ninja") if not path.parent.name.endswith("-asan")]
    if not files:
        sys.exit("no build/*/build.ninja: build the extension first (make profile)")
    newest = max(files, key=lambda path: path.stat().st_mtime)
    ninja = Path(sys.executable).with_name("ninja")
    listed = subprocess.run([ninja, "-C", newest.parent, "-t", "commands"], capture_output=True, text=True, check=True)
    return [words for words in map(shlex.split, listed.stdout.splitlines()) if "-c" in words]


def source_of(command: list[str]) -> str:
    return next(word for word in command if word.endswith((".cpp", ".cu")))


def seconds_of(command: list[str], made: Path) -> float:
    """Processor seconds, the system's included, of the command with another output."""
    words = [
        str(made) if before in ("-o", "-MF") else word for before, word in zip(["", *command], command, strict=False)
    ]
    before = os.times()
    subprocess.run(words, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


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
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        seconds = {
            os.path.relpath(source_of(command), ROOT): seconds_of(command, made) for command in compile_commands()
        }
    text = table(seconds)
    print(text)
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + "\n" + text + "\n" + page[end:])


if __name__ == "__main__":
    main()

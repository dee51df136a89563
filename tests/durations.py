"""Prints what took the time in the last runs of the tests, from build/tests/*.xml: `make durations`.

With --write it also writes tests/durations.csv, the tests that take 2 seconds or more, which tests/conftest.py marks as
slow: `make test-all && make durations ARGS=--write`.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_name("durations.csv")
BUILD = Path(__file__).parent.parent / "build/tests"
SLOW_SECONDS = 2.0
RUNS = ("test", "rest", "nightly")  # Of all tests on the CPU, with its own instructions.


def slow_tests() -> dict[str, float]:
    """The seconds of the tests that took SLOW_SECONDS or more, by the name that pytest gives them."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def write(paths: list[Path]) -> None:
    """Writes the durations of these runs in place of older ones of the same tests."""
    known = slow_tests()
    for path in paths:
        known |= {nodeid(case): float(case.get("time", 0)) for case in cases_of(path) if case.find("skipped") is None}
    rows = [[test, f"{time:.1f}"] for test, time in sorted(known.items()) if time >= SLOW_SECONDS and is_there(test)]
    with FILE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["test", "seconds"], *rows])
    print(f"{FILE}: {len(rows)} tests of {SLOW_SECONDS:g} s or more")


def is_there(test: str) -> bool:
    """Whether the file of a test still has a function of its name."""
    file, _, name = test.partition("::")
    path = FILE.parent.parent / file
    return path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8")


def cases_of(path: Path) -> list[ElementTree.Element]:
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None, f"{path} is no junit file"
    return suite.findall("testcase")


def nodeid(case: ElementTree.Element) -> str:
    return f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}"


def seconds(cases: list[ElementTree.Element]) -> float:
    return sum(float(case.get("time", 0)) for case in cases)


def table(cases: list[ElementTree.Element], name, rows: int) -> Iterator[str]:
    """Yields the rows with the most seconds, one per name of a test case."""
    groups = defaultdict(list)
    for case in cases:
        groups[name(case)].append(case)
    for key, group in sorted(groups.items(), key=lambda item: -seconds(item[1]))[:rows]:
        yield f"{seconds(group):8.1f} s {len(group):6} tests  {key}"


def report(path: Path, rows: int) -> str:
    cases = cases_of(path)
    alone = [case for case in cases if any(found.get("name") == "isolated" for found in case.iter("property"))]
    slow = [case for case in cases if float(case.get("time", 0)) >= SLOW_SECONDS]
    return "\n".join(
        [
            f"{path.name}: {len(cases)} tests, {seconds(cases):.0f} s in all workers",
            f"{seconds(alone):8.1f} s {len(alone):6} tests  in processes of their own",
            f"{seconds(slow):8.1f} s {len(slow):6} tests  of {SLOW_SECONDS:g} s or more",
            "By file:",
            *table(cases, lambda case: case.get("classname"), rows),
            "By function:",
            *table(cases, lambda case: nodeid(case).partition("[")[0], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="junit files; by default those of build/tests")
    parser.add_argument("--rows", type=int, default=20, help="rows of each table (default: 20)")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}, too")
    chosen = parser.parse_args()
    paths = chosen.files or sorted(BUILD.glob("*.xml"), key=lambda path: path.stat().st_mtime)
    for path in paths:
        print(report(path, chosen.rows), end="\n\n")
    if chosen.write:
        if not paths:
            sys.exit(f"no run in {BUILD}")
        write(chosen.files or [path for path in paths if path.stem in RUNS])


if __name__ == "__main__":
    main()

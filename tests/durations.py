"""Prints what took the time in the last runs of the tests, from build/tests/*.xml: `make durations`."""

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

BUILD = Path(__file__).parent.parent / "build/tests"


def seconds(cases: list[ElementTree.Element]) -> float:
    return sum(float(case.get("time", 0)) for case in cases)


def table(cases: list[ElementTree.Element], name, rows: int) -> str:
    """Returns the rows with the most seconds, one per name of a test case."""
    groups = defaultdict(list)
    for case in cases:
        groups[name(case)].append(case)
    slowest = sorted(groups.items(), key=lambda group: -seconds(group[1]))[:rows]
    return "\n".join(f"{seconds(group):8.1f} s {len(group):6} tests  {name}" for name, group in slowest)


def isolated(case: ElementTree.Element) -> bool:
    return any(found.get("name") == "isolated" for found in case.iter("property"))


def function(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name', '').partition('[')[0]}"


def report(path: Path, rows: int) -> str:
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None, f"{path} is no junit file"
    cases = suite.findall("testcase")
    alone = [case for case in cases if isolated(case)]
    wall = float(suite.get("time", 0))
    return f"""{path.name}: {len(cases)} tests, {wall:.0f} s, {seconds(cases):.0f} s in all workers
{seconds(alone):8.1f} s {len(alone):6} tests  in processes of their own
By file:
{table(cases, lambda case: case.get("classname"), rows)}
By function:
{table(cases, function, rows)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="junit files; by default those of build/tests")
    parser.add_argument("--rows", type=int, default=20, help="rows of each table (default: 20)")
    chosen = parser.parse_args()
    for path in chosen.files or sorted(BUILD.glob("*.xml")):
        print(report(path, chosen.rows), end="\n\n")


if __name__ == "__main__":
    main()

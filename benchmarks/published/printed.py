"""Runs programs whose memory a real GPU printed on the simulated GPU: `python benchmarks/published/printed.py P20 P03`.

scripts.csv has a row for each figure: who printed it, the program in programs/ that stands for theirs, and the cause
of each difference. Without words, the table is shown as it is stored.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

HERE = Path(__file__).parent
TABLE, PROGRAMS = HERE / "scripts.csv", HERE / "programs"
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}
EXHAUSTED = "OOM"
SECONDS = 600
START = """
import runpy, sys
import memcheck
memcheck.simulate(sys.argv[1])
del sys.argv[:2]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Row = dict[str, str]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="printed.py", description="Compares simulated figures with printed ones.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of the figures' names, such as P20")
    parser.add_argument("--write", action="store_true", help="write the simulated figures into scripts.csv")
    given = parser.parse_args(words)
    rows = table()
    chosen = [row for row in rows if row["id"].startswith(tuple(given.names))] if given.names else []
    if given.names and not chosen:
        parser.error(f"no figure begins with {' or '.join(given.names)}")
    for command in dict.fromkeys(command_of(row) for row in chosen):
        compare([row for row in chosen if command_of(row) == command], figures_of(*command))
    show(chosen or rows)
    if given.write:
        write(rows)
    return 0


def table(path: Path = TABLE) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def write(rows: Sequence[Row]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def command_of(row: Mapping[str, str]) -> tuple[str, str]:
    """The simulated GPU, and the program with its words."""
    return row["device"], row["program"]


def figures_of(device: str, program: str) -> dict[str, str]:
    """What the program prints in a process with the simulated GPU: name -> bytes, or that memory was exhausted."""
    name, *words = program.split()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))),
    }
    ended = subprocess.run(
        [sys.executable, "-c", START, device, str(PROGRAMS / name), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
    )
    if ended.returncode:
        raise RuntimeError(f"{program} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    pairs = [line.split() for line in ended.stdout.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and (pair[1].isdecimal() or pair[1] == EXHAUSTED)}


def compare(rows: Iterable[Row], figures: Mapping[str, str]) -> None:
    """Fills in what is simulated, and by how much it differs."""
    for row in rows:
        row["simulated"] = figures[row["id"]]
        row["difference"] = difference(row["simulated"], row["printed"], row["unit"])


def difference(simulated: str, printed: str, unit: str) -> str:
    """Simulated less printed, in the printed unit and with its decimals."""
    if EXHAUSTED in (simulated, printed):
        return "0" if simulated == printed else f"{simulated}, not {printed}"
    exact = Decimal(simulated) / UNITS[unit]
    return f"{exact.quantize(Decimal(printed)) - Decimal(printed):f}"


def is_equal(row: Mapping[str, str]) -> bool:
    return not row["difference"].strip("0.")


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        words = f"{row['id']:20} {row['printed']:>12} {row['unit']:4} {row['simulated']:>14} B {row['difference']:>10}"
        print(words, "" if is_equal(row) else row["cause"], sep="  ")
    print(f"{sum(map(is_equal, rows))} of {len(rows)} figures are equal as printed")


if __name__ == "__main__":
    sys.exit(main())

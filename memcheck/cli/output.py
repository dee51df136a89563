"""What commands print and write: bars, answers, and files that can be written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from memcheck.core import files, options
from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.report.accounting import doubt_details, doubt_lines
from memcheck.report.tables import Screen

R = TypeVar("R", bound=Record)
T = TypeVar("T")
DOES_NOT_FIT = 3  # The exit code of --fail-on-oom.
PICTURES = ("png", "svg", "pdf")


def progress_bar(total: float, title: str = "") -> tqdm[Any]:
    """A bar on stderr with the estimated time left, on a terminal. Rows are printed above it by tqdm.write."""
    words = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    hidden = not sys.stderr.isatty()
    tqdm.monitor_interval = 0  # No thread of tqdm beside a measurement.
    return tqdm(desc=title, total=total, file=sys.stderr, disable=hidden, bar_format=words, leave=False)


def watch(items: Sequence[T], title: str = "plots") -> Iterator[T]:
    """The items one by one, beside a bar."""
    with progress_bar(len(items), title) as bar:
        for item in items:
            yield item
            bar.update()


def print_details(records: list[R], in_detail: bool, screen: Screen, out: TextIO) -> None:
    """Below a table: each doubt, or the flag that lists them."""
    lines = doubt_details(records) if in_detail else ["--doubts lists each doubt."] if doubt_lines(records) else []
    for line in lines:
        print(screen.fill(line), file=out)


def make_room(name: str, path: Path) -> None:
    """Creates the folder of an output file. name: the option that gives the path.

    UsageError: that fails, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        if (part := files.beside(path)) != path:
            part.open("ab").close()
            part.unlink()
    except OSError as error:
        raise UsageError(f"{options.named(name)} {path} cannot be written to: {error.strerror}") from None


def check_picture(name: str, path: Path) -> None:
    if path.suffix.removeprefix(".") not in PICTURES:
        raise UsageError(f"{options.named(name)} {path} must end in one of .{', .'.join(PICTURES)}")

"""Writes records as a sweep's folder holds them, for tests of what reads it."""

from collections.abc import Iterable
from pathlib import Path

from memcheck.core.record import Record


def write_json_lines(records: Iterable[Record], path: Path) -> None:
    path.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")

"""Reading records back from a folder of results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from memcheck.errors import UsageError
from memcheck.records import Record

CASE = [field.name for field in dataclasses.fields(Record)][1 : 1 + 13]


def read_records(folder: Path) -> list[Record]:
    """Of DIR/records.jsonl, the newest record of each key; a half-written last line is left out with a note."""
    path = folder / "records.jsonl"
    if not path.is_file():
        raise UsageError(f"{folder} holds no records.jsonl")
    newest: dict[str, Record] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record, key = Record.from_json(line), json.loads(line).get("key")
        except ValueError:
            print(f"note: line {number} of {path} is no record and left out", file=sys.stderr)
            continue
        newest[key or repr([getattr(record, name) for name in (*CASE, "device", "device_index")])] = record
    return list(newest.values())

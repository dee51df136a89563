"""The sweep behind notebooks/4_comparison.ipynb: its grid, and the rows of it that are stored."""

import json
from pathlib import Path

from pages import documentation

from memcheck.__main__ import main
from memcheck.bench.case import CONTENDERS
from memcheck.bench.catalog import attention_types
from memcheck.bench.sweep.store import read_records

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/results/comparison"


def case_of(record):
    return record.operator, record.query_len, record.mode, record.compiled


def test_every_attention_is_stored_eager_and_compiled():
    train = [record for record in read_records(FOLDER) if record.mode == "train"]
    ways = {(record.operator, record.compiled) for record in train if record.status == "ok"}
    refused = {record.operator for record in train if record.status == "unsupported"}
    always_compiled = {name for name in attention_types() if CONTENDERS[name].compiled}
    assert refused == {"softmax/efficient", "softmax/cudnn", "flex"}
    eager = {(name, False) for name in attention_types() if name not in always_compiled | refused}
    compiled = {(name, True) for name in attention_types() if name not in refused | {"naive"}}
    assert ways == eager | compiled


def test_the_stored_rows_are_those_of_the_grid_each_once(capsys):
    assert main(["sweep", "--config", str(ROOT / "benchmarks/comparison.toml"), "--device", "cpu", "--dry-run"]) == 0
    cases = capsys.readouterr().out.splitlines()[:-2]
    rows = [case_of(record) for record in read_records(FOLDER)]
    assert len(rows) == len(set(rows)) == len(cases)
    command = json.loads((FOLDER / "sweep.json").read_text())["command"]
    assert command == "memcheck sweep --config benchmarks/comparison.toml --output benchmarks/results/comparison"
    assert command in documentation()

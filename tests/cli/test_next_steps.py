"""Commands end with the command that answers the next question, and that command runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from memcheck.__main__ import main
from memcheck.cli.next_steps import with_flags
from memcheck.core.units import exact_bytes, parse_bytes

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "benchmarks/results/quick")
SCRIPT = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), torch.zeros(2, 8)

def make_linear():
    return torch.nn.Linear(8, 8), torch.zeros(2, 8)

model, x = make()
model(x).sum().backward()
"""
SMALL = ["--dim", "16", "--heads", "2"]


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["compare", QUICK, QUICK], "compare"),
        (["report", QUICK], "report"),
        (["fit", "--attention-type", "naive", *SMALL, "--device", "1GiB"], "predict"),
        (["fit", "--attention-type", "naive", *SMALL, "--device", "1GiB", "--bsz", "1000000"], "predict"),
        (["predict", "--mode", "decode", *SMALL, "--kv-len", "64", "--device", "1GiB"], "predict"),
        (["predict", "--mode", "decode", *SMALL, "--kv-len", "64", "--device", "cpu"], "predict"),
    ],
)
def test_the_next_step_is_a_command(
    words: list[str], step: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    assert line.startswith(f"Next: memcheck {step} ")
    assert main(shlex.split(line)[2:]) == 0


@pytest.mark.extension
@pytest.mark.parametrize(
    "words",
    [
        ["run", "--device", "cpu", "train.py"],
        ["calibrate", "--model", "train.py:make", "--output", "table.jsonl"],
        ["calibrate", "--model", "train.py:make_linear", "--output", "table.jsonl"],  # It needs no table.
        ["snapshot", str(next((ROOT / "tests/data/histories").glob("*snapshot-1*.json.gz")))],
    ],
)
def test_the_next_step_predicts_the_model_of_the_script(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    Path("train.py").write_text(SCRIPT)
    assert main(words) == 0
    printed = capsys.readouterr()  # run's report goes to stderr: stdout is the script's.
    line = (printed.err if words[0] == "run" else printed.out).splitlines()[-2]
    assert line.startswith("Next: memcheck predict ")
    assert "train.py:make" in line
    assert main(shlex.split(line)[2:]) == 0
    assert "a training step needs " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["compare", QUICK, QUICK], ["report", QUICK]])
def test_data_has_no_next_step(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--format", "csv"]) == 0
    assert "Next:" not in capsys.readouterr().out


def test_a_change_replaces_its_flags() -> None:
    words = ["--bsz", "24", "--doubts", "--seq-len", "8"]
    assert with_flags(words, "--bsz 12") == ["--seq-len", "8", "--bsz", "12"]
    assert with_flags(words, "--checkpointing", ["--seq-len"]) == ["--bsz", "24", "--checkpointing"]


@pytest.mark.parametrize(
    ("size", "text"), [(2**30, "1GiB"), (16 * 10**9, "16GB"), (12345, "12345B"), (3 * 2**10, "3KiB")]
)
def test_bytes_are_written_without_rounding(size: int, text: str) -> None:
    assert exact_bytes(size) == text
    assert parse_bytes(text) == size

"""Runs of a script with other values and other settings: memcheck fit, sweep and run --changes, on a simulated GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from simulated.commands import ROOT

pytestmark = pytest.mark.extension

Command = Callable[..., subprocess.CompletedProcess[str]]
# Holds N MiB in blocks that the allocator gives as they are.
HOLDS = """
import sys
import torch
held = [torch.empty(2**24, dtype=torch.uint8, device="cuda") for _ in range(int(sys.argv[2]) // 16)]
"""
CATCHES = HOLDS.replace("held", "try:\n    held") + "except torch.OutOfMemoryError:\n    print('went on')\n"
CHANGES = "run --device RTX-4090 --changes docs/examples/gpt.py --batch 24"
TRAINS = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    model(torch.randn(int(sys.argv[2]), 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs memcheck with the words in a folder that has the scripts."""
    for name, text in {"holds": HOLDS, "catches": CATCHES, "trains": TRAINS, "ignores": "import torch\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)

    def memcheck(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONSAFEPATH", None)
        every = [sys.executable, "-m", "memcheck", *words]
        return subprocess.run(every, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return memcheck


@pytest.mark.smoke
def test_the_largest_value_fits_and_the_next_one_does_not(command: Command) -> None:
    words = ("--memory-limit", "256MiB", "--step", "16", "--format", "json", "--", "holds.py", "--mib", "{}")
    done = command("fit", "--device", "T4", *words)
    found = json.loads(done.stdout)
    assert (found["find"], found["largest"]) == ("mib", 256)
    results = {row["mib"]: row["outcome"] for row in found["runs"]}
    assert (results[256], results[272]) == ("fits", "out of memory")
    assert all((value <= 256) == (result == "fits") for value, result in results.items())


def test_a_script_that_catches_the_error_is_named(command: Command) -> None:
    words = ("--memory-limit", "256MiB", "--step", "16", "--", "catches.py", "--mib", "{}")
    done = command("fit", "--device", "T4", "--find", "size", *words)
    assert "The largest size that fits a simulated T4 is 256" in done.stdout
    assert "The script catches torch.OutOfMemoryError itself" in done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("ignores.py", "--mib", "{}"), "mib 8 and 128 need the same memory: the script does not read the value"),
        (("holds.py", "{}"), "holds.py 8 fails: IndexError: list index out of range"),
        (("holds.py", "--mib", "{1,x}"), None),
    ],
)
def test_what_cannot_be_searched_is_said_and_what_was_tried_is_shown(
    command: Command, words: tuple[str, ...], error: str | None
) -> None:
    done = command("fit", "--device", "T4", "--", *words)
    assert "Runs on a simulated T4" in done.stdout
    assert (error is None) == (done.returncode == 0)
    assert (error or "") in done.stderr
    assert error is not None or "ValueError: invalid literal" in done.stdout


def test_a_sweep_goes_on_where_it_stopped(command: Command, tmp_path: Path) -> None:
    first = command("sweep", "--device", "T4", "--output", "out", "--", "holds.py", "--mib", "{16,32}")
    assert first.returncode == 0
    assert "mib 16: fits" in first.stderr
    again = command("sweep", "--device", "T4", "--output", "out", "--", "holds.py", "--mib", "{16:64:x2}")
    assert "3 runs, 2 of them are in out" in again.stderr
    assert "mib 16: fits" not in again.stderr
    rows = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert [row["peak_bytes"] for row in rows[0]["rows"]] == [size * 2**20 for size in (16, 32, 64)]
    assert (tmp_path / "out" / "runs.png").stat().st_size > 5_000
    other = command("sweep", "--device", "L4", "--output", "out", "--", "holds.py", "--mib", "{16,32}")
    assert other.returncode == 2
    assert "is of another run, holds.py --mib 16 on a simulated T4: give another --output" in other.stderr


def test_a_run_that_failed_begins_again(command: Command, tmp_path: Path) -> None:
    words = ("sweep", "--device", "T4", "--output", "out", "--", "fails.py", "--mib", "{16,32}")
    (tmp_path / "fails.py").write_text(f"{HOLDS}assert sys.argv[2] != '32'\n")
    assert "mib 32: failed" in command(*words).stderr
    (tmp_path / "fails.py").write_text(HOLDS)
    again = command(*words)
    assert "2 runs, 1 of them are in out" in again.stderr
    assert "mib 32: fits" in again.stderr


@pytest.mark.ci
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions allocate otherwise")
def test_the_pages_show_what_is_printed() -> None:
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/capacity.md", "README.md"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    for command in ("fit --device RTX-4090 -- docs/examples/gpt.py --batch {}", CHANGES):
        words = [sys.executable, "-m", "memcheck", *command.split()]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        printed = (done.stdout + done.stderr).splitlines()
        for shown in re.findall(rf"\$ memcheck {re.escape(command)}\n(.*?)(?=\n```|\n\$)", pages, re.DOTALL):
            assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


def test_each_change_that_has_an_effect_is_a_row(command: Command, tmp_path: Path) -> None:
    done = command("run", "--device", "T4", "--changes", "--output", "out", "trains.py", "--batch", "4096")
    table = done.stderr.partition("What would help")[2]
    names = [line.partition("  ")[0] for line in table.splitlines() if "fits" in line]
    assert names == [
        "as it is",
        "expandable_segments:True",
        "max_split_size_mb:128",
        "autocast to bfloat16",
        "activation checkpointing",
        "optimizer with foreach=False",
        "optimizer with fused=True",
        "Adafactor in place of Adam",
    ]
    assert "Without an effect here: zero_grad(set_to_none=True)." in table


def test_changes_of_a_script_that_runs_out(command: Command) -> None:
    done = command("run", "--device", "T4", "--memory-limit", "120MiB", "--changes", "trains.py", "--batch", "4096")
    assert done.returncode == 1
    results = dict(re.findall(r"^memcheck: (.*): (fits|out of memory|failed)$", done.stderr, re.MULTILINE))
    assert results["optimizer with foreach=False"] == "out of memory"
    assert results["autocast to bfloat16"] == "fits"

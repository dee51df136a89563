"""`memcheck run` on a GPU: the snapshot that it writes, replayed and compared with torch's statistics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memcheck.snapshot.snapshot import Snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, torch
from pathlib import Path

layers = [torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in (512, 4096, 100, 3000):
    model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if batch == 100:
        torch.cuda.empty_cache()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
Path("peaks.json").write_text(json.dumps(peaks))
"""
RUNS_OUT = """
torch.empty(1 << 30, device="cuda")
"""


def run(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "memcheck", "run", "--device", "cuda", *flags, "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


def test_a_recorded_run_is_replayed_exactly(tmp_path: Path) -> None:
    ended = run(tmp_path, TRAIN, "--snapshot", "train.pickle")
    assert ended.returncode == 0, ended.stderr
    record = Snapshot.load(tmp_path / "train.pickle").record
    assert record.replay.exact, record.replay
    peaks = json.loads((tmp_path / "peaks.json").read_text())
    assert [record.peak.allocated_bytes, record.peak_reserved_bytes] == peaks
    assert (record.oom, record.before) == (None, (0, 0))


def test_a_run_out_of_memory_leaves_its_snapshot(tmp_path: Path) -> None:
    ended = run(tmp_path, TRAIN + RUNS_OUT, "--memory-limit", "900MiB")
    assert ended.returncode == 1, ended.stderr
    assert "memcheck snapshot results/run-snapshot.pickle" in ended.stderr
    oom = Snapshot.load(tmp_path / "results" / "run-snapshot.pickle").record.oom
    assert oom is not None
    assert oom.requested_bytes >= 1 << 30
    # The weights were allocated steps before.
    at = [alive.place.line for alive in oom.moment.alive if alive.bytes >= 2 * 4 * 1024 * 4096]
    assert any(line is not None and Path(line.file).name == "train.py" for line in at)

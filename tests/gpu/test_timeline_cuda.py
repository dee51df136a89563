"""Timelines and snapshots on a GPU: torch's own trace adds up to what is measured."""

import pickle
from pathlib import Path

import pytest
import torch

from memcheck.measure.export import write_snapshot, write_trace
from memcheck.measure.measurement import measure_memory
from memcheck.measure.timeline import record_timeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 65, 32, device="cuda", requires_grad=True) for _ in range(3)]


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def test_a_timeline_adds_up_to_what_is_measured() -> None:
    measure_memory(naive_attention, *inputs())  # what is loaded once
    record = measure_memory(naive_attention, *inputs())
    timeline = record_timeline(naive_attention, *inputs())
    assert timeline.alive[timeline.peak["forward"]] == record.forward_peak_bytes
    assert timeline.alive[timeline.peak["backward"]] == record.backward_peak_bytes
    names = {block.allocator for block in timeline.blocks}
    assert {"aten::bmm", "aten::_softmax", "BmmBackward0", "SoftmaxBackward0"} <= names


def test_files_are_written(tmp_path: Path) -> None:
    path = write_snapshot(naive_attention, *inputs(), path=tmp_path / "memory.pickle")
    assert any(pickle.loads(path.read_bytes())["device_traces"])
    rows = write_trace(naive_attention, *inputs(), path=tmp_path / "trace.json")
    assert sum(row["share"] for row in rows) == pytest.approx(1)

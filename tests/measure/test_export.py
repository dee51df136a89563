"""Snapshots for torch's viewer, traces with shares of time, and NVTX ranges."""

import gzip
import itertools
import json
import pickle
import pickletools
from contextlib import contextmanager

import pytest
import torch
from small_attention import heads, leaf, naive_attention
from torch.cuda import _memory_viz

from memcheck.measure import export as tracing
from memcheck.measure.measurement import measure_memory, measure_time


@pytest.fixture
def inputs():
    return heads()


@pytest.fixture
def snapshot(inputs, tmp_path):
    path = tracing.write_snapshot(naive_attention, *inputs, path=tmp_path / "memory.pickle")
    return pickle.loads(path.read_bytes())


def test_torch_tools_read_a_snapshot_of_the_cpu(snapshot):
    assert "total_allocated" in _memory_viz.segsum(snapshot)  # checks that blocks fill their segments
    assert "TOTAL MEM" in _memory_viz.trace(snapshot)
    assert "MemoryViz.js" in _memory_viz.trace_plot(snapshot)
    assert "MemoryViz.js" in _memory_viz.segment_plot(snapshot)
    assert "aten::_softmax" in _memory_viz.memory(snapshot, format_flamegraph=str) + str(snapshot)


def test_a_snapshot_peaks_where_the_record_does(snapshot, inputs):
    """Live bytes as the viewer counts them: blocks without an allocation event existed from the start."""
    [trace] = snapshot["device_traces"]
    allocated = {entry["addr"] for entry in trace if entry["action"] == "alloc"}
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    alive = highest = sum(
        block["size"] for block in blocks if block["state"] == "active_allocated" and block["address"] not in allocated
    )
    for entry in trace:
        alive += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        highest = max(highest, alive)
    assert highest == measure_memory(naive_attention, *inputs).backward_peak_bytes
    assert alive == sum(block["size"] for block in blocks if block["state"] == "active_allocated")


def test_every_block_of_a_snapshot_lies_in_a_segment(snapshot):
    places = [(segment["address"], segment["address"] + segment["total_size"]) for segment in snapshot["segments"]]
    for entry in snapshot["device_traces"][0]:
        assert any(begin <= entry["addr"] and entry["addr"] + entry["size"] <= end for begin, end in places)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


def test_a_snapshot_has_the_names_of_operators(snapshot):
    names = [entry["frames"][0]["name"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    assert names[0] == "aten::bmm float32 [6, 17, 17]"
    assert "SoftmaxBackward0 float32 [2, 3, 17, 17]" in names
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["frames"]]
    assert {"input q float32 [2, 3, 17, 5]"} <= {block["frames"][0]["name"] for block in blocks}


def test_a_snapshot_is_pickled_as_the_viewer_unpickles(inputs, tmp_path):
    path = tracing.write_snapshot(naive_attention, *inputs, path=tmp_path / "memory.pickle", backward=False)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    plain = "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET EMPTY_DICT EMPTY_LIST EMPTY_TUPLE SETITEM SETITEMS "
    plain += "APPEND APPENDS SHORT_BINUNICODE BINUNICODE BININT BININT1 BININT2 LONG1 NONE NEWTRUE NEWFALSE TUPLE2"
    assert opcodes <= set(plain.split())


def test_a_snapshot_of_cuda_is_torch_s_own(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **options: said.append(args[0]))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: said.append(path))
    monkeypatch.setattr(
        tracing, "MeasuredRun", lambda call: type("Run", (), {"measure": lambda *args: said.append("run")})
    )
    monkeypatch.setattr(tracing, "MeasuredCall", lambda *args: type("Call", (), {"device": torch.device("cuda", 0)}))
    path = tracing.write_snapshot(torch.exp, path=str(tmp_path / "memory.pickle"))
    assert said == ["all", "run", str(path), None]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_traces_have_shares_that_add_up(name, inputs, tmp_path):
    rows = tracing.write_trace(naive_attention, *inputs, path=tmp_path / name)
    opened = gzip.open if name.endswith("gz") else open
    with opened(tmp_path / name) as file:
        events = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"forward", "backward", "aten::bmm", "aten::_softmax"} <= events
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    calls = {row["name"]: row["calls"] for row in rows}
    # Two products forward, four backward; the pass that warms up is not in it.
    assert (calls["aten::bmm"], calls["aten::_softmax"], calls["forward, between operators"]) == (6, 1, 1)
    assert rows == sorted(rows, key=lambda row: -row["self_ms"])
    assert all(leaf.grad is None for leaf in inputs)


def test_shares_of_cuda_are_those_of_kernels():
    def event(key, kind, cpu, cuda):
        times = {"self_cpu_time_total": cpu, "self_device_time_total": cuda}
        return type("Event", (), {"key": key, "device_type": kind, "count": 2, **times})

    kinds = torch.autograd.DeviceType
    averages = [
        event("aten::bmm", kinds.CPU, 500, 0),
        event("gemm", kinds.CUDA, 0, 3000),
        event("softmax", kinds.CUDA, 0, 1000),
        event("forward", kinds.CUDA, 0, 4000),  # the range on the GPU
    ]
    assert tracing._shares(averages, on_cuda=True) == [
        {"name": "gemm", "calls": 2, "self_ms": 3.0, "share": 0.75},
        {"name": "softmax", "calls": 2, "self_ms": 1.0, "share": 0.25},
    ]


def test_shares_as_text():
    rows = [
        {"name": name, "calls": 1, "self_ms": ms, "share": ms / 10} for name, ms in zip("abc", (7, 2, 1), strict=True)
    ]
    assert tracing.format_shares(rows, top=2).splitlines() == [
        "self time  share  calls  name",
        "  7.00 ms  70.0%      1  a",
        "  3.00 ms  30.0%      2  2 others",
    ]
    assert len(tracing.format_shares(rows).splitlines()) == 4


def test_ranges_stand_around_what_is_measured(monkeypatch):
    @contextmanager
    def fake_range(name):
        said.append(name)
        yield
        said.append(f"/{name}")

    said = []
    monkeypatch.setattr(torch.cuda.nvtx, "range", fake_range)
    with tracing.nvtx_ranges():
        measure_time(torch.exp, leaf(3), passes=1, warmup=0)
    assert said == []  # no CUDA here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with tracing.nvtx_ranges(False):
        measure_time(torch.exp, leaf(3), passes=1, warmup=0)
    assert said == []
    with tracing.nvtx_ranges():
        measure_time(torch.exp, leaf(3), passes=1, warmup=0)
        assert said == ["pass", "forward", "/forward", "backward", "/backward", "/pass"]
        del said[:]
        measure_memory(torch.exp, leaf(3))
    assert said == ["forward", "/forward", "backward", "/backward"]
    measure_memory(torch.exp, leaf(3))
    assert len(said) == 4

"""The CUDA code of trackers and measurements, with a substitute for torch.cuda, so without a GPU."""

import copy
import json
import pickle
import sys

import pytest
import torch
from modelled import segments_of

import memcheck
from memcheck.__main__ import main
from memcheck.allocator import MIB, CachingAllocator, OutOfMemory
from memcheck.core.script_record import Line
from memcheck.measure import machine as machines
from memcheck.measure import measurement
from memcheck.measure import tracker as tracking
from memcheck.measure.script_watch import ScriptWatch
from memcheck.measure.timeline import record_timeline


class FakeCuda:
    """The statistics of one device with 1000 bytes."""

    total_memory = 1000
    name = "stand-in"
    uuid = "1-2-3"

    def __init__(self):
        self.current = self.peak = self.workspace = 0
        self.fraction = 1.0
        self.observers = []
        self.trace = None  # of device 0, while memory history is recorded
        self.address = 4096
        self.metadata = ""
        self.python = []  # Python's frames, the innermost first.

    def allocate(self, count):
        self.current += count
        self.peak = max(self.peak, self.current)

    def allocate_workspace(self, count):
        self.workspace += count
        self.allocate(count)

    def drop_workspaces(self):
        self.allocate(-self.workspace)
        self.workspace = 0

    def reset_peak(self, device):
        self.peak = self.current

    def allocate_traced(self, count, *functions):
        """The address of a block that is in the trace with the C++ functions, the innermost first."""
        self.allocate(count)
        self.address += 512
        self.note("alloc", self.address, count, functions)
        return self.address

    def free_traced(self, address, count):
        self.allocate(-count)
        self.note("free_requested", address, count)
        self.note("free_completed", address, count)

    def note(self, action, address, count, functions=()):
        if self.trace is not None:
            frames = [{"name": name, "filename": "Operators.cpp", "line": 1} for name in functions]
            frames += self.python
            entry = {"action": action, "addr": address, "size": count, "stream": 0, "frames": frames}
            entry |= {"time_us": 10**6 + 1000 * self.current, "user_metadata": self.metadata}
            self.trace.append(entry)

    def set_metadata(self, text):
        self.metadata = text

    def record_history(self, enabled, **options):
        self.trace = [] if enabled else None

    def snapshot(self):
        traces = [list(self.trace), []]
        self.note("snapshot", 0, 0)  # like torch
        return {"segments": [], "device_traces": traces}

    def set_fraction(self, fraction, device):
        self.fraction = fraction

    def stats(self, device):
        figures = {"current": self.current, "peak": self.peak}
        kinds = ("requested", "allocated", "reserved")
        return {f"{kind}_bytes.all.{name}": value for kind in kinds for name, value in figures.items()}


class ModelledCuda(FakeCuda):
    """Events and segments are those of the allocator's model, on a GPU with 64 MiB."""

    def __init__(self):
        super().__init__()
        self.settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
        self.allocator = CachingAllocator(64 * MIB)
        self.blocks = {}  # In use, by address: the block and its frames.
        self.noted = []  # All entries, though the trace is cleared.

    def allocate_traced(self, count, *functions):
        try:
            block = self.allocator.malloc(count)
        except OutOfMemory:
            self.note_events(functions)
            for observer in self.observers:
                observer(0, count, 64 * MIB, 0)
            raise torch.OutOfMemoryError("CUDA out of memory.") from None
        self.allocate(count)
        self.note_events(functions)
        self.blocks[block.address] = block, self.trace[-1]["frames"]
        return block.address

    def free_traced(self, address, count):
        self.allocate(-count)
        self.allocator.free(self.blocks.pop(address)[0])
        self.note_events()

    def note_events(self, functions=()):
        for event in self.allocator.events(len(self.noted)):
            self.note(event.action, event.address, event.bytes, functions)
            if event.action == "oom":
                self.trace[-1]["device_free"] = self.trace[-1].pop("addr")
            self.noted.append(copy.deepcopy(self.trace[-1]))

    def snapshot(self):
        return super().snapshot() | {"segments": self.segments(), "allocator_settings": self.settings}

    def segments(self):
        return segments_of(self.allocator, {address: frames for address, (_, frames) in self.blocks.items()})


@pytest.fixture
def cuda(request, monkeypatch):
    fake = getattr(request, "param", FakeCuda)()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_stats", fake.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset_peak)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record_history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", fake.set_metadata)
    monkeypatch.setattr(machines, "_compute_processes", lambda uuid: [])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: fake)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 1000))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", fake.drop_workspaces, raising=False)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fake.fraction)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fake.set_fraction)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", fake.observers.append, raising=False)
    tracking._watch_cuda_refusals.cache_clear()
    yield fake
    tracking._watch_cuda_refusals.cache_clear()


def test_cuda_peaks_survive_the_resets_of_others(cuda):
    cuda.allocate(100)
    with memcheck.track(device="cuda:0") as outer:
        cuda.allocate(50)
        cuda.allocate(-50)
        with memcheck.track(device="cuda:0") as inner:
            cuda.allocate(30)
            cuda.allocate(-10)
            inner.reset_peak()
            assert inner.peak_bytes == 20
            cuda.allocate(5)
        assert (inner.peak_bytes, inner.current_bytes) == (25, 25)
        assert (outer.peak_bytes, outer.current_bytes) == (50, 25)
        outer.reset_peak()
        assert outer.peak_bytes == 25
    cuda.allocate(500)
    assert outer.peak_bytes == 25


def test_cuda_budgets_are_fractions_put_back(cuda):
    cuda.allocate(100)
    with memcheck.track(device="cuda:0", memory_limit=400):
        assert cuda.fraction == 0.5
        with memcheck.track(device="cuda:0", memory_limit=900):
            assert cuda.fraction == 0.5
    assert cuda.fraction == 1.0


def test_cuda_refusals_are_observed(cuda):
    with memcheck.track(device="cuda:0") as memory:
        cuda.allocate(70)
        assert memory.refusal is None
        [observer] = cuda.observers
        observer(0, 2048, 1000, 930)
    assert memory.refusal == (2048, 70)


def run_on_stand_in(cuda):
    """The forward requests 300 bytes, keeps 100 and a workspace of 64; the backward requests 200 and 32."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            cuda.allocate(300)
            cuda.allocate(-200)
            cuda.allocate_workspace(64)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            cuda.allocate_workspace(32)
            cuda.allocate(200)
            cuda.allocate(-300)
            return gradient.clone()

    return Function.apply


def test_cuda_records_separate_library_workspaces(cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    cuda.allocate_workspace(500)
    record = memcheck.measure_memory(run_on_stand_in(cuda), torch.ones(3, requires_grad=True), device="cuda:0")
    assert (record.device, record.device_index, record.device_name, record.device_uuid) == (
        "cuda",
        0,
        "stand-in",
        "1-2-3",
    )
    assert (record.device_total_bytes, record.device_free_bytes) == (1000, 400)
    assert record.allocator == "expandable_segments:True"
    assert (record.forward_peak_bytes, record.saved_bytes) == (300, 100)
    # Live bytes before, without the dropped workspace: 0. Saved 100, workspace 32, scratch 200.
    assert (record.backward_peak_bytes, record.library_workspace_bytes) == (332, 64)
    assert record.workspace_bytes == 200
    assert (record.forward_max_allocated_bytes, record.backward_max_allocated_bytes) == (300, 332)
    assert record.reserved_bytes == cuda.current


def test_one_tracker_watches_every_device(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda.allocate(100)
    with memcheck.track() as memory:
        kept = torch.zeros(10)
        cuda.allocate(50)
        cuda.allocate(-20)
        with memcheck.track(device="cuda:1", saved=False) as inner:
            cuda.allocate(5)
            assert (
                str(inner)
                == "MemoryTracker(cpu: peak 0 B, now 0 B; cuda:0: peak 5 B, now 5 B; cuda:1: peak 5 B, now 5 B)"
            )
        memory.reset_peak()
        assert memory.by_device["cuda:0"] == tracking.DeviceMemory(35, 35, 0)
        cuda.allocate(7)
    cuda.allocate(1000)
    assert memory.by_device == {
        "cpu": tracking.DeviceMemory(40, 40, 0),
        "cuda:0": tracking.DeviceMemory(42, 42, 0),
        "cuda:1": tracking.DeviceMemory(42, 42, 0),  # the substitute has the same figures for both
    }
    assert kept.nbytes == memory.current_bytes == 40


def test_a_device_first_used_during_the_block_counts_from_nothing(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with memcheck.track() as memory:
        assert list(memory.by_device) == ["cpu"]
        cuda.allocate(60)
        cuda.allocate(-20)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert memory.by_device["cuda:0"] == tracking.DeviceMemory(60, 40, 0)


def test_a_gpu_in_use_by_others_is_named_in_the_record(cuda, monkeypatch):
    monkeypatch.setattr(machines, "_compute_processes", lambda uuid: [(1, 2**30), (machines.os.getpid(), 2**20)])
    record = memcheck.measure_memory(torch.exp, torch.ones(3), backward=False, device="cuda:0")
    assert record.doubts == ("the GPU is shared with process 1 (1 GiB)",)


def test_cuda_timelines_come_from_torch_s_trace(cuda):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            scores = cuda.allocate_traced(300, "empty_cuda", "at::_ops::bmm::call(at::Tensor const&)")
            ctx.saved = cuda.allocate_traced(100, "at::_ops::_softmax::call(at::Tensor const&)")
            cuda.free_traced(scores, 300)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            node = "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"
            cuda.allocate_traced(250, "at::_ops::mul_Tensor::call(at::Tensor const&)", node)
            cuda.free_traced(ctx.saved, 100)
            cuda.note("free_requested", cuda.address, 250)  # another stream still reads it
            return gradient.clone()

    timeline = record_timeline(Function.apply, torch.ones(3, requires_grad=True), device="cuda:0")
    assert [(event.bytes, event.name, event.phase) for event in timeline.events] == [
        (300, "aten::bmm", "forward"),
        (100, "aten::_softmax", "forward"),
        (-300, "aten::bmm", "forward"),
        (250, "MulBackward0", "backward"),
        (-100, "aten::_softmax", "backward"),
    ]
    assert timeline.phases == [("forward", 0, 3), ("backward", 3, 5)]
    record = timeline.record
    assert (timeline.alive[timeline.peak["forward"]], record.forward_peak_bytes) == (400, 400)
    assert (timeline.alive[timeline.peak["backward"]], record.backward_peak_bytes) == (350, 350)
    assert cuda.trace is None


def test_a_script_on_cuda(cuda):
    """The history is folded at every step, so that it stays short, and blocks outlive it."""
    line = {"name": "train", "filename": "/home/me/train.py", "line": 12}
    inner = {"name": "linear", "filename": f"{torch.__path__[0]}/nn/functional.py", "line": 3}
    addmm, node = "at::_ops::addmm::call(at::Tensor const&)", "torch::autograd::AddmmBackward0::apply()"
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    lengths = []

    class Model(torch.nn.Module):
        def forward(self):
            return cuda.allocate_traced(100, addmm)

    cuda.python = [inner, line]
    with ScriptWatch(torch.device("cuda:0")) as watch:
        kept = cuda.allocate_traced(10)
        for _ in range(3):
            activation = Model()()
            scratch = cuda.allocate_traced(30, addmm, node)
            cuda.free_traced(scratch, 30)
            cuda.free_traced(activation, 100)
            optimizer.step()
            lengths.append(len(cuda.trace))
        cuda.note("oom", 0, 5000, [addmm])
    assert cuda.trace is None
    assert max(lengths) <= 1
    record = watch.record(["train.py"], 1, torch.OutOfMemoryError("CUDA"))
    assert (record.device, record.peak.bytes, record.peak.step, record.steps) == ("cuda:0", 140, 1, 3)
    assert record.peak.seconds == 0.13
    assert {(each.place.operator, each.place.module, each.place.phase, each.bytes) for each in record.alive} == {
        (f"{inner['filename']}:3 linear", None, "elsewhere", 10),
        ("aten::addmm", "Model", "forward", 100),
        ("AddmmBackward0", None, "backward", 30),
    }
    assert {each.place.line for each in record.alive} == {Line("/home/me/train.py", 12, "train")}
    assert (record.refusals, record.refusal.requested_bytes, record.refusal.moment.bytes) == (1, 5000, 10)
    assert (record.left_bytes, record.doubts, kept > 0) == (10, [], True)


def test_a_script_that_grows_on_cuda(cuda):
    addmm = "at::_ops::addmm::call(at::Tensor const&)"
    cuda.python = [{"name": "train", "filename": "/home/me/train.py", "line": 12}]

    class Model(torch.nn.Module):
        def forward(self):
            return cuda.allocate_traced(100_000, addmm)

    def grown(train):
        """What grows if every second activation is kept, and the longest history."""
        model, lengths = Model(), []
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
        with ScriptWatch(torch.device("cuda:0")) as watch:
            for step in range(18):
                activation = model()
                if step % 2:
                    cuda.free_traced(activation, 100_000)
                if train:
                    optimizer.step()
                lengths.append(len(cuda.trace))
        record = watch.record(["train.py"], 0, None)
        (growth,) = record.growing
        assert growth.place.module == "Model"
        assert growth.place.line == Line("/home/me/train.py", 12, "train")
        return record.step_name, growth.bytes_per_step, max(lengths)

    # The ends of steps 2 to 18, and the beginnings of calls 3 to 18: 8 of each, the first and the last among them.
    assert grown(True) == ("step", 8 * 100_000 // 16, 0)
    assert grown(False) == ("call of Model", 8 * 100_000 // 15, 4)


SCRIPT = """
import torch

def free(blocks):
    for address in blocks:
        cuda.free_traced(address, blocks[address])

cuda = torch.cuda.stand_in
weights = {cuda.allocate_traced(3 << 20, "at::_ops::empty::call()"): 3 << 20}
kept = {cuda.allocate_traced(500): 500}
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
for step in range(3):
    sizes = [300 << 10, 25 << 20, 7000]
    free({cuda.allocate_traced(size, "at::_ops::addmm::call()"): size for size in sizes})
    optimizer.step()
"""
RUNS_OUT = """
try:
    cuda.allocate_traced(62 << 20, "at::_ops::bmm::call()")
finally:
    free(weights)
"""


@pytest.fixture
def run(cuda, tmp_path, monkeypatch, capsys):
    """Runs `memcheck run` on a script, on the stand-in; returns the exit code and stderr."""
    monkeypatch.setattr(torch.cuda, "stand_in", cuda, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    cuda.python = [{"name": "train", "filename": "/home/me/train.py", "line": 12}]

    def run_text(text, *flags):
        (tmp_path / "train.py").write_text(text)
        code = main(["run", "--device", "cuda:0", *flags, "train.py"])
        return code, capsys.readouterr().err

    return run_text


@pytest.mark.parametrize("cuda", [ModelledCuda], indirect=True)
@pytest.mark.parametrize("end", ["", RUNS_OUT])
def test_a_run_keeps_the_whole_history_if_asked(cuda, run, tmp_path, end):
    code, err = run(SCRIPT + end, "--snapshot", "of run/train.pickle")
    assert code == bool(end)
    assert "memcheck snapshot reads of run/train.pickle and says what would have fitted." in err
    data = pickle.loads((tmp_path / "of run/train.pickle").read_bytes())
    assert data["device_traces"] == [cuda.noted, []]
    assert (data["segments"], data["allocator_settings"]) == (cuda.segments(), cuda.settings)
    # Equal stacks are stored once.
    assert len({id(entry["frames"]) for entry in data["device_traces"][0]}) == (4 if end else 3)
    assert [path.name for path in (tmp_path / "of run").iterdir()] == ["train.pickle"]
    assert not (tmp_path / "results/run-snapshot.pickle").exists()
    record = memcheck.Snapshot.load(tmp_path / "of run/train.pickle").record
    assert (record.events, record.replay.exact, record.ooms) == (len(cuda.noted), True, bool(end))
    # Of a segment of 26 MiB the last MiB is not split off.
    assert record.peak.allocated_bytes == (3 << 20) + 512 + (300 << 10) + (26 << 20) + 7168
    assert record.peak_reserved_bytes == (20 + 2 + 26) << 20
    assert json.loads((tmp_path / "results/run.json").read_text())["snapshot"] == "of run/train.pickle"


@pytest.mark.parametrize("cuda", [ModelledCuda], indirect=True)
def test_a_run_out_of_memory_leaves_the_history_of_its_last_step(cuda, run, tmp_path):
    """The snapshot is of the moment: the exception has not released the weights, which have their line."""
    code, err = run(SCRIPT + RUNS_OUT, "--output", "out")
    assert (code, "memcheck snapshot reads out/run-snapshot.pickle" in err) == (1, True)
    path = tmp_path / "out/run-snapshot.pickle"
    [events, _] = pickle.loads(path.read_bytes())["device_traces"]
    end = [entry["action"] for entry in cuda.noted].index("oom") + 1
    assert events == cuda.noted[end - len(events) : end]
    assert 0 < len(events) < end
    record = memcheck.Snapshot.load(path).record
    assert (record.ooms, record.oom.requested_bytes, record.replay.exact) == (1, 62 << 20, True)
    weights, kept = record.oom.moment.alive
    assert (weights.place.operator, weights.bytes, kept.bytes) == ("aten::empty", 3 << 20, 512)
    assert str(weights.place.line) == str(kept.place.line) == "/home/me/train.py:12 (train)"
    assert "memcheck snapshot reads out/run-snapshot.pickle" in (tmp_path / "out/run.html").read_text()


@pytest.mark.parametrize("cuda", [ModelledCuda], indirect=True)
def test_a_run_that_does_not_end_out_of_memory_leaves_no_snapshot(run, tmp_path):
    code, err = run(f"{SCRIPT}\ntry:\n cuda.allocate_traced(62 << 20)\nexcept RuntimeError: pass\n1 / 0")
    assert (code, "memcheck snapshot" in err) == (1, False)
    assert not (tmp_path / "results/run-snapshot.pickle").exists()


@pytest.mark.parametrize("cuda", [ModelledCuda], indirect=True)
def test_a_snapshot_that_cannot_be_written_is_a_doubt(run, tmp_path, monkeypatch):
    (tmp_path / "old.pickle").write_text("of an earlier run")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", fail)
    code, err = run(SCRIPT, "--snapshot", "old.pickle")
    assert code == 0
    assert "Doubt: the memory snapshot old.pickle could not be written: No space left on device." in err
    assert (tmp_path / "old.pickle").read_text() == "of an earlier run"
    assert {path.name for path in tmp_path.iterdir()} == {"old.pickle", "results", "train.py"}


def test_cuda_times_come_from_events(cuda, monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "the stream"

        def elapsed_time(self, end):
            return 2.5

    synchronized = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    times = measurement.measure_time(torch.exp, torch.ones(3, requires_grad=True), device="cuda:0", warmup=0, passes=3)
    assert (times["forward_ms"], times["backward_ms"], times["passes"]) == (2.5, 2.5, 3)
    assert synchronized == [0] * 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_cuda_device():
    a, b = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2))
    record = memcheck.measure_memory(torch.matmul, a, b)
    assert (record.status, record.device, record.input_bytes, record.output_bytes) == ("ok", "cuda", 32768, 16384)
    assert (record.saved_bytes, record.gradient_bytes) == (0, 32768)
    assert record.forward_peak_bytes == 49152 + record.library_workspace_bytes

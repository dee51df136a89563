"""Memory snapshots: what is read of them, what they say, and what would have fitted."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from modelled import segments_of

import memcheck
from memcheck.allocator import MIB, AllocatorSettings, Block, CachingAllocator, Order, OutOfMemory
from memcheck.core.errors import UsageError
from memcheck.core.snapshot_record import SnapshotRecord
from memcheck.snapshot import Snapshot
from memcheck.snapshot.files import origin_of

HISTORIES = sorted((Path(__file__).parents[1] / "data" / "histories").glob("*.json.gz"))
GIB = 1024 * MIB


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


TORCH = "/env/lib/python3.11/site-packages/torch"
LINEAR = [
    frame("??", 0, "at::_ops::addmm::call(at::Tensor const&)"),
    frame(f"{TORCH}/nn/modules/linear.py", 134, "forward"),
]
CALL = [frame(f"{TORCH}/nn/modules/module.py", 1784, "_call_impl")]
MODEL = [frame("/home/me/project/model.py", 41, "forward")]
TRAIN = [frame("/home/me/project/train.py", 12, "main")]
FORWARD = [*LINEAR, *CALL, *MODEL, *CALL, *TRAIN]
BACKWARD = [
    frame("??", 0, "at::_ops::mm::call(at::Tensor const&)"),
    frame("??", 0, "torch::autograd::generated::AddmmBackward0::apply(std::vector<at::Tensor>&&)"),
    frame("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
]
STEP = [
    frame("??", 0, "at::_ops::zeros_like::call(at::Tensor const&)"),
    frame(f"{TORCH}/optim/adam.py", 173, "_init_group"),
    *TRAIN,
]


class Recorder:
    """A program whose allocations are recorded as torch does, in the model of the allocator."""

    def __init__(
        self,
        settings: str = "",
        limit_bytes: int | None = None,
        *,
        device: int = 0,
        order: Order = Order.ADDRESS,
    ) -> None:
        self.text, self.device = settings, device
        self.allocator = CachingAllocator(limit_bytes, AllocatorSettings.parse(settings), order=order)
        self.frames: list[list[dict[str, Any]]] = []
        self.alive: dict[Block, list[dict[str, Any]]] = {}
        self.forgotten = 0  # Events.

    def malloc(self, size: int, frames: Sequence[dict[str, Any]] = FORWARD) -> Block:
        try:
            block = self.allocator.malloc(size)
        finally:
            self._note(list(frames))
        assert block is not None
        self.alive[block] = list(frames)
        return block

    def free(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.free(block)
            del self.alive[block]
            self._note([])

    def forget(self) -> None:
        """Only what follows is recorded."""
        self.forgotten += len(self.frames)
        self.frames.clear()

    def data(self) -> dict[str, Any]:
        """What torch.cuda.memory._snapshot() would return."""
        trace = [
            {
                "action": event.action,
                "size": event.bytes,
                "stream": event.stream,
                "time_us": 10**6 + index,
                "frames": frames,
            }
            | {"device_free" if event.action == "oom" else "addr": event.address}
            for index, (event, frames) in enumerate(
                zip(self.allocator.events(self.forgotten), self.frames, strict=True)
            )
        ]
        settings = {"PYTORCH_CUDA_ALLOC_CONF": self.text, "expandable_segments": "expandable" in self.text}
        traces = [[] for _ in range(self.device)]
        return {"segments": self.segments(), "device_traces": [*traces, trace], "allocator_settings": settings}

    def segments(self) -> list[dict[str, Any]]:
        frames = {block.address: frames for block, frames in self.alive.items()}
        return segments_of(self.allocator, frames, self.device)

    def _note(self, frames: list[dict[str, Any]]) -> None:
        """The events since the last note have these frames."""
        self.frames += [frames] * (len(self.allocator.events(self.forgotten)) - len(self.frames))


def fragmented() -> Recorder:
    """Four segments of 30 MiB, of each 16 in use and 14 free; then a request of 30 MiB, with 10 MiB left."""
    program = Recorder(limit_bytes=130 * MIB)
    for _ in range(4):
        program.free(program.malloc(30 * MIB, BACKWARD))
        program.malloc(16 * MIB, FORWARD)
    with pytest.raises(OutOfMemory):
        program.malloc(30 * MIB, TRAIN)
    return program


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(data: Any, name: str = "snapshot.pickle", protocol: int = 4) -> Path:
        path = tmp_path / name
        path.write_bytes(pickle.dumps(data, protocol))
        return path

    return written


def load(data: Any, write: Callable[..., Path], **how: Any) -> SnapshotRecord:
    return Snapshot.load(write(data), **how).record


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_every_protocol_are_read(protocol: int, write: Callable[..., Path]) -> None:
    record = Snapshot.load(write(fragmented().data(), protocol=protocol)).record
    assert (record.peak.allocated_bytes, record.peak_reserved_bytes) == (78 * MIB, 120 * MIB)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["json", "pickle"])
def test_json_and_compressed_files_say_the_same(
    form: str, packed: bool, write: Callable[..., Path], tmp_path: Path
) -> None:
    data = fragmented().data()
    text = json.dumps(data).encode() if form == "json" else pickle.dumps(data)
    path = tmp_path / "other"
    path.write_bytes(gzip.compress(text) if packed else text)
    ours, theirs = (Snapshot.load(file).to_dict() for file in (write(data), path))
    assert {**ours, "file": ""} == {**theirs, "file": ""}


def test_the_answer_of_a_program_that_ran_out(write: Callable[..., Path]) -> None:
    record = load(fragmented().data(), write)
    assert record.replay.exact
    assert record.replay.at_recorded_address == record.replay.allocations == 8
    oom = record.oom
    assert oom is not None
    assert (oom.requested_bytes, oom.free_bytes, oom.moment.event) == (30 * MIB, 10 * MIB, record.events - 1)
    (large,) = oom.moment.holes
    assert (large.pool, large.reserved_bytes, large.free_bytes) == ("large", 120 * MIB, 56 * MIB)
    assert sum(alive.bytes for alive in oom.moment.alive) == oom.moment.allocated_bytes == 64 * MIB


def test_a_setting_that_would_have_had_room_is_named(write: Callable[..., Path]) -> None:
    snapshot = Snapshot.load(write(fragmented().data()))
    first, *rest = snapshot.summary()
    assert first.startswith("Memory ran out on cuda:0 at event ")
    assert "30 MiB were requested, at me/project/train.py:12 (main), with 10 MiB of the GPU free" in first
    assert any(
        line.startswith("With expandable_segments:True every recorded request would have had room") for line in rest
    )
    cases = {case.settings: case for case in snapshot.record.what_if}
    assert snapshot.record.oom is not None
    assert (cases["as recorded"].fits, cases["as recorded"].failing_event) == (False, snapshot.record.oom.moment.event)
    assert cases["expandable_segments:True"].fits


def test_holes_are_what_lies_between_blocks(write: Callable[..., Path]) -> None:
    """Of a segment of 20 MiB two holes of 4 MiB, of another one of 16; 30 MiB have a segment of their own."""
    program = Recorder()
    first, _, _, fourth, _ = (program.malloc(size * MIB) for size in (4, 3, 9, 3, 4))
    program.free(first, fourth)
    program.malloc(30 * MIB)
    (large,) = load(program.data(), write).peak.holes
    assert (large.reserved_bytes, large.free_bytes, large.largest_bytes, large.holes) == (
        70 * MIB,
        24 * MIB,
        16 * MIB,
        3,
    )


def test_what_was_alive_is_named_by_line_and_adds_up(write: Callable[..., Path]) -> None:
    program = Recorder()
    kept = program.malloc(30 * MIB, STEP)
    program.malloc(20 * MIB, FORWARD)
    program.free(program.malloc(50 * MIB, BACKWARD))
    record = load(program.data(), write)
    assert kept in program.alive
    lines = {line["line"]: (line["bytes"], line["blocks"]) for line in Snapshot([record]).to_dict()["alive_at_peak"]}
    assert lines == {
        "me/project/train.py:12 (main)": (30 * MIB, 1),
        "me/project/model.py:41 (forward)": (20 * MIB, 1),
        "backward: AddmmBackward0": (50 * MIB, 1),
    }
    assert record.peak.allocated_bytes == 100 * MIB
    assert [(least, size) for least, size, _ in record.peak.sizes] == [(10 * MIB, 100 * MIB)]


def test_places_of_frames() -> None:
    forward, backward, step = (origin_of(frames) for frames in (FORWARD, BACKWARD, STEP))
    assert (forward.operator, forward.phase, forward.module) == ("aten::addmm", "forward", "model.py:41 > nn.linear")
    assert (backward.operator, backward.phase, backward.line) == ("AddmmBackward0", "backward", None)
    assert (step.phase, step.kind, step.where) == ("optimizer step", "optimizer state", "me/project/train.py:12 (main)")
    assert str(origin_of([frame(f"{TORCH}/functional.py", 7, "norm")]).line).endswith("functional.py:7 (norm)")


def test_a_library_has_the_line_of_its_forward_and_a_helper_that_of_its_caller() -> None:
    library = "/env/lib/python3.11/site-packages/models/llama.py"
    helper = frame("/env/lib/python3.11/site-packages/einops/backends.py", 9, "einsum")
    inner = origin_of([helper, frame(library, 5, "forward"), *TRAIN])
    assert str(inner.line) == "site-packages/models/llama.py:5 (forward)"
    assert str(origin_of([helper, *TRAIN]).line) == "me/project/train.py:12 (main)"


def test_what_was_in_use_before_the_recording_is_named(write: Callable[..., Path]) -> None:
    program = Recorder()
    early, parameters = program.malloc(30 * MIB), program.malloc(12 * MIB)
    program.forget()
    program.free(early)
    program.malloc(8 * MIB, FORWARD)
    record = load(program.data(), write)
    assert record.replay.exact
    assert record.before == (42 * MIB, 2)
    assert record.peak.event == -1
    names = {alive.place.where: alive.bytes for alive in record.peak.alive}
    assert names == {"before the recording": 30 * MIB, "me/project/model.py:41 (forward)": 12 * MIB}
    assert parameters in program.alive


def test_what_grows_from_step_to_step_is_found(write: Callable[..., Path]) -> None:
    program = Recorder()
    for _ in range(12):
        activations = program.malloc(30 * MIB, FORWARD)
        gradients = program.malloc(20 * MIB, BACKWARD)
        program.malloc(2 * MIB, TRAIN)
        program.free(activations, gradients)
    record = load(program.data(), write)
    assert record.steps == 12
    (growth,) = record.growing
    assert (growth.place.where, growth.bytes_per_step) == ("me/project/train.py:12 (main)", 2 * MIB)
    (table,) = Snapshot([record]).table("growing")
    assert table.rows == [["me/project/train.py:12 (main)", 2, 1, 22]]


def test_the_requests_are_replayed_on_another_gpu(write: Callable[..., Path]) -> None:
    program = Recorder()
    blocks = [program.malloc(size * GIB, TRAIN) for size in (10, 20, 30)]
    data = program.data()
    recorded, other = load(data, write, settings=[]), load(data, write, settings=[], memory_limit="40GiB")
    assert [(case.fits, case.peak_reserved_bytes) for case in recorded.what_if] == [(True, 60 * GIB)]
    (case,) = other.what_if
    assert (case.fits, case.limit_bytes, case.peak_reserved_bytes) == (False, 40 * GIB, 30 * GIB)
    assert case.failing_place is not None
    assert case.failing_place.where == "me/project/train.py:12 (main)"
    program.forget()
    program.free(blocks[0])
    (early,) = load(program.data(), write, settings=[], device="L4").what_if
    assert (early.fits, early.failing_event) == (False, -1)


@pytest.mark.parametrize("order", Order)
def test_the_order_of_the_torch_that_recorded_is_found(order: Order, write: Callable[..., Path]) -> None:
    """No snapshot names the version of torch, on which it depends which of equal free blocks is taken."""
    recorder = Recorder(order=order)
    recorder.free(*[recorder.malloc(20 * MIB) for _ in range(2)])
    parts = [recorder.malloc(5 * MIB) for _ in range(4)]  # The first segment, from its begin to its end.
    recorder.free(parts[0], parts[3])
    recorder.malloc(5 * MIB)
    record = load(recorder.data(), write)
    assert record.replay.exact
    assert record.what_if[0].peak_reserved_bytes == record.peak_reserved_bytes


def test_several_devices_have_a_record_each(write: Callable[..., Path]) -> None:
    first, second = Recorder(), Recorder(device=1)
    first.malloc(30 * MIB)
    second.malloc(50 * MIB)
    data = second.data()
    data["device_traces"][0] = first.data()["device_traces"][0]
    data["segments"] += first.data()["segments"]
    records = Snapshot.load(write(data)).records
    assert [(record.device, record.peak.allocated_bytes) for record in records] == [(1, 50 * MIB), (0, 30 * MIB)]


def test_segments_alone_say_what_is_in_use(write: Callable[..., Path]) -> None:
    """A bare list, with the keys of torch 2.0."""
    program = Recorder()
    program.malloc(30 * MIB)
    segments = program.segments()
    for segment in segments:
        for name in ("is_expandable", "segment_pool_id", "device"):
            del segment[name]
        for block in segment["blocks"]:
            size, frames = block.pop("requested_size"), block.pop("frames")
            del block["address"]
            if block["state"] != "inactive":
                block["history"] = [{"addr": segment["address"], "real_size": size, "frames": frames}]
    snapshot = Snapshot.load(write(segments))
    assert snapshot.record.peak.allocated_bytes == 30 * MIB
    assert snapshot.to_dict()["alive_at_peak"][0]["line"] == "me/project/model.py:41 (forward)"
    assert "no recorded events" in snapshot.summary()[0]


def test_an_incomplete_history_is_reported_without_a_replay(write: Callable[..., Path]) -> None:
    program = Recorder()
    program.free(program.malloc(30 * MIB))
    data = program.data()
    data["device_traces"][0] = data["device_traces"][0][2:]
    data["segments"] = []
    record = load(data, write)
    assert record.replay.reason is not None
    assert "not replayed: the history is incomplete" in " ".join(Snapshot([record]).summary())
    assert record.peak.allocated_bytes == 30 * MIB


def test_settings_of_old_and_new_torch_are_read(write: Callable[..., Path]) -> None:
    data = fragmented().data()
    divisions = {str(2**index): 4 for index in range(16)}
    data["allocator_settings"] = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "max_split_size": 64 * MIB,
        "roundup_power2_divisions": divisions,
        "garbage_collection_threshold": 0.5,
    }
    assert load(data, write).settings == (
        "max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:4"
    )
    data["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "something_new:3"}
    record = load(data, write)
    assert "something_new" in record.doubts[0]


@pytest.mark.parametrize(
    "text", ["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2,>:8]"]
)
def test_settings_are_written_as_they_are_read(text: str) -> None:
    settings = AllocatorSettings.parse(text)
    assert AllocatorSettings.parse(str(settings)) == settings


def test_settings_that_contradict_the_recorded_ones_are_not_tried(write: Callable[..., Path]) -> None:
    program = Recorder("max_split_size_mb:32")
    program.malloc(30 * MIB)
    path = write(program.data())
    tried = [case.settings for case in Snapshot.load(path).record.what_if]
    assert "max_split_size_mb:128" in tried
    assert "large_segment_size_mb:64" not in tried
    with pytest.raises(UsageError, match="beside max_split_size_mb:32: max_split_size_mb must be an integer of at"):
        Snapshot.load(path, settings="large_segment_size_mb:64")


class Malicious:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was-run"),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pickle.dumps({"segments": [Malicious()]}), "it holds pathlib.Path.touch, and only plain data is read"),
        (lambda: pickle.dumps(fragmented().data())[:900], "is torn, or is no memory snapshot"),
        (lambda: gzip.compress(pickle.dumps(fragmented().data()))[:300], "is torn, or is no memory snapshot"),
        (lambda: b"", "is torn, or is no memory snapshot"),
        (lambda: b"just a text", "is torn, or is no memory snapshot"),
        (lambda: pickle.dumps({"state_dict": 1}), "it has no segments, only state_dict"),
        (lambda: pickle.dumps(3), "it holds a int, not a dict"),
        (lambda: pickle.dumps({"segments": []}), "has no segments and no events"),
        (lambda: pickle.dumps({"segments": [], "device_type": "cpu"}), "it is of the CPU, for the viewer"),
        (lambda: pickle.dumps({"segments": [{"address": "x"}]}), "a part of it is missing or wrong"),
    ],
)
def test_torn_and_foreign_files_end_in_one_line(
    make: Callable[[], bytes], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(make())
    with pytest.raises(UsageError) as error:
        Snapshot.load("file")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("was-run").exists()


def test_wrong_settings_and_devices_are_refused(write: Callable[..., Path]) -> None:
    path = write(fragmented().data())
    with pytest.raises(
        UsageError, match=r"settings max_split: unknown allocator setting 'max_split', got '' \(write it as in PYTORCH"
    ):
        Snapshot.load(path, settings="max_split")
    with pytest.raises(UsageError, match="device X100 is unknown"):
        Snapshot.load(path, device="X100")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        Snapshot.load(path.with_name("absent"))


def test_the_28_histories_are_exact() -> None:
    assert len(HISTORIES) == 28
    for path in HISTORIES:
        record = Snapshot.load(path, settings=[]).record
        assert record.replay.exact, path
        assert record.replay.peak_reserved_bytes == record.peak_reserved_bytes == record.what_if[0].peak_reserved_bytes
        assert sum(alive.bytes for alive in record.peak.alive) == record.peak.allocated_bytes


def test_a_notebook_shows_the_answer_the_picture_and_the_tables(write: Callable[..., Path]) -> None:
    snapshot = memcheck.Snapshot.load(write(fragmented().data()))
    page = snapshot._repr_html_()
    assert all(part in page for part in ("Memory ran out on cuda:0", "<img", "Alive when memory ran out, by line"))
    assert [table.name for table in snapshot.table("what-if")] == ["what-if"]
    with pytest.raises(UsageError, match="table: line is unknown"):
        snapshot.table("line")
    assert len(snapshot.plot().axes) == 2  # The events, and the bar of the peak.


def test_a_snapshot_is_not_made_of_a_path() -> None:
    with pytest.raises(TypeError, match=r"memcheck\.Snapshot\.load\('snapshot\.pickle'\) reads a file"):
        Snapshot("snapshot.pickle")

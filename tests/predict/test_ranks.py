"""What one rank of a split model needs, predicted without data, equals what processes of gloo measure."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from ranks_of_gloo import CASES, OVER_A_MESH, Case, Network, predict
from torch.distributed.fsdp import fully_shard

import memcheck
from memcheck import Ranks
from memcheck.core.errors import UsageError
from memcheck.core.prediction import verdict

pytestmark = pytest.mark.cpu

WAITING = "how long memory of collectives waits for their stream"

WORKER = Path(__file__).parent.parent / "ranks_of_gloo.py"
FIGURES = ("input_bytes", "output_bytes", "parameter_bytes", "optimizer_bytes", "forward_peak_bytes", "saved_bytes")
FIGURES += ("backward_peak_bytes", "gradient_bytes", "workspace_bytes", "optimizer_peak_bytes")
FIGURES += ("forward_end_allocated_bytes", "backward_end_allocated_bytes")
Measured = list[dict[str, dict[str, Any]]]  # By rank and case.


@pytest.fixture(autouse=True, scope="module")
def frozen_modules() -> None:
    """Python finds no holders among frozen objects, such as the caches of DTensor, which are not warned of."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # The workers fill nothing.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Measured]:
    """Measures every case in so many processes, once."""
    done: dict[int, Measured] = {}

    def measure(processes: int) -> Measured:
        if processes not in done:
            folder = tmp_path_factory.mktemp(f"{processes}-processes")
            done[processes] = run_ranks(WORKER, processes, folder)
        return done[processes]

    return measure


def assert_equal(record: dict[str, Any], case: Case, processes: int, rank: int) -> None:
    """A bound is off by as much as threads of gloo free late: a level is higher then, a difference of levels lower."""
    prediction = predict(case, processes, rank)
    assert prediction.record.status == "ok"
    for figure in FIGURES:
        late = case.late if figure in prediction.bounds else 0
        found, real = getattr(prediction.record, figure), record[figure]
        assert found == real or abs(found - real) <= late, (rank, figure, found, real, prediction.unknown)


@pytest.mark.ci
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_equals_its_measurement(name: str, processes: int, measured: Callable[[int], Measured]) -> None:
    for rank, records in enumerate(measured(processes)):
        assert_equal(records[name], CASES[name], processes, rank)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", OVER_A_MESH)
def test_a_mesh_of_running_processes_predicts_the_same(
    name: str, processes: int, measured: Callable[[int], Measured]
) -> None:
    """The collectives of a prediction over a mesh are real, too."""
    for rank, records in enumerate(measured(processes)):
        assert_equal(records[f"{name}, predicted over the mesh"], CASES[name], processes, rank)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_the_plan_of_a_model_of_transformers(require_package: Callable[[str], None], tmp_path: Path) -> None:
    """Each of two processes; bounds are off by what gloo frees late, at most its copies of two results."""
    require_package("transformers")
    import plan_over_gloo

    for rank, record in enumerate(run_ranks(Path(plan_over_gloo.__file__), 2, tmp_path)):
        prediction = plan_over_gloo.predict(2, rank)
        assert all("gloo" in words for words in prediction.unknown)
        for figure in FIGURES:
            late = 2 * 2 * 16 * 128 * 4 if figure in prediction.bounds else 0  # the largest result: logits, float32
            assert abs(getattr(prediction.record, figure) - record[figure]) <= late, (rank, figure)


def test_buffers_of_collectives_are_terms_by_name() -> None:
    prediction = predict(CASES["fsdp"], 8, 0)
    assert sum(prediction.terms["parameter_bytes"].values()) * 7 < sum(x.nbytes for x in Network().parameters())
    assert {"all-gathered parameters", "all-gather buffer"} <= prediction.buffers.keys()
    assert any("gloo" in words for words in prediction.unknown)
    assert "all-reduce buffer" in predict(CASES["ddp"], 8, 0).buffers


def test_a_gpu_has_unknowns_by_name() -> None:
    with torch.device("meta"):
        model = Network()
    tokens = torch.zeros(4, 32, dtype=torch.long, device="cpu")
    prediction = memcheck.predict_memory(model, tokens, device="H100-80GB", ranks=Ranks(fsdp=8, rank=7))
    assert prediction.fits
    assert "NCCL's own buffers, which torch's allocator does not count" in prediction.unknown
    assert "reserved_bytes" in prediction.bounds
    assert not torch.distributed.is_initialized()


def test_memory_of_a_collective_is_reserved_on_its_stream() -> None:
    """FSDP2 gathers into one stream's memory and reduces into another's, which the default stream cannot use again."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
    ranks = Ranks(fsdp=8, split_by=lambda model, mesh: [*map(partial(fully_shard, mesh=mesh), (*model, model))][-1])
    found = memcheck.predict_memory(model, torch.zeros(64, 2048), device="H100-80GB", optimizer="adamw", ranks=ranks)
    assert found.trace is not None
    streams: dict[str, set[int]] = {}
    for allocation in found.trace.log.allocations:
        streams.setdefault(allocation.name, set()).add(allocation.stream)
    assert streams["all-gathered parameters"] == streams["reduce-scatter input"] == {0}
    # Under its copy of what it sends, and under the gradient that it becomes.
    (gathering,), (reducing,) = streams["all-gather buffer"], streams["d0.weight"]
    assert 0 < gathering < reducing
    assert WAITING not in found.unknown
    assert "up to 5% more in the allocator's segments, which published runs of FSDP2 had" in found.unknown
    assert "Published runs of FSDP2 reserved up to 5% more." in verdict(found)
    other = memcheck.predict_memory(model, torch.zeros(64, 2048), device="H100-80GB", ranks=Ranks(ddp=8))
    assert WAITING in other.unknown


def test_the_longest_batch_of_a_rank() -> None:
    def batch(size: int) -> torch.Tensor:
        return torch.zeros(size, 32, dtype=torch.long)

    how: dict[str, Any] = {"memory_limit": 4 * 2**20, "start": 8, "optimizer": torch.optim.AdamW}
    whole, rank = (memcheck.largest(batch, Network(), "cpu", **how, ranks=ranks) for ranks in (None, Ranks(fsdp=8)))
    assert whole.size < rank.size
    assert rank.at is not None
    assert rank.at.fits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of fsdp, tp and ddp must be given, got none"),
        ({"fsdp": 2, "tp": 2}, "got fsdp and tp"),
        ({"fsdp": 0}, "fsdp must be at least 1, got 0"),
        ({"ddp": 2, "rank": 2}, "rank must be from 0 to 1, got 2"),
        ({"fsdp": 2.0}, "fsdp must be a number of processes or a DeviceMesh, got 2.0"),
    ],
)
def test_wrong_ranks(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Ranks(**given)


def test_tensor_parallelism_needs_a_plan() -> None:
    with pytest.raises(UsageError, match="Network has no tp_plan: give Ranks"):
        memcheck.predict_memory(Network(), torch.zeros(4, 32, dtype=torch.long), ranks=Ranks(tp=2))

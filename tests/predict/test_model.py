"""Predictions of any model equal measurements, from real or meta tensors, and allocate nothing of its size."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memcheck
from memcheck.allocator import MIB
from memcheck.core.errors import UsageError
from memcheck.core.prediction import Prediction
from memcheck.core.record import Record
from memcheck.core.step import Step
from memcheck.measure.measurement import measure_memory
from memcheck.measure.tracker import track
from memcheck.predict import process
from memcheck.predict.operators.products import LT_WORKSPACE
from memcheck.predict.probe import CpuProbe
from memcheck.predict.probed import Table

pytestmark = pytest.mark.cpu

FIGURES = ("input_bytes", "output_bytes", "parameter_bytes", "optimizer_bytes", "forward_peak_bytes", "saved_bytes")
FIGURES += ("backward_peak_bytes", "gradient_bytes", "workspace_bytes", "optimizer_peak_bytes")
FIGURES += ("forward_end_allocated_bytes", "backward_end_allocated_bytes")


@pytest.fixture(autouse=True)
def a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))
    return tmp_path / "probes.jsonl"


class Tied(nn.Module):
    """A language model whose embedding is also its head, with normalization, dropout and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, *, scale: float = 1.0, extra: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(tokens) * scale
        if extra is not None:
            x = x + extra["bias"]
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].square().mean()


def tokens() -> Tensor:
    return torch.randint(50, (3, 10))


def figures(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIGURES}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


HOW: dict[str, dict[str, Any]] = {
    "training": {"optimizer": adamw, "loss": loss_of},
    "the first step": {"optimizer": adamw, "loss": loss_of, "steps": 1},
    "momentum": {"optimizer": lambda parameters: torch.optim.SGD(parameters, momentum=0.9), "loss": loss_of},
    "no optimizer": {"loss": loss_of},
    "every output": {},
    "inference": {"backward": False},
    "keywords": {"loss": loss_of, "scale": 2.0, "extra": {"bias": torch.ones(3, 10, 16)}},
}


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)), torch.randn(16, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return nn.Sequential(*layers), torch.randn(2, 3, 12, 12)


def words_of_a_language() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16)), torch.randint(50, (3, 7))


def encoder() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), torch.randn(2, 8, 16)


STEPS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 4},
    "accumulated, stepped": {"accumulate": 3, "optimizer": adamw},
    "clipped": {"clip_grad_norm": 1.0, "optimizer": adamw},
    "gradients kept": {"set_to_none": False, "optimizer": adamw},
    "all": {"accumulate": 2, "clip_grad_norm": 1.0, "set_to_none": False, "optimizer": adamw},
    "all, the first step": {"accumulate": 2, "clip_grad_norm": 1.0, "optimizer": adamw, "steps": 1},
}


@pytest.mark.extension
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("make", [mlp, convolutions, words_of_a_language, encoder])
def test_a_step_is_predicted_exactly(make: Callable[[], tuple[nn.Module, Tensor]], name: str) -> None:
    model, x = make()
    prediction = memcheck.predict_memory(model, x, **STEPS[name])
    assert prediction.exact, prediction.unknown
    assert figures(prediction.record) == figures(measure_memory(model, x, **STEPS[name]))


def test_gradients_of_earlier_passes_are_alive() -> None:
    """In the last forward of a step, and, where zero_grad keeps them, in every forward."""
    model, x = mlp()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    plain = memcheck.predict_memory(model, x, optimizer=adamw).record
    for how in ({"accumulate": 2}, {"set_to_none": False}):
        record = memcheck.predict_memory(model, x, optimizer=adamw, **how).record
        assert record.forward_peak_bytes == (plain.forward_peak_bytes or 0) + gradients


def test_a_long_accumulation_costs_no_more_to_predict() -> None:
    model, x = mlp()
    two, many = (memcheck.predict_memory(model, x, accumulate=count) for count in (2, 1000))
    assert two.trace is not None
    assert many.trace is not None
    assert len(two.trace.log.events) == len(many.trace.log.events)


def test_clipping_on_a_gpu_takes_lists() -> None:
    model, x = mlp()
    prediction = memcheck.predict_memory(model, x, device="RTX-4090", **STEPS["clipped"])
    assert prediction.trace is not None
    assert {"aten::_foreach_norm", "aten::_foreach_mul_"} <= set(prediction.trace.operators)


@pytest.mark.extension
def test_gradients_of_inputs_accumulate() -> None:
    """As in a loop over the same tensor: the gradient of the first pass is alive in the forward of the last one."""
    logits, targets = torch.randn(64, 512, requires_grad=True), torch.zeros(64, dtype=torch.int64)
    for function, inputs in ((torch.nn.functional.cross_entropy, (logits, targets)), (torch.sin, (logits,))):
        once, often = (measure_memory(function, *inputs, accumulate=count) for count in (1, 3))
        assert (often.gradient_bytes, often.saved_bytes) == (once.gradient_bytes, once.saved_bytes)
        assert often.forward_peak_bytes == (once.forward_peak_bytes or 0) + logits.nbytes
        prediction = memcheck.predict_memory(function, *inputs, accumulate=3)
        assert prediction.exact
        assert prediction.record.forward_peak_bytes == often.forward_peak_bytes
        assert prediction.record.backward_peak_bytes == often.backward_peak_bytes
        assert prediction.record.gradient_bytes == often.gradient_bytes


@pytest.mark.extension
@pytest.mark.parametrize("name", HOW)
def test_a_model_is_predicted_exactly(name: str) -> None:
    model, ids = Tied(), tokens()
    prediction = memcheck.predict_memory(model, ids, **HOW[name])
    assert prediction.unknown == ()
    assert prediction.exact
    assert figures(prediction.record) == figures(measure_memory(model, ids, **HOW[name]))


def test_the_first_step_has_other_peaks() -> None:
    """The optimizer has no state before its first step."""
    first, later = (
        memcheck.predict_memory(Tied(), tokens(), **HOW[name]).record for name in ("the first step", "training")
    )
    assert first.forward_peak_bytes is not None
    assert later.forward_peak_bytes is not None
    assert later.forward_peak_bytes == first.forward_peak_bytes + (later.optimizer_bytes or 0)
    assert not first.optimizer_bytes


def test_a_model_on_meta_is_predicted_alike() -> None:
    real = memcheck.predict_memory(Tied(), tokens(), **HOW["training"])
    with torch.device("meta"):
        model, ids = Tied(), tokens()
    model.head.weight = model.embedding.weight
    meta = memcheck.predict_memory(model, ids, **HOW["training"])
    assert figures(meta.record) == figures(real.record)


def test_the_model_stays_as_it_is() -> None:
    model, ids = Tied(), tokens()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memcheck.predict_memory(model, ids, **HOW["training"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.extension
def test_nothing_of_its_size_is_allocated() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU())
    x = torch.zeros(1000, 1000)
    with track() as memory:
        prediction = memcheck.predict_memory(model, x, device="RTX-4090", optimizer=adamw)
    assert prediction.record.backward_peak_bytes is not None
    assert prediction.record.backward_peak_bytes > 10_000_000
    assert memory.peak_bytes < 20_000  # States of the random generator, of 5 KB each.


def test_modules_are_told_apart() -> None:
    prediction = memcheck.predict_memory(Tied(), tokens(), **HOW["training"])
    record = prediction.record
    modules = prediction.by_module
    assert sum(sums["saved"] for sums in modules.values()) == record.saved_bytes
    peak = max(record.forward_peak_bytes or 0, record.backward_peak_bytes or 0, record.optimizer_peak_bytes or 0)
    assert sum(sums["peak"] for sums in modules.values()) == peak
    assert modules["layers.1.linear1"]["peak"] >= 3 * 32 * 16 * 4  # weight and AdamW's two moments
    assert modules["norm"]["saved"] > 0


def test_the_timeline_has_the_peaks() -> None:
    prediction = memcheck.predict_memory(Tied(), tokens(), **HOW["training"])
    for phase in ("forward", "backward", "optimizer"):
        peak = max(size for name, size in prediction.timeline if name == phase)
        assert peak == getattr(prediction.record, f"{phase}_peak_bytes")


def test_it_fits_or_runs_out() -> None:
    model, x = nn.Linear(1000, 1000), torch.zeros(100, 1000)
    assert memcheck.predict_memory(model, x, device="40GiB").fits
    prediction = memcheck.predict_memory(model, x, memory_limit=4_000_000)
    assert prediction.fits is False
    assert prediction.record.status == "oom"


def test_the_largest_size_that_fits() -> None:
    model = nn.Linear(100, 100)
    found = memcheck.largest(lambda n: torch.zeros(n, 100), model, "cpu", memory_limit=1_000_000, backward=False)
    assert found.at is not None
    assert found.beyond is not None
    assert (found.at.fits, found.beyond.fits) == (True, False)
    assert found.size == (1_000_000 - 100 * 100 * 4 - 400) // 800
    with pytest.raises(UsageError, match="no limit"):
        memcheck.largest(lambda n: torch.zeros(n, 100), model, "cpu")


def test_the_largest_size_of_inputs_is_found_by_their_dimension() -> None:
    how: dict[str, Any] = {"memory_limit": 1_000_000, "backward": False}
    made = memcheck.largest(lambda n: torch.zeros(n, 100), nn.Linear(100, 100), "cpu", **how)
    found = memcheck.largest(nn.Linear(100, 100), torch.zeros(7, 100), "cpu", find="bsz", **how)
    assert (found.size, found.at.record) == (made.size, made.at.record)

    def both(x: Tensor, *, times: Tensor) -> Tensor:
        return x * times

    of_two = memcheck.largest(
        both, {"x": torch.zeros(2, 5, 3), "times": torch.zeros(2, 5, 1)}, "cpu", find="seq-len", **how
    )
    assert of_two.at.record.input_bytes == 4 * 2 * of_two.size * (3 + 1)
    with pytest.raises(UsageError, match="find seq_len needs an input with dimension 1, got none"):
        memcheck.largest(torch.exp, torch.zeros(3), "cpu", find="seq_len", **how)
    with pytest.raises(UsageError, match="find bzs is unknown; did you mean bsz\? Known: bsz, seq_len"):
        memcheck.largest(torch.exp, torch.zeros(3), "cpu", find="bzs", **how)
    with pytest.raises(TypeError, match="for a model and its inputs say find='bsz'"):
        memcheck.largest(nn.Linear(100, 100), torch.zeros(7, 100), "cpu", **how)


class Asking(nn.Module):
    """A module whose control flow depends on question(x)."""

    def __init__(self, question: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if self.question(x) else x * x


def predicted(question: Callable[[Tensor], Any], x: Tensor) -> Prediction:
    return memcheck.predict_memory(Asking(question), x)


@pytest.mark.extension
def test_small_contents_are_known() -> None:
    ids = torch.arange(10)
    for question in (
        lambda x: (x[1:] - x[:-1] == 1).all(),
        lambda x: torch.arange(3, device=x.device).max().item() == 2,
        lambda x: x.tolist()[-1] == 9,
        lambda x: int(x.max()) == 9,
    ):
        prediction = predicted(question, ids)
        assert prediction.exact, prediction.unknown
        assert figures(prediction.record) == figures(measure_memory(Asking(question), ids))


@pytest.mark.extension
def test_an_assumption_is_named() -> None:
    prediction = predicted(lambda x: (x < 0).any(), torch.rand(2000, device="meta"))
    assert not prediction.exact
    assert prediction.unknown == ("a branch on the value of aten::any, assumed to be False",)


def test_unknown_contents_stop_the_prediction() -> None:
    prediction = predicted(lambda x: x.argmax().item(), torch.rand(2000, device="meta"))
    assert prediction.fits is None
    assert prediction.record.status == "skipped"
    assert "not predicted" in (prediction.record.reason or "")


def test_an_error_of_the_model_is_raised() -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        memcheck.predict_memory(nn.Linear(3, 4), torch.zeros(2, 5))


def wave(x: Tensor) -> Tensor:
    return (x * 2).exp().sin()


def test_code_that_torch_compile_leaves_alone_is_predicted() -> None:
    compiled = torch.compile(wave)

    def eager(x: Tensor) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return compiled(x)

    part = nn.Sequential(nn.Linear(4, 4))
    part.compile(disable=True)
    for model in (torch.compiler.disable(wave), torch.compile(wave, disable=True), part, eager):
        assert memcheck.predict_memory(model, torch.rand(2, 4), device="T4").record.status == "ok"


def test_without_a_probe_operators_are_named() -> None:
    prediction = memcheck.predict_memory(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), probes=False)
    assert not prediction.exact
    assert "what aten::convolution takes beside its outputs" in prediction.unknown
    assert "forward_peak_bytes" in prediction.bounds


def test_without_a_probe_unknown_functions_are_not_exact() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    prediction = memcheck.predict_memory(torch.cumsum, x, dim=0, probes=False)
    assert not prediction.exact


@pytest.mark.extension
def test_a_function_that_differs_is_named() -> None:
    """The function's backward differs between meta tensors and the CPU."""
    x = torch.eye(6).repeat(2, 1, 1).requires_grad_()
    prediction = memcheck.predict_memory(lambda x: torch.linalg.cholesky(x), x)
    assert any(words.startswith("linalg_cholesky alone takes") for words in prediction.unknown)
    measured = measure_memory(lambda x: torch.linalg.cholesky(x), x)
    assert prediction.record.backward_peak_bytes != measured.backward_peak_bytes


@pytest.mark.extension
def test_scratch_that_depends_on_contents_is_named() -> None:
    """The matrix exponential computes more terms for larger values."""
    prediction = memcheck.predict_memory(torch.matrix_exp, torch.rand(8, 8), backward=False)
    assert prediction.unknown == ("aten::linalg_matrix_exp: it took different amounts for different contents",)


@pytest.mark.extension
def test_a_file_of_probes_is_read_and_gets_what_it_lacks(tmp_path: Path) -> None:
    model, x, table = nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), tmp_path / "new" / "cpu.jsonl"
    first = memcheck.predict_memory(model, x, probes=str(table))
    lines = table.read_text().splitlines()
    assert any("convolution" in json.loads(line)["key"] for line in lines)
    assert memcheck.predict_memory(Step(model, x), probes=table).record == first.record
    assert table.read_text().splitlines() == lines
    table.write_text("\n".join([*lines, '{"key": "cut o']))

    class Unused(CpuProbe):
        def _run(self, *args: Any) -> Any:
            raise AssertionError("the table has it")

        _check = _run

    assert memcheck.predict_memory(model, x, probes=Unused(Table(table))).exact


@pytest.mark.parametrize("place", [{"device": "T4"}, {"threads": 77}, {"torch_version": "2.7"}])
def test_a_file_of_probes_is_of_a_cpu(place: dict[str, Any], tmp_path: Path) -> None:
    table = tmp_path / "cpu.jsonl"
    with pytest.raises(UsageError, match=r"probes is of a CPU, and device T4|one machine is needed.* it has no rows"):
        memcheck.predict_memory(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), probes=table, **place)
    assert not table.exists()


def test_a_gpu_that_is_not_here() -> None:
    model = Tied()
    prediction = memcheck.predict_memory(model, tokens(), device="RTX-4090", **HOW["training"])
    assert prediction.fits
    assert not prediction.exact
    assert prediction.record.device == "cuda"
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert prediction.record.optimizer_bytes == 2 * 4 * elements  # the step counters are on the host


@pytest.mark.parametrize(
    ("dtype", "attention", "scratch"),
    [
        (torch.float32, "aten::bmm", None),  # Efficient attention takes no groups.
        (torch.bfloat16, "aten::_scaled_dot_product_flash_attention", "dk of every head"),
    ],
)
def test_grouped_heads_on_a_gpu(dtype: torch.dtype, attention: str, scratch: str | None) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    heads = (4, 2, 2)
    qkv = [torch.zeros(2, count, 24, 8, dtype=dtype, device="meta", requires_grad=True) for count in heads]
    prediction = memcheck.predict_memory(grouped, *qkv, device="RTX-4090")
    assert prediction.trace is not None
    assert attention in prediction.trace.operators
    assert prediction.record.gradient_bytes == sum(x.nbytes for x in qkv)
    assert scratch is None or scratch in {allocation.name for allocation in prediction.trace.log.allocations}


@pytest.mark.parametrize(("rows", "unknown"), [(1000, ()), (70_000, ("the partial sums of layer_norm's backward",))])
def test_layer_norm_on_a_gpu(rows: int, unknown: tuple[str, ...]) -> None:
    x = torch.zeros(rows, 32, device="meta", requires_grad=True)
    assert memcheck.predict_memory(nn.LayerNorm(32), x, device="RTX-4090").unknown == unknown


def test_a_mask_as_an_index_is_named_on_a_gpu() -> None:
    x, index = torch.zeros(8, 3), torch.tensor([0, 2])
    plain = memcheck.predict_memory(lambda x, i: x[i], x, index, device="RTX-4090", backward=False)
    assert plain.unknown == ()
    masked = memcheck.predict_memory(lambda x, i: x[i], x, x[:, 0] == 0, device="RTX-4090", backward=False)
    assert not masked.exact
    assert masked.unknown


def test_an_error_that_only_a_gpu_gives_is_a_reason() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.is_cuda:
                raise ValueError("there is no kernel for it")
            return x * x

    x = torch.zeros(2, 3, requires_grad=True)
    prediction = memcheck.predict_memory(Refusing(), x, device="RTX-4090")
    assert (prediction.fits, prediction.unknown) == (None, ("there is no kernel for it",))
    assert memcheck.predict_memory(Refusing(), x).fits


def test_a_model_may_ask_for_the_capability_of_a_gpu_that_is_not_here() -> None:
    def asking(x: Tensor) -> Tensor:
        return x * 2.0 if torch.cuda.get_device_capability(x.device) >= (9, 0) else x * x

    x = torch.zeros(2, 3, requires_grad=True)
    ada, hopper = (memcheck.predict_memory(asking, x, device=name) for name in ("RTX-4090", "H100-80GB"))
    assert (ada.record.saved_bytes, hopper.record.saved_bytes) == (0, 0)
    assert ada.record.backward_peak_bytes != hopper.record.backward_peak_bytes
    unknown = memcheck.predict_memory(asking, x, device="40GiB")
    assert "architecture" in (unknown.record.reason or "")


class AsksFirst(nn.Module):
    """A forward that asks something before its layer runs."""

    def __init__(self, question: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor) -> Any:
        self.question()
        return self.layer(x)


class FusedIfThereIsAGpu(torch.optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, fused=torch.cuda.is_available())


QUESTIONS: dict[str, Callable[[], Any]] = {
    "torch.cuda.is_available": lambda: torch.cuda.is_available(),
    "torch.cuda.device_count": lambda: torch.cuda.device_count(),
    "torch.cuda.get_device_name": lambda: torch.cuda.get_device_name(),
    "torch.cuda.get_device_properties": lambda: torch.cuda.get_device_properties(0),
    "torch.cuda.mem_get_info": lambda: torch.cuda.mem_get_info(),
    "torch.accelerator.is_available": lambda: torch.accelerator.is_available(),
    "torch.accelerator.device_count": lambda: torch.accelerator.device_count(),
    "torch.accelerator.current_accelerator": lambda: torch.accelerator.current_accelerator(),
}
AS_IN_PUBLISHED_RUNS: dict[str, Any] = {"device": "A100-40GB", "torch_version": "2.7"}  # Which may be exact.


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the process needs that answers for the target."""
    monkeypatch.setitem(process.NEEDED, "cuda", ("no_such_package",))


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.usefixtures("stays")
def test_what_only_this_machine_answers_is_a_doubt_or_the_reason(name: str) -> None:
    prediction = memcheck.predict_memory(AsksFirst(QUESTIONS[name]), torch.rand(2, 4), **AS_IN_PUBLISHED_RUNS)
    assert not prediction.exact
    assert re.search(rf"{name}\(\) at \S*tests/predict/test_model\.py:\d+", prediction.unknown[0])
    assert (prediction.record.status == "ok") == ("backward_peak_bytes" in prediction.bounds)


@pytest.mark.extension
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_process_that_pretends_to_have_the_gpu_answers_for_it(name: str) -> None:
    answers = {"torch.cuda.get_device_name": "A100-40GB", "torch.cuda.device_count": 1}

    def asks() -> None:
        found = QUESTIONS[name]()
        assert found == answers.get(name, found)
        assert found

    prediction = memcheck.predict_memory(AsksFirst(asks), torch.rand(2, 4), **AS_IN_PUBLISHED_RUNS)
    assert (prediction.record.status, prediction.unknown) == ("ok", ())


@pytest.mark.extension
def test_a_model_that_cannot_be_sent_is_predicted_here() -> None:
    lock = threading.Lock()

    def asks() -> None:
        with lock:
            assert not torch.cuda.is_available()

    prediction = memcheck.predict_memory(AsksFirst(asks), torch.rand(2, 4), **AS_IN_PUBLISHED_RUNS)
    assert "torch.cuda.is_available() at" in prediction.unknown[0]


@pytest.mark.usefixtures("stays")
def test_an_optimizer_that_asks_for_a_gpu_is_a_doubt_about_every_phase() -> None:
    how = {"optimizer": FusedIfThereIsAGpu, **AS_IN_PUBLISHED_RUNS}
    prediction = memcheck.predict_memory(nn.Linear(4, 4), torch.rand(2, 4), **how)
    assert "torch.cuda.is_available() at" in prediction.unknown[0]
    assert {"forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes"} <= prediction.bounds


def test_what_torch_itself_asks_and_what_the_target_answers_is_no_doubt() -> None:
    def answered() -> None:
        major, _ = torch.cuda.get_device_capability()
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.is_bf16_supported(including_emulation=False) == (major >= 8)

    found, capable = [], []
    how: dict[str, Any] = {"optimizer": "adamw", "autocast": "fp16", "clip_grad_norm": 1.0}
    for device in ("T4", "A100-40GB"):
        found.append(
            memcheck.predict_memory(nn.TransformerEncoderLayer(8, 2), torch.rand(2, 3, 8), device=device, **how)
        )
        capable.append(memcheck.predict_memory(AsksFirst(answered), torch.rand(2, 4), device=device))
    assert [one.record.status for one in (*found, *capable)] == ["ok"] * 4
    assert not any("this machine" in words for one in (*found, *capable) for words in one.unknown)
    here = memcheck.predict_memory(AsksFirst(torch.cuda.is_available), torch.rand(2, 4), device="cpu")
    assert here.unknown == ()


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] + torch.zeros(4, 4)


class MixedStep:
    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.add_(torch.zeros(parameter.shape))


class WithHost(nn.Module):
    """Calls a function of itself, its input x (4,4) and a tensor (4,4) on the CPU."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.cell, self.lstm = nn.Linear(4, 4), nn.LSTMCell(4, 4), nn.LSTM(4, 4)
        self.gru, self.embedding, self.conv = nn.GRUCell(4, 4), nn.Embedding(5, 4), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, torch.zeros(4, 4))


MIXED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "sum": lambda m, x, host: host + x,
    "in place": lambda m, x, host: (x * 1).add_(host),
    "cat": lambda m, x, host: torch.cat([x, host]),
    "product": lambda m, x, host: x @ host,
    "batched": lambda m, x, host: torch.bmm(x[None], host[None]),
    "convolution": lambda m, x, host: functional.conv1d(x[None], host[..., None]),
    "attention": lambda m, x, host: functional.scaled_dot_product_attention(x[None], host[None], x[None]),
    "gathered": lambda m, x, host: x.gather(0, host.long()),
    "written": lambda m, x, host: x.index_put((torch.zeros(4).long(),), host),
    "loss": lambda m, x, host: functional.mse_loss(x, host),
    "classes": lambda m, x, host: functional.cross_entropy(x, host[0].long()),
    "a layer": lambda m, x, host: m.linear(host),
    "a convolution": lambda m, x, host: m.conv(host[None]),
    "an embedding": lambda m, x, host: m.embedding(host.long()),
    "a cell": lambda m, x, host: m.cell(x, (host, host))[0],
    "another cell": lambda m, x, host: m.gru(x, host),
    "a network": lambda m, x, host: m.lstm(x[None], (host[None], host[None]))[0],
    "memcheck": lambda m, x, host: memcheck.softplus_attention(x[None], host[None], x[None]),
}
ALIKE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a number": lambda m, x, host: x * host[0, 0] + torch.tensor(2.0),
    "indices": lambda m, x, host: x[host[0].long()],
    "a mask": lambda m, x, host: x[host[0] > -1],
    "copied": lambda m, x, host: (x * 1).copy_(host) + host.to(x.device) + host.type_as(x),
    "by itself": lambda m, x, host: x * float((host + host).sum()),
}


@pytest.mark.extension
def test_tensors_on_the_cpu_among_those_of_a_gpu_are_named_with_their_line() -> None:
    def reason(model: Any, **how: Any) -> str:
        x = torch.rand(4, 4, requires_grad=True)
        record = memcheck.predict_memory(model, x, device="RTX-4090", **how).record
        assert record.status == "skipped"
        return record.reason or ""

    def words(phase: str) -> str:
        return rf"not predicted: {phase} mixes cpu and cuda tensors, at \S*tests/predict/test_model\.py:\d+$"

    for name, function in MIXED.items():
        said = reason(WithHost(function))
        assert re.match(words("forward"), said), (name, said)
        assert said.endswith(f":{function.__code__.co_firstlineno}"), name
    assert re.match(words("forward"), reason(lambda x: x + torch.zeros(4, 4)))
    assert re.match(words("backward"), reason(MixedBackward.apply))
    assert re.match(words("optimizer"), reason(nn.Linear(4, 4), optimizer=MixedStep))
    assert re.match(words("forward"), reason(nn.Linear(4, 4), loss=lambda y: (y - torch.zeros(4, 4)).sum()))


def test_what_a_gpu_takes_from_the_cpu_is_predicted() -> None:
    for name, function in ALIKE.items():
        prediction = memcheck.predict_memory(WithHost(function), torch.rand(4, 4), device="RTX-4090")
        assert prediction.record.status == "ok", (name, prediction.record.reason)


def test_dropout_on_a_gpu_keeps_a_mask_of_bytes() -> None:
    x = torch.zeros(8, 20, 48, requires_grad=True)
    assert memcheck.predict_memory(nn.Dropout(0.2), x, device="RTX-4090").record.saved_bytes == x.numel()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        memcheck.predict_memory(nn.Linear(3, 4), torch.zeros(2, 3), steps=0)
    with pytest.raises(ValueError, match="backward=False"):
        memcheck.predict_memory(nn.Linear(3, 4), torch.zeros(2, 3), optimizer=adamw, backward=False)


@pytest.mark.parametrize("function", [memcheck.predict_memory, memcheck.measure_memory])
def test_arguments_of_a_step_that_do_not_fit_together(function: Callable[..., Any]) -> None:
    for words, how in {
        "accumulate must be at least 1": {"accumulate": 0},
        "accumulate needs a backward": {"accumulate": 2, "backward": False},
        "clip_grad_norm needs an optimizer": {"clip_grad_norm": 1.0},
        "set_to_none=False needs an optimizer": {"set_to_none": False},
    }.items():
        with pytest.raises(ValueError, match=words):
            function(nn.Linear(3, 4), torch.zeros(2, 3), **how)


@pytest.mark.extension
def test_a_dataclass_of_tensors() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Tensor
        y: Tensor

    def fn(batch: Batch) -> Tensor:
        return batch.x * batch.y

    batch = Batch(torch.rand(5), torch.rand(5))
    assert figures(memcheck.predict_memory(fn, batch).record) == figures(measure_memory(fn, batch))


@pytest.mark.extension
def test_rows_of_a_table_in_another_format_are_not_read(a_table_of_its_own: Path) -> None:
    memcheck.predict_memory(torch.nn.GELU(), torch.randn(3, 4), device="cpu")
    rows = a_table_of_its_own.read_text().splitlines()
    assert Table(a_table_of_its_own).found
    a_table_of_its_own.write_text("\n".join(row.replace('"format": 2', '"format": 1') for row in rows))
    assert not Table(a_table_of_its_own).found


@pytest.mark.extension
def test_a_probe_leaves_the_doubt_that_threads_allocate_at_once() -> None:
    q = torch.randn(1, 2, 40, 8).bfloat16().requires_grad_()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prediction = memcheck.predict_memory(torch.nn.functional.scaled_dot_product_attention, q, q, q, device="cpu")
    finally:
        torch.set_num_threads(before)
    assert "how many of 2 threads have their sums of rows at once" in prediction.unknown


def on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.sin() * x


SENTENCES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "higher-order operator cond is not predicted; measure the model": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        "cpu",
    ),
    "a tensor moves to cpu": (on_the_cpu, "A100-40GB"),
}


@pytest.mark.parametrize("words", SENTENCES)
def test_what_is_not_predicted_says_what_to_do(words: str) -> None:
    model, device = SENTENCES[words]
    record = memcheck.predict_memory(model, torch.ones(4, requires_grad=True), device=device).record
    assert record.status == "skipped"
    assert words in str(record.reason)


class Inferring(nn.Module):
    """A model whose forward turns inference mode on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@pytest.mark.extension
@pytest.mark.parametrize("make", [mlp, convolutions, encoder])
def test_inference_mode_is_predicted_as_it_is_measured(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    """Around the call, where autograd does not take operators apart, and inside of the model."""
    model, x = make()
    with torch.inference_mode():
        found = [memcheck.predict_memory(model, x, backward=False), memcheck.measure_memory(model, x, backward=False)]
        with pytest.raises(UsageError, match=r"backward must be False under torch.inference_mode\(\), got True"):
            memcheck.predict_memory(model, x)
    inside = Inferring(model)
    pairs = [found, [find(inside, x, backward=False) for find in (memcheck.predict_memory, memcheck.measure_memory)]]
    for predicted, measured in pairs:
        assert predicted.exact
        for name in ("forward_peak_bytes", "output_bytes", "saved_bytes", "workspace_bytes"):
            assert getattr(predicted.record, name) == getattr(measured, name)


@pytest.mark.parametrize(("version", "many", "kept"), [("2.8", 3, 0), ("2.11", 1, 1), ("2.13", 0, 0)])
def test_a_product_with_a_bias_has_cublas_lts_workspace(version: str, many: int, kept: int) -> None:
    """Of each call, then of the thread; newer releases share cuBLAS's. A product with one column has none."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 1))
        x = torch.empty(4, 8)
    found = memcheck.predict_memory(model, x, device="A100-40GB", torch_version=version, drop_workspaces=False)
    assert found.trace is not None
    made = [allocation for allocation in found.trace.log.allocations if allocation.name == LT_WORKSPACE]
    assert [allocation.bytes for allocation in made] == [MIB] * many
    assert sum(allocation.died is None for allocation in made) == kept

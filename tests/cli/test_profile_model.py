"""Whole models: what is predicted is measured, and the command says so."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which predicting loads: before modules are frozen, see conftest.py

import memcheck
from memcheck.__main__ import main
from memcheck.bench.decoders import MODES, SIZES, DecoderCase
from memcheck.bench.predict import predict_case
from memcheck.bench.profile import profile_case
from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.measure.measurement import measure_memory, measure_time
from memcheck.measure.modules import kept_by_component
from memcheck.nn.decoder import ATTENTIONS

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

COUNTS = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}
FIGURES = (
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes", "kept_by_part", "input_bytes"),
    *("output_bytes", "forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes"),
)


def case(**fields: object) -> DecoderCase:
    return DecoderCase("tiny", **{"bsz": 2, "context": 40, **fields})


@pytest.mark.parametrize("size", COUNTS)
def test_the_sizes_have_the_parameters_that_they_should(size: str) -> None:
    assert sum(weight.numel() for weight in DecoderCase(size, device="meta").model().parameters()) == COUNTS[size]


def test_training_the_largest_holds_what_it_should() -> None:
    """Parameters, gradients and AdamW's moments, in float32."""
    of = DecoderCase("2.7B", context=128)
    record = predict_case(of).record
    steps = 4 * 291  # one for each tensor of parameters, on the CPU
    tables = sum(table.nbytes for table in dataclasses.replace(of, device="meta").model().buffers())
    held = record.parameter_bytes + record.gradient_bytes + record.optimizer_bytes
    assert held - steps - tables == 54_508_953_600


def profiled(of: DecoderCase, limit: int | None = None) -> tuple[Record, Record]:
    """The measured record and the predicted one."""
    place = Place(memory_limit=limit, device=Place("cpu").unlimited.device)
    return profile_case(of, memory_limit=limit, timed=False), predict_case(of, place).record


def disagreements(of: DecoderCase) -> dict[str, object]:
    """Field -> measured and predicted, where it was said to be known."""
    record, predicted = profiled(of)
    assert record.status == "ok", record.reason
    pairs = {name: (getattr(record, name), getattr(predicted, name)) for name in FIGURES}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in predicted.bounds}


@pytest.mark.parametrize(("attention", "mode"), [*itertools.product(ATTENTIONS, MODES)])
def test_predictions_equal_measurements(attention: str, mode: str) -> None:
    of = case(attention_type=attention, mode=mode)
    assert disagreements(of) == {}
    on_one_thread = predict_case(of, Place(threads=1)).record
    assert on_one_thread.exact or attention == "softmax"
    assert not {"saved_bytes", "forward_peak_bytes"} & {*on_one_thread.bounds}


VARIANTS = (
    {"checkpointing": True},
    {"autocast": "bfloat16"},
    {"autocast": "bfloat16", "checkpointing": True},
    {"dtype": "float64", "bsz": 1, "context": 33},
    {"dtype": "bfloat16"},
    {"feed_forward": "combinator"},
    {"feed_forward": "combinator-low-memory", "checkpointing": True},
)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))
def test_predicted_is_measured_of_every_variant(attention: str, variant: dict[str, object]) -> None:
    assert disagreements(case(attention_type=attention, **variant)) == {}


@pytest.mark.parametrize("variant", [{}, *VARIANTS[:5]], ids=lambda variant: "-".join(map(str, variant.values())))
def test_predicted_is_measured_with_a_window(variant: dict[str, object]) -> None:
    assert disagreements(case(attention_type="compressed", window=11, **variant)) == {}


def test_what_is_not_known_is_named_and_is_a_bound() -> None:
    record, predicted = profiled(case(dtype="bfloat16"))
    if predicted.bounds:
        assert predicted.doubts
        assert record.backward_peak_bytes >= predicted.backward_peak_bytes
    assert not predicted.exact or not predicted.bounds


def test_layers_are_alike_and_the_parts_add_up() -> None:
    record = profile_case(case(attention_type="softmax"), timed=False)
    layers = [
        {
            path.removeprefix(f"layers.{index}"): size
            for path, size in record.kept_by_part.items()
            if f".{index}." in path
        }
        for index in range(SIZES["tiny"].layers)
    ]
    assert layers[0] == layers[1] != {}
    assert sum(record.kept_by_part.values()) == record.saved_bytes


def test_a_number_that_autograd_keeps_is_no_part_of_a_module() -> None:
    """naive divides its scores by a Python number: 8 bytes a layer, which hooks do not hear of."""
    record = profile_case(case(attention_type="naive"), timed=False)
    assert record.saved_bytes - sum(record.kept_by_part.values()) == 8 * SIZES["tiny"].layers


def test_a_gpu_that_is_not_here() -> None:
    of = DecoderCase("small", bsz=16, context=1024)
    small, large = (predict_case(of, name).record for name in ("T4", "H200"))
    assert (small.status, small.oom_phase) == ("oom", "forward")
    assert large.status == "ok"
    # AdamW on CUDA updates all tensors at once, with a square root for each parameter beside them.
    held = large.parameter_bytes + large.gradient_bytes + large.optimizer_bytes
    assert large.optimizer_peak_bytes >= held + large.gradient_bytes


def test_a_model_of_our_kernels_needs_a_gpu_that_is_new_enough() -> None:
    record = predict_case(case(attention_type="softplus"), "T4").record
    assert record.status == "unsupported"
    assert "memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got 7.5" in record.reason
    assert predict_case(case(), "T4").record.status == "ok"


def test_predicting_allocates_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert predict_case(DecoderCase("small", context=64, mode="backward")).record.backward_peak_bytes > 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10  # KiB


def test_a_model_beyond_the_machine_is_skipped_with_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(device: str) -> dict[str, object]:
        return {"device": "cpu", "device_free_bytes": 2**20}

    monkeypatch.setattr("memcheck.bench.profile.measurement.machine_facts", facts)
    record, predicted = profile_case(case()), predict_case(case()).record
    assert record.status == "skipped"
    assert "above the 1 MiB that this machine has left" in record.reason
    assert not record.peaks
    assert max(predicted.peaks.values()) > 2**20


@pytest.mark.parametrize("attention", ["naive", "softplus"])
def test_running_out_of_memory_is_a_row_and_was_predicted(attention: str) -> None:
    of = case(attention_type=attention, context=128)
    peaks = predict_case(of).record
    for limit in (peaks.forward_peak_bytes - 1, peaks.backward_peak_bytes - 1, 2**19):
        record, predicted = profiled(of, limit)
        assert record.status == predicted.status == "oom"
        assert record.oom_phase == predicted.oom_phase


def test_an_error_is_a_row_also_where_it_is_the_prediction_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("it failed")

    for name in ("predict.predict_case", "run_memory"):
        with monkeypatch.context() as patch:
            patch.setattr(f"memcheck.bench.profile.{name}", fails)
            record = profile_case(case())
        assert (record.status, record.reason, record.size) == ("error", "RuntimeError: it failed", "tiny")


def test_an_optimizer_step_is_measured_and_timed() -> None:
    weight = torch.ones(1000, requires_grad=True)
    calls = []

    def step() -> None:
        calls.append(weight.grad.sqrt())

    record = measure_memory(lambda x: x * weight, torch.ones(1000), parameters=weight, optimizer_step=step)
    # Weight, input, output, gradient, and what this step made and the first one.
    assert record.optimizer_peak_bytes == 6 * 4000
    times = measure_time(lambda x: x * weight, torch.ones(1000), parameters=weight, optimizer_step=step, passes=3)
    assert times["optimizer_ms"] > 0
    assert len(calls) == 2 + 2 + 3
    with pytest.raises(ValueError, match="optimizer_step needs a backward, got backward=False"):
        measure_memory(torch.exp, torch.ones(1), backward=False, optimizer_step=step)


def test_components_survive_a_module_that_fails() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("it failed")

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Fails())
    with pytest.raises(RuntimeError, match="it failed"):
        kept_by_component(model, lambda: model(torch.ones(2, 3)))
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["profile-model", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--attention-type", "linear", "--context", "32", "--passes", "2", "--output", str(tmp_path))
    code, out, _ = run(capsys, *words)
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("tiny"))
    assert row.split()[1:6] == ["linear", "(causal)", "32", "train", "fp32"]
    assert "3 of 3 figures are as predicted, to the byte; 1 of 1 verdicts are." in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("layer.", "loss"))}
    assert rows["layer.attention.attend"] == [f"{3 * 32 * 64 * 4:,}"] * 2
    assert rows["loss"] == [f"{32 * 512 * 4 + 4:,}"] * 2
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    measured, prediction = map(Record.from_json, (tmp_path / "records.jsonl").read_text().splitlines())
    assert (measured.source, measured.passes, prediction.source) == ("measured", 2, "predicted")
    assert measured.kept_by_part == prediction.kept_by_part
    assert run(capsys, *words, "--no-time")[0] == 0
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def test_a_folder_of_models_is_reported_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--context", "16", "--attention-type", "softmax,softplus", "--no-time", "--output", str(tmp_path))
    assert run(capsys, *words)[0] == 0
    assert main(["report", str(tmp_path), "--accounting"]) == 0
    assert capsys.readouterr().out.count("kept for backward by") == 2
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 cases of whole models: cpu, " in out
    assert "2 of 2 verdicts are" in " ".join(out.split())
    assert main(["compare", str(tmp_path), str(tmp_path), "--fail-on-growth"]) == 0


def test_json_is_a_list_of_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--mode", "forward,train", "--dtype", "fp32,bf16", "--context", "16,8", "--no-time", "--format", "json")
    code, out, _ = run(capsys, *words, "--output", str(tmp_path))
    assert code == 0
    measured, predicted = (
        [one for one in json.loads(out) if one["source"] == kind] for kind in ("measured", "predicted")
    )
    cells = [(record["query_len"], record["dtype"], record["mode"]) for record in measured]
    assert cells == list(itertools.product((8, 16), ("float32", "bfloat16"), ("forward", "train")))
    assert measured[1]["optimizer_bytes"] == 2 * measured[1]["gradient_bytes"] + 4 * 21
    assert predicted[1]["optimizer_peak_bytes"] == measured[1]["optimizer_peak_bytes"]


def test_predict_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memcheck.cli.commands.profile_model.profile_case", None)
    words = ("--size", "small,2.7B", "--predict", "--device", "A100-40GB", "--format", "json")
    code, out, _ = run(capsys, *words, "--output", str(tmp_path))
    assert code == 0
    small, large = json.loads(out)
    assert small["source"] == "predicted"
    assert (small["status"], large["status"]) == ("ok", "oom")
    assert small["saved_bytes"] == sum(small["kept_by_part"].values())


def test_snapshot_and_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    snapshot, trace = tmp_path / "snapshot.pickle", tmp_path / "trace.json"
    words = ("--context", "16", "--no-time", "--snapshot", str(snapshot), "--trace", str(trace))
    code, out, _ = run(capsys, *words, "--output", str(tmp_path))
    assert code == 0
    phases = {entry["frames"][0]["filename"] for entry in pickle.loads(snapshot.read_bytes())["device_traces"][0]}
    assert phases == {"forward", "backward", "optimizer"}
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"layers.0", "attend", "optimizer"} <= names
    assert "what took the time" in out


def test_a_compiled_model_is_measured_and_predicted() -> None:
    record, predicted = profiled(case(compiled=True, mode="backward"))
    assert record.status == "ok", record.reason
    assert record.kept_by_part is None
    assert record.saved_bytes > 0
    assert (predicted.saved_bytes, predicted.backward_peak_bytes) == (record.saved_bytes, record.backward_peak_bytes)


def test_a_case_names_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="factor must be at least 1, got 0"):
        case(attention_type="compressed", factor=0)
    with pytest.raises(UsageError, match="window must be at least 1, got 0"):
        case(attention_type="compressed", window=0)
    with pytest.raises(UsageError, match="bsz must be at least 1, got -1"):
        case(bsz=-1)


# Sizes and strides of x (B,S,E), as if in elements of a large enough storage.
LAYOUTS = {
    "contiguous": (700 * 24, 24, 1),
    "transposed": (700 * 24, 1, 700),
    "batch last": (24, 3 * 24, 1),
    "every other": (700 * 48, 48, 2),
    "expanded": (0, 24, 1),
}


@pytest.mark.parametrize("dense_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["linear_r", "linear_l"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projections_take_what_is_predicted(name: str, layout: str, dense_grad: bool, dtype: torch.dtype) -> None:
    operator = getattr(memcheck, name)
    x = torch.randn(3 * 700 * 48, dtype=dtype).as_strided((3, 700, 24), LAYOUTS[layout]).detach().requires_grad_()
    w = torch.randn(24, 200, dtype=dtype, requires_grad=True)
    measured = measure_memory(operator, x, w, dense_grad=dense_grad)
    assert memcheck.predict_memory(operator, x, w, dense_grad=dense_grad).record.peaks == measured.peaks

"""Whole models: predicted is measured, the formulas are both, and the command says so."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which predicting loads: before modules are frozen, see conftest.py

import memcheck
from memcheck.__main__ import main
from memcheck.bench.models.case import MODES, SIZES, ModelCase, build_decoder, make_model_case
from memcheck.bench.models.formulas import evaluate, held_formulas, is_of_backend, kept_formulas
from memcheck.bench.models.model_predictions import predict_model, traced_model
from memcheck.bench.models.profile import profile_model_case
from memcheck.core.devices import device_named
from memcheck.core.errors import UsageError
from memcheck.core.model_record import FIGURES, components_of, total
from memcheck.core.place import Place
from memcheck.measure.measurement import measure_memory, measure_time
from memcheck.measure.modules import kept_by_component
from memcheck.measure.tracker import track
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

COUNTS = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}


def case(**fields: object) -> ModelCase:
    return make_model_case("tiny", **{"bsz": 2, "context": 40, **fields})


@pytest.mark.parametrize("size", COUNTS)
def test_the_sizes_have_the_parameters_that_they_should(size: str) -> None:
    of_size = make_model_case(size, device="meta")
    assert sum(weight.numel() for weight in build_decoder(of_size).parameters()) == COUNTS[size]
    assert held_formulas(of_size, "cpu")["parameters"].value == COUNTS[size]


@pytest.mark.parametrize(("attention", "feed_forward"), [*itertools.product(ATTENTIONS, FEED_FORWARDS)])
def test_the_count_is_by_formula_for_every_model(attention: str, feed_forward: str) -> None:
    of_model = case(attention_type=attention, feed_forward=feed_forward, device="meta")
    held = held_formulas(of_model, "cpu")
    decoder = build_decoder(of_model)
    assert held["parameters"].value == sum(weight.numel() for weight in decoder.parameters())
    assert held["buffer_bytes"].value == sum(table.numel() * 4 for table in decoder.buffers())


def test_training_the_largest_holds_what_it_should() -> None:
    """Parameters, gradients and AdamW's moments, in float32."""
    record = predict_model(make_model_case("2.7B", context=128), dataclasses.replace(device_named("cpu"))).record
    steps = 4 * 291  # one for each tensor of parameters, on the CPU
    assert record.parameter_bytes + record.gradient_bytes + record.optimizer_bytes - steps == 54_508_953_600


def measured_and_predicted(of: ModelCase) -> tuple[memcheck.measure.measurement.Record, dict[str, object]]:
    record = profile_model_case(of, timed=False)
    assert record.status == "ok", record.reason
    assert record.predicted is not None
    return record, record.predicted


def disagreements(of: ModelCase) -> dict[str, object]:
    """Field -> measured and predicted, where it was said to be known."""
    record, predicted = measured_and_predicted(of)
    known = [name for name in (*FIGURES, "activations") if name not in predicted["bounds"]]
    return {
        name: (getattr(record, name), predicted[name]) for name in known if getattr(record, name) != predicted[name]
    }


@pytest.mark.parametrize(("attention", "mode"), [*itertools.product(ATTENTIONS, MODES)])
def test_predictions_equal_measurements(attention: str, mode: str) -> None:
    of = case(attention_type=attention, mode=mode)
    assert disagreements(of) == {}
    on_one_thread = predict_model(of, Place(threads=1))
    assert on_one_thread.exact or attention == "softmax"
    assert not {"saved_bytes", "forward_peak_bytes"} & on_one_thread.bounds


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
    record, predicted = measured_and_predicted(case(dtype="bfloat16"))
    if predicted["bounds"]:
        assert any("oneDNN" in words for words in predicted["unknown"])
        assert record.backward_peak_bytes >= predicted["backward_peak_bytes"]
    assert not predicted["exact"] or not predicted["bounds"]


# Formulas are those of a component, so make test varies one component at a time.
BLOCKS = [
    pytest.param(
        attention, feed_forward, marks=() if attention == "softplus" or feed_forward == "swiglu" else pytest.mark.ci
    )
    for attention, feed_forward in itertools.product(ATTENTIONS, FEED_FORWARDS)
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize(("attention", "feed_forward"), BLOCKS)
def test_every_part_keeps_what_its_formula_says(
    attention: str, feed_forward: str, autocast: str | None, checkpointing: bool
) -> None:
    fields = {"attention_type": attention, "feed_forward": feed_forward, "mode": "backward"}
    for window in (None, 7) if attention == "compressed" else (None,):
        check_formulas(window=window, **fields, autocast=autocast, checkpointing=checkpointing)


def check_formulas(*, autocast: str | None, **fields: object) -> None:
    for kind, dtype, context in (("cpu", "float32", 300), ("cuda", "float32", 41), ("cpu", "bfloat16", 41)):
        if autocast and dtype != "float32":
            continue
        of = case(**fields, autocast=autocast, dtype=dtype, context=context)
        on_meta = dataclasses.replace(of, device="meta")
        device = device_named("A100-80GB" if kind == "cuda" else "cpu")
        target = memcheck.predict.replay.target_at(Place(device))
        kept = components_of(traced_model(on_meta, target).activations)
        formulas = {name: formula.value for name, formula in kept_formulas(of, kind).items()}
        of_backend = {name for name in kept if is_of_backend(name.removeprefix("layer."), of, kind)}
        assert {name: size for name, size in kept.items() if name not in of_backend} == formulas


def test_layers_are_alike_and_the_parts_add_up() -> None:
    record, _ = measured_and_predicted(case(attention_type="softmax"))
    layers = record.activations["layers"]
    assert len(layers) == SIZES["tiny"].layers
    assert layers[0] == layers[1]
    assert total(record.activations) == record.saved_bytes


def test_a_number_that_autograd_keeps_is_no_part_of_a_module() -> None:
    """naive divides its scores by a Python number: 8 bytes a layer, which hooks do not hear of."""
    record, _ = measured_and_predicted(case(attention_type="naive"))
    assert record.saved_bytes - total(record.activations) == 8 * SIZES["tiny"].layers


def test_formulas_are_sums_of_products() -> None:
    assert evaluate("2 A B + 3 B + 4", {"A": 5, "B": 7}) == 2 * 5 * 7 + 3 * 7 + 4


def test_a_gpu_that_is_not_here() -> None:
    of = make_model_case("small", bsz=16, context=1024)
    small, large = (predict_model(of, name).record for name in ("T4", "H200"))
    assert (small.status, small.oom_phase) == ("oom", "forward")
    assert large.status == "ok"
    # AdamW on CUDA updates all tensors at once, with a square root for each parameter beside them.
    held = large.parameter_bytes + large.gradient_bytes + large.optimizer_bytes
    assert large.optimizer_peak_bytes >= held + large.parameter_bytes


def test_a_model_of_our_kernels_needs_a_gpu_that_is_new_enough() -> None:
    record = predict_model(make_model_case("tiny", attention_type="softplus"), "T4").record
    assert record.status == "unsupported"
    assert record.reason == "memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got 7.5"
    assert predict_model(make_model_case("tiny"), "T4").record.status == "ok"


def test_predicting_allocates_nothing() -> None:
    traced_model.cache_clear()
    of = make_model_case("small", context=64, mode="backward")
    with track(saved=False) as memory:
        assert predict_model(of).record.peak_bytes > 10**9
    # But for torch's own: Python numbers, and the steps of AdamW.
    assert memory.peak_bytes < 4096


def test_a_model_beyond_the_machine_is_skipped_with_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(device: str) -> dict[str, object]:
        return {"device": "cpu", "device_free_bytes": 2**20}

    monkeypatch.setattr("memcheck.bench.models.profile.machine_facts", facts)
    record = profile_model_case(case())
    assert record.status == "skipped"
    assert "above the 1 MiB that this machine has left" in record.reason
    assert record.peak_bytes is None
    assert record.predicted["peak_bytes"] > 2**20


@pytest.mark.parametrize("attention", ["naive", "softplus"])
def test_running_out_of_memory_is_a_row_and_was_predicted(attention: str) -> None:
    of = case(attention_type=attention, context=128)
    peaks = predict_model(of).record
    for limit in (peaks.forward_peak_bytes - 1, peaks.backward_peak_bytes - 1, 2**19):
        record = profile_model_case(of, memory_limit=limit, timed=False)
        assert record.status == "oom"
        assert (record.oom_phase, "oom") == (record.predicted["oom_phase"], record.predicted["status"])


def test_an_error_is_a_row_also_where_it_is_the_prediction_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("it failed")

    for name in ("predict_model", "measured"):
        with monkeypatch.context() as patch:
            patch.setattr(f"memcheck.bench.models.profile.{name}", fails)
            record = profile_model_case(case())
        assert (record.status, record.reason) == ("error", "RuntimeError: it failed")
        assert record.parameters == 196_928


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
    assert "196,928 parameters" in out
    predicted = next(line for line in out.splitlines() if "predicted" in line)
    assert predicted.split() == ["predicted", *["same"] * 7]
    assert re.search(r"layer\.attention\.attend +3 B S E a", out)
    assert out.rpartition("\n\n")[2].startswith("tiny with linear (causal) at S 32 needs ")
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    (record,) = [json.loads(line) for line in (tmp_path / "models.jsonl").read_text().splitlines()]
    assert record["times"]["total"].keys() == {"mean_ms", "deviation_ms", "median_ms"}
    assert record["passes"] == 2


def test_a_model_that_does_not_fit_says_what_it_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--context", "32", "--no-time", "--memory-limit", "2MiB", "--device", "cpu", "--output", str(tmp_path))
    _, out, _ = run(capsys, *words)
    assert "tiny with softmax, S 32, does not fit: OOM" in out
    assert "Its parameters, gradients and AdamW's state alone take 3 MiB." in out


def test_json_is_a_list_of_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--mode", "forward,train", "--dtype", "fp32,bf16", "--context", "16,8", "--no-time", "--format", "json")
    code, out, _ = run(capsys, *words, "--output", str(tmp_path))
    assert code == 0
    records = json.loads(out)
    cells = [(record["query_len"], record["dtype"], record["mode"]) for record in records]
    assert cells == list(itertools.product((8, 16), ("float32", "bfloat16"), ("forward", "train")))
    train = records[1]
    assert train["parameters"] == 196_928
    assert train["optimizer_bytes"] == 2 * train["parameter_bytes"] + 4 * 21
    peaks = [train[f"{phase}_peak_bytes"] for phase in ("forward", "backward", "optimizer")]
    assert train["predicted"]["peak_bytes"] == train["peak_bytes"] == max(peaks)
    assert train["formulas"]["gradient_bytes"] == {"formula": "w P", "value": train["gradient_bytes"]}


def test_predict_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memcheck.cli.commands.profile_model.profile_model_case", None)
    words = ("--size", "small,2.7B", "--predict", "--device", "A100-40GB", "--format", "json")
    code, out, _ = run(capsys, *words, "--output", str(tmp_path))
    assert code == 0
    small, large = json.loads(out)
    assert small["source"] == "predicted"
    assert (small["status"], large["status"]) == ("ok", "oom")
    assert small["saved_bytes"] == total(small["activations"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "huge"), "--size huge is unknown; known: tiny, mini, small, medium, large, xl, 2.7B"),
        (("--attention-type", "flash"), "--attention-type flash is unknown; known: naive, softmax, linear"),
        (("--mode", "infer"), "--mode infer is unknown; known: forward, backward, train"),
        (("--dtype", "int8"), "--dtype int8 is unknown"),
        (("--feed-forward", "gelu"), "--feed-forward gelu is unknown; known: swiglu, combinator"),
        (("--context", "0"), "--context must be at least 1, got 0"),
        (("--autocast", "fp32"), "--autocast must be bf16 or fp16, as a text"),
        (("--autocast", "--dtype", "bf16"), "--autocast needs parameters in float32, got --dtype bfloat16"),
        (("--device", "A100-40GB"), "--device A100-40GB is no device of this machine"),
        (("--device-from-this-gpu",), "--device-from-this-gpu is for --predict"),
        (("--predict", "--trace", "x.json"), "--trace needs a single case that runs"),
        (("--trace", "/dev/null/x.json"), "--trace /dev/null/x.json cannot be written to"),
    ],
)
def test_wrong_flags_end_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *words, "--output", str(tmp_path))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


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


@pytest.mark.slow
def test_a_compiled_model_is_measured_and_not_predicted() -> None:
    record = profile_model_case(case(compiled=True, mode="backward"), timed=False)
    assert record.status == "ok", record.reason
    assert record.activations is None
    assert record.saved_bytes > 0
    assert record.predicted["status"] == "skipped"
    assert record.predicted["peak_bytes"] is None
    assert record.predicted["parameter_bytes"] == record.parameter_bytes
    assert record.predicted["unknown"] == ("the compiler decides what is allocated",)


def test_a_case_names_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="factor must be at least 1, got 0"):
        make_model_case("tiny", attention_type="compressed", factor=0)
    with pytest.raises(UsageError, match="window must be at least 1, got 0"):
        make_model_case("tiny", attention_type="compressed", window=0)
    with pytest.raises(UsageError, match="bsz must be at least 1, got -1"):
        make_model_case("tiny", bsz=-1)


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
    from memcheck.core.workload import Workload
    from memcheck.predict.scratch import Target
    from memcheck.predict.trace_runner import TraceRunner

    operator = getattr(memcheck, name)
    shape, strides = (3, 700, 24), LAYOUTS[layout]
    x = torch.randn(3 * 700 * 48, dtype=dtype).as_strided(shape, strides).detach().requires_grad_()
    w = torch.randn(24, 200, dtype=dtype, requires_grad=True)
    record = measure_memory(operator, x, w, dense_grad=dense_grad)
    storage = torch.empty(3 * 700 * 48, dtype=dtype, device="meta")
    meta = [storage.as_strided(shape, strides).detach(), torch.empty_like(w, device="meta")]
    meta = [tensor.requires_grad_() for tensor in meta]
    workload = Workload(case(mode="backward"), operator, tuple(meta), ((), ()), ("x", "w"))
    trace = TraceRunner(Target("cpu", torch.get_num_threads()), dense_grad=dense_grad).trace(workload)
    peaks = {
        phase: max(sum(allocation.bytes for allocation in trace.log.alive(event)) for event in range(first, last + 1))
        for phase, (first, last) in trace.phases.items()
    }
    assert peaks["forward"] == record.forward_peak_bytes
    assert peaks["backward"] == record.backward_peak_bytes

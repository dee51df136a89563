"""`memcheck mixed-precision`: sums against independent arithmetic, dtypes and bytes of every stage, underflow."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import memcheck
from memcheck.__main__ import main
from memcheck.report.tables import to_text
from memcheck.studies.accumulation import (
    COMBINATIONS,
    SUMS,
    WAYS,
    accumulate,
    accumulation,
    library_sum,
    library_sums,
    running_sums,
    spacing,
    underflow,
    underflows,
)
from memcheck.studies.autocast_stages import Cast, Kept, Stage, StagesRun, make_network, run_stages
from memcheck.studies.mixed_precision_report import accumulation_table, library_words, norm_words, observations

PAGE = Path(__file__).parents[2] / "docs" / "mixed-precision.md"
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
SIXTEEN = [torch.bfloat16, torch.float16]
DTYPES = pytest.mark.parametrize("dtype", SIXTEEN, ids=["bf16", "fp16"])


# ---- sums


def rounded(x: float, dtype: torch.dtype) -> float:
    """x rounded to the dtype, to nearest with ties to even; for normal numbers."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, BITS[dtype])), exponent - BITS[dtype])


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(("accumulator", "addend"), dict.fromkeys(it[:2] for it in COMBINATIONS))
@pytest.mark.parametrize(("value", "steps"), SUMS)
def test_every_step_is_correctly_rounded(
    value: float, steps: int, accumulator: torch.dtype, addend: torch.dtype, converted: bool
) -> None:
    """In float64 s + x is exact here."""
    x, expected = rounded(value, addend), [0.0]
    for _ in range(steps):
        expected.append(rounded(expected[-1] + x, accumulator))
    assert running_sums(value, steps, accumulator, addend, converted=converted).tolist() == expected


@pytest.mark.parametrize(("accumulator", "addend", "converted"), COMBINATIONS)
def test_running_sums_are_those_of_the_loop(accumulator: torch.dtype, addend: torch.dtype, converted: bool) -> None:
    x, s = torch.tensor(0.01, dtype=addend), torch.zeros((), dtype=accumulator)
    found = running_sums(0.01, 1000, accumulator, addend, converted=converted)
    assert found.dtype == accumulator
    for expected in found[1:]:
        s += x.to(accumulator) if converted else x
        assert torch.equal(s, expected)


@pytest.mark.parametrize(
    ("accumulator", "addend", "expected"),
    [(np.float32, np.float32, torch.float32), (np.float16, np.float16, torch.float16), (np.float32, np.float16, None)],
)
def test_sums_are_those_of_numpy(accumulator: type, addend: type, expected: torch.dtype | None) -> None:
    for value, steps in SUMS:
        x, s = addend(value), accumulator(0)
        for _ in range(steps):
            s = accumulator(s + accumulator(x))
        it = accumulation(value, steps, expected or torch.float32, expected or torch.float16)
        assert it.sum == float(s)


def test_the_experiment() -> None:
    """Sums, where they stop, and errors; the first four of 0.01 are those of a well-known exercise."""
    found = {(it.steps, it.accumulator_dtype, it.addend_dtype, it.converted): it for it in accumulate()}
    assert len(found) == len(SUMS) * len(COMBINATIONS)
    sums = [
        (it.sum, it.stopped_after) for (steps, *_, converted), it in found.items() if steps == 1000 and not converted
    ]
    assert sums == [
        (10.000133514404297, None),
        (9.953125, None),
        (4.0, 350),
        (10.00213623046875, None),
        (10.009765625, None),
    ]
    assert found[10_000, "float16", "float16", False].stopped_after == 3070
    assert found[10_000, "bfloat16", "bfloat16", False].stopped_after == 383
    for it in found.values():
        assert it.absolute_error == abs(it.sum - 10)
        assert it.relative_error == it.absolute_error / 10


@pytest.mark.parametrize(("accumulator", "addend", "converted"), COMBINATIONS)
@pytest.mark.parametrize(("value", "steps"), SUMS)
def test_a_sum_stops_where_nothing_changes_any_more(
    value: float, steps: int, accumulator: torch.dtype, addend: torch.dtype, converted: bool
) -> None:
    it = accumulation(value, steps, accumulator, addend, converted=converted)
    sums = running_sums(value, steps, accumulator, addend, converted=converted).tolist()
    stop = it.stopped_after if it.stopped_after is not None else steps
    assert all(before < after for before, after in itertools.pairwise(sums[: stop + 1]))
    assert set(sums[stop:]) == {it.sum}
    if it.stopped_after is not None:
        assert it.addend < it.spacing / 2


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("value", [0.5, 0.75, 1.0, 3.9921875, 4.0, 9.953125])
def test_spacing_is_the_way_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    x = torch.tensor(value, dtype=dtype)
    assert spacing(x.item(), dtype) == torch.nextafter(x, torch.tensor(math.inf, dtype=dtype)).item() - x.item()


@pytest.mark.extension
@DTYPES
@pytest.mark.parametrize(("value", "steps"), SUMS)
@pytest.mark.parametrize("way", [way for way in WAYS if "LayerNorm" not in way])
def test_one_call_rounds_once(way: str, value: float, steps: int, dtype: torch.dtype) -> None:
    it = library_sum(way, value, steps, dtype)
    exact = rounded(value, dtype) * steps
    result = torch.float32 if "memcheck" in way else dtype
    assert it.result_dtype == str(result).removeprefix("torch.")
    assert it.sum == rounded(exact, result)
    assert it.rounded_once


@DTYPES
@pytest.mark.parametrize(("value", "steps"), SUMS)
def test_layer_norm_is_a_loop(value: float, steps: int, dtype: torch.dtype) -> None:
    """torch's CPU kernel adds in 16 bits in 2.11 and 2.13. A later one that does not must be exact to the last bit."""
    threads = torch.get_num_threads()
    it = library_sum("the gradient of LayerNorm's bias, one thread", value, steps, dtype)
    assert it.result_dtype == "float32"
    assert it.rounded_once or it.sum == accumulation(value, steps, dtype, dtype).sum
    assert it.rounded_once == (it.sum == rounded(value, dtype) * steps)
    assert torch.get_num_threads() == threads


@pytest.mark.extension
@DTYPES
def test_a_state_is_in_float32_from_token_to_token(dtype: torch.dtype) -> None:
    """One call per key gives the same state as one call with all keys."""
    one, key, state = torch.ones(1, 1, 1, 1, dtype=dtype), torch.full((1, 1, 1, 1), 0.01, dtype=dtype), None
    for _ in range(1000):
        _, state = memcheck.linear_attention_step(one, key, one, state, feature_map="identity")
    assert state[1].item() == library_sum("the state of memcheck.linear_attention_step", 0.01, 1000, dtype).sum


@pytest.mark.extension
def test_each_library_call_is_described() -> None:
    sums = [it for it in library_sums() if it.way in ("x @ ones", "torch.sum(x)")]
    looped = [dataclasses.replace(it, rounded_once=it.way != "x @ ones", sum=1.0) for it in sums]
    loop = {(f"{it.steps} x {it.value:g}", it.addend_dtype): 1.0 for it in sums}
    both = next(library_words(sums, loop))
    assert both.startswith(
        "The exact sum of what x is, rounded once, to the dtype of the result: torch.sum(x), x @ ones."
    )
    first, second = library_words(looped, loop)
    assert "result: torch.sum(x). A" in first
    assert second == "The sums of the loop, from torch itself: x @ ones. It adds in the dtype of x."
    assert list(library_words(looped, {}))[1] == "Neither: x @ ones."
    wide = [dataclasses.replace(it, result_dtype="float32") for it in looped]
    assert list(library_words(wide, loop))[1].endswith("though the parameter and its gradient are in fp32.")


def test_sums_are_explained() -> None:
    text = to_text(accumulation_table(accumulate()))
    assert "bf16, 1000 x 0.01: stops at 4, where the next number is 0.03125 further. x = 0.01000977 is less" in text
    assert "fp16, 1000 x 0.01: does not stop, but its numbers near 9.953125 are 0.0078125 apart" in text
    assert text.count(": stops at ") == 3
    assert "s in fp32, x in 16 bits: s is the exact sum of what x is" in text


# ---- stages


@pytest.fixture(scope="module", params=SIXTEEN, ids=["bf16", "fp16"])
def both(request: pytest.FixtureRequest) -> tuple[StagesRun, StagesRun]:
    """Runs without and with autocast."""
    return run_stages(request.param, autocast=False), run_stages(request.param, autocast=True)


def of_stages(run: StagesRun, field: str) -> dict[str, str | None]:
    return {stage.name: getattr(stage, field) for stage in run.stages}


STAGES = ("fc1", "relu", "ln", "qkv", "sdpa", "linear_attention", "add", "fc2", "loss")
WITH_PARAMETERS = ("fc1", "ln", "qkv", "fc2")


@pytest.mark.extension
def test_without_autocast_everything_is_float32(both: tuple[StagesRun, StagesRun]) -> None:
    plain, _ = both
    everywhere = dict.fromkeys(STAGES, "float32")
    for field in ("input_dtype", "output_dtype", "output_gradient_dtype"):
        assert of_stages(plain, field) == everywhere
    for field in ("parameter_dtype", "parameter_gradient_dtype"):
        assert of_stages(plain, field) == {name: "float32" if name in WITH_PARAMETERS else None for name in STAGES}
    assert of_stages(plain, "rounded_gradient") == {name: False if name in WITH_PARAMETERS else None for name in STAGES}
    assert all(stage.casts == () for stage in plain.stages)
    assert plain.freed_bytes == 0


@pytest.mark.extension
def test_dtypes_under_autocast(both: tuple[StagesRun, StagesRun]) -> None:
    """On a CPU; on CUDA the layer norm's output is float32."""
    _, run = both
    low = run.autocast_dtype
    assert of_stages(run, "input_dtype") == {name: "float32" if name == "fc1" else low for name in STAGES}
    assert of_stages(run, "output_dtype") == {name: "float32" if name == "loss" else low for name in STAGES}
    assert of_stages(run, "output_gradient_dtype") == of_stages(run, "output_dtype")
    for field in ("parameter_dtype", "parameter_gradient_dtype"):
        assert of_stages(run, field) == {name: "float32" if name in WITH_PARAMETERS else None for name in STAGES}
    # The layer norm's depends on how many threads there are: each has a sum in 16 bits.
    assert [it.name for it in run.stages if it.rounded_gradient and it.name != "ln"] == ["fc1", "qkv", "fc2"]


@pytest.mark.extension
def test_what_is_kept(both: tuple[StagesRun, StagesRun]) -> None:
    _, run = both
    low = run.autocast_dtype
    kept = {stage.name: [it for it in stage.kept if it.bytes] for stage in run.stages}
    assert kept["fc1"] == [Kept("copy of x", low, (16, 16), 2 * 8 * 16 * 2)]
    assert kept["relu"] == [Kept("output of relu", low, (2, 8, 32), 2 * 8 * 32 * 2)]
    assert kept["ln"] == [Kept("made by ln", "float32", (2, 8, 1), 2 * 8 * 4)] * 2
    assert kept["qkv"] == [
        Kept("output of ln", low, (16, 32), 2 * 8 * 32 * 2),
        Kept("copy of qkv.weight", low, (32, 96), 32 * 96 * 2),
    ]
    assert kept["linear_attention"] == []
    assert kept["fc2"] == [
        Kept("output of add", low, (16, 32), 2 * 8 * 32 * 2),
        Kept("copy of fc2.weight", low, (32, 10), 32 * 10 * 2),
    ]
    assert kept["loss"] == [Kept("made by loss", "float32", (16, 10), 640), Kept("made by loss", "float32", (), 4)]
    (attention,) = (stage for stage in run.stages if stage.name == "linear_attention")
    assert {it.what for it in attention.kept} == {"output of qkv"}


@pytest.mark.extension
def test_what_hooks_saw_is_what_the_allocator_has(both: tuple[StagesRun, StagesRun]) -> None:
    for run in both:
        assert sum(stage.kept_bytes for stage in run.stages) == run.saved_bytes


@pytest.mark.extension
def test_a_measurement_says_the_same(both: tuple[StagesRun, StagesRun]) -> None:
    plain, _ = both
    record = memcheck.measure_memory(*make_network("cpu"))
    assert (record.saved_bytes, record.parameter_bytes) == (plain.saved_bytes, plain.parameter_bytes)


@pytest.mark.extension
def test_copies_of_parameters(both: tuple[StagesRun, StagesRun]) -> None:
    _, run = both
    copies = {cast.what: cast.bytes for cast in run.parameter_copies}
    network, _, _ = make_network("cpu")
    sizes = {name: parameter.numel() * 2 for name, parameter in network.named_parameters() if not name.startswith("ln")}
    assert copies == sizes
    kept = {it.what for stage in run.stages for it in stage.kept}
    assert run.freed_bytes == sum(size for name, size in sizes.items() if f"copy of {name}" not in kept)
    (loss,) = (stage for stage in run.stages if stage.name == "loss")
    assert loss.casts == (Cast("output of fc2", run.autocast_dtype, "float32", 640, of_parameter=False),)


@DTYPES
def test_the_cache_holds_one_copy_of_each(dtype: torch.dtype) -> None:
    """A second use of a weight in the same region makes no further copy."""
    network, x, _ = make_network("cpu")
    saved: list[Tensor] = []
    x = x.requires_grad_()  # so that the weight is kept
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda nothing: nothing)
    with hooks, torch.autocast("cpu", dtype):
        network.fc1(x), network.fc1(x)
    weights = [tensor for tensor in saved if tensor.shape == (16, 32)]
    assert [weight.dtype for weight in weights] == [dtype, dtype]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


@pytest.mark.extension
def test_observations(both: tuple[StagesRun, StagesRun]) -> None:
    plain, run = both
    low = {"bfloat16": "bf16", "float16": "fp16"}[run.autocast_dtype]
    said = list(observations(plain, run))
    assert said[0] == f"ln: {low} in, {low} out, with parameters in fp32; its mean and 1/std are kept in fp32."
    assert said[1] == f"loss: fp32, of logits that are {low}, copied to fp32 first (640 B)."
    assert f"in those of fc1, qkv, fc2 fits {low}" in said[2]
    assert "copies of 6 parameters, 8,084 B beside the 16,424 B" in said[3]
    assert "the cache held the others until the region ended, 1,300 B." in said[3]
    assert said[4].startswith("Kept for backward: 15,172 B without autocast, 15,300 B with it, 8,516 B without")
    assert len(said) == 5


@pytest.mark.extension
def test_observations_are_of_what_was_seen() -> None:
    """For a GPU, where the layer norm's output is float32, and without autocast."""
    ln = Stage("ln", "float32", "bfloat16", "float32", (), (), "float32", "float32", None)
    assert norm_words(ln) == "ln: bf16 in, fp32 out, with parameters in fp32; its mean and 1/std are kept in no dtype."
    plain = run_stages(torch.bfloat16, autocast=False)
    said = list(observations(plain, plain))
    assert said[1] == "loss: fp32, of logits that are fp32."
    assert len(said) == 3


@pytest.mark.extension
def test_torchs_generator_is_untouched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    run_stages(torch.bfloat16, autocast=True)
    assert torch.equal(torch.rand(1), expected)


# ---- underflow


def test_a_gradient_that_flushes_to_zero() -> None:
    full, bfloat, half, scaled = underflows()
    assert full.output_gradient == full.parameter_gradient == np.float32(1e-8)
    # 1e-8 in bfloat16, by bits: 8 of the mantissa, to nearest.
    assert bfloat.output_gradient == bfloat.parameter_gradient == rounded(1e-8, torch.bfloat16)
    assert (half.output_gradient, half.parameter_gradient, half.relative_error) == (0.0, 0.0, 1.0)
    assert float(np.float16(1e-8)) == 0.0
    assert scaled.scale == 2**16
    assert scaled.output_gradient == float(np.float16(np.float32(1e-8) * np.float32(2**16)))
    assert scaled.parameter_gradient == scaled.output_gradient / 2**16
    assert scaled.relative_error < 2**-11
    assert [it.dtype for it in (full, bfloat, half, scaled)] == ["float32", "bfloat16", "float16", "float16"]


def test_bfloat16_needs_no_scale() -> None:
    plain, scaled = underflow(torch.bfloat16), underflow(torch.bfloat16, scaled=True)
    assert plain.parameter_gradient == scaled.parameter_gradient


# ---- the command


def printed_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["mixed-precision", "--device", "cpu", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.extension
@pytest.mark.parametrize(("dtype", "long"), [("bf16", "bfloat16"), ("fp16", "float16"), ("float16", "float16")])
def test_json_is_one_object(dtype: str, long: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed_by(capsys, "--dtype", dtype, "--format", "json"))
    assert list(found) == [
        "device",
        "torch_version",
        "accumulations",
        "one_call",
        "without_autocast",
        "under_autocast",
        "underflow",
        "observations",
    ]
    assert found["accumulations"] == [dataclasses.asdict(it) for it in accumulate()]
    assert len(found["one_call"]) == len(WAYS) * len(SUMS) * 2
    run = found["under_autocast"]
    assert (run["device"], run["autocast"], run["autocast_dtype"]) == ("cpu", True, long)
    assert [stage["name"] for stage in run["stages"]] == list(STAGES)
    assert sum(stage["kept_bytes"] for stage in run["stages"]) == run["saved_bytes"]
    assert set(run["stages"][0]) == {field.name for field in dataclasses.fields(Stage)} | {"kept_bytes"}
    assert len(found["underflow"]) == 4


@pytest.mark.extension
def test_the_table_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed_by(capsys)
    titles = [block.partition("\n")[0] for block in said.split("\n\n\n")]
    assert titles == [
        "s = 0, then s += x, one after the other: both sums should be 10",
        "16-bit x by one call instead of a loop",
        "The stages of a small network, on cpu, with autocast off and on (to bf16)",
        "What is kept for backward with autocast on (to bf16)",
        "y = w x under autocast, loss = 1e-8 y, w in fp32: both gradients should be 1e-8, times the scale for y",
    ]
    assert "on (to fp16)" in printed_by(capsys, "--dtype", "fp16")
    assert "nan" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "fp8"], "--dtype must be bf16 or fp16, as a text or a torch.dtype, got 'fp8'"),
        (["--dtype", "fp32"], "--dtype must be bf16 or fp16, as a text or a torch.dtype, got 'fp32'"),
        (["--device", "abacus"], "--device abacus is no device of this machine"),
        (["--device", "meta"], "--device must be cpu or cuda, got meta"),
        (["--device", "cuda:99"], "--device cuda:99 is absent"),
        (["--format", "csv"], "invalid choice: 'csv'"),
        (["--steps", "10"], "unrecognized arguments: --steps 10"),
    ],
)
def test_what_there_is_not(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixed-precision", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("memcheck: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.extension
def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed_by(capsys).splitlines()
    page = PAGE.read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(lines) > 40
    assert [line for line in lines if line not in said] == []

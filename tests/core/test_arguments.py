"""Arguments of the public functions: each is used, or refused in words that name it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcheck
from memcheck import Place, Step
from memcheck.bench.capacity import largest_case
from memcheck.bench.catalog import make_case
from memcheck.bench.predict import predict_case
from memcheck.bench.sweep.predicted_sweep import predict_sweep
from memcheck.bench.sweep.run import run_sweep
from memcheck.core.converters import OPTIMIZERS
from memcheck.core.devices import running, version_name
from memcheck.core.errors import UsageError
from memcheck.core.options import options_of
from memcheck.core.record import Record
from memcheck.report.tables import render

SIZES: dict[str, Any] = {"core_dim": None, "factor": None, "dtype": "float32", "mode": "train"}
CASE = make_case("naive", bsz=1, query_len=8, kv_len=8, dim=8, heads=2, **SIZES)
LINEAR = nn.Linear(4, 4)


class Repeated(nn.Module):
    """A model whose keyword has the name of an option."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        for _ in range(steps):
            x = self.inner(x).tanh()
        return x


def x() -> Tensor:
    return torch.ones(2, 4)


def measured(model: Any, *inputs: Any, **options: Any) -> Record:
    return dataclasses.replace(memcheck.measure_memory(model, *inputs, **options), device_free_bytes=None)


def predicted(model: Any, *inputs: Any, **options: Any) -> Record:
    return memcheck.predict_memory(model, *inputs, **options).record


def largest(**options: Any) -> Any:
    return memcheck.largest(lambda size: torch.empty(size, 4), LINEAR, "1MiB", **{"up_to": 8, "step": 8, **options})


both = pytest.mark.parametrize("find", [predicted, pytest.param(measured, marks=pytest.mark.extension)])


# Keywords.


@both
def test_a_keyword_of_the_model_and_the_function_is_refused(find: Any) -> None:
    model, name = Repeated(), "predict_memory" if find is predicted else "measure_memory"
    words = f"steps is an argument of {name} and of Repeated.forward: give that of Repeated.forward as kwargs="
    with pytest.raises(TypeError, match=words):
        find(model, x(), steps=5)
    five = find(model, x(), kwargs={"steps": 5}).saved_bytes
    assert five > find(model, x()).saved_bytes
    assert find(functools.partial(model, steps=5), x(), steps=1).saved_bytes == five
    assert find(model, x(), 5, steps=1).saved_bytes == five
    assert find(model, x(), steps=1, kwargs={}).saved_bytes < five
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        find(model, x(), steps=0, kwargs={"steps": 5})


@both
def test_keywords_of_the_model_alone_go_on(find: Any) -> None:
    def scaled(x: Tensor, *, scale: Tensor) -> Tensor:
        return x * scale

    def any_of_them(x: Tensor, **named: Tensor) -> Tensor:
        return x * named["scale"]

    given = [find(scaled, x(), scale=x()), find(scaled, x(), kwargs={"scale": x()})]
    given += [find(any_of_them, x(), scale=x()), find(functools.partial(scaled, scale=None), x(), scale=x())]
    assert {record.input_bytes for record in given} == {64}
    with pytest.raises(TypeError, match="scale is given twice, once in kwargs"):
        find(scaled, x(), scale=x(), kwargs={"scale": x()})
    with pytest.raises(TypeError, match="kwargs must be a dict of the model's keyword inputs, got 3"):
        find(scaled, x(), kwargs=3)


@both
@pytest.mark.parametrize("name", ["memory_limi", "nonsense"])
def test_a_keyword_of_neither_is_refused(find: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is no argument of .*_memory or of Linear.forward") as refused:
        find(LINEAR, x(), **{name: 3})
    assert ("did you mean memory_limit" in str(refused.value)) == (name == "memory_limi")


@pytest.mark.parametrize("name", ["backward", "nonsense", "optimizer", "steps", "loss", "probes", "ranks", "kwargs"])
def test_a_case_takes_what_it_does_not_say_itself(name: str) -> None:
    with pytest.raises(TypeError, match=f"predict_memory of a Case takes device, .*, not {name}: the Case says"):
        predicted(CASE, **{name: None})
    assert predicted(CASE, "T4", memory_limit="1GiB", threads=2, torch_version="2.13", dense_grad=True).status == "ok"
    for inputs, options in ((("cpu", 3), {}), (("cpu",), {"device": "T4"})):
        with pytest.raises(TypeError, match=r"predict_memory takes one place, got 'cpu', (3|device)"):
            predicted(CASE, *inputs, **options)


def test_largest_takes_keyword_inputs_of_any_name() -> None:
    def make(size: int) -> dict[str, Any]:
        return {"x": torch.empty(size, 4), "steps": 3}

    found = memcheck.largest(make, Repeated(), "64MiB", step=64, up_to=64)
    assert found.size == 64
    assert found.at is not None
    assert found.at.record.saved_bytes == 64 * 4 * 4 * 2  # The third is the output.
    for options, words in (
        ({"nonsense": 3}, "nonsense is no argument"),
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"up_to": 4}, "up_to must be at least the step of 8, got 4"),
        ({"start": -1}, "start must be at least 1, got -1"),
        ({"memory_limit": -5}, "memory_limit must be a positive number of bytes, got -5"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            largest(**options)


# Values.

WRONG: list[tuple[str, Any, str]] = [
    ("memory_limit", -5, "memory_limit must be a positive number of bytes, got -5"),
    ("memory_limit", 0, "memory_limit must be a positive number of bytes, got 0"),
    ("memory_limit", True, "memory_limit must be a positive number of bytes, got True"),
    ("memory_limit", "lots", "memory_limit must look like 40GiB, 512MiB, 40GB or 4096B, got 'lots'"),
    ("memory_limit", "16", "memory_limit 16: 16 what"),
    ("optimizer", "adamq", "optimizer 'adamq' is unknown; did you mean adam"),
    ("optimizer", 3, "optimizer must be a function that makes one of parameters.*, got 3"),
    ("autocast", "int8", "autocast must be bf16 or fp16, as a text or a torch.dtype, got 'int8'"),
    ("autocast", True, "autocast must be .*, got True"),
    ("autocast", torch.int8, "autocast must be .*, got torch.int8"),
    ("loss", "sum", "loss must be callable, got 'sum'"),
    ("steps", "two", "steps must be a whole number, got 'two'"),
    ("accumulate", -1, "accumulate must be at least 1, got -1"),
    ("device", "toaster", "device toaster is unknown"),
    ("threads", -3, "threads must be at least 1, got -3"),
    ("threads", 0, "threads must be at least 1, got 0"),
    ("threads", 1.5, "threads must be a whole number, got 1.5"),
    ("torch_version", (1, 0), r"torch_version must be at least 2.7: rules are known for 2.7 to 2.15, got \(1, 0\)"),
    ("torch_version", "2.6.1", "torch_version must be at least 2.7: rules are known for 2.7 to 2.15, got '2.6.1'"),
    ("torch_version", "new", r"torch_version must look like '2.13', '2.13.0' or \(2, 13\), got 'new'"),
    ("torch_version", 2.13, "torch_version must look like .*, got 2.13"),
    ("ranks", 8, "ranks must be a memcheck.Ranks, got 8"),
    ("device", 3, "device must be a Device or a name such as 'A100-40GB', '40GiB' or 'cpu', got 3"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_value_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Step(LINEAR, x(), **{name: value}) if name in options_of(Step) else Place(**{name: value}).resolved()


@both
@pytest.mark.parametrize("name", ["memory_limit", "optimizer", "device"])
def test_public_functions_make_steps_and_places(find: Any, name: str) -> None:
    value, words = next((value, words) for other, value, words in WRONG if other == name)
    with pytest.raises(ValueError, match="device must be" if name == "device" and find is measured else words):
        find(LINEAR, x(), **{name: value})


def test_a_wrong_value_of_a_prediction_of_a_case_is_named() -> None:
    for find in (predicted, lambda case, **place: predict_case(case, Place(**place))):
        with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
            find(CASE, threads=0)
    with pytest.raises(ValueError, match="probes must be a file, True or False, got 3"):
        predicted(LINEAR, x(), probes=3)


def test_wrong_values_of_sweeps_and_searches_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_limit must be a positive number of bytes, got -5"):
        largest_case(CASE, "seq_len", Place("1MiB", memory_limit=-5))
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        largest_case(CASE, "seq_len", Place("1MiB"), step=0)
    with pytest.raises(ValueError, match="memory_limit must be a positive number of bytes, got 0"):
        predict_sweep([CASE], tmp_path, Place("1MiB", memory_limit=0))
    for name, words in (("passes", "at least 1"), ("workers", "at least 1"), ("max_seconds", "a number of seconds")):
        with pytest.raises(ValueError, match=f"{name} must be {words}.*, got -1"):
            run_sweep([CASE], tmp_path, **{name: -1})
    assert not list(tmp_path.iterdir())


@both
def test_words_of_the_command_line(find: Any) -> None:
    size = 2**30
    assert find(LINEAR, x(), memory_limit="1GiB") == find(LINEAR, x(), memory_limit=size)
    assert find(LINEAR, x(), memory_limit="4B").status == "oom"
    for name in ("bf16", "bfloat16"):
        assert find(LINEAR, x(), autocast=name) == find(LINEAR, x(), autocast=torch.bfloat16)
    assert find(LINEAR, x(), optimizer="adamw") == find(LINEAR, x(), optimizer=torch.optim.AdamW)
    assert find(LINEAR, x(), optimizer="none") == find(LINEAR, x())
    assert find(LINEAR, x(), device=torch.device("cpu")) == find(LINEAR, x(), device="cpu")


@pytest.mark.extension
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_every_optimizer_by_its_name(name: str) -> None:
    assert (
        predicted(LINEAR, x(), optimizer=name).optimizer_bytes == measured(LINEAR, x(), optimizer=name).optimizer_bytes
    )


def test_a_form_of_tables_that_is_none_is_named() -> None:
    with pytest.raises(
        ValueError, match="form text is unknown; did you mean latex\\? Known: table, markdown, latex, csv, json"
    ):
        render([], "text")


# Versions of torch.


@pytest.mark.parametrize("version", ["2.13", "2.13.0", "2.13.1+cpu", (2, 13), (2, 13, 0), [2, 13]])
def test_a_version_in_every_form(version: Any) -> None:
    for thing in (LINEAR, CASE):
        given = (x(),) if thing is LINEAR else ()
        prediction = memcheck.predict_memory(thing, *given, torch_version=version)
        assert prediction.exact
        assert (prediction.record.torch_version or "").startswith("2.13")


def test_the_running_version_by_its_name_is_the_default() -> None:
    named = predicted(LINEAR, x(), torch_version=version_name(running()))
    assert named == predicted(LINEAR, x())


@pytest.mark.parametrize(("version", "certainty"), [("2.7", "derived"), ("2.10", "derived"), ("2.11", "verified")])
def test_a_version_that_no_test_ran_with_is_not_verified(version: str, certainty: str) -> None:
    prediction = memcheck.predict_memory(LINEAR, x(), torch_version=version)
    assert prediction.certainty == certainty


@pytest.mark.extension
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "A100-40GB", "meta", 3.5])
def test_a_measurement_names_a_device_that_is_not_here(device: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=rf"device (must be cpu or cuda, got '{device}'|{device} is absent: torch .*)"):
        measured(LINEAR, x(), device=device)

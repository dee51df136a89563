"""Steps and places: what they refuse, and that they ask for the same as keywords do."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcheck
from memcheck import Place, Ranks, Step
from memcheck.bench.catalog import make_case
from memcheck.bench.sweep.predicted_sweep import key
from memcheck.core.errors import UsageError
from memcheck.core.options import options_of, spoken_as_flags
from memcheck.core.record import Record
from memcheck.core.step import HERE, MEASURED_ONLY
from memcheck.measure.timeline import record_timeline
from memcheck.nn import Decoder

SIZES: dict[str, Any] = {"core_dim": None, "factor": None, "dtype": "float32", "mode": "train"}
CASE = make_case("naive", bsz=1, query_len=8, kv_len=8, dim=8, heads=2, **SIZES)
LINEAR = nn.Linear(4, 4)
FIGURES = ("input_bytes", "parameter_bytes", "optimizer_bytes", "output_bytes", "forward_peak_bytes", "saved_bytes")
FIGURES += ("backward_peak_bytes", "gradient_bytes", "workspace_bytes", "optimizer_peak_bytes")
FIGURES += ("forward_end_allocated_bytes", "backward_end_allocated_bytes")


def x() -> Tensor:
    return torch.ones(2, 4)


def layers() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 40))


def decoder() -> nn.Module:
    return Decoder(50, 32, 64, 3, 4, context=32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backward": "no"}, "backward must be True or False, got 'no'"),
        ({"training": "yes"}, "training must be True or False, got 'yes'"),
        ({"kwargs": 3}, "kwargs must be a dict of the model's keyword inputs, got 3"),
        ({"clip_grad_norm": -1, "optimizer": "sgd"}, "clip_grad_norm must be a number that is not negative, got -1"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm needs an optimizer"),
        ({"set_to_none": False}, "set_to_none=False needs an optimizer"),
        ({"steps": 2, "backward": False}, "steps 2 needs a backward, got backward=False"),
        ({"backward": False, "optimizer": "sgd"}, "optimizer needs a backward, got backward=False"),
        ({"backward": False, "keep_outputs": False}, "keep_outputs=False needs a backward, got backward=False"),
        ({"backward": False, "dense_grad": True}, "dense_grad needs a backward, got backward=False"),
        ({"backward": False, "clip_grad_norm": 1.0}, "clip_grad_norm needs a backward, got backward=False"),
        ({"backward": False, "checkpointing": True}, "checkpointing needs a backward, got backward=False"),
        ({"optimizer": "sgd", "optimizer_step": bool}, "optimizer and optimizer_step exclude each other"),
    ],
)
def test_what_a_step_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Step(LINEAR, x(), **options)


def test_messages_speak_as_the_caller_does() -> None:
    with spoken_as_flags(), pytest.raises(UsageError, match="--no-keep-outputs needs a backward, got --mode inf"):
        Step(LINEAR, x(), keep_outputs=False, backward=False)
    with spoken_as_flags(), pytest.raises(UsageError, match="--memory-limit must be a positive number of bytes, got 0"):
        Place(memory_limit=0)
    with pytest.raises(UsageError, match="memory_limit must be a positive number of bytes, got 0"):
        Place(memory_limit=0)
    with pytest.raises(UsageError, match="model must be callable, got 3"):
        Step(3)


def test_none_is_an_option_that_is_not_given() -> None:
    assert Step(LINEAR, x(), accumulate=None, backward=None).accumulate == 1  # type: ignore[arg-type]
    assert Step(LINEAR, x(), optimizer="none", backward=False).optimizer is None
    assert Place("cpu", drop_workspaces=None) == Place("cpu")  # type: ignore[arg-type]


def test_a_single_input_is_the_only_one() -> None:
    given = x()
    assert Step(LINEAR, given).inputs == (given,)
    assert Step(LINEAR, (given,)).inputs == (given,)


# A Step and a Place, or the same as keywords.

HOW: dict[str, Any] = {"optimizer": "adamw", "loss": Tensor.mean, "accumulate": 2, "autocast": "bf16"}
GPU: dict[str, Any] = {"device": "A100-40GB", "memory_limit": "1GiB", "torch_version": "2.13"}


def without_changes(record: Record) -> Record:
    return dataclasses.replace(record, device_free_bytes=None)


@pytest.mark.extension
def test_a_measured_step_is_that_of_the_keywords() -> None:
    by_step = memcheck.measure_memory(Step(LINEAR, x(), **HOW), Place("cpu", memory_limit="1GiB"))
    by_name = memcheck.measure_memory(LINEAR, x(), **HOW, device="cpu", memory_limit=2**30)
    assert without_changes(by_step) == without_changes(by_name)
    step = Step(LINEAR, kwargs={"input": x()}, backward=False)
    timelines = record_timeline(step, "cpu"), record_timeline(LINEAR, input=x(), backward=False, place=Place("cpu"))
    assert len({tuple(timeline.alive) for timeline in timelines}) == 1


def test_a_predicted_step_is_that_of_the_keywords(tmp_path: Path) -> None:
    step = Step(LINEAR, x(), **HOW)
    by_name = memcheck.predict_memory(LINEAR, x(), **HOW, **GPU).record
    places: list[dict[str, Any]] = [GPU, {"place": Place(**GPU)}, {"place": "A100-40GB", **GPU, "device": None}]
    for place in places:
        given = {name: value for name, value in place.items() if value is not None}
        assert memcheck.predict_memory(step, **given).record == by_name
    assert memcheck.predict_memory(step, Place(**GPU)).record == by_name
    assert memcheck.predict_memory(CASE, Place(**GPU)) == memcheck.predict_memory(CASE, **GPU)


def test_the_largest_of_a_step_is_that_of_the_keywords() -> None:
    def step(size: int) -> Step:
        return Step(LINEAR, torch.empty(size, 4), optimizer="sgd")

    more = {"up_to": 2**12, "step": 64}
    found = [
        memcheck.largest(step, device="cpu", memory_limit="64KiB", **more),
        memcheck.largest(step, place=Place("cpu", memory_limit=2**16), **more),
        memcheck.largest(lambda size: torch.empty(size, 4), LINEAR, "cpu", memory_limit=2**16, optimizer="sgd", **more),
    ]
    assert [it.size for it in found] == [found[0].size] * 3
    assert 0 < found[0].size < 2**12
    with pytest.raises(TypeError, match="predict_memory of a Step takes no optimizer: the Step says it"):
        memcheck.largest(step, None, "64KiB", optimizer="sgd", **more)
    with pytest.raises(TypeError, match="largest takes a model or a function that makes Steps, got both"):
        memcheck.largest(step, LINEAR, "64KiB", **more)


def test_a_step_says_its_options_itself() -> None:
    for find in (memcheck.predict_memory, memcheck.measure_memory):
        for options in ({"optimizer": "sgd"}, {"kwargs": {}}, {"nonsense": 3}):
            with pytest.raises(TypeError, match=f"{find.__name__} of a Step takes no {next(iter(options))}: the Step"):
                find(Step(LINEAR, x()), **options)  # type: ignore[operator]


def test_one_place_is_given_once() -> None:
    for inputs, options in (
        (("cpu", "T4"), {}),
        (("cpu",), {"device": "T4"}),
        ((Place("cpu"),), {"memory_limit": 5}),
        ((Place("cpu"),), {"place": "T4"}),
    ):
        with pytest.raises(TypeError, match="predict_memory takes one place, got"):
            memcheck.predict_memory(Step(LINEAR, x()), *inputs, **options)


@pytest.mark.extension
@pytest.mark.parametrize("name", [name for name in options_of(Place) if name not in HERE])
def test_a_measurement_happens_here(name: str) -> None:
    given: dict[str, Any] = {"threads": 2, "torch_version": "2.13", "ranks": Ranks(ddp=2)}
    given |= {"expandable_segments": True, "drop_workspaces": False, "cuda_context": 5}
    with pytest.raises(TypeError, match=f"measure_memory takes no {name}"):
        memcheck.measure_memory(Step(LINEAR, x()), Place("cpu", **{name: given[name]}))
    with pytest.raises(TypeError, match=f"{name} is no argument of measure_memory or of Linear.forward"):
        memcheck.measure_memory(LINEAR, x(), **{name: given[name]})


def test_an_operator_is_not_split() -> None:
    with pytest.raises(UsageError, match="ranks split a model; naive is an operator"):
        memcheck.predict_memory(CASE, Place("T4", ranks=Ranks(ddp=2)))


def test_each_option_of_a_place_makes_another_row_of_a_sweep() -> None:
    others: dict[str, Any] = {"torch_version": "2.13", "expandable_segments": True, "drop_workspaces": False}
    places = [Place("T4"), Place("cpu"), Place("cpu", threads=64), Place("T4", memory_limit=5)]
    places += [Place("T4", **{name: value}) for name, value in others.items()]
    assert len({key(CASE, place, ()) for place in places}) == len(places)


# Signatures.


def test_signature_and_documentation_list_every_option() -> None:
    every = {**options_of(Step), **options_of(Place)}
    for name in MEASURED_ONLY:
        del every[name]
        assert name not in inspect.signature(memcheck.predict_memory).parameters
        with pytest.raises(TypeError, match=f"{name} is no argument of predict_memory or of Linear.forward"):
            memcheck.predict_memory(LINEAR, x(), **{name: ()})
    signature, text = inspect.signature(memcheck.predict_memory), memcheck.predict_memory.__doc__ or ""
    assert {name: signature.parameters[name].default for name in every} == {n: f.default for n, f in every.items()}
    assert list(signature.parameters)[:3] == ["model", "inputs", "kwargs"]
    assert [name for name in every if f"\n    {name}: " not in text] == []
    measured = inspect.signature(memcheck.measure_memory).parameters
    assert {name for name in options_of(Place) if name in measured} == set(HERE)
    assert measured.keys() >= {*options_of(Step), "details", "place"}
    assert "Options of the place" in text


# What a step arranges.


@pytest.mark.extension
@pytest.mark.parametrize("make", [layers, decoder])
@pytest.mark.parametrize(
    "how",
    [
        {"checkpointing": True},
        {"training": False},
        {"checkpointing": True, "training": False, "optimizer": "adamw", "accumulate": 2},
    ],
    ids=str,
)
def test_checkpoints_and_modes_are_predicted_and_undone(make: Callable[[], nn.Module], how: dict[str, Any]) -> None:
    model, given = make(), torch.randn(30, 16) if make is layers else torch.randint(0, 50, (4, 32))
    before = [dict(vars(part)) for part in model.modules()]
    measured, prediction = memcheck.measure_memory(model, given, **how), memcheck.predict_memory(model, given, **how)
    assert [dict(vars(part)) for part in model.modules()] == before
    assert prediction.exact or make is decoder
    assert [(name, getattr(prediction.record, name)) for name in FIGURES] == [
        (name, getattr(measured, name)) for name in FIGURES
    ]
    if "checkpointing" in how:
        assert measured.saved_bytes < memcheck.measure_memory(model, given).saved_bytes / 3


class Switched(nn.Module):
    """A model with a switch of transformers, which sets attributes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.layer.checkpointing  # Inside of the measurement they are on.
        return self.layer(x)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.layer.checkpointing, self.layer.how = True, gradient_checkpointing_kwargs

    def gradient_checkpointing_disable(self) -> None:
        self.layer.checkpointing = False


@pytest.mark.extension
def test_checkpoints_that_were_on_stay_on() -> None:
    model = Decoder(50, 32, 64, 2, 4, context=32, checkpointing=True)
    memcheck.measure_memory(model, torch.randint(0, 50, (1, 8)), checkpointing=True)
    assert all(layer.checkpointing for layer in model.layers)
    switched = Switched()
    switched.gradient_checkpointing_enable({})
    memcheck.measure_memory(switched, x(), checkpointing=True)
    assert (switched.layer.checkpointing, switched.layer.how) == (True, {})


@pytest.mark.extension
def test_a_model_without_layers_has_no_checkpoints() -> None:
    model = nn.Dropout()
    for find in (memcheck.predict_memory, memcheck.measure_memory):
        with pytest.raises(UsageError, match="checkpointing: Dropout has no switch for it and no list of layers"):
            find(model, x(), checkpointing=True, training=False)  # type: ignore[operator]
    assert model.training

"""`memcheck gradcheck`: every configuration passes, and a wrong gradient fails."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from memcheck.__main__ import main
from memcheck.ops import gradcheck as gradchecking
from memcheck.ops.gradcheck import CONFIGURATIONS, Configuration, check

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda it: f"{it.operator}: {it.text}")
def test_gradients(configuration: Configuration) -> None:
    assert sum(x.numel() for x in configuration.inputs()) <= 200
    outcome = check(configuration)
    assert outcome.ok, outcome
    # Central differences of step 1e-6 have about this error in float64, far below the allowed one.
    assert outcome.largest_error < 1e-7


class Square(torch.autograd.Function):
    """x^2, with the gradient of x^2 + x / 1000."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 * ctx.saved_tensors[0] + 1e-3)


def square(x: Tensor) -> Tensor:
    return Square.apply(x)


def missing(x: Tensor) -> Tensor:
    raise NotImplementedError("square: no kernel\n for this device")


WRONG = {
    "square": (square, 1e-3),
    "square/missing": (missing, None),
    "square/nan": (lambda x: x + torch.full_like(x, math.nan), math.inf),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_fails(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    function, error = WRONG[name]
    right = Configuration("cube", "2 numbers", lambda x: x**3, ((2,),))
    wrong = Configuration(name, "3 numbers", function, ((3,),))
    monkeypatch.setattr(gradchecking, "CONFIGURATIONS", (right, wrong))

    assert main(["gradcheck", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("cube")).endswith("ok")
    assert next(line for line in lines if line.startswith(name)).endswith("FAILED")
    assert lines[-1].startswith("1 of 2 FAILED")

    assert main(["gradcheck", "--device", "cpu", "--format", "json"]) == 1
    outcomes = json.loads(capsys.readouterr().out)
    assert [outcome["ok"] for outcome in outcomes] == [True, False]
    assert outcomes[1]["largest_error"] == (error if error is None else pytest.approx(error, rel=1e-5))

    assert main(["gradcheck", "--device", "cpu", "--operator", "cube"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all 1 ok")


def test_operators_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--device", "cpu", "--operator", "linear_r", "--operator", "linear_l"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:-2]
    assert {row.split()[0] for row in rows} == {"linear_r", "linear_l"}
    assert len(rows) == sum(it.operator in ("linear_r", "linear_l") for it in CONFIGURATIONS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--operator", "softmax"], "--operator softmax is unknown; known: softplus_attention, "),
        (["--device", "abacus"], "--device abacus is no device of this machine"),
    ],
)
def test_unknown_operators_and_devices_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gradcheck", *words]) == 2
    assert said in capsys.readouterr().err

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
    # Central differences of step 1e-6 have about this error in float64, far below the allowed one.
    outcome = check(configuration, absolute=1e-7, relative=0)
    assert outcome.ok, outcome


class Product(torch.autograd.Function):
    """x w, with a gradient of w that is 1/1000 too large."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * (x + 1e-3)


def missing(x: Tensor, w: Tensor) -> Tensor:
    raise NotImplementedError("product: no kernel\n for this device")


# The function, and what is said of it.
WRONG = {
    "product": (
        lambda x, w: Product.apply(x, w),
        "gradient of w: Jacobian mismatch for output 0 with respect to input 1",
    ),
    "product/missing": (missing, "raised NotImplementedError: product: no kernel for this device"),
    "product/nan": (lambda x, w: x + w * math.nan, "gradient of x, w: Jacobian mismatch for output 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_fails(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines name the operator, the sizes and the input; numbers of both Jacobians follow."""
    function, said = WRONG[name]
    right = Configuration("cube", lambda x: x**3, "x:S", {"S": 2})
    wrong = Configuration(name, function, "x:S w:S", {"S": 3})
    monkeypatch.setattr(gradchecking, "CONFIGURATIONS", (right, wrong))

    assert main(["gradcheck", "--device", "cpu"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["operator configuration, on cpu", "cube ok S=2", f"{name} FAILED S=3"]
    assert lines[3].startswith(said)
    assert lines[-1].startswith("1 of 2 FAILED")

    assert main(["gradcheck", "--device", "cpu", "--format", "json"]) == 1
    outcomes = json.loads(capsys.readouterr().out)
    assert outcomes[0] == {"operator": "cube", "configuration": "S=2", "ok": True, "reason": None}
    assert outcomes[1].pop("reason").replace("\n", "").startswith(said)
    assert outcomes[1] == {"operator": name, "configuration": "S=3", "ok": False}

    assert main(["gradcheck", "--device", "cpu", "--operator", "cube"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all 1 ok")


def test_operators_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--device", "cpu", "--operator", "linear_r", "--operator", "linear_l"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:-2]
    assert {row.split()[0] for row in rows} == {"linear_r", "linear_l"}
    assert len(rows) == sum(it.operator in ("linear_r", "linear_l") for it in CONFIGURATIONS)

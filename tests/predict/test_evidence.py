"""Which published measurements are evidence of a prediction, and in which words."""

from __future__ import annotations

import pytest
import torch

import memcheck
from memcheck.predict import replay
from memcheck.predict.replay import Measured, evidence_of


@pytest.fixture(autouse=True)
def of_three_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        Measured("a", "A100-40GB", frozenset({"aten::mm", "aten::relu"}), (0.0, 0.01, -0.02)),
        Measured("b", "A100-80GB", frozenset({"aten::conv"}), (0.5,)),
        Measured("c", "RTX-4090", frozenset({"aten::exp"}), (0.1,)),
    )
    monkeypatch.setattr(replay, "measured", lambda: found)


def test_runs_with_half_of_the_operators_on_gpus_of_the_kind_count() -> None:
    found = evidence_of(["aten::mm", "aten::exp"], (8, 0))
    assert (found.rows, found.gpus, found.sources) == (3, {"A100-40GB": 3}, {"a": 3})
    assert (found.median, found.most, found.largest) == (0.01, 0.02, 0.02)
    assert found.missing == ("aten::exp",)
    assert str(found) == (
        "3 published runs of such programs on A100-40GB were predicted with a median error of 1.0%, 95 % of them "
        "within 2.0%; none of them has aten::exp"
    )


def test_figures_are_verified_where_measured_runs_share_the_operators() -> None:
    x = torch.empty(4, device="meta")
    for model, device, basis in (
        (torch.exp, "RTX-4090", "verified"),
        (torch.exp, "A100-40GB", "derived"),
        (lambda x: torch.exp(x).sin(), "RTX-4090", "derived"),
    ):
        found = memcheck.predict_memory(model, x, device=device, backward=False)
        assert found.certainty == basis
    assert not evidence_of([], (8, 0)).covers


def test_there_may_be_no_evidence() -> None:
    for operators, architecture in ((["aten::sin"], (8, 0)), (["aten::mm"], None), (["aten::mm"], (9, 0))):
        found = evidence_of(operators, architecture)
        assert (found.rows, found.median, found.missing) == (0, None, tuple(operators))
        assert str(found) == "No published run is like it"


def test_a_prediction_has_its_evidence() -> None:
    x = torch.empty(4, device="meta")
    found = memcheck.predict_memory(torch.exp, x, device="RTX-4090", backward=False).evidence
    assert found is not None
    assert (found.rows, found.missing) == (1, ())
    assert memcheck.predict_memory(torch.exp, x, backward=False).evidence is None

"""Which published measurements are evidence of a prediction, and in which words."""

from __future__ import annotations

import pytest
import torch

import memcheck
from memcheck.predict import evidence
from memcheck.predict.evidence import Measured, evidence_of


@pytest.fixture(autouse=True)
def of_three_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        Measured("a", "A100-40GB", frozenset({"aten::mm", "aten::relu"}), (0.0, 0.01, -0.02)),
        Measured("b", "A100-80GB", frozenset({"aten::conv"}), (0.5,)),
        Measured("c", "RTX-4090", frozenset({"aten::exp"}), (0.1,)),
    )
    monkeypatch.setattr(evidence, "measured", lambda: found)


def test_runs_with_half_of_the_operators_on_gpus_of_the_kind_count() -> None:
    found = evidence_of(["aten::mm", "aten::exp"], (8, 0))
    assert (found.rows, found.gpus, found.sources) == (3, {"A100-40GB": 3}, {"a": 3})
    assert (found.median, found.most, found.largest) == (0.01, 0.02, 0.02)
    assert found.missing == ("aten::exp",)
    assert str(found) == (
        "3 published runs of such programs on A100-40GB were predicted with a median error of 1.0%, 95 % of them "
        "within 2.0%; none of them has aten::exp"
    )


def test_there_may_be_no_evidence() -> None:
    for operators, architecture in ((["aten::sin"], (8, 0)), (["aten::mm"], None), (["aten::mm"], (9, 0))):
        found = evidence_of(operators, architecture)
        assert (found.rows, found.median, found.missing) == (0, None, tuple(operators))
        assert str(found) == "No published run is like it"


@pytest.mark.extension
def test_a_prediction_has_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the files, which the process of the GPU reads."""
    monkeypatch.undo()
    x = torch.empty(4, 8, device="meta")
    for model, certainty in ((torch.nn.Linear(8, 8), "verified"), (torch.special.bessel_j0, "derived")):
        found = memcheck.predict_memory(model, x, device="A100-40GB", backward=False)
        assert found.trace is not None
        assert found.evidence == evidence_of(found.trace.operators, (8, 0))
        assert (found.certainty, found.evidence.covers) == (certainty, certainty == "verified")
    assert memcheck.predict_memory(torch.exp, x, backward=False).evidence is None
    assert not evidence_of([], (8, 0)).covers

"""Whole models on this GPU: what is predicted is what they take, and every part keeps what its formula says."""

from __future__ import annotations

import gc

import pytest
import torch

from memcheck.bench.models.case import make_model_case, prepare_model
from memcheck.bench.models.model_predictions import kept_by_path
from memcheck.bench.models.profile import profile_model_case
from memcheck.core.model_record import FIGURES, by_layer, components_of
from memcheck.nn.decoder import ATTENTIONS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VARIANTS = (
    {},
    {"mode": "forward"},
    {"dtype": "bfloat16"},
    {"autocast": "bfloat16"},
    {"autocast": "float16", "checkpointing": True},
    {"feed_forward": "combinator"},
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())) or "plain")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_predictions_equal_measurements(attention: str, variant: dict[str, object]) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    case = make_model_case("tiny", attention_type=attention, bsz=2, context=256, device="cuda:0", **variant)
    record = profile_model_case(case, passes=2)
    assert record.status == "ok", record.reason
    known = [name for name in (*FIGURES, "activations") if name not in record.predicted["bounds"]]
    assert {name: getattr(record, name) for name in known} == {name: record.predicted[name] for name in known}
    for name in record.predicted["bounds"]:
        if name in FIGURES:
            assert getattr(record, name) >= record.predicted[name]


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_part_keeps_what_its_formula_says(attention: str, autocast: str | None) -> None:
    case = make_model_case("tiny", attention_type=attention, mode="backward", autocast=autocast, device="cuda:0")
    formulas = profile_model_case(case, timed=False).formulas
    kept = components_of(by_layer(kept_by_path(prepare_model(case)), case.sizes.layers))
    known = {name: size for name, size in kept.items() if name in formulas}
    assert known == {name: formulas[name]["value"] for name in known}

"""Whole models on this GPU: what is predicted is what they take, part by part."""

from __future__ import annotations

import gc

import pytest
import torch

from memcheck.bench.decoders import DecoderCase
from memcheck.bench.predict import predict_case
from memcheck.bench.profile import profile_case
from memcheck.core.step import Place
from memcheck.nn.decoder import ATTENTIONS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FIGURES = (
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes"),
)
VARIANTS = (
    {},
    {"mode": "forward"},
    {"mode": "backward"},
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
    case = DecoderCase("tiny", attention, bsz=2, context=256, device="cuda:0", **variant)
    record, predicted = profile_case(case, passes=2), predict_case(case, Place("cuda:0").unlimited).record
    assert record.status == "ok", record.reason
    known = [name for name in (*FIGURES, "kept_by_part") if name not in predicted.bounds]
    assert {name: getattr(record, name) for name in known} == {name: getattr(predicted, name) for name in known}
    for name in {*FIGURES} & {*predicted.bounds}:
        assert getattr(record, name) >= getattr(predicted, name)

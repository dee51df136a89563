"""The zoo: what is claimed of a layer or a model is what a measurement says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from zoo_of_models import loaded

from memcheck.core.step import Place, Step
from memcheck.predict.targets import predicted_at

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

ROOT = Path(__file__).parents[2]


zoo = loaded()
# One of each kind; all of them run in benchmarks/zoo.py.
EXACT = [
    "Linear",
    "Bilinear",
    "Conv2d",
    "Conv2d, depthwise",
    "ConvTranspose2d",
    "LayerNorm",
    "GroupNorm",
    "BatchNorm2d",
    "InstanceNorm2d",
    "RNN",
    "GRU, bidirectional",
    "LSTM, projection",
    "GRUCell",
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerEncoderLayer, eval",
    "Mish",
    "MaxPool1d, inference",
    "Upsample, bilinear",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CosineEmbeddingLoss",
    "fft",
    "gather",
    "sort",
    "EmbeddingBag, max",
    "prod",
    "linalg.cholesky",
    "numbers",
    "numbers, in place",
    "MLP, AdamW",
    "MLP, AdamW, foreach",
    "MLP, Adagrad",
    "MLP, checkpointed",
    "MLP, autocast inside, checkpointed",
    "MLP, all of these",
]
# Of models of other packages; make ci installs these.
PACKAGED = {
    "transformers": [
        "GPT-2, eager",
        "GPT-2, accumulated",
        "Llama, eager",
        "Llama, checkpointed",
        "BERT, sdpa",
        "T5",
        "Whisper",
    ],
    "timm": ["timm ConvNeXt", "timm EfficientNet", "timm Mixer"],
    "torchvision": ["torchvision ResNet", "torchvision MobileNetV2"],
}
# Decoders whose masks and experts depend on contents; for a GPU without one.
ON_A_GPU = [
    "GPT-2, sdpa",
    "Llama, sdpa",
    "Llama, inference",
    "Mistral",
    "Mixtral",
    "DeepSeek-V3",
    "T5",
    "Whisper",
    "Mamba",
]


@pytest.fixture(autouse=True)
def a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))


@pytest.mark.parametrize("name", EXACT)
def test_it_is_predicted_exactly(name: str) -> None:
    row = zoo.run_entry(name)
    assert row["verdict"] == "exact", row


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGED)
def test_models_of_another_package_are_predicted_exactly(require_package: Callable[[str], None], package: str) -> None:
    require_package(package)
    rows = [zoo.run_entry(name) for name in PACKAGED[package]]
    assert {row["name"]: row for row in rows if row["verdict"] != "exact"} == {}


def step_of(name: str) -> Step:
    """The step of an entry, which is made where the device is simulated."""
    entry = loaded().ZOO[name]
    model, inputs, *rest = entry.build()
    return Step(model, inputs, rest[0] if rest else {}, **entry.how())


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_decoders_are_predicted_for_a_gpu_that_is_not_here(require_package: Callable[[str], None]) -> None:
    """Nothing escapes, and no figure is claimed to be verified."""
    require_package("transformers")
    for name in ON_A_GPU:
        prediction = predicted_at(Place("H100-80GB").resolved(), name, make=step_of)
        assert prediction.fits, (name, prediction.record.reason)
        assert not prediction.exact
        assert prediction.certainty == "derived"


def test_a_compiled_entry_is_predicted_to_the_byte() -> None:
    assert zoo.run_entry("MLP, compiled")["verdict"] == "exact"


def test_memtracker_is_compared() -> None:
    """It sees a backward; it does not see what a kernel takes besides its outputs."""
    assert zoo.run_entry("MLP, SGD")["memtracker"]["percent"] == 0
    assert zoo.run_entry("Linear, no bias")["memtracker"]["percent"] < -1


def test_the_committed_results_claim_nothing_false() -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/zoo/cpu.jsonl").read_text().splitlines()]
    counts = Counter(row["verdict"] for row in rows)
    assert counts["false exact"] == counts["error"] == 0
    assert counts["exact"] >= 0.85 * len(rows)
    assert counts["exact"] + counts["equal"] + counts["within 1 %"] >= 0.95 * len(rows)

"""The zoo: what is claimed of a layer or a model is what a measurement says."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def loaded() -> ModuleType:
    """benchmarks/zoo.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("zoo", ROOT / "benchmarks" / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    return module


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
    "numbers",
    "numbers, in place",
    "MLP, AdamW",
    "MLP, AdamW, foreach",
    "MLP, Adagrad",
    "MLP, checkpointed",
]
DOUBTED = ["LSTM", "EmbeddingBag, max", "prod", "linalg.cholesky"]
PACKAGED = ["GPT-2, eager", "Llama, eager", "T5", "timm ResNet", "torchvision ResNet"]


@pytest.fixture(autouse=True)
def a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))


@pytest.mark.parametrize("name", EXACT)
def test_it_is_predicted_exactly(name: str) -> None:
    row = zoo.run_entry(name)
    assert row["verdict"] == "exact", row


@pytest.mark.parametrize("name", DOUBTED)
def test_it_is_doubted(name: str) -> None:
    row = zoo.run_entry(name)
    assert row["verdict"] not in ("exact", "false exact"), row
    assert row["unknown"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKAGED)
def test_a_model_of_another_package_is_predicted_exactly(name: str) -> None:
    pytest.importorskip(zoo.ZOO[name].needs)
    row = zoo.run_entry(name)
    assert row["verdict"] == "exact", row


def test_the_committed_results_claim_nothing_false() -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/zoo/cpu.jsonl").read_text().splitlines()]
    counts = Counter(row["verdict"] for row in rows)
    assert counts["false exact"] == counts["error"] == 0
    assert counts["exact"] >= 0.85 * len(rows)
    assert counts["exact"] + counts["equal"] + counts["within 1 %"] >= 0.95 * len(rows)
    docs = (ROOT / "docs/predict.md").read_text()
    for verdict, words in zoo.VERDICTS.items():
        assert f"| {words} | {counts[verdict]} |" in docs
    assert f"| entries | {len(rows)} |" in docs

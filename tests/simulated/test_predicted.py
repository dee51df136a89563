"""Steps on a simulated A100 take what memcheck's imitation of PyTorch predicted, except for causes that are known."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from memcheck.core.devices import running

FOLDER = Path(__file__).parent
DATA = FOLDER.parent / "data"
pytestmark = pytest.mark.skipif(running() != (2, 13), reason="what was predicted is of torch 2.13")

PLAIN = ("zoo", "catalog", "attention", "optimizers", "transforms", "published")
# Groups of models of other packages, and what they need.
PACKAGED = {
    "zoo_of_packages": ("transformers", "timm", "torchvision"),
    "timm": ("timm", "torchvision"),
    "transformers": ("transformers",),
}
# Of large models only the first figures of a row are compared, requested bytes: a step releases gradients in another
# order, and so blocks differ. Which order a real GPU has was not looked at.
REQUESTED = {"timm": 8, "transformers": 8}


@dataclass(frozen=True)
class Cause:
    """Why rows differ, in which the simulated GPU is right unless the reason says otherwise.

    rows: name -> by how many bytes the simulated GPU's figures, in the order of FIGURES of predicted.py, are larger.
    """

    reason: str
    rows: dict[str, list[int]]


CAUSES = [
    Cause(
        "at::bilinear is products of matrices (_trilinear of native/Linear.cpp); predictions took it for one kernel",
        {"zoo: Bilinear": [8520320, 0, 0, 8534016, 0, 0, 0, 8519680, 8520704, 8534016, 20971520]},
    ),
    Cause(
        "its sparse gradient divides by the bags' sizes (apply_bag_size_backward of native/EmbeddingBag.cpp)",
        {"zoo: EmbeddingBag, sparse": [0, 0, 0, 352, 0, 0, 0, 0, 0, 1536, 0]},
    ),
    Cause(
        "torch chooses cuDNN's batch norm, which keeps no statistics in evaluation (cudnn/BatchNorm.cpp)",
        {"zoo: BatchNorm2d, eval": [-128, -128, 0, -128, 0, 0, 0, 0, -1024, -1024, 0]},
    ),
    Cause(
        "torch chooses cuDNN's recurrent layers, predictions one cell a step; cuDNN's reserve is known to neither",
        {
            "zoo: RNN": [-8542720, -23040, 0, -8537216, 0, 0, 0, -8519680, -8544256, -8539648, -20971520],
            "zoo: RNN, relu": [-8527360, -7680, 0, -8529536, 0, 0, 0, -8519680, -8527872, -8530432, -20971520],
            "zoo: GRU": [-8634880, -114176, 0, -8624768, 0, 0, 0, -8519680, -8635392, -8625152, -20971520],
            "zoo: GRU, bidirectional": [
                *(-8641536, -106496, 0, -8616960, 0, 0, 0),
                *(-8519680, -8642048, -8617472, -20971520),
            ],
            "zoo: LSTM": [-8573440, -52736, 0, -8593024, 0, 0, 0, -8519680, -8573440, -8592896, -20971520],
            "zoo: LSTM, deep": [-8711680, -188928, 0, -8665984, 0, 0, 0, -8519680, -8711680, -8665600, -20971520],
            "zoo: LSTM, bidirectional": [
                *(-8761344, -226304, 0, -8700800, 0, 0, 0),
                *(-8519680, -8761344, -8700416, -20971520),
            ],
            "zoo: LSTM, projection": [-8577280, -56832, 0, -8590464, 0, 0, 0, -8519680, -8581120, -8593408, -20971520],
            "zoo: LSTM, no bias": [-8573440, -52736, 0, -8593024, 0, 0, 0, -8519680, -8573440, -8592896, -20971520],
            "zoo: LSTM, double": [-8627200, -105472, 0, -8664832, 0, 0, 0, -8519680, -8627200, -8664576, -20971520],
        },
    ),
    Cause(
        "torch takes its fused cells on a GPU (_thnn_fused_lstm_cell and _thnn_fused_gru_cell of native/RNN.cpp)",
        {
            "zoo: GRUCell": [2048, 5120, 0, 0, 0, 0, 0, 0, 2048, 0, 0],
            "zoo: LSTMCell": [6144, 7168, 0, -1024, 0, 0, 0, 0, 6144, -1024, 0],
        },
    ),
    Cause(
        "predictions leave out what the fused attention takes (native/transformers/cuda/attention.cu)",
        {"zoo: TransformerEncoderLayer, eval": [13824, 0, 0, 0, 0, 0, 0, 0, 13824, 0, 0]},
    ),
    Cause(
        "torch pads the rows of a mask to multiples of 8 (native/transformers/attention.cpp), predictions to 16",
        {"timm: beit_base_patch16_224": [-907776, -907776, 0, -907776, 0, 0, 0, 0, -907776, -907776, 0]},
    ),
    Cause(
        "CUDA keeps no buffer for log_sigmoid's backward (native/cuda/Activation.cpp)",
        {
            "zoo: LogSigmoid": [-36864, -36864, 0, -36864, 0, 0, 0, 0, -36864, -36864, 0],
            "zoo: MultiLabelSoftMarginLoss": [-1280, -1280, 0, -1280, 0, 0, 0, 0, -2048, -2048, 0],
            "published: Liger, fused_linear_cpo_loss B=16": [0, -64, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "published: Liger, fused_linear_cpo_loss B=2": [0, -8, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "published: Liger, fused_linear_orpo_loss B=2": [0, -4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "published: Liger, fused_linear_simpo_loss B=2": [0, -8, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        },
    ),
    Cause(
        "the loss is made of several operators (binary_cross_entropy_with_logits of native/Loss.cpp)",
        {
            "zoo: BCEWithLogitsLoss": [1280, 0, 0, 0, 0, 0, 0, 0, 2048, 512, 0],
            "zoo: BCEWithLogitsLoss, weighted": [1308, 0, 0, 0, 0, 0, 0, 0, 2048, 0, 0],
        },
    ),
    Cause(
        "the loss is resized to one number, and keeps its storage (soft_margin_loss_out of native/Loss.cpp)",
        {"zoo: SoftMarginLoss": [640, 0, 636, 1916, 0, 0, 0, 0, 1024, 2560, 0]},
    ),
    Cause(
        "sums within a node are new tensors (FunctionsManual.cpp); predictions add in place, as where gradients meet",
        {
            "zoo: linalg.cholesky": [0, 0, 0, 2304, 0, 0, 0, 0, 0, 2560, 0],
            "zoo: linalg.svd": [0, 0, 0, 1536, 0, 0, 0, 0, 0, 1536, 0],
        },
    ),
    Cause(
        "whether a system was singular is asked by any() (_linalg_check_errors of native/LinearAlgebra.cpp)",
        {"zoo: linalg.solve": [1, 0, 0, 0, 0, 0, 0, 0, 512, 0, 0]},
    ),
    Cause(
        "small inputs are known and have no zero, so that the backward takes its short way; predictions, the long one",
        {
            "zoo: cumprod": [0, 0, 0, -7072, 0, 0, 0, 0, 0, -9216, 0],
            "zoo: prod": [0, 0, 0, -5696, 0, 0, 0, 0, 0, -5120, 0],
        },
    ),
    Cause(
        "numbers that an optimizer makes or is given on the CPU stay there; predictions count them",
        {
            "optimizers: ASGD for-loop": [-96, 0, 0, -96, 0, 0, -96, 0, -12288, -12288, 0],
            "optimizers: AdamW, rate in a tensor": [-4, 0, 0, -4, 0, 0, -4, 0, -512, -512, 0],
        },
    ),
]
# Rows that were not predicted, and what the simulated GPU says.
SEEN = {
    "zoo: MultiMarginLoss": [804, 0, 4, 1448, 640, None, None, 0, 2048, 3584, 2097152],
    "zoo: MultiLabelMarginLoss": [2564, 640, 4, 3208, 640, None, None, 0, 4096, 5632, 2097152],
    "zoo: CTCLoss": [16212, 10112, 4, 21960, 5760, None, None, 0, 18944, 25088, 2097152],
    "transforms: saved on the host": [
        *(8561408, 0, 4, 8602632, 24832, None, None),
        *(8519680, 8562176, 8604672, 23068672),
    ],
}
DIFFERENCES = {name: differences for cause in CAUSES for name, differences in cause.rows.items()}


def measured(*groups):
    """The rows of these groups, on a simulated GPU in one process."""
    command = [sys.executable, FOLDER / "predicted.py", *groups]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


def stored(group):
    return json.loads((DATA / f"predicted_{group}.json").read_text(encoding="utf-8"))


def expected(group):
    """The rows that were predicted, with what is known to differ."""
    rows = {f"{group}: {name}": row for name, row in stored(group).items()}
    return {name: SEEN.get(name) or adjusted(row, DIFFERENCES.get(name)) for name, row in rows.items()}


def adjusted(row, differences):
    if differences is None:
        return row
    return [None if figure is None else figure + more for figure, more in zip(row, differences, strict=True)]


def differing(group, rows):
    """Name -> what was expected and what is; no row but these differs."""
    found, wanted = {f"{group}: {name}": row for name, row in rows.items()}, expected(group)
    assert list(found) == list(wanted)
    compared = slice(REQUESTED.get(group))
    return {name: (wanted[name], row) for name, row in found.items() if row[compared] != wanted[name][compared]}


@pytest.fixture(scope="module")
def plain():
    return measured(*PLAIN)


@pytest.mark.parametrize("group", PLAIN)
def test_no_step_differs_but_by_a_known_cause(plain, group):
    assert differing(group, plain[group]) == {}


@pytest.mark.ci
@pytest.mark.parametrize("group", PACKAGED)
def test_no_model_of_another_package_differs(require_package, group):
    for package in PACKAGED[group]:
        require_package(package)
    assert differing(group, measured(group)[group]) == {}


def test_every_cause_is_of_a_stored_row_that_differs():
    known = {f"{group}: {name}" for group in (*PLAIN, *PACKAGED) for name in stored(group)}
    assert {*DIFFERENCES, *SEEN} <= known
    assert all(any(differences) for differences in DIFFERENCES.values())

"""Random multi-layer perceptrons of GPUMemNet, trained on an A100 with 40 GB: the memory that nvidia-smi showed.

Facts of the recipe, from the scripts of github.com/itu-rad/GPUMemNet (NeuroNetGen_scripts/MLP): 4,096 samples, so the
last batch of an epoch has 4,096 mod batch; torchsummary.summary with a batch of 2 before; cross entropy;
torch.optim.Adam with its defaults; inputs and labels of 64 bits moved to the GPU for each step, before zero_grad().
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import memcheck
from memcheck.core.step import Program
from memcheck.predict.model import predict_last

from .repeated import reserved_after
from .study import DATA, NVIDIA_SMI, Published, Study, read_rows

SAMPLES = 4096
# Binary cross entropy refuses labels (B) beside outputs (B,1), which the script gives it.
FAILED = "the script fails in the loss of a single output"
EPOCHS, MOST_STEPS = 20, 10  # That are replayed, and steps of each: segments do not grow any more by then.
SOURCE = "GPUMemNet, random MLPs"
TORCH = "2.7"  # The oldest release with rules; the scripts are from 2024.


def published(path: Path | None) -> list[Published]:
    given = read_rows(path or DATA / "mlp.csv.gz")
    return [
        Published(
            f"M{number:04}",
            SOURCE,
            "A100-40GB",
            row["nvidia_smi_mib"],
            "MiB",
            NVIDIA_SMI,
            left_out=FAILED if row["outputs"] == "1" else "",
            given=row,
        )
        for number, row in enumerate(given, 1)
    ]


def layers_of(inputs: int, text: str) -> nn.Sequential:
    """The layers of a text such as "linear:629 ReLU:629 batchnorm:629 dropout:629"."""
    layers: list[nn.Module] = []
    width = inputs
    for part in text.split():
        kind, _, size = part.partition(":")
        if kind == "linear":
            layers.append(nn.Linear(width, int(size)))
            width = int(size)
        elif kind == "batchnorm":
            layers.append(nn.BatchNorm1d(width))
        elif kind == "dropout":
            layers.append(nn.Dropout(0.5))
        elif kind == "Softmax":
            layers.append(nn.Softmax(dim=1))
        else:
            layers.append(getattr(nn, kind)())
    return nn.Sequential(*layers)


class Training(nn.Module):
    """The layers, which hand on the labels to the loss. Without labels it is torchsummary's pass, which has a graph."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        if labels is not None:
            return self.layers(x), labels
        with torch.enable_grad():
            self.layers(x)
        return None


def loss_of(returned: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(*returned)


def predict(row: Published) -> memcheck.Prediction:
    """The prediction of the last step of many epochs."""
    inputs, batch = int(row.given["inputs"]), int(row.given["batch"])
    with torch.device("meta"):
        model = Training(layers_of(inputs, row.given["layers"]))
        last = [SAMPLES % batch] * (SAMPLES % batch > 0)
        sizes = [batch, batch, *last, batch]
        given = [(torch.empty(size, inputs), torch.empty(size, dtype=torch.int64)) for size in sizes]
        summary = memcheck.Step(model, torch.empty(2, 1, inputs), backward=False)
    steps = [memcheck.Step(model, each, loss=loss_of, optimizer="adam") for each in given]
    program = Program([summary, *steps], inputs_stay=False)
    place = memcheck.Place(row.gpu, torch_version=TORCH, drop_workspaces=False).resolved()
    prediction = predict_last(program, place)
    assert prediction.trace is not None
    # The trace: the summary, the first step, another two, the last of an epoch, and the first of the next one.
    usual, *ends = range(3, 3 + len(sizes) - 1)
    epoch = [usual] * min(SAMPLES // batch - 1, MOST_STEPS) + ends
    prediction.record.reserved_bytes = reserved_after(prediction.trace, place, epoch * EPOCHS)
    return prediction


# Learned: the median of what nvidia-smi showed beside the predicted segments.
STUDY = Study("Random MLPs on an A100", published, predict, context_bytes=1429 * 2**20)

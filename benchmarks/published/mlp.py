"""Random multi-layer perceptrons of GPUMemNet, trained on an A100 with 40 GB: the memory that nvidia-smi showed.

Facts of the recipe, from the scripts of github.com/itu-rad/GPUMemNet (NeuroNetGen_scripts/MLP): 4,096 samples, so the
last batch of an epoch has 4,096 mod batch; torchsummary.summary with a batch of 2 before; cross entropy;
torch.optim.Adam with its defaults; inputs and labels of 64 bits moved to the GPU for each step, before zero_grad().
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place

from .scripts import Script, predict_script
from .study import DATA, NVIDIA_SMI, Published, Study, read_rows

SAMPLES = 4096
# Binary cross entropy refuses labels (B) beside outputs (B,1), which the script gives it.
FAILED = "the script fails in the loss of a single output"
EPOCHS, MOST_STEPS = 2, 3  # That run, and steps of each: segments do not grow any more by then.
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


class Training(Script):
    """The script: torchsummary's pass, which has a graph, and then epochs, of which each has so many steps at most."""

    def __init__(self, layers: nn.Sequential, inputs: int, batch: int) -> None:
        super().__init__()
        self.layers, self.inputs, self.batch = layers, inputs, batch

    def iteration(self) -> None:
        self.layers(torch.empty(2, 1, self.inputs, device="cuda"))
        optimizer = torch.optim.Adam(self.layers.parameters())
        whole, rest = divmod(SAMPLES, self.batch)
        for _ in range(EPOCHS):
            for size in [self.batch] * min(whole, MOST_STEPS) + [rest] * (rest > 0):
                x, labels = self.data(size)
                optimizer.zero_grad()
                y = self.layers(x)
                loss = nn.functional.cross_entropy(y, labels)
                loss.backward()
                optimizer.step()
                del x, labels

    def data(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.empty(size, self.inputs, device="cuda"), torch.empty(size, dtype=torch.int64, device="cuda")


def predict(row: Published) -> Prediction:
    inputs = int(row.given["inputs"])
    with torch.device("meta"):
        script = Training(layers_of(inputs, row.given["layers"]), inputs, int(row.given["batch"]))
    return predict_script(script, Place(row.gpu, torch_version=TORCH, drop_workspaces=False), iterations=1)


# Learned: the median of what nvidia-smi showed beside the predicted segments.
STUDY = Study("Random MLPs on an A100", published, predict, context_bytes=1429 * 2**20)

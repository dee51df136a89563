"""A notebook on activation checkpointing: github.com/vinitvyas09/optimizers, hw2_activation_checkpointing.ipynb.

Models of earlier cells are alive, with the gradients of their last step; the states of their optimizers are not.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memcheck.core.place import Place
from memcheck.core.step import Program, Step
from memcheck.predict.model import predict_last
from memcheck.predict.replay import Prediction

# In both rows exactly 2 and 10 of cuBLAS's workspaces more were alive than the program explains.
DOUBT = "what earlier cells of the notebook left besides their models"
LAYERS, WIDTH, HEADS, LENGTH = 12, 512, 4, 4096


class Block(nn.Module):
    """needs_weights: the attention returns its weights, so that it is not fused."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.needs_weights = needs_weights

    def attend(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        return x + self.attention(h, h, h, need_weights=self.needs_weights)[0]

    def feed(self, x: Tensor) -> Tensor:
        h = self.norm_2(x)
        return x + self.narrow(functional.relu(self.wide(h)))


class Tower(nn.Module):
    """Blocks of which all but the first are checkpointed, in one or both of their halves.

    models, trained: models besides, and how many of them have gradients.
    """

    def __init__(self, attends: bool, feeds: bool, needs_weights: bool, models: int, trained: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(needs_weights) for _ in range(LAYERS))
        self.attends, self.feeds = attends, feeds
        count = models + trained
        shapes = [parameter.shape for parameter in self.blocks.parameters()] * count
        self.others = nn.ParameterList(nn.Parameter(torch.empty(shape), requires_grad=False) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            for run, is_checkpointed in ((block.attend, self.attends), (block.feed, self.feeds)):
                x = checkpoint(run, x, use_reentrant=False) if number and is_checkpointed else run(x)
        return x


def predict(config: str, place: Place) -> Prediction:
    with torch.device("meta"):
        if config == "mlp":  # The third of four models.
            model = Tower(False, True, True, models=3, trained=2)
        else:  # Of nine models, seven were trained before.
            model = Tower(True, True, False, models=8, trained=7)
        model = model.to(torch.bfloat16)
        x = torch.empty(1, LENGTH, WIDTH, dtype=torch.bfloat16)
    step = Step(model, x, optimizer="adamw", loss=torch.mean)
    prediction = predict_last(Program([step]), place)
    return dataclasses.replace(prediction, unknown=(DOUBT, *prediction.unknown))

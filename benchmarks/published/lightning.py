"""The guide to FSDP of Lightning Fabric: its demonstration Transformer of 1 B parameters on two A100.

Facts were read in Lightning-AI/pytorch-lightning: docs/source-fabric/advanced/model_parallel/fsdp.rst and
src/lightning/pytorch/demos/transformer.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.predict.api import predict_memory

VOCABULARY, WIDTH, LENGTH, MOST = 33278, 1024, 35, 5000


class Transformer(nn.Module):
    """Encoder and decoder of torch. Its masks are made in each forward, its table of positions in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH,
            nhead=64,
            num_encoder_layers=32,
            num_decoder_layers=32,
            dim_feedforward=4096,
            dropout=0.2,
            batch_first=True,
        )
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("positions", torch.empty(1, MOST, WIDTH), persistent=False)
        self.register_buffer("source_mask", torch.empty(LENGTH, LENGTH), persistent=False)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        mask = torch.empty(LENGTH, LENGTH, device=inputs.device)  # Made on the CPU and copied.
        source = self.placed(self.embedding(inputs) * math.sqrt(WIDTH))
        aim = self.placed(self.embedding(target) * math.sqrt(WIDTH))
        y = self.transformer(source, aim, tgt_mask=mask)
        y = self.decoder(y)
        y = functional.log_softmax(y, dim=-1)
        return y.view(-1, VOCABULARY)

    def placed(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.positions[:, x.size(1)])


def predict(place: Place) -> Prediction:
    with torch.device("meta"):
        model = Transformer()
        inputs, target = (torch.empty(1, LENGTH, dtype=torch.long) for _ in range(2))
    step = Step(model, (inputs, target), optimizer="adam", loss=lambda y: functional.nll_loss(y, target.view(-1)))
    return predict_memory(step, place)

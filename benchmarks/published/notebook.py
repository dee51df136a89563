"""A notebook on activation checkpointing: github.com/vinitvyas09/optimizers, hw2_activation_checkpointing.ipynb.

Its cells are followed from the first model on, as the blocks that freed tensors leave decide how large later ones are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place

from .scripts import Script, predict_script

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

    alternate: only every second block is checkpointed, from the second one on.
    """

    def __init__(self, attends: bool, feeds: bool, needs_weights: bool = True, alternate: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(needs_weights) for _ in range(LAYERS))
        self.attends, self.feeds, self.alternate = attends, feeds, alternate

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            is_chosen = number % 2 == 1 if self.alternate else number > 0
            for run, is_checkpointed in ((block.attend, self.attends), (block.feed, self.feeds)):
                x = checkpoint(run, x, use_reentrant=False) if is_chosen and is_checkpointed else run(x)
        return x


# The models of a cell are made first, and then trained one after another.
CELLS: tuple[tuple[dict[str, bool], ...], ...] = (
    (
        {"attends": False, "feeds": False},
        {"attends": True, "feeds": True},
        {"attends": False, "feeds": True},
        {"attends": True, "feeds": False},
    ),
    ({"attends": True, "feeds": True}, {"attends": True, "feeds": True, "alternate": True}),
    (
        {"attends": True, "feeds": True},
        {"attends": True, "feeds": True, "needs_weights": False},
        {"attends": True, "feeds": True, "needs_weights": False, "alternate": True},
    ),
)


class Cells(Script):
    """The cells up to a model, and then an iteration of its training. A training has two steps here, and ten there."""

    doubts = ("how freed blocks lie after earlier cells, of which two steps of ten are followed",)

    def __init__(self, cell: int, number: int) -> None:
        super().__init__()
        self.cell, self.number = cell, number

    def prepare(self) -> None:
        self.models: list[list[Tower]] = []
        for cell in range(self.cell + 1):
            self.x = torch.empty(1, LENGTH, WIDTH, dtype=torch.bfloat16, device="cuda")
            made = [self.made(how) for how in CELLS[cell]]
            self.models.append(made)
            for model in made[: self.number] if cell == self.cell else made:
                self.train_model(model)
        self.model = self.models[self.cell][self.number]
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def made(self, how: dict[str, bool]) -> Tower:
        """In bfloat16 from the start, as it is on the GPU."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                return Tower(**how)
        finally:
            torch.set_default_dtype(before)

    def train_model(self, model: Tower) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            # Of the last step, this and the loss are alive, as in a loop.
            y = self.step(model, optimizer)
        del y

    def step(self, model: Tower, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        y = model(self.x)
        y.mean().backward()
        optimizer.step()
        return y

    def iteration(self) -> None:
        self.y = self.step(self.model, self.optimizer)


def predict(config: str, place: Place) -> Prediction:
    return predict_script(Cells(0, 2) if config == "mlp" else Cells(2, 1), place)

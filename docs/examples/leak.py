"""Trains a small network on images of noise, and keeps too much of each step."""

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(784, 512)
        self.down = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.relu(self.up(images))
        return self.down(features), features


def main() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    seen, losses, kept = [], [], []
    for step in range(40):
        images = np.random.default_rng(step).standard_normal((512, 784))
        targets = torch.randint(10, (512,))
        scores, features = model(torch.tensor(images, dtype=torch.float32))
        loss = nn.functional.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        kept.append(features)
        seen.append(images)


main()

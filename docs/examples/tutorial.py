"""Trains a small decoder to write Python, from the bytes of a module of the standard library. See docs/tutorial.md."""

import inspect
import typing

import torch
from torch import nn

WORDS, DIM, HEADS, LAYERS = 256, 128, 4, 4
BATCH, LENGTH, STEPS = 8, 512, 3

TEXT = torch.tensor(list(inspect.getsource(typing).encode()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make(bsz: int = BATCH, seq_len: int = LENGTH) -> tuple[Decoder, tuple[torch.Tensor, torch.Tensor]]:
    """The model and the inputs of a step, for memcheck predict."""
    starts = torch.randint(len(TEXT) - seq_len - 1, (bsz, 1))
    pieces = TEXT[starts + torch.arange(seq_len + 1)]
    return Decoder(), (pieces[:, :-1], pieces[:, 1:])


def validate(model: Decoder) -> float:
    """The mean loss over some batches."""
    total = torch.zeros(())
    for _ in range(4):
        total += model(*make()[1])
    return (total / 4).item()


def main() -> None:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        loss = model(*make()[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss:.2f}")
    print(f"validation: loss {validate(model):.2f}")


if __name__ == "__main__":
    main()

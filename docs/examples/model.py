"""A language model of the size of GPT-2 for `memcheck predict --model`. Its two factories differ in their attention."""

import torch
from torch import nn

DIM, HEADS, LAYERS, WORDS = 768, 12, 12, 50257


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(fused), nn.LayerNorm(DIM)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Model(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make(bsz=8, seq_len=1024):
    """The model with its attention written out, and the inputs of a step."""
    return Model(fused=False), (torch.randint(WORDS, (bsz, seq_len)), torch.randint(WORDS, (bsz, seq_len)))


def make_fused(bsz=8, seq_len=1024):
    """The same with PyTorch's fused attention."""
    return Model(fused=True), make(bsz, seq_len)[1]

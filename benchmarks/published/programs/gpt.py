"""The GPT-2 of github.com/rasbt/LLMs-from-scratch, in small operators: norm and GELU are written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 768
    heads: int = 12
    layers: int = 12
    length: int = 1024
    words: int = 50257
    dropout: float = 0.0
    bias: bool = False  # Of query, key and value.


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        y = (x - mean) / torch.sqrt(var + 1e-5)
        return self.scale * y + self.shift


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Causal attention with a mask of floats for the whole context, which is made boolean in each pass."""

    mask: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=config.bias) for _ in range(3))
        self.output, self.dropout = nn.Linear(width, width), nn.Dropout(config.dropout)
        self.register_buffer("mask", torch.triu(torch.ones(config.length, config.length), diagonal=1))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1)

    def forward(self, x: Tensor) -> Tensor:
        key, query, value = self.key(x), self.query(x), self.value(x)
        key, value, query = (self.split(y).transpose(1, 2) for y in (key, value, query))
        scores = query @ key.transpose(2, 3)
        mask = self.mask.bool()[: x.shape[1], : x.shape[1]]
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        found = (weights @ value).transpose(1, 2)
        found = found.reshape(*x.shape)
        found = self.output(found)
        return found


class Block(nn.Module):
    def __init__(self, config: Config, attention: nn.Module) -> None:
        super().__init__()
        width = config.width
        self.attention = attention
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), Gelu(), nn.Linear(4 * width, width))
        self.before, self.between = Norm(width), Norm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.before(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.between(x)
        x = self.feed(x)
        x = self.dropout(x)
        x = x + shortcut
        return x


class Gpt(nn.Module):
    """attention: makes the attention of the layer of that number."""

    def __init__(self, config: Config, attention: Callable[[Config, int], nn.Module] | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        make = attention or (lambda config, number: Attention(config))
        self.blocks = nn.Sequential(*(Block(config, make(config, number)) for number in range(config.layers)))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """first: the place of the first of the tokens."""
        words = self.words(tokens)
        places = self.places(torch.arange(first, first + tokens.shape[1], device=tokens.device))
        x = words + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)

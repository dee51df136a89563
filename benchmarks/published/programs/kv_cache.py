"""Generating 32,768 tokens with a cache of keys and values, in four kinds of attention: python kv_cache.py KIND.

After ch04/04_gqa, 05_mla and 06_swa of github.com/rasbt/LLMs-from-scratch. The last tokens alone are generated:
the caches start as tensors of the length that they had before.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from gpt import Config, Gpt
from torch import Tensor, nn

PROMPT, GENERATED, LAST = 4, 32768, 24
WINDOW = 1024
CONFIG = Config(heads=24, length=PROMPT + GENERATED)


def causal_weights(scores: Tensor, size: int, seen: int, in_place: bool) -> Tensor:
    """The softmax of the scores of the last tokens: seen came before them. size: elements of a head."""
    queries, keys = scores.shape[-2:]
    after = torch.arange(seen, seen + queries, device=scores.device)
    places = torch.arange(keys, device=scores.device)
    mask = after.unsqueeze(-1) < places.unsqueeze(0)
    scores = scores.masked_fill_(mask, -torch.inf) if in_place else scores.masked_fill(mask, -torch.inf)
    return torch.softmax(scores / size**0.5, dim=-1)


class Cached(nn.Module):
    """Attention whose keys and values grow by concatenation. window: of so many tokens alone."""

    def __init__(self, config: Config, window: int | None = None) -> None:
        super().__init__()
        width = config.width
        self.heads, self.window, self.seen = config.heads, window, 0
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1)

    def begin(self, seen: int) -> None:
        """As if so many tokens were seen."""
        size = self.query.weight.shape[0] // self.heads
        self.seen, kept = seen, min(seen, self.window or seen)
        self.keys, self.values = (self.query.weight.new_empty(1, kept, self.heads, size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        new_keys, new_values, query = self.key(x), self.value(x), self.query(x)
        new_keys, new_values, query = self.split(new_keys), self.split(new_values), self.split(query)
        self.keys = torch.cat([self.keys, new_keys], dim=1)
        self.values = torch.cat([self.values, new_values], dim=1)
        if self.window and self.keys.shape[1] > self.window:
            self.keys, self.values = self.keys[:, -self.window :], self.values[:, -self.window :]
        keys, query, values = self.keys.transpose(1, 2), query.transpose(1, 2), self.values.transpose(1, 2)
        scores = query @ keys.transpose(2, 3)
        weights = causal_weights(scores, keys.shape[-1], keys.shape[2] - 1, in_place=True)
        self.seen += x.shape[1]
        found = (weights @ values).transpose(1, 2)
        return self.output(found.contiguous().view(*x.shape))


class Grouped(nn.Module):
    """Groups of heads share keys and values, which are repeated for every head."""

    def __init__(self, config: Config, groups: int) -> None:
        super().__init__()
        width, self.heads, self.groups = config.width, config.heads, groups
        narrow = groups * (width // config.heads)
        self.key, self.value = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    def begin(self, seen: int) -> None:
        size = self.query.weight.shape[0] // self.heads
        self.keys, self.values = (self.query.weight.new_empty(1, self.groups, seen, size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, new_keys, new_values = self.query(x), self.key(x), self.value(x)
        query = self.split(query, self.heads)
        new_keys, new_values = self.split(new_keys, self.groups), self.split(new_values, self.groups)
        self.keys = torch.cat([self.keys, new_keys], dim=2)
        self.values = torch.cat([self.values, new_values], dim=2)
        repeats = self.heads // self.groups
        keys, values = self.keys.repeat_interleave(repeats, dim=1), self.values.repeat_interleave(repeats, dim=1)
        scores = query @ keys.transpose(2, 3)
        weights = causal_weights(scores, keys.shape[-1], keys.shape[2] - 1, in_place=False)
        found = (weights @ values).transpose(1, 2)
        return self.output(found.reshape(*x.shape))


class Latent(nn.Module):
    """What is kept of each token is a short vector, from which keys and values are made in each pass."""

    def __init__(self, config: Config, latent: int) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.query, self.narrow = nn.Linear(width, width, bias=False), nn.Linear(width, latent, bias=False)
        self.key, self.value = (nn.Linear(latent, width, bias=False) for _ in range(2))
        self.output = nn.Linear(width, width)
        self.kept: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2).contiguous()

    def begin(self, seen: int) -> None:
        self.kept = self.query.weight.new_empty(1, seen, self.narrow.weight.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        query, new = self.query(x), self.narrow(x)
        kept = torch.cat([self.kept, new], dim=1)
        self.kept = kept
        all_keys, all_values = self.key(kept), self.value(kept)
        query, keys, values = self.split(query), self.split(all_keys), self.split(all_values)
        scores = torch.matmul(query, keys.transpose(-2, -1))
        weights = causal_weights(scores, keys.shape[-1], keys.shape[2] - 1, in_place=True)
        found = (weights @ values).transpose(1, 2)
        return self.output(found.contiguous().view(*x.shape))


# Of six layers, five have a window.
KINDS = {
    "P03a.mha": lambda config, number: Cached(config),
    "P03a.gqa": lambda config, number: Grouped(config, groups=4),
    "P03b.mla": lambda config, number: Latent(config, latent=192),
    "P03c.swa": lambda config, number: Cached(config, window=None if number % 6 == 5 else WINDOW),
}


def generate(model: Gpt, tokens: Tensor) -> Tensor:
    seen = CONFIG.length - LAST
    for block in model.blocks:
        block.attention.begin(seen)
    logits = model(tokens[:, -1:], seen - 1)
    for place in range(seen, CONFIG.length):
        following = logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
        logits = model(following, place)
    return tokens


def main(kind: str) -> None:
    torch.manual_seed(123)
    model = Gpt(dataclasses.replace(CONFIG), KINDS[kind]).to("cuda", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        generate(model, torch.zeros(1, CONFIG.length - LAST, dtype=torch.long, device="cuda"))
    print(kind, torch.cuda.max_memory_allocated())


main(sys.argv[1])

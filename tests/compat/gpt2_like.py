"""A GPT-2-like stack as clients of the closed bluewalm module write it: `python -m memcheck.compat gpt2_like.py 30`."""

import torch
import training
from bluewalm.softplus_attention import (
    Combinator,
    KeyProjection,
    OutProjection,
    QueryProjection,
    ValueProjection,
    attention_operator,
    heuristic_core_dim,
)


class Attention(torch.nn.Module):
    def __init__(self, dim, core_dim):
        super().__init__()
        self.query = QueryProjection(dim, core_dim)
        self.key = KeyProjection(dim, core_dim)
        self.value = ValueProjection(dim, core_dim)
        self.out = OutProjection(dim, core_dim)

    def forward(self, x, k_cache, v_cache):
        k = torch.cat((k_cache, self.key(x)), dim=2)
        v = torch.cat((v_cache, self.value(x)), dim=2)
        return self.out(attention_operator(self.query(x), k, v)), k, v


class Layer(torch.nn.Module):
    def __init__(self, dim, core_dim):
        super().__init__()
        self.attention = Attention(dim, core_dim)
        self.combinator = Combinator(dim)
        self.norm_attention = torch.nn.LayerNorm(dim)
        self.norm_combinator = torch.nn.LayerNorm(dim)

    def forward(self, x, k_cache, v_cache):
        y, k, v = self.attention(self.norm_attention(x), k_cache, v_cache)
        x = x + y
        return x + self.combinator(self.norm_combinator(x)), k, v


class GPT2Like(torch.nn.Module):
    def __init__(self, vocabulary, length, dim, layers, core_dim=None):
        super().__init__()
        self.core_dim = core_dim or heuristic_core_dim(dim)
        self.tokens = torch.nn.Embedding(vocabulary, dim)
        self.positions = torch.nn.Embedding(length, dim)
        self.layers = torch.nn.ModuleList(Layer(dim, self.core_dim) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(dim)

    def empty_caches(self, batch_size):
        shape = (len(self.layers), batch_size, self.core_dim, 0)
        return [torch.empty(shape, device=self.norm.weight.device, dtype=self.norm.weight.dtype) for _ in "kv"]

    def forward(self, tokens, k_cache, v_cache):
        start = k_cache.size(3)
        positions = torch.arange(start, start + tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        caches = []
        for layer, k, v in zip(self.layers, k_cache, v_cache, strict=True):
            x, k, v = layer(x, k, v)
            caches.append((k, v))
        k_cache, v_cache = (torch.stack(kind) for kind in zip(*caches, strict=True))
        return self.norm(x) @ self.tokens.weight.T, k_cache, v_cache


if __name__ == "__main__":
    torch.manual_seed(0)
    training.main(GPT2Like(training.VOCABULARY, training.LENGTH, dim=32, layers=2, core_dim=48))

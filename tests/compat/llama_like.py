"""A Llama-like stack as a client of the closed bluewalm module writes it: RoPE on q, and on channel-major k."""

import bluewalm.softplus_attention as softplus
import torch
import training


def angles(core_dim, length, theta=10000.0):
    """Returns cosines and sines (length,core_dim/2,2)."""
    speeds = theta ** -(torch.arange(0, core_dim, 2).double() / core_dim)
    turns = torch.outer(torch.arange(length).double(), speeds)
    return torch.stack([turns.cos(), turns.sin()], -1)


def rotated(x, rope):
    """Returns x (B,S,R) with pairs of channels rotated by rope (S,R/2,2)."""
    even, odd = x.unflatten(2, (-1, 2)).unbind(3)
    cos, sin = rope.to(x).unbind(2)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], 3).flatten(2)


class RMSNorm(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


class Attention(torch.nn.Module):
    def __init__(self, dim, core_dim):
        super().__init__()
        self.query = softplus.QueryProjection(dim, core_dim)
        self.key = softplus.KeyProjection(dim, core_dim)
        self.value = softplus.ValueProjection(dim, core_dim)
        self.out = softplus.OutProjection(dim, core_dim)

    def reset_parameters(self):
        for projection in (self.query, self.key, self.value, self.out):
            projection.normal_(0.0, 0.1)

    def forward(self, x, k_cache, v_cache, rope):
        q = rotated(self.query(x), rope)
        k = rotated(self.key(x).transpose(2, 1), rope).transpose(2, 1)
        k = torch.cat((k_cache, k), dim=2)
        v = torch.cat((v_cache, self.value(x)), dim=2)
        return self.out(softplus.attention_operator(q, k, v)), k, v


class Block(torch.nn.Module):
    def __init__(self, dim, core_dim):
        super().__init__()
        self.attention = Attention(dim, core_dim)
        self.combinator = softplus.Combinator(dim)
        self.norm_attention = RMSNorm(dim)
        self.norm_combinator = RMSNorm(dim)

    def reset_parameters(self):
        self.attention.reset_parameters()
        self.combinator.uniform_(-0.2, 0.2)

    def forward(self, x, k_cache, v_cache, rope):
        y, k, v = self.attention(self.norm_attention(x), k_cache, v_cache, rope)
        x = x + y
        return x + self.combinator(self.norm_combinator(x)), k, v


class LlamaLike(torch.nn.Module):
    def __init__(self, vocabulary, length, dim, layers, core_dim):
        super().__init__()
        self.core_dim = core_dim
        self.tokens = torch.nn.Embedding(vocabulary, dim)
        self.layers = torch.nn.ModuleList(Block(dim, core_dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = torch.nn.Linear(dim, vocabulary, bias=False)
        self.rope = angles(core_dim, length)

    def reset_parameters(self):
        for layer in self.layers:
            layer.reset_parameters()

    def empty_caches(self, batch_size):
        shape = (len(self.layers), batch_size, self.core_dim, 0)
        weight = self.output.weight
        return [torch.empty(shape, device=weight.device, dtype=weight.dtype) for _ in "kv"]

    def forward(self, tokens, k_cache, v_cache):
        start = k_cache.size(3)
        rope = self.rope[start : start + tokens.size(1)]
        x, k_caches, v_caches = self.tokens(tokens), [], []
        for layer, k, v in zip(self.layers, k_cache, v_cache, strict=True):
            x, k, v = layer(x, k, v, rope)
            k_caches.append(k)
            v_caches.append(v)
        return self.output(self.norm(x)), torch.stack(k_caches), torch.stack(v_caches)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaLike(training.VOCABULARY, training.LENGTH, dim=32, layers=2, core_dim=40)
    model.reset_parameters()
    training.main(model)

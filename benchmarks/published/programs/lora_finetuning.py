"""Finetuning models of 1.4 to 13 billion weights in bfloat16 with LoRA: python lora_finetuning.py FIGURE.

After finetune/lora.py and tutorials/resource-tables.md of github.com/Lightning-AI/litgpt. The first micro-batch has
the longest sample of Alpaca, the others are shorter. The validation before it is left out.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK, RANK, ACCUMULATED, USUAL = 128, 8, 2, 256
device = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Config:
    """rotary: share of a head that is rotated. longest: tokens of the longest sample of Alpaca. is_parallel: the
    feed-forward takes the block's input, after the norm of the attention where the block shares_norm.
    """

    layers: int
    width: int
    inner: int
    words: int
    longest: int
    heads: int = 32
    rotary: float = 1.0
    is_llama: bool = True
    is_parallel: bool = False
    shares_norm: bool = False
    head_bias: bool = False

    @property
    def size(self) -> int:
        return self.width // self.heads


NEOX = {"is_llama": False, "is_parallel": True}
PHI = Config(24, 2048, 8192, 51200, 1044, rotary=0.5, shares_norm=True, head_bias=True, **NEOX)
STABLELM = Config(16, 4096, 16384, 50688, 1034, rotary=0.25, **NEOX)
LLAMA_7B = Config(32, 4096, 11008, 32000, 1304)
LLAMA_13B = Config(40, 5120, 13824, 32000, 1304, heads=40)
# The model and the micro-batch.
RUNS = {
    "P13.phi1": (PHI, 1),
    "P13.phi2": (PHI, 2),
    "P13.phi4": (PHI, 4),
    "P13.st1": (STABLELM, 1),
    "P13.st2": (STABLELM, 2),
    "P13.st4": (STABLELM, 4),
    "P13.ll1": (LLAMA_7B, 1),
    "P13.ll2": (LLAMA_7B, 2),
    "P13.ll4": (LLAMA_7B, 4),
    "P13.l13": (LLAMA_13B, 1),
    "P13.l13o": (LLAMA_13B, 2),
}


class Norm(nn.Module):
    """Root mean square in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        y = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * y).to(dtype=dtype)


class Projections(nn.Module):
    """Queries, keys and values in one product. LoRA adds to queries and values, and zeros to the keys."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(c.width, 3 * c.width, bias=not c.is_llama), nn.Dropout(0.05)
        self.low, self.high = nn.Parameter(torch.zeros(2 * RANK, c.width)), nn.Parameter(torch.zeros(2 * c.width, RANK))
        self.places = [*range(c.width), *range(2 * c.width, 3 * c.width)]

    def forward(self, x: Tensor) -> Tensor:
        known = self.linear(x)
        low = functional.linear(self.dropout(x), self.low)
        wide = functional.conv1d(low.transpose(-2, -1), self.high.unsqueeze(-1), groups=2).transpose(-2, -1)
        learned = self.padded(wide, known.shape[-1]) * 2
        return known + learned

    def padded(self, x: Tensor, size: int) -> Tensor:
        x = x.transpose(0, 1)
        found = x.new_zeros((*x.shape[:-1], size))
        found = found.view(-1, size)
        places = torch.tensor(self.places, device=x.device)
        found = found.index_copy(1, places, x.reshape(-1, len(self.places)))
        return found.view(*x.shape[:-1], size).transpose(0, 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    found = (x * cos) + (swapped * sin)
    return found.type_as(x)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.attn, self.proj = Projections(c), nn.Linear(c.width, c.width, bias=not c.is_llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (batch, length, width) = self.c, x.shape
        qkv = self.attn(x)
        qkv = qkv.view(batch, length, c.heads, 3, c.size)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((1, 1, 1), dim=2)
        q, k, v = (part.reshape(batch, -1, length, c.size) for part in (q, k, v))
        turned = int(c.rotary * c.size)
        q_turned, k_turned = rotated(q[..., :turned], cos, sin), rotated(k[..., :turned], cos, sin)
        q = torch.cat((q_turned, q[..., turned:]), dim=-1)
        k = torch.cat((k_turned, k[..., turned:]), dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = y.reshape(batch, length, width)
        return self.proj(y)


class Feed(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.is_llama = c.is_llama
        self.fc_1 = nn.Linear(c.width, c.inner, bias=not c.is_llama)
        self.fc_2 = nn.Linear(c.width, c.inner, bias=False) if c.is_llama else None
        self.proj = nn.Linear(c.inner, c.width, bias=not c.is_llama)

    def forward(self, x: Tensor) -> Tensor:
        if self.fc_2 is None:
            x = self.fc_1(x)
            x = functional.gelu(x)
        else:
            first, second = self.fc_1(x), self.fc_2(x)
            x = functional.silu(first) * second
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        norm = Norm if c.is_llama else nn.LayerNorm
        self.norm_1, self.attn = norm(c.width), Attention(c)
        self.norm_2 = None if c.shares_norm else norm(c.width)
        self.mlp, self.is_parallel = Feed(c), c.is_parallel

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if self.is_parallel:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            x = x + h + self.mlp(n_2)
        else:
            x = x + h
            x = x + self.mlp(self.norm_2(x))
        return x


class Model(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head = nn.Linear(c.width, c.words, bias=c.head_bias)
        self.words = nn.Embedding(c.words, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = (Norm if c.is_llama else nn.LayerNorm)(c.width)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(c.longest, int(c.rotary * c.size), dtype=torch.float32))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return [self.head(part) for part in x.split(CHUNK, dim=1)]


def chunked_loss(logits: list[Tensor], targets: Tensor) -> Tensor:
    rows = [part.reshape(-1, part.size(-1)) for part in logits]
    wanted = [part.reshape(-1) for part in targets.split(logits[0].size(1), dim=1)]
    losses = [
        functional.cross_entropy(row, target, ignore_index=-1, reduction="none")
        for row, target in zip(rows, wanted, strict=True)
    ]
    return torch.cat(losses).mean()


def train(c: Config, batch: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Model(c)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith((".low", ".high"))
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=3e-4, weight_decay=0.01)
    for number in range(2 * ACCUMULATED):
        length = USUAL if number else c.longest
        tokens = torch.randint(c.words, (batch, length)).pin_memory().to(device)
        targets = torch.randint(c.words, (batch, length)).pin_memory().to(device)
        # Fabric returns float32 of what the model returned.
        logits = [part.float() for part in model(tokens)]
        logits[-1] = logits[-1][..., :-1, :]
        loss = chunked_loss(logits, targets[..., 1:])
        (loss / ACCUMULATED).backward()
        if (number + 1) % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()


def main(figure: str) -> None:
    try:
        train(*RUNS[figure])
    except torch.OutOfMemoryError:
        print(figure, "OOM")
    else:
        print(figure, torch.cuda.max_memory_allocated())


main(sys.argv[1])

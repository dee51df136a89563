"""LoRA, full finetuning and generation of litgpt: its resource tables of 2023 and its hub of configurations of 2024.

Facts were read in Lightning-AI/litgpt at commit 8641822, and of the hub at 32a9c181: the models, LoRA, the loops, and
that Fabric makes the chunks of logits float32. The hub's longest samples are assumed to have the 512 tokens allowed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.predict.api import predict_memory

from .scripts import Loop, Script, doubted, predict_script

CHUNK = 128
LENGTHS = "how many tokens the longest sample has; assumed: the 512 that are allowed"


@dataclass(frozen=True)
class Config:
    """groups: heads of keys and values. rotary: share of a head that is rotated. parallel: the feed-forward takes the
    block's input. lora: the parts with LoRA, of "q", "k", "v", "projection", "mlp" and "head", of a rank.
    """

    layers: int
    width: int
    inner: int
    vocabulary: int
    heads: int = 32
    groups: int = 32
    rotary: float = 1.0
    is_llama: bool = True
    parallel: bool = False
    shares_norm: bool = False
    head_bias: bool = False
    lora: frozenset[str] = field(default=frozenset())
    rank: int = 0

    @property
    def size(self) -> int:
        return self.width // self.heads


STABLELM = Config(16, 4096, 16384, 50688, rotary=0.25, is_llama=False, parallel=True)
PHI = Config(24, 2048, 8192, 51200, rotary=0.5, is_llama=False, parallel=True, shares_norm=True, head_bias=True)
LLAMA_2 = Config(32, 4096, 11008, 32000)
LLAMA_3 = Config(16, 2048, 8192, 128256, groups=8)
TINY = Config(22, 2048, 5632, 32000, groups=4)
MODELS = {
    "StableLM Alpha 3B": STABLELM,
    "phi-1.5": PHI,
    "Llama 2 7B": LLAMA_2,
    "llama-2-7b": LLAMA_2,
    "llama-3.2-1b": LLAMA_3,
    "tiny-llama": TINY,
}
ALL = frozenset(("q", "k", "v", "projection", "mlp", "head"))


class LowRank(nn.Module):
    """A linear layer with LoRA; of rank 0 without."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.dropout = nn.Dropout(0.05)
        self.rank = rank
        if rank:
            self.lora_a = nn.Parameter(torch.empty(rank, inputs))
            self.lora_b = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        known = self.linear(x)
        if not self.rank:
            return known
        learned = (self.dropout(x) @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1)) * 0.5
        return known + learned


class LowRankProjections(nn.Module):
    """Queries, keys and values in one linear layer, some with LoRA, whose results are padded with zeros."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.sizes = [c.width * ("q" in c.lora)] + [c.groups * c.size * (name in c.lora) for name in ("k", "v")]
        total = c.width + 2 * c.groups * c.size
        self.linear = nn.Linear(c.width, total, bias=not c.is_llama)
        self.dropout = nn.Dropout(0.05)
        self.rank, self.grouped = c.rank, c.groups != c.heads
        enabled = [size for size in self.sizes if size]
        if enabled:
            self.lora_a = nn.Parameter(torch.empty(c.rank * len(enabled), c.width))
            self.lora_b = nn.Parameter(torch.empty(sum(enabled), c.rank))

    def forward(self, x: Tensor) -> Tensor:
        known = self.linear(x)
        enabled = [size for size in self.sizes if size]
        if not enabled:
            return known
        low = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        weight = self.lora_b.unsqueeze(-1)
        if self.grouped:
            parts = zip(low.chunk(len(enabled), dim=1), weight.split(enabled), strict=True)
            wide = torch.cat([functional.conv1d(part, its) for part, its in parts], dim=1)
        else:
            wide = functional.conv1d(low, weight, groups=len(enabled))
        return known + self.padded(wide.transpose(-2, -1), known.shape[-1]) * 0.5

    def padded(self, x: Tensor, size: int) -> Tensor:
        if all(self.sizes):
            return x
        x = x.transpose(0, 1)
        padded = x.new_zeros((*x.shape[:-1], size)).view(-1, size)
        places = torch.empty(x.shape[-1], dtype=torch.long, device=x.device)
        padded = padded.index_copy(1, places, x.reshape(-1, x.shape[-1]))
        return padded.view(*x.shape[:-1], size).transpose(0, 1)


class RMSNorm(nn.Module):
    """In float32, as since 2024."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + 1e-5)).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B,heads,T,E) with tables in float32, or float16, which makes float32 of bfloat16."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (swapped * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.attn = LowRankProjections(c)
        self.proj = LowRank(c.width, c.width, not c.is_llama, c.rank * ("projection" in c.lora))
        self.cache: nn.ParameterList | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None, mask: Tensor | None) -> Tensor:
        c, (batch, length, width) = self.c, x.shape
        each = c.heads // c.groups
        parts = self.attn(x).view(batch, length, c.groups, each + 2, c.size).permute(0, 2, 3, 1, 4)
        q, k, v = parts.split((each, 1, 1), dim=2)
        if c.groups not in (1, c.heads) or (places is not None and c.groups != 1):
            k, v = (part.expand(batch, c.groups, each, length, c.size) for part in (k, v))
        q, k, v = (part.reshape(batch, -1, length, c.size) for part in (q, k, v))
        turned = int(c.rotary * c.size)
        q, k = (torch.cat((rotated(part[..., :turned], cos, sin), part[..., turned:]), dim=-1) for part in (q, k))
        if places is not None and self.cache is not None:
            k, v = (part.index_copy_(2, places, new) for part, new in zip(self.cache, (k, v), strict=True))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        rank = c.rank * ("mlp" in c.lora)
        self.is_llama = c.is_llama
        self.fc_1 = LowRank(c.width, c.inner, not c.is_llama, rank)
        self.fc_2 = LowRank(c.width, c.inner, False, rank) if c.is_llama else None
        self.proj = LowRank(c.inner, c.width, not c.is_llama, rank)

    def forward(self, x: Tensor) -> Tensor:
        first = self.fc_1(x)
        if self.fc_2 is None:
            return self.proj(functional.gelu(first))
        second = self.fc_2(x)
        return self.proj(functional.silu(first) * second)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        norm = RMSNorm if c.is_llama else nn.LayerNorm
        self.norm_1 = norm(c.width)
        self.attn = Attention(c)
        self.norm_2 = None if c.shares_norm else norm(c.width)
        self.mlp = FeedForward(c)
        self.parallel = c.parallel

    def forward(self, x: Tensor, *given: Tensor | None) -> Tensor:
        first = self.norm_1(x)
        h = self.attn(first, *given)
        if self.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            return x + h + self.mlp(second)
        x = x + h
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """length: of the tables of rotations. tokens: of the key-value cache of a generation."""

    def __init__(self, c: Config, length: int, tokens: int = 0) -> None:
        super().__init__()
        self.lm_head = LowRank(c.width, c.vocabulary, c.head_bias, c.rank * ("head" in c.lora))
        self.wte = nn.Embedding(c.vocabulary, c.width)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = (RMSNorm if c.is_llama else nn.LayerNorm)(c.width)
        turned = int(c.rotary * c.size)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, turned), persistent=False)
        if tokens:
            self.register_buffer("mask", torch.empty(1, 1, tokens, tokens, dtype=torch.bool), persistent=False)
            for block in self.h:
                shape = (1, c.heads, tokens, c.size)
                block.attn.cache = nn.ParameterList(nn.Parameter(torch.empty(shape), False) for _ in range(2))

    def forward(self, ids: Tensor, places: Tensor | None = None, chunked: bool = False) -> Tensor | list[Tensor]:
        if places is None:
            given = self.cos[: ids.size(1)], self.sin[: ids.size(1)], None, None
        else:
            tables = (table.index_select(0, places) for table in (self.cos, self.sin))
            given = *tables, places, self.mask.index_select(2, places)
        x = self.wte(ids)
        for block in self.h:
            x = block(x, *given)
        x = self.ln_f(x)
        if not chunked:
            return self.lm_head(x).float()
        # Fabric converts what the model returned.
        logits = [self.lm_head(part) for part in x.split(CHUNK, dim=1)]
        return [part.float() for part in logits]


def chunked_loss(targets: Tensor, logits: list[Tensor]) -> Tensor:
    logits[-1] = logits[-1][..., :-1, :]
    rows = [part.reshape(-1, part.size(-1)) for part in logits]
    wanted = [part.reshape(-1) for part in targets[..., 1:].split(CHUNK, dim=1)]
    losses = [functional.cross_entropy(*pair, reduction="none") for pair in zip(rows, wanted, strict=True)]
    return torch.cat(losses).mean() / 4


def loss_of_whole(targets: Tensor, logits: Tensor) -> Tensor:
    """In chunks of rows, as full finetuning does it, whose logits are not made in chunks."""
    rows, wanted = logits[..., :-1, :].reshape(-1, logits.size(-1)), targets[..., 1:].reshape(-1)
    pairs = zip(rows.split(CHUNK), wanted.split(CHUNK), strict=True)
    losses = [functional.cross_entropy(*pair, reduction="none") for pair in pairs]
    return torch.cat(losses).mean() / 4


def trained(c: Config, batch: int, length: int, full: bool, place: Place, longest_first: bool) -> Prediction:
    """longest_first: the first step has the longest sample, so that no output of that size is alive before it."""
    with torch.device("meta"):
        model = GPT(c, length).to(torch.bfloat16)
        for name in ("cos", "sin"):  # Made anew after the model became bfloat16.
            setattr(model, name, getattr(model, name).float())
        ids, targets = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(full or "lora_" in name)
    loss = functools.partial(loss_of_whole if full else chunked_loss, targets)
    step = Step(model, ids, {"chunked": not full}, loss=loss, optimizer="adamw", accumulate=2)
    if longest_first:
        return predict_memory(step, place)
    return predict_script(Loop(step), place, iterations=1)


def generated(c: Config, prompt: int, new: int, place: Place) -> Prediction:
    tokens = prompt + new
    with torch.device("meta"):
        model = GPT(c, tokens, tokens).to(torch.bfloat16).requires_grad_(False)
        return predict_script(Generation(model, prompt), place, iterations=1)


class Generation(Script):
    """The forward of the prompt, and that of a token."""

    def __init__(self, model: GPT, prompt: int) -> None:
        super().__init__()
        self.model = model
        self.ids, self.places = (torch.empty(shape, dtype=torch.long) for shape in ((1, prompt), (prompt,)))

    def iteration(self) -> None:
        for count in (len(self.places), 1):
            y = self.model(self.ids[:, :count].clone(), self.places[:count].clone())
        del y


def predict(row: dict[str, str], place: Place) -> Prediction:
    c = MODELS[row["model"]]
    if row["config"] == "generate":  # "Hello, my name is", and 50 tokens.
        return generated(c, 6 if c.is_llama else 5, 50, place)
    batch = int(row["batch"])
    if "resource-tables" in row["source"]:
        lora = replaced(c, frozenset("qv"), 8)
        return trained(lora, batch, 1034, False, place, True)
    full = row["config"] == "full"
    parts = ALL if row["model"] == "tiny-llama" else frozenset("qv")
    prediction = trained(c if full else replaced(c, parts, 32), batch, 512, full, place, False)
    return doubted(prediction, LENGTHS)


def replaced(c: Config, lora: frozenset[str], rank: int) -> Config:
    return Config(**{**vars(c), "lora": lora, "rank": rank})

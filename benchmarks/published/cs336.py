"""The language model of Stanford's CS336, as reports of its second assignment measured it.

Facts of the model were read in stanford-cs336/assignment2-systems, cs336-basics: of 2025, and of 2026 (26.0).
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.predict.api import predict_memory

from .scripts import Loop, Script, at_its_end, doubted, predict_script

# Name -> width, inner width, layers, heads.
SIZES = {
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (2560, 10240, 32, 32),
}


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids, :]


class RMSNorm(nn.Module):
    """In float32, whatever the dtype of x is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    """Rotary embedding of neighbouring numbers. gathers: cosines are picked by positions, as in 2025."""

    def __init__(self, length: int, size: int, gathers: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2, length, size // 2), persistent=False)
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        length = x.size(-2)
        if self.gathers:
            positions = torch.arange(length, device=x.device)
            cos, sin = self.table[:, positions, :].unbind(0)
        else:
            cos, sin = self.table[:, :length, :].unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        if self.gathers:
            return torch.stack((turned_first, turned_second), dim=-1).flatten(-2).contiguous()
        return torch.concat((turned_first, turned_second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, size: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (Linear(size, size) for _ in range(4))
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in (q, k, v))
        q, k = self.rotation(q), self.rotation(k)
        places = torch.arange(x.shape[-2], device=x.device)
        mask = (places[:, None] >= places[None, :])[None]
        y = attention(q, k, v, mask)
        y = y.transpose(-3, -2).flatten(-2).contiguous()
        return self.out(y)


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(size, inner), Linear(inner, size), Linear(size, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, size: int, inner: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.attention = Attention(size, heads, rotation)
        self.feed_forward = FeedForward(size, inner)
        self.norm_1, self.norm_2 = RMSNorm(size), RMSNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm_1(x))
        middle = x + mixed
        fed = self.feed_forward(self.norm_2(middle))
        return middle + fed


class LanguageModel(nn.Module):
    """group: blocks that are checkpointed together; 0: none. edition: the year of the course.

    Since 2026 the embedded tokens have a name of their own, and stay alive.
    """

    def __init__(self, size: str, vocabulary: int, length: int, group: int = 0, edition: int = 2026) -> None:
        super().__init__()
        width, inner, layers, heads = SIZES[size]
        self.embedding = Embedding(vocabulary, width)
        self.rotation = Rotation(length, width // heads, gathers=edition == 2025)
        self.layers = nn.ModuleList(Block(width, inner, heads, self.rotation) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = Linear(width, vocabulary)
        self.group, self.edition = group, edition

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        _embedded = x if self.edition == 2026 else None
        if not self.group:
            for layer in self.layers:
                x = layer(x)
        for first in range(0, len(self.layers) if self.group else 0, self.group or 1):
            x = checkpoint(self.run, x, first, use_reentrant=False)
        return self.head(self.norm(x))

    def run(self, x: Tensor, first: int) -> Tensor:
        for layer in self.layers[first : first + self.group]:
            x = layer(x)
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """By the course's own log-softmax."""
    highest = torch.max(logits, dim=-1, keepdim=True)[0]
    logits = logits - highest
    negative = -(logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True)))
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """The course's optimizer, which goes from parameter to parameter and makes its state anew in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad.data, self.state[parameter]
                parameter.data -= 1e-5 * parameter.data
                before_m = state.get("m", torch.zeros_like(gradient))
                before_v = state.get("v", torch.zeros_like(gradient))
                m = 0.9 * before_m + (0.1 * gradient)
                v = 0.999 * before_v + (0.001 * torch.square(gradient))
                parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v


class Attentions(Script):
    """yyin-dev's benchmark of attention (8,S,d), up to its figure: after a backward, 100 forwards with gradients."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(8, length, size)) for _ in range(3))
        self.register_buffer("mask", torch.empty(length, length, dtype=torch.bool))

    def prepare(self) -> None:
        self.y = attention(self.q, self.k, self.v, self.mask)
        self.loss = self.y.sum()
        self.loss.backward()

    def iteration(self) -> None:
        self.y = attention(self.q, self.k, self.v, self.mask)


class OwnModel(nn.Module):
    """The model that GAOYUEtianc wrote for the first assignment: an embedding by one-hot products, torch's softmax."""

    def __init__(self, size: str, vocabulary: int, length: int) -> None:
        super().__init__()
        width, inner, layers, heads = SIZES[size]
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.layers = nn.ModuleList(OwnBlock(width, inner, heads, length) for _ in range(layers))
        self.norm = OwnNorm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        safe = ids.clamp(0, len(self.embedding) - 1)
        one_hot = functional.one_hot(safe, num_classes=len(self.embedding)).to(self.embedding.dtype)
        x = one_hot @ self.embedding
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand(ids.shape[0], -1)
        for layer in self.layers:
            x = layer(x, places)
        return self.head(self.norm(x))


class OwnNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
        normed = x / scale
        y = normed * self.gain
        return y.to(dtype)


class OwnBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = OwnNorm(width), OwnNorm(width)
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.gate, self.down, self.up = Linear(width, inner), Linear(inner, width), Linear(width, inner)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, width // heads), persistent=False)
        self.register_buffer("mask", torch.empty(length, length, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attend(normed, places)
        x = x + attended
        normed = self.norm_2(x)
        fed = self.feed(normed)
        return x + fed

    def attend(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q, k = self.turned(q, places), self.turned(k, places)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(self.mask[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        weights = functional.softmax(scores, dim=-1)
        y = torch.matmul(weights, v)
        y = y.transpose(1, 2).contiguous()
        return self.out(y.flatten(-2))

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        cos, sin = self.cos[places].unsqueeze(1), self.sin[places].unsqueeze(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned_even = even * cos[..., 0::2] - odd * sin[..., 0::2]
        turned_odd = even * sin[..., 1::2] + odd * cos[..., 1::2]
        stacked = torch.stack([turned_even, turned_odd], dim=-1)
        return stacked.flatten(start_dim=-2)

    def feed(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gated = gate * torch.sigmoid(gate)
        up = self.up(x)
        product = gated * up
        return self.down(product)


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    sums = shifted.exp().sum(dim=-1).log()
    chosen = shifted.gather(dim=-1, index=targets.unsqueeze(-1)).squeeze(-1)
    losses = -(chosen - sums)
    return losses.mean()


class Benchmark(Script):
    """GAOYUEtianc's benchmark: forwards and backwards without an optimizer, after which gradients are dropped."""

    def __init__(self, model: nn.Module, ids: Tensor, targets: Tensor, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast
        self.register_buffer("ids", ids)
        self.register_buffer("targets", targets)

    def iteration(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            self.logits = self.model(self.ids)
            self.loss = own_loss(self.logits.view(-1, self.logits.size(-1)), self.targets.view(-1))
        self.loss.backward()
        self.model.zero_grad()


@dataclass(frozen=True)
class Run:
    """A program of a report. training: with a backward and an optimizer. keep_outputs: as of a Step. outputs_stay:
    variables keep what model and loss returned until they are set again.
    """

    size: str
    vocabulary: int
    batch: int
    length: int
    training: bool
    optimizer: str | type[torch.optim.Optimizer] = AdamW
    autocast: str | None = None
    edition: int = 2026
    group: int = 0
    keep_outputs: bool = True
    outputs_stay: bool = False

    def prediction(self, place: Place) -> Prediction:
        with torch.device("meta"):
            model = LanguageModel(self.size, self.vocabulary, self.length, self.group, self.edition)
            ids, targets = (torch.empty(self.batch, self.length, dtype=torch.long) for _ in range(2))
        if self.training:
            options: dict[str, Any] = {"optimizer": self.optimizer, "loss": lambda y: cross_entropy(y, targets)}
            options["keep_outputs"] = self.keep_outputs
        else:
            options = {"backward": False}
        step = Step(model, ids, autocast=self.autocast, **options)
        return predict_script(Loop(step), place, iterations=1) if self.outputs_stay else predict_memory(step, place)


def predict(row: dict[str, str], place: Place) -> Prediction:
    """The prediction of a row of the table."""
    batch, length = int(row["batch"]), int(row["seq"])
    autocast = "bf16" if "autocast" in row["dtype_recipe"] else None
    if "yyin-dev" in row["source"]:
        width = int(re.findall(r"d (\d+)", row["config"])[0])
        with torch.device("meta"):
            script = Attentions(length, width)
        return at_its_end(predict_script(script, place))
    if "GAOYUE" in row["source"]:
        with torch.device("meta"):
            ids, targets = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))
            script = Benchmark(OwnModel("large", 10000, length), ids, targets, autocast is not None)
        return predict_script(script, place)
    report = row["source"].removeprefix("CS336 report ")[0]
    training = row["id"] in TRAINING_OF_A if report == "A" else not row["config"].startswith("forward")
    if report == "A":  # The output of a step is alive in the next one.
        run = Run("xl", 32000, batch, length, training, autocast=autocast, outputs_stay=True)
        place = dataclasses.replace(place, expandable_segments=row["id"] == "F199")
    elif report == "B":
        run = Run("xl", 10000, batch, length, training, autocast=autocast, edition=2025, keep_outputs=False)
    elif report == "C":
        run = Run("xl", 10000, batch, length, training, "adamw", autocast)
    else:
        group = row["activation_checkpointing"].removeprefix("groups of ")
        run = Run("medium", 10000, batch, length, True, "adamw", autocast, group=0 if group == "none" else int(group))
    prediction = run.prediction(place)
    if report != "C" or not training:
        return prediction
    return doubted(prediction, WHICH)


WHICH = "which AdamW the report means; assumed: torch's"
# The report has two tables of the same configurations, forwards and then training.
TRAINING_OF_A = ("F197", "F198", "F199", "F200")

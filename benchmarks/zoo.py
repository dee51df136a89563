"""The zoo: layers, losses and whole models, each predicted and measured on the CPU, beside torch's MemTracker.

    python -m benchmarks.zoo [--only NAME ...] [--output FILE]

torch.distributed._tools.mem_tracker.MemTracker observes two steps of the same entry on real tensors.

Models of transformers, timm and torchvision are built from configurations with random weights; nothing is downloaded.
Entries of missing packages are skipped, and the packages are named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memcheck
from memcheck.core.outputs import ForwardOptions, Outputs
from memcheck.core.tensors import gradients_for, tensors_in

FIGURES = (
    "input_bytes",
    "output_bytes",
    "parameter_bytes",
    "optimizer_bytes",
    "forward_peak_bytes",
    "saved_bytes",
    "backward_peak_bytes",
    "gradient_bytes",
    "workspace_bytes",
    "optimizer_peak_bytes",
)
PEAKS = ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes")
# Verdicts, in words.
VERDICTS = {
    "exact": "exact in every figure, and claimed to be",
    "equal": "exact in every figure, with a doubt",
    "within 1 %": "within 1 %, with a doubt",
    "off": "further off, with a doubt",
    "stopped": "not predicted, with the reason",
    "false exact": "claimed to be exact and wrong",
}
# What MemTracker's peak is, in words.
TRACKED = {
    "within 1 %": "MemTracker's peak within 1 %",
    "within 10 %": "within 10 %",
    "off": "further off",
    "error": "MemTracker raised an error",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a model and its inputs are built, and how a step of it runs.

    build: returns the model, its positional inputs, and perhaps keyword inputs.
    """

    build: Callable[[], tuple[Any, ...]]
    loss: Callable[[Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    backward: bool = True
    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    set_to_none: bool = True
    needs: str | None = None  # A package.

    def how(self) -> dict[str, Any]:
        fields = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name not in ("build", "needs")}


ZOO: dict[str, Entry] = {}


def layer(name: str, module: Callable[[], Any], *shapes: Any, **how: Any) -> None:
    """An entry of one module; a shape is a tuple, and anything else a function that makes the input."""

    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        inputs = tuple(
            torch.randn(*shape, requires_grad=True) if isinstance(shape, tuple) else shape() for shape in shapes
        )
        return module(), inputs

    ZOO[name] = Entry(build, **how)


def classes(*shape: int, count: int = 8) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(count, shape)


def shares(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: (torch.rand(*shape) * 0.8 + 0.1).requires_grad_()


def fixed(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return make


def signs(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(2, shape) * 2.0 - 1


# Layers.
layer("Linear", lambda: nn.Linear(64, 96), (8, 20, 64))
layer("Linear, no bias", lambda: nn.Linear(64, 96, bias=False), (20, 64))
layer("Bilinear", lambda: nn.Bilinear(12, 20, 16), (32, 12), (32, 20))
layer("Embedding", lambda: nn.Embedding(100, 32), classes(4, 20))
layer("Embedding, sparse", lambda: nn.Embedding(100, 32, sparse=True), classes(4, 20))
layer("EmbeddingBag", lambda: nn.EmbeddingBag(100, 32), classes(4, 20))
layer("EmbeddingBag, max", lambda: nn.EmbeddingBag(100, 32, mode="max"), classes(4, 20))
layer("EmbeddingBag, sparse", lambda: nn.EmbeddingBag(100, 32, sparse=True), classes(4, 20))
layer("Conv1d", lambda: nn.Conv1d(16, 32, 5, padding=2), (4, 16, 60))
layer("Conv2d", lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 24, 24))
layer("Conv2d, strided", lambda: nn.Conv2d(8, 16, 3, stride=2), (4, 8, 25, 25))
layer("Conv2d, depthwise", lambda: nn.Conv2d(16, 16, 3, groups=16), (4, 16, 24, 24))
layer("Conv2d, dilated", lambda: nn.Conv2d(8, 16, 3, dilation=2), (4, 8, 24, 24))
layer("Conv3d", lambda: nn.Conv3d(4, 8, 3), (2, 4, 10, 10, 10))
layer("ConvTranspose1d", lambda: nn.ConvTranspose1d(16, 8, 4, stride=2), (4, 16, 30))
layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(16, 8, 4, stride=2), (4, 16, 12, 12))
layer("ConvTranspose3d", lambda: nn.ConvTranspose3d(8, 4, 3), (2, 8, 6, 6, 6))
layer("LayerNorm", lambda: nn.LayerNorm(48), (8, 20, 48))
layer("LayerNorm, no affine", lambda: nn.LayerNorm(48, elementwise_affine=False), (8, 20, 48))
layer("RMSNorm", lambda: nn.RMSNorm(48), (8, 20, 48))
layer("GroupNorm", lambda: nn.GroupNorm(4, 16), (4, 16, 12, 12))
layer("BatchNorm1d", lambda: nn.BatchNorm1d(32), (16, 32))
layer("BatchNorm2d", lambda: nn.BatchNorm2d(16), (4, 16, 12, 12))
layer("BatchNorm2d, eval", lambda: nn.BatchNorm2d(16).eval(), (4, 16, 12, 12))
layer("BatchNorm3d", lambda: nn.BatchNorm3d(8), (2, 8, 6, 6, 6))
layer("InstanceNorm1d", lambda: nn.InstanceNorm1d(16, affine=True), (4, 16, 30))
layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True), (4, 16, 12, 12))
layer("InstanceNorm3d", lambda: nn.InstanceNorm3d(8, affine=True), (2, 8, 6, 6, 6))
layer("LocalResponseNorm", lambda: nn.LocalResponseNorm(3), (4, 16, 12, 12))
layer("RNN", lambda: nn.RNN(24, 32, 2, batch_first=True), (4, 15, 24))
layer("RNN, relu", lambda: nn.RNN(24, 32, nonlinearity="relu"), (15, 4, 24))
layer("GRU", lambda: nn.GRU(24, 32, 2, batch_first=True), (4, 15, 24))
layer("GRU, bidirectional", lambda: nn.GRU(24, 32, bidirectional=True), (15, 4, 24))
layer("LSTM", lambda: nn.LSTM(24, 32, batch_first=True), (4, 15, 24))
layer("LSTM, deep", lambda: nn.LSTM(24, 32, 3, dropout=0.2), (15, 4, 24))
layer("LSTM, bidirectional", lambda: nn.LSTM(24, 32, 2, bidirectional=True), (15, 4, 24))
layer("LSTM, projection", lambda: nn.LSTM(24, 32, proj_size=16), (15, 4, 24))
layer("LSTM, no bias", lambda: nn.LSTM(24, 32, bias=False), (15, 4, 24))
layer("LSTM, double", lambda: nn.LSTM(24, 32).double(), lambda: torch.randn(15, 4, 24, dtype=torch.float64))
layer("RNNCell", lambda: nn.RNNCell(24, 32), (8, 24))
layer("GRUCell", lambda: nn.GRUCell(24, 32), (8, 24))
layer("LSTMCell", lambda: nn.LSTMCell(24, 32), (8, 24))
layer(
    "MultiheadAttention", lambda: nn.MultiheadAttention(48, 4, batch_first=True), (4, 18, 48), (4, 18, 48), (4, 18, 48)
)
layer("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), (4, 18, 48))
layer(
    "TransformerEncoderLayer, eval",
    lambda: nn.TransformerEncoderLayer(48, 4, 96, batch_first=True).eval(),
    (4, 18, 48),
    backward=False,
)
layer(
    "TransformerEncoderLayer, no dropout",
    lambda: nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True),
    (4, 18, 48),
)
layer("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(48, 4, 96), (18, 4, 48), (18, 4, 48))
layer("Transformer", lambda: nn.Transformer(32, 4, 2, 2, 64), (12, 4, 32), (10, 4, 32))
layer("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2), (12, 4, 32))
layer("TransformerDecoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64), 2), *[(12, 4, 32)] * 2)
layer("PReLU", lambda: nn.PReLU(16), (4, 16, 12, 12))
layer(
    "AdaptiveLogSoftmaxWithLoss",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 100, [10, 40]),
    (20, 32),
    classes(20, count=100),
)
# Layers without parameters.
ACTIVATIONS = """
    ReLU ReLU6 ELU SELU CELU GELU SiLU Mish Softplus Softsign Tanh Tanhshrink
    Sigmoid Hardswish Hardsigmoid Hardtanh LeakyReLU LogSigmoid Softshrink Hardshrink RReLU Softmax2d
"""
for name in ACTIVATIONS.split():
    layer(name, getattr(nn, name), (4, 16, 12, 12))
layer("GLU", lambda: nn.GLU(), (8, 20, 48))
layer("GELU, tanh", lambda: nn.GELU("tanh"), (8, 20, 48))
layer("Softmax", lambda: nn.Softmax(-1), (8, 20, 48))
layer("LogSoftmax", lambda: nn.LogSoftmax(-1), (8, 20, 48))
layer("Dropout", lambda: nn.Dropout(0.2), (8, 20, 48))
layer("Dropout2d", lambda: nn.Dropout2d(0.2), (4, 16, 12, 12))
layer("AlphaDropout", lambda: nn.AlphaDropout(0.2), (8, 20, 48))
layer("FeatureAlphaDropout", lambda: nn.FeatureAlphaDropout(0.2), (4, 16, 12, 12))
layer("MaxPool1d", lambda: nn.MaxPool1d(3), (4, 16, 30))
layer("MaxPool1d, inference", lambda: nn.MaxPool1d(3), (4, 16, 30), backward=False)
layer("MaxPool2d", lambda: nn.MaxPool2d(2), (4, 16, 12, 12))
layer("MaxPool3d", lambda: nn.MaxPool3d(2), (2, 8, 6, 6, 6))
layer("AvgPool1d", lambda: nn.AvgPool1d(3), (4, 16, 30))
layer("AvgPool2d", lambda: nn.AvgPool2d(2), (4, 16, 12, 12))
layer("AvgPool3d", lambda: nn.AvgPool3d(2), (2, 8, 6, 6, 6))
layer("LPPool2d", lambda: nn.LPPool2d(2, 3), (4, 16, 12, 12))
layer("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(3, output_size=(5, 5)), (4, 16, 12, 12))
layer("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(5), (4, 16, 12, 12))
layer("AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d(5), (4, 16, 12, 12))
layer("Upsample, nearest", lambda: nn.Upsample(scale_factor=2), (4, 8, 12, 12))
layer("Upsample, bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 8, 12, 12))
layer("Upsample, bicubic", lambda: nn.Upsample(scale_factor=2, mode="bicubic"), (4, 8, 12, 12))
layer("PixelShuffle", lambda: nn.PixelShuffle(2), (4, 16, 12, 12))
layer("ReflectionPad2d", lambda: nn.ReflectionPad2d(2), (4, 8, 12, 12))
layer("ReplicationPad2d", lambda: nn.ReplicationPad2d(2), (4, 8, 12, 12))
layer("CircularPad2d", lambda: nn.CircularPad2d(2), (4, 8, 12, 12))
layer("ConstantPad2d", lambda: nn.ConstantPad2d(2, 1.0), (4, 8, 12, 12))
layer("Unfold", lambda: nn.Unfold(3), (4, 8, 12, 12))
layer("Fold", lambda: nn.Fold((12, 12), 3), (4, 72, 100))
layer("CosineSimilarity", lambda: nn.CosineSimilarity(), (20, 48), (20, 48))
layer("PairwiseDistance", lambda: nn.PairwiseDistance(), (20, 48), (20, 48))
layer("Flatten", lambda: nn.Flatten(), (4, 8, 12))
# Losses.
layer("CrossEntropyLoss", lambda: nn.CrossEntropyLoss(), (20, 8), classes(20))
layer("CrossEntropyLoss, smoothed", lambda: nn.CrossEntropyLoss(label_smoothing=0.1), (20, 8), classes(20))
layer("CrossEntropyLoss, shares", lambda: nn.CrossEntropyLoss(), (20, 8), lambda: torch.rand(20, 8))
layer("CrossEntropyLoss, images", lambda: nn.CrossEntropyLoss(), (4, 8, 6, 6), classes(4, 6, 6))
layer("NLLLoss", lambda: nn.NLLLoss(), (20, 8), classes(20))
layer("MSELoss", lambda: nn.MSELoss(), (20, 8), (20, 8))
layer("L1Loss", lambda: nn.L1Loss(), (20, 8), (20, 8))
layer("SmoothL1Loss", lambda: nn.SmoothL1Loss(), (20, 8), (20, 8))
layer("HuberLoss", lambda: nn.HuberLoss(), (20, 8), (20, 8))
layer("BCELoss", lambda: nn.BCELoss(), shares(20, 8), lambda: torch.rand(20, 8))
layer("BCEWithLogitsLoss", lambda: nn.BCEWithLogitsLoss(), (20, 8), lambda: torch.rand(20, 8))
layer(
    "BCEWithLogitsLoss, weighted",
    lambda: nn.BCEWithLogitsLoss(pos_weight=torch.rand(8)),
    (20, 8),
    lambda: torch.rand(20, 8),
)
layer("KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), (20, 8), lambda: torch.rand(20, 8))
layer("PoissonNLLLoss", lambda: nn.PoissonNLLLoss(), (20, 8), lambda: torch.rand(20, 8))
layer("GaussianNLLLoss", lambda: nn.GaussianNLLLoss(), (20, 8), lambda: torch.rand(20, 8), shares(20, 8))
layer("HingeEmbeddingLoss", lambda: nn.HingeEmbeddingLoss(), (20, 8), signs(20, 8))
layer("SoftMarginLoss", lambda: nn.SoftMarginLoss(), (20, 8), signs(20, 8))
layer("MarginRankingLoss", lambda: nn.MarginRankingLoss(), (20,), (20,), signs(20))
layer("CosineEmbeddingLoss", lambda: nn.CosineEmbeddingLoss(), (20, 8), (20, 8), signs(20))
layer("TripletMarginLoss", lambda: nn.TripletMarginLoss(), (20, 8), (20, 8), (20, 8))
layer("MultiMarginLoss", lambda: nn.MultiMarginLoss(), (20, 8), classes(20))
layer("MultiLabelMarginLoss", lambda: nn.MultiLabelMarginLoss(), (20, 8), classes(20, 8))
layer(
    "MultiLabelSoftMarginLoss",
    lambda: nn.MultiLabelSoftMarginLoss(),
    (20, 8),
    lambda: torch.randint(2, (20, 8)).float(),
)
layer(
    "CTCLoss",
    lambda: Ctc(),
    lambda: torch.randn(30, 4, 12).log_softmax(-1).requires_grad_(),
    lambda: torch.randint(1, 12, (4, 10)),
)


class Ctc(nn.Module):
    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.ctc_loss(scores, targets, (30,) * 4, (10,) * 4)


class Function(nn.Module):
    """A function as a module, so that it may stand in the table."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def function(name: str, call: Callable[..., Any], *shapes: Any, **how: Any) -> None:
    layer(name, lambda: Function(call), *shapes, **how)


function("fft", lambda x: torch.fft.irfft(torch.fft.rfft(x)), (8, 20, 48))
function("fft2", lambda x: torch.fft.fft2(x).abs(), (4, 16, 16))
function("linalg.inv", lambda x: torch.linalg.inv(x @ x.mT + torch.eye(12, device=x.device)), (4, 12, 12))
function("linalg.cholesky", lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(12, device=x.device)), (4, 12, 12))
function("linalg.qr", lambda x: torch.linalg.qr(x), (4, 12, 8))
function("linalg.svd", lambda x: torch.linalg.svd(x, full_matrices=False), (4, 12, 8))
function("linalg.eigh", lambda x: torch.linalg.eigh(x @ x.mT).eigenvalues, (4, 12, 12))
function(
    "linalg.solve",
    lambda x, y: torch.linalg.solve(x @ x.mT + torch.eye(12, device=x.device), y),
    (4, 12, 12),
    (4, 12, 3),
)
function("linalg.det", lambda x: torch.linalg.det(x), (4, 12, 12))
function("linalg.norm", lambda x: torch.linalg.norm(x, dim=-1), (8, 20, 48))
function("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (4, 10, 12), (4, 12, 14))
function(
    "sdpa", lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), *[(2, 4, 18, 16)] * 3
)
function(
    "sdpa, dropout",
    lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    *[(2, 4, 18, 16)] * 3,
)
function("gather", lambda x: x.gather(-1, torch.zeros(8, 20, 5, dtype=torch.int64, device=x.device)), (8, 20, 48))
function("index", lambda x: x[torch.tensor([0, 2, 1])], (8, 48))
function("index_select", lambda x: x.index_select(0, torch.tensor([0, 2, 1], device=x.device)), (8, 48))
function("cumprod", lambda x: x.cumprod(-1), shares(8, 48))
function("cumsum", lambda x: x.cumsum(-1), (8, 48))
function("sort", lambda x: x.sort(-1).values, (8, 48))
function("topk", lambda x: x.topk(4).values, (8, 48))
function("logsumexp", lambda x: x.logsumexp(-1), (8, 48))
function("masked_fill", lambda x: x.masked_fill(x > 0, 0.0), (8, 48))
function("where, numbers", lambda x: torch.where(x > 0, x, 0.0), (8, 48))
function("std", lambda x: x.std(-1), (8, 48))
function("prod", lambda x: x.prod(-1), (8, 48))
function("numbers", lambda x: (1 - x) * 2 / 3 + 2 / (x * x + 1) - 4 ** (x / 5) + (x + 1) ** 2, (8, 48))
function("numbers, in place", lambda x: (x * 1).mul_(2).add_(1).div_(3), (8, 48))
function("roll", lambda x: x.roll(2, -1), (8, 48))
function("repeat_interleave", lambda x: x.repeat_interleave(2, 1), (8, 48))
function(
    "grid_sample", lambda x, g: nn.functional.grid_sample(x, g.tanh(), align_corners=False), (2, 4, 8, 8), (2, 6, 6, 2)
)


# Whole models.
def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def rmsprop(parameters: Any) -> Any:
    return torch.optim.RMSprop(parameters)


SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
KEYS = {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_transformers(model: str, config: str, attention: str = "eager", **sizes: Any) -> Any:
    """A model of random weights, of a configuration."""
    with_stubs_of_torchvision()
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes)
    made._attn_implementation = attention
    return getattr(transformers, model)(made)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 128, shape)


def language_model(
    name: str, model: str, config: str, attention: str = "eager", how: dict[str, Any] | None = None, **sizes: Any
) -> None:
    """An entry that trains a language model of transformers by its own loss."""
    how = {"optimizer": adamw, **(how or {})}
    checkpointed = how.pop("checkpointed", False)

    def build() -> tuple[Any, ...]:
        ids = tokens(2, 24)
        given = {"input_ids": ids, "use_cache": False} if how.get("backward", True) else {"input_ids": ids}
        if "loss" in how:
            given["labels"] = ids
        made = of_transformers(model, config, attention, **sizes)
        if checkpointed:
            made.train().gradient_checkpointing_enable()
        return made, (), given

    ZOO[name] = Entry(build, needs="transformers", **how)


def own_loss(output: Any) -> Any:
    return output.loss


def first(output: Any) -> Any:
    return output[0]


LOSS = {"loss": own_loss}
BF16 = {"autocast": torch.bfloat16}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA = {**SMALL, **KEYS, "max_position_embeddings": 64}
language_model("GPT-2, eager", "GPT2LMHeadModel", "GPT2Config", how=LOSS, **GPT2)
language_model("GPT-2, sdpa", "GPT2LMHeadModel", "GPT2Config", "sdpa", how=LOSS, **GPT2)
language_model(
    "GPT-2, inference", "GPT2LMHeadModel", "GPT2Config", "sdpa", how={"backward": False, "optimizer": None}, **GPT2
)
language_model("Llama, eager", "LlamaForCausalLM", "LlamaConfig", how=LOSS, **LLAMA)
language_model("Llama, sdpa", "LlamaForCausalLM", "LlamaConfig", "sdpa", how=LOSS, **LLAMA)
language_model(
    "Llama, inference", "LlamaForCausalLM", "LlamaConfig", "sdpa", how={"backward": False, "optimizer": None}, **LLAMA
)
language_model("Llama, checkpointed", "LlamaForCausalLM", "LlamaConfig", how={**LOSS, "checkpointed": True}, **LLAMA)
language_model("Llama, autocast", "LlamaForCausalLM", "LlamaConfig", how={**LOSS, **BF16}, **LLAMA)
language_model("GPT-2, autocast", "GPT2LMHeadModel", "GPT2Config", how={**LOSS, **BF16}, **GPT2)
language_model(
    "GPT-2, accumulated", "GPT2LMHeadModel", "GPT2Config", how={**LOSS, "accumulate": 2, "clip_grad_norm": 1.0}, **GPT2
)
language_model("Mistral", "MistralForCausalLM", "MistralConfig", "sdpa", how=LOSS, **LLAMA)
language_model("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", how=LOSS, **LLAMA)
language_model("Gemma", "GemmaForCausalLM", "GemmaConfig", how=LOSS, **LLAMA, head_dim=8)
language_model("Phi", "PhiForCausalLM", "PhiConfig", how=LOSS, **SMALL)
language_model("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", how=LOSS, **SMALL)
language_model(
    "OPT",
    "OPTForCausalLM",
    "OPTConfig",
    how=LOSS,
    vocab_size=128,
    hidden_size=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=32,
    max_position_embeddings=64,
)
language_model("Mixtral", "MixtralForCausalLM", "MixtralConfig", how=LOSS, **LLAMA, num_local_experts=4)
language_model(
    "Mamba",
    "MambaForCausalLM",
    "MambaConfig",
    how=LOSS,
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    state_size=8,
)
language_model(
    "DeepSeek-V3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    how=LOSS,
    **SMALL,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=1,
)
language_model("BERT, eager", "BertForMaskedLM", "BertConfig", how=LOSS, **SMALL)
language_model("BERT, sdpa", "BertForMaskedLM", "BertConfig", "sdpa", how=LOSS, **SMALL)
language_model("RoBERTa", "RobertaForMaskedLM", "RobertaConfig", how=LOSS, **SMALL)
language_model(
    "DistilBERT",
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    how=LOSS,
    vocab_size=128,
    dim=32,
    hidden_dim=64,
    n_layers=2,
    n_heads=4,
)
language_model(
    "T5",
    "T5ForConditionalGeneration",
    "T5Config",
    how=LOSS,
    vocab_size=128,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
language_model(
    "BART",
    "BartForConditionalGeneration",
    "BartConfig",
    how=LOSS,
    vocab_size=128,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
)


def image_model(name: str, build: Callable[[], Any], size: int = 32, needs: str | None = None, **how: Any) -> None:
    def made() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return build(), (torch.randn(2, 3, size, size),)

    ZOO[name] = Entry(made, needs=needs, **{"optimizer": adamw, **how})


VIT = {**SMALL, "image_size": 32, "patch_size": 8}
del VIT["vocab_size"]
image_model(
    "ViT", lambda: of_transformers("ViTForImageClassification", "ViTConfig", **VIT), needs="transformers", loss=first
)
image_model(
    "ConvNeXt, transformers",
    lambda: of_transformers(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]
    ),
    needs="transformers",
    loss=first,
)
ZOO["Whisper"] = Entry(
    lambda: (
        of_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=128,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        (torch.randn(2, 8, 40),),
        {"labels": tokens(2, 12)},
    ),
    loss=own_loss,
    optimizer=adamw,
    needs="transformers",
)


def of_timm(name: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        with_stubs_of_torchvision()
        return importlib.import_module("timm").create_model(name, pretrained=False, num_classes=10, **sizes)

    return build


image_model("timm ConvNeXt", of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)), 32, "timm")
image_model("timm EfficientNet", of_timm("efficientnet_lite0"), 32, "timm", optimizer=momentum)
image_model("timm MobileNetV3", of_timm("mobilenetv3_small_050"), 32, "timm", optimizer=rmsprop)
image_model("timm Mixer", of_timm("mixer_s32_224", img_size=64), 64, "timm", optimizer=sgd)
image_model("timm ViT", of_timm("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4), 32, "timm")
image_model("timm ResNet", of_timm("resnet10t"), 32, "timm", optimizer=momentum)
image_model(
    "timm Swin",
    of_timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2)),
    32,
    "timm",
)


def of_torchvision(name: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        with_stubs_of_torchvision()
        return getattr(importlib.import_module("torchvision.models"), name)(weights=None, num_classes=10, **sizes)

    return build


@functools.cache
def with_stubs_of_torchvision() -> torch.library.Library:
    """Defines two operators that `import torchvision` needs.

    The wheel on PyPI cannot load its operators with a CPU build of torch. The models use none of them.
    """
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


image_model("torchvision ResNet", of_torchvision("resnet18"), 32, "torchvision", optimizer=momentum)
image_model("torchvision MobileNetV2", of_torchvision("mobilenet_v2"), 32, "torchvision", optimizer=sgd)
image_model("torchvision SqueezeNet", of_torchvision("squeezenet1_1"), 64, "torchvision")
image_model("torchvision Swin", lambda: swin_transformer(), 32, "torchvision")
image_model("torchvision ViT", lambda: vision_transformer(), 32, "torchvision")


def swin_transformer() -> Any:
    with_stubs_of_torchvision()
    kind = importlib.import_module("torchvision.models").SwinTransformer
    return kind([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=10)


def vision_transformer() -> Any:
    with_stubs_of_torchvision()
    kind = importlib.import_module("torchvision.models").VisionTransformer
    return kind(32, 8, 2, 4, 32, 64, num_classes=10)


# Ways to train one model.
class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Checkpointed(Mlp):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for module in self.layers:
            x = checkpoint(module, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


def sum_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def trained(name: str, model: Callable[[], Any], **how: Any) -> None:
    ZOO[name] = Entry(lambda: (model(), (torch.randn(16, 32),)), **{"loss": sum_of, **how})


for title, make in {
    "SGD": sgd,
    "momentum": momentum,
    "AdamW": adamw,
    "RMSprop": rmsprop,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adafactor": torch.optim.Adafactor,
    "SGD, nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}.items():
    trained(f"MLP, {title}", Mlp, optimizer=make)
trained("MLP, inference", Mlp, backward=False)
trained("MLP, checkpointed", Checkpointed, optimizer=adamw)
trained("MLP, checkpointed, reentrant", Reentrant, optimizer=adamw)
trained("MLP, autocast", Mlp, autocast=torch.bfloat16, optimizer=adamw)
trained("MLP, autocast to float16", Mlp, autocast=torch.float16, optimizer=adamw)
trained("MLP, autocast inside", lambda: Cast(), optimizer=adamw)
trained("MLP, autocast inside, checkpointed", lambda: CastCheckpoints(), optimizer=adamw)
trained("MLP, accumulated", Mlp, accumulate=3, optimizer=adamw)
trained("MLP, clipped", Mlp, clip_grad_norm=1.0, optimizer=adamw)
trained("MLP, gradients kept", Mlp, set_to_none=False, optimizer=momentum)
trained("MLP, all of these", Mlp, accumulate=2, clip_grad_norm=1.0, set_to_none=False, optimizer=adamw)
trained("MLP, compiled", lambda: torch.compile(Mlp()), optimizer=adamw)


class Cast(Mlp):
    """Enters autocast in its forward, and leaves it for the last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[:-1](x)
            with torch.autocast("cpu", enabled=False):
                return self.layers[-1](x.float())


class CastCheckpoints(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def run_entry(name: str) -> dict[str, Any]:
    """Predicted and measured figures of an entry, the verdict about them, and MemTracker's peak."""
    entry = ZOO[name]
    model, inputs, *rest = entry.build()
    kwargs = rest[0] if rest else {}
    prediction = memcheck.predict_memory(model, *inputs, device="cpu", **entry.how(), **kwargs)
    row = {"name": name, "verdict": "stopped", "wrong": {}, "unknown": list(prediction.unknown)}
    row["reason"] = prediction.record.reason
    if prediction.fits is None:
        return row
    measured = memcheck.measure_memory(model, *inputs, **entry.how(), **kwargs)
    pairs = {field: (getattr(prediction.record, field), getattr(measured, field)) for field in FIGURES}
    wrong = {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
    unclaimed = {field for field in wrong if field in prediction.bounds}
    if not wrong:
        verdict = "exact" if prediction.exact else "equal"
    elif prediction.exact or set(wrong) - unclaimed:
        verdict = "false exact"
    else:
        verdict = "within 1 %" if all(is_near(*pairs[field]) for field in wrong) else "off"
    peak = max(getattr(measured, field) or 0 for field in PEAKS)
    return {**row, "verdict": verdict, "wrong": wrong, "peak_bytes": peak, "memtracker": tracked(entry, peak)}


def tracked(entry: Entry, peak: int) -> dict[str, Any]:
    """MemTracker's error in percent of the measured peak, or what it raised."""
    try:
        return {"percent": round(100 * (tracked_peak(entry) - peak) / peak, 2)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:120]}


def tracked_peak(entry: Entry) -> int:
    """MemTracker's peak of two steps of the entry on real tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, inputs, *rest = entry.build()
    kwargs = rest[0] if rest else {}
    optimizer = entry.optimizer(model.parameters()) if entry.optimizer is not None else None
    tracker = MemTracker()
    tracker.track_external(model, *([] if optimizer is None else [optimizer]), *tensors_in([inputs, kwargs]))
    with tracker:
        for _ in range(1 if optimizer is None else 2):
            for _ in range(entry.accumulate):
                outputs = None  # Those of an earlier pass are gone.
                outputs = run_pass(entry, model, inputs, kwargs)
                tracker.reset_mod_stats()  # Without it a module may run only once.
            if optimizer is not None:
                if entry.clip_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), entry.clip_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=entry.set_to_none)
            del outputs
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def run_pass(entry: Entry, model: Any, inputs: Any, kwargs: Any) -> Outputs:
    """Runs a forward and a backward, and returns what stays alive until the step ends."""
    with torch.set_grad_enabled(entry.backward):
        outputs = ForwardOptions(entry.loss, entry.autocast).run("cpu", functools.partial(model, *inputs, **kwargs))
    if outputs.roots and entry.backward:
        torch.autograd.backward(outputs.roots, gradients_for(outputs.roots, False))
    return outputs


def kind_of(tracking: dict[str, Any]) -> str:
    """The key of TRACKED."""
    if "error" in tracking:
        return "error"
    percent = abs(tracking["percent"])
    return "within 1 %" if percent <= 1 else "within 10 %" if percent <= 10 else "off"


def is_near(predicted: int | None, measured: int | None) -> bool:
    return predicted is not None and measured is not None and abs(predicted - measured) <= 0.01 * measured


def available(names: Iterable[str]) -> Iterator[str]:
    """The names whose packages are installed. Prints the missing packages to stderr."""
    missing = set()
    for name in names:
        needs = ZOO[name].needs
        if needs is None or importlib.util.find_spec(needs) is not None:
            yield name
        elif needs not in missing:
            missing.add(needs)
            print(f"skipped, because {needs} is not installed: {name} and others", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names")
    parser.add_argument("--output", type=Path, help="a file of JSON lines")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = [name for name in ZOO if not args.only or any(name.startswith(only) for only in args.only)]
    rows = []
    for name in available(names):
        try:
            row = run_entry(name)
        except Exception as error:
            row = {
                "name": name,
                "verdict": "error",
                "wrong": {},
                "unknown": [],
                "reason": f"{type(error).__name__}: {error}",
            }
        rows.append(row)
        if row["verdict"] != "exact":
            print(
                f"{name:34} {row['verdict']:12} {row['wrong']} {row['unknown']} {(row['reason'] or '')}"[:400],
                flush=True,
            )
    print(Counter(row["verdict"] for row in rows))
    print("MemTracker:", Counter(kind_of(row["memtracker"]) for row in rows if "memtracker" in row))
    if args.output:
        args.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Sources of single figures, torchtune's model after it was made and torchao's ViT, and why others have none."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.predict.api import predict_memory

from .scripts import Script, at_its_end, predict_script

# Row -> why its program cannot be said, or not be predicted.
NOT_PREDICTED = {
    "F179": "its samples are not packed, and their lengths are not stated",
    **dict.fromkeys(("F182", "F183", "F184"), "the lengths of its batches, which set reserved memory, are not stated"),
    **dict.fromkeys(("F187", "F189", "F190"), "torch 1.10 is older than any release with rules"),
    "F256": "the first FSDP, with flat parameters, is not predicted",
    **dict.fromkeys(("F264", "F265"), "its program is not in the stored text"),
    "F259": "torch 2.0, whose Adam makes a copy more, is older than any release with rules",
    "F269": "rank and parts of its LoRA are not stated",
    **dict.fromkeys(("F271", "F272"), "the sizes of its images vary"),
}


class Made(Script):
    """torchtune's Llama 3.2 of 3 B parameters in bfloat16 with LoRA of rank 64, and its table of rotations.

    Facts: pytorch/torchtune, recipes/configs/llama3_2/3B_lora_single_device.yaml, release 0.5.
    """

    def __init__(self) -> None:
        super().__init__()
        width, inner, narrow, rank = 3072, 8192, 1024, 64
        lora = [(width, width), (width, narrow), (width, width), *[(width, inner)] * 3]
        shapes = [(width, width), (width, narrow), (width, narrow), (width, width), *[(width, inner)] * 3]
        shapes += [(width,), (width,)]
        shapes += [(rank, size) for sizes in lora for size in sizes]
        shapes = [(128256, width), *shapes * 28, (width,)]
        self.parts = nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        self.register_buffer("turns", torch.empty(131072, 64, 2))

    def iteration(self) -> None:
        """Nothing has run yet."""


def made(place: Place) -> Prediction:
    with torch.device("meta"):
        script = Made()
    return at_its_end(predict_script(script, place, iterations=1))


class Block(nn.Module):
    """Of timm's vit_giant_patch14_dinov2: scales of both branches, and a gated feed-forward in one product."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc_1, self.fc_2 = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.scale_1, self.scale_2 = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x)) * self.scale_1
        return x + self.feed(self.norm_2(x)) * self.scale_2

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))

    def feed(self, x: Tensor) -> Tensor:
        x = self.fc_1(x)
        gate, up = x.chunk(2, dim=-1)
        x = functional.silu(gate) * up
        return self.fc_2(x)


class VisionTransformer(nn.Module):
    """Of 1.1 B parameters, for pictures of 224 x 224 and 45 classes. Each block is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        width, length = 1536, (224 // 14) ** 2 + 1
        self.patches = nn.Conv2d(3, width, 14, stride=14)
        self.token, self.places = nn.Parameter(torch.empty(1, 1, width)), nn.Parameter(torch.empty(1, length, width))
        self.blocks = nn.ModuleList(Block(width, 24, 4096) for _ in range(40))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 45)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x)[:, 0])


def fine_tuned_vit(place: Place) -> Prediction:
    """All in bfloat16, with the fused AdamW. Facts: pytorch/ao, benchmarks/benchmark_low_bit_adam.py."""
    with torch.device("meta"):
        model = VisionTransformer().to(torch.bfloat16)
        pictures = torch.empty(32, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.empty(32, dtype=torch.long)
    step = Step(
        model,
        pictures,
        loss=lambda y: functional.cross_entropy(y, labels),
        optimizer=functools.partial(torch.optim.AdamW, fused=True),
        keep_outputs=False,
    )
    return predict_memory(step, place)

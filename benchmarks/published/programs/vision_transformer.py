"""ViT-L/16 fine-tuned on pictures of CIFAR-10 in nine manners: python vision_transformer.py FIGURE.

After 01_pytorch-vit.py to 07_03_init-module.py of github.com/rasbt/pytorch-memory-optim, whose Fabric casts the
model or the pictures to 16 bits, and scales losses. A few steps and two batches of validation stand for an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, PATCH, SIDE, CLASSES = 1024, 24, 16, 16, 224, 10
device = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Manner:
    """precision: None is float32, "mixed" autocast to float16 and scaled losses. accumulated: batches of a step."""

    precision: torch.dtype | str | None = None
    batch: int = 64
    accumulated: int = 1
    optimizer: str = "adam"
    fabric: bool = True


MANNERS = {
    "P01.01": Manner(fabric=False),
    "P01.01b": Manner(),
    "P01.02": Manner("mixed"),
    "P01.03": Manner(torch.bfloat16),
    "P01.04": Manner(torch.bfloat16, batch=16),
    "P01.05": Manner(torch.bfloat16, batch=4, accumulated=4),
    "P01.06": Manner(torch.bfloat16, batch=4, accumulated=4, optimizer="sgd"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        y = y + x
        z = self.between(y)
        z = self.feed(z)
        return y + z


class Vit(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.empty(1, (SIDE // PATCH) ** 2 + 1, WIDTH).normal_(std=0.02))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        count = pictures.shape[0]
        x = self.patches(pictures)
        x = x.reshape(count, WIDTH, -1)
        x = x.permute(0, 2, 1)
        x = torch.cat([self.first.expand(count, -1, -1), x], dim=1)
        x = self.norm(self.blocks(x + self.places))
        return self.head(x[:, 0])


class Adam(torch.optim.Optimizer):
    """As torch wrote it until July 2023: a step has two temporary results of the size of the weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self) -> None:
        weights = [it for it in self.param_groups[0]["params"] if it.grad is not None]
        grads = [it.grad for it in weights]
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["average"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
        averages, squares = ([self.state[it][name] for it in weights] for name in ("average", "square"))
        torch._foreach_mul_(averages, 0.9)
        torch._foreach_add_(averages, grads, alpha=0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, grads, grads, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 0.5)
        divisors = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(weights, averages, divisors, -5e-5)


class Accuracy:
    """Counts of right answers by class, as torchmetrics keeps them."""

    def __init__(self) -> None:
        self.counts = [torch.zeros(CLASSES, dtype=torch.long, device=device) for _ in range(4)]

    def update(self, found: Tensor, targets: Tensor) -> None:
        right = functional.one_hot(targets, CLASSES) * functional.one_hot(found, CLASSES)
        self.counts[0] += right.sum(0)


class Trainer:
    """The model and its steps, cast as the manner says."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self.model = Vit()
        self.model.head = nn.Linear(WIDTH, CLASSES)
        cast = manner.precision if isinstance(manner.precision, torch.dtype) else None
        self.model.to(dtype=cast).to(device)
        self.make_optimizer()
        self.scaler = torch.amp.GradScaler("cuda", enabled=manner.precision == "mixed")
        self.cast = cast

    def make_optimizer(self) -> None:
        parameters = self.model.parameters()
        is_adam = self.manner.optimizer == "adam"
        self.optimizer = Adam(parameters) if is_adam else torch.optim.SGD(parameters, lr=0.01)

    def batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(count):
            pictures = torch.rand(self.manner.batch, 3, SIDE, SIDE)
            yield pictures.to(device), torch.randint(CLASSES, (self.manner.batch,)).to(device)

    def logits(self, pictures: Tensor) -> Tensor:
        """Of 16 bits become 32, as Fabric's outputs do."""
        is_mixed = self.manner.precision == "mixed"
        with torch.autocast("cuda", torch.float16) if is_mixed else contextlib.nullcontext():
            found = self.model(pictures.to(self.cast) if self.cast else pictures)
        return found.float() if self.manner.fabric else found

    def train(self) -> None:
        accuracy, manner = Accuracy(), self.manner
        self.model.train()
        for number, (pictures, targets) in enumerate(self.batches(3 * manner.accumulated)):
            logits = self.logits(pictures)
            loss = functional.cross_entropy(logits, targets)
            if manner.accumulated == 1:
                self.optimizer.zero_grad()
            else:
                loss = loss / manner.accumulated
            self.scaler.scale(loss).backward()
            if number % manner.accumulated == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if manner.accumulated > 1:
                    self.optimizer.zero_grad()
            with torch.no_grad():
                accuracy.update(torch.argmax(logits, 1), targets)
        self.model.eval()
        with torch.no_grad():
            for pictures, targets in self.batches(2):
                accuracy.update(torch.argmax(self.logits(pictures), 1), targets)


def make_only(figure: str) -> None:
    """A model that is made: moved and then cast, or made in 16 bits on the device."""
    if figure == "P01.07a":
        Vit().to(device).to(torch.float16)
        return
    torch.set_default_dtype(torch.float16)
    with device:
        Vit()


def main(figure: str) -> None:
    if figure in MANNERS:
        Trainer(MANNERS[figure]).train()
    else:
        make_only(figure)
    print(figure, torch.cuda.max_memory_reserved())


main(sys.argv[1])

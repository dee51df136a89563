"""Models of timm, trained by timm's script on an A100 with 40 GB: the memory that nvidia-smi showed.

Facts of the recipe, from the scripts of github.com/huggingface/pytorch-image-models (train.py, timm/data/loader.py) and
github.com/itu-rad/GPUMemNet, which ran them: float32, 1,000 classes at the model's own size, SGD with Nesterov's
momentum and weight decay of matrices alone, label smoothing, gradients set to None after the step, cudnn.benchmark. The
loader makes the next batch on a stream of its own, of 8-bit images, while the training holds two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memcheck
from memcheck.predict.targets import predicted_at

from .study import DATA, NVIDIA_SMI, NotPredicted, Published, Study, read_rows

SOURCE = "GPUMemNet, models of timm"
CLASSES, SMOOTHING = 1000, 0.1
NEARLY_FULL = 39_000  # Of 40,960 MiB.
# The median of what nvidia-smi showed beside the predicted segments, of the models that estimates were learned from.
CONTEXT_BYTES = 1722 * 2**20

# The operators of torchvision that it registers itself for and that no model of timm calls. Builds for CUDA lack them
# where torch has no CUDA.
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def published(path: Path | None) -> list[Published]:
    given = read_rows(path or DATA / "timm.csv")
    figures: dict[str, dict[int, int]] = {}
    estimates: dict[str, dict[int, float]] = {}
    for row in given:
        name, batch = row["model"], int(row["batch"])
        figures.setdefault(name, {})[batch] = int(row["nvidia_smi_mib"])
        estimates.setdefault(name, {})[batch] = float(row["fake_tensor_mib"])
    return [
        Published(
            f"{row['model']} {row['batch']}",
            SOURCE,
            "A100-40GB",
            row["nvidia_smi_mib"],
            "MiB",
            NVIDIA_SMI,
            others={"FakeTensor": float(row["fake_tensor_mib"]) * 2**20},
            left_out=why_left_out(int(row["batch"]), figures[row["model"]], estimates[row["model"]]),
            given=row,
        )
        for row in given
    ]


def why_left_out(batch: int, figures: dict[int, int], estimates: dict[int, float]) -> str:
    """Why the table itself shows that a run failed, or that a search for algorithms was sampled; else empty.

    figures, estimates: batch -> MiB, of one model.
    """
    failed = {other: failure(other, figures, estimates) for other in figures}
    if failed[batch]:
        return failed[batch]
    larger = [figures[other] for other in figures if other > batch and not failed[other]]
    if any(size < figures[batch] for size in larger):
        return "a larger batch took less: nvidia-smi saw the search for algorithms"
    return ""


def failure(batch: int, figures: dict[int, int], estimates: dict[int, float]) -> str:
    if figures[batch] >= NEARLY_FULL:
        return "the GPU was full"
    if figures[batch] < estimates[batch]:
        return "it took less than FakeTensor's estimate: the run failed"
    if any(size == figures[batch] for other, size in figures.items() if other != batch):
        return "another batch took as much to the last digit: the run failed"
    return ""


@functools.lru_cache(1)
def library() -> Any:
    """timm, or NotPredicted."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            LIBRARY.define(name + BOXES)
    try:
        import timm
    except ImportError as error:
        raise NotPredicted(f"timm is missing, which `make ci` installs: {error}") from None
    return timm


@contextmanager
def numbers_on_the_cpu() -> Iterator[None]:
    """Inside, torch.linspace makes real numbers, of which models read their rates."""
    linspace = torch.linspace
    torch.linspace = functools.partial(linspace, device="cpu")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.linspace = linspace


def model_named(name: str) -> nn.Module:
    """The model on the GPU. It is made without data if it can be."""
    model: nn.Module
    try:
        with torch.device("meta"), numbers_on_the_cpu():
            model = library().create_model(name)
    except (NotImplementedError, RuntimeError, TypeError):  # It reads values, or mixes devices.
        model = library().create_model(name)
    return model._apply(lambda x: torch.empty_like(x, device="cuda") if x.is_meta else x.cuda()).train()


def momentum(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """timm's sgd: no decay of vectors."""
    given = list(parameters)
    groups = [
        {"params": [x for x in given if x.ndim <= 1], "weight_decay": 0.0},
        {"params": [x for x in given if x.ndim > 1], "weight_decay": 2e-5},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def smoothed(batches: list[Tensor], y: Tensor) -> Tensor:
    """timm's LabelSmoothingCrossEntropy, with the labels of the first batch."""
    logs = torch.log_softmax(y, dim=-1)
    right = -logs.gather(dim=-1, index=batches[2][:, None])[:, 0]
    return ((1 - SMOOTHING) * right + SMOOTHING * -logs.mean(dim=-1)).mean()


def step_of(name: str, batch: int) -> memcheck.Step:
    """Called where the GPU is simulated.

    The inputs lie on the loader's stream, which has two more batches: the next one, and that being made. A batch has
    images of 8 bits until they are float32.
    """
    model = model_named(name)
    shape = batch, *model.default_cfg["input_size"]  # type: ignore[misc, index]
    with torch.device("cuda"), torch.cuda.stream(torch.cuda.Stream()):
        batches = [torch.empty(shape, dtype=torch.uint8)]
        for _ in range(3):
            batches += [torch.empty(shape), torch.empty(batch, dtype=torch.int64)]
    return memcheck.Step(model, batches[1], optimizer=momentum, loss=functools.partial(smoothed, batches))


def predict(row: Published) -> memcheck.Prediction:
    place = memcheck.Place(row.gpu, torch_version="2.7", drop_workspaces=False).resolved()
    with torch.backends.cudnn.flags(benchmark=True, deterministic=False, allow_tf32=True):
        return predicted_at(place, row.given["model"], int(row.given["batch"]), make=step_of)


# Workspaces of convolutions are estimates, learned from one half of the models: predict/operators/convolutions.py.
STUDY = Study("Models of timm on an A100", published, predict, CONTEXT_BYTES)

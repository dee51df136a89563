"""Attentions of Stanford's CS336 that reports measured eager and under torch.compile, on several GPUs, in float32.

Each report has its own attention, and its own order of steps around the figure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memcheck.core.devices import Device
from memcheck.core.prediction import Prediction
from memcheck.core.step import Place

from . import cs336
from .scripts import Script, at_its_end, predict_script
from .study import DATA, Published, Study, read_rows

DEVICES: dict[str, Device | str] = {
    "B200": "B200",
    "RTX 4090": "RTX-4090",
    "RTX 5090": "RTX-5090",
    "RTX 5060": Device("RTX 5060", "cuda", (12, 0), 8 * 2**30, 8 * 2**30, "its nominal size"),
    "A100 80GB": "A100-80GB",
    "not named": "A100-80GB",  # With workspaces of the same size, and enough memory.
}
OLDEST = "2.7"  # That is predicted: for reports of 2.6, and for one that does not say.
TIMES = "its peak has the first step, in which Inductor times kernels on copies of their arguments"


def published(path: Path | None) -> list[Published]:
    return [
        Published(
            f"{row['source'].partition('/')[0]} S{row['length']} dim {row['width']} {row['step']} {how}",
            row["source"],
            row["gpu"],
            row[how],
            "MiB",
            row["metric"],
            left_out=TIMES if how == "compiled" and row["source"].startswith("bolongcheng") else "",
            given={**row, "how": how},
        )
        for row in read_rows(path or DATA / "compiled.csv")
        for how in ("eager", "compiled")
        if row[how]
    ]


# Attentions as the reports write them, of q, k and v (B,S,d) and a mask (S,S).


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    return torch.einsum("...qk,...kd->...qd", cs336.softmax(scores), v)


def by_amax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = scores.masked_fill(~mask, float("-inf"))
    exponentials = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    weights = exponentials / exponentials.sum(dim=-1, keepdim=True)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


class Projected(nn.Module):
    """One head with projections, of x (B,S,d). That the maximum and its indices stay alive is assumed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
        scores = torch.where(mask, scores, float("-inf"))
        return self.out(torch.einsum("...qk,...kd->...qd", self.softmax(scores), v))

    def softmax(self, x: Tensor) -> Tensor:
        highest, _indices = torch.max(x, dim=-1, keepdim=True)
        shifted = x - highest
        exponentials = torch.exp(shifted)
        return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


@dataclass(frozen=True)
class Report:
    """How a report measures its attention. None as the attention: Projected.

    masked: a mask of booleans lies there. resident: so many further tensors of the size of q do.
    gradient: backwards begin from a given gradient, else from the sum.
    infers: without gradients first. trains: with backwards before the figure, so that cuBLAS has both workspaces.
    zeroes: gradients are set to zero, else dropped. deletes: each iteration deletes its output.
    widest: the largest width that was compiled. With dynamic=False, torch.compile gives a function up after 8 shapes.
    """

    attend: Callable[..., Tensor] | None
    masked: bool = False
    resident: int = 0
    gradient: bool = False
    infers: bool = False
    trains: bool = True
    zeroes: bool = False
    deletes: bool = False
    widest: int = 2**30


REPORTS = {
    "subha-v": Report(by_hand),
    "jennjwang": Report(by_hand, gradient=True, zeroes=True),  # No sum; workspaces are those of an earlier cell.
    "ShanningZhuang": Report(by_torch, gradient=True, zeroes=True),
    "VictorHuu": Report(by_torch, masked=True, resident=4, gradient=True),
    "CTKnight": Report(by_amax, masked=True, infers=True),
    "yegdsdknf": Report(by_hand, gradient=True, deletes=True, widest=32),
    "duoan": Report(cs336.attention, masked=True),
    "bolongcheng": Report(None, masked=True, trains=False, zeroes=True),
}


class Cell(Script):
    """A cell of a report's table. trains: an iteration has a backward."""

    def __init__(self, report: Report, shape: tuple[int, int, int], trains: bool, compiled: bool) -> None:
        super().__init__()
        self.report, self.trains = report, trains
        if report.attend is None:
            self.register_buffer("x", torch.empty(shape))
            self.layer = Projected(shape[-1])
        else:
            self.q, self.k, self.v = (nn.Parameter(torch.empty(shape)) for _ in range(3))
        for number in range(report.resident):
            self.register_buffer(f"resident_{number}", torch.empty(shape))
        self.register_buffer("mask", torch.empty(shape[1], shape[1], dtype=torch.bool) if report.masked else None)
        # Where gradients are zeroed, the given one is made after the forwards that the figure is about.
        is_there = report.gradient and (trains or not report.zeroes)
        self.register_buffer("gradient", torch.empty(shape) if is_there else None)
        attend: Any = report.attend or self.layer
        self.attend = torch.compile(attend) if compiled else attend

    def prepare(self) -> None:
        for _ in range(3 if self.report.infers else 0):
            with torch.no_grad():
                self.run_forward()
        for _ in range(3 if self.report.trains else 0):
            self.run_forward()
            self.run_backward()

    def iteration(self) -> None:
        infers = self.report.attend is None and not self.trains
        with torch.set_grad_enabled(not infers):
            self.run_forward()
        if self.trains:
            self.run_backward()
        if infers:
            del self.y

    def run_forward(self) -> None:
        given = [self.x] if self.report.attend is None else [self.q, self.k, self.v]
        self.y = self.attend(*given, *([self.mask] if self.report.masked else []))

    def run_backward(self) -> None:
        if self.report.gradient:
            self.y.backward(torch.ones_like(self.y) if self.gradient is None else self.gradient)
        else:
            self.loss = self.y.sum()
            self.loss.backward()
        self.zero_grad(set_to_none=not (self.report.zeroes and self.trains))
        if self.report.deletes:
            del self.y


@functools.cache
def predicted(source: str, gpu: str, version: str, shape: tuple[int, int, int], trains: bool, how: str) -> Prediction:
    report = REPORTS[source.partition("/")[0]]
    is_compiled = how == "compiled" and shape[-1] <= report.widest
    with torch.device("meta"):
        cell = Cell(report, shape, trains, is_compiled)
    version = OLDEST if version in ("", "2.6.0") else version
    place = Place(DEVICES[gpu], drop_workspaces=False, torch_version=version)
    return predict_script(cell, place, iterations=3 if trains else 2)


def predict(row: Published) -> Prediction:
    given = row.given
    shape = int(given["batch"]), int(given["length"]), int(given["width"])
    prediction = predicted(row.source, row.gpu, given["torch"], shape, given["step"] == "both", given["how"])
    return at_its_end(prediction) if row.metric == "kept" else prediction


def figure(prediction: Prediction, row: Published) -> float | None:
    record = prediction.record
    if record.status != "ok":
        return None
    return record.reserved_bytes if row.metric == "reserved" else record.max_allocated_bytes


STUDY = Study(
    "Attentions of CS336, eager and compiled, on several GPUs", published, predict, figure=figure, is_evidence=False
)

"""Programs that are more than steps of a model: scripts that run their own backwards, on tensors without data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memcheck.core.prediction import Prediction
from memcheck.core.record import UNKNOWN, Doubt
from memcheck.core.step import Place, Program, Step
from memcheck.predict.autocast import run_backward
from memcheck.predict.model import predict_last


class Script(nn.Module):
    """A script that prepares something once, and then repeats an iteration.

    Its tensors from the start are its parameters and buffers. What an iteration leaves in attributes stays alive.
    """

    is_prepared = False
    doubts: tuple[str, ...] = ()  # What is not known of the script.

    def prepare(self) -> None:
        """Runs before the first iteration."""

    def iteration(self) -> None:
        raise NotImplementedError

    def forward(self) -> None:
        with torch.enable_grad():
            if not self.is_prepared:
                self.is_prepared = True
                self.prepare()
            self.iteration()


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], keep_graph: bool = False) -> None:
    """torch.autograd.backward in a script, whose functions would switch off the modes that follow it."""
    run_backward(roots, filled(roots, gradients), keep_graph)


def gradients_of(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], keep_graph: bool = False
) -> tuple[Tensor, ...]:
    """torch.autograd.grad in a script."""
    return run_backward(roots, filled(roots, gradients), keep_graph, inputs)


def filled(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.ones_like(root) if grad is None else grad for root, grad in zip(roots, gradients, strict=True)]


def use_cublas() -> None:
    """Makes the workspaces of both threads, as earlier parts of a script did."""
    x = torch.empty(1, 1, requires_grad=True, device="meta")
    gradients_of([x @ x], [x], [None])


def predict_script(script: Script, place: Place, iterations: int = 3) -> Prediction:
    """The prediction of the last iteration, with what the ones before it left."""
    step = Step(script, backward=False)
    prediction = predict_last(Program([step] * iterations, outputs_stay=False), place)
    return doubted(prediction, *script.doubts)


def doubted(prediction: Prediction, *sentences: str) -> Prediction:
    """The prediction with further doubts, before its own: what is assumed of the program."""
    doubts = (*(Doubt(words, UNKNOWN) for words in sentences), *prediction.record.doubts)
    return dataclasses.replace(prediction, record=dataclasses.replace(prediction.record, doubts=doubts))


def at_its_end(prediction: Prediction) -> Prediction:
    """The same with the bytes that are allocated at the end of the step as its figure, in blocks of 512 bytes."""
    alive = prediction.trace.log.alive() if prediction.trace is not None else []
    size = sum(-(-allocation.bytes // 512) * 512 for allocation in alive)
    return dataclasses.replace(prediction, record=dataclasses.replace(prediction.record, max_allocated_bytes=size))

"""Programs that are more than steps of a model: scripts that run their own backwards."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import torch
from torch import nn

from memcheck.core.optimizers import clipped_step, optimizer_factory
from memcheck.core.prediction import Prediction
from memcheck.core.record import UNKNOWN, Doubt
from memcheck.core.step import Place, Step
from memcheck.predict.targets import predicted_at


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


class Loop(Script):
    """A step of a model twice, as a loop runs it whose variables keep what model and loss returned until the next."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model, self.step = step.model, step

    def iteration(self) -> None:
        step = self.step
        makes = optimizer_factory(step.optimizer)
        steps = clipped_step(makes(self.model.parameters()), step.clip_grad_norm) if makes else None
        for _ in range(2):
            self.model.zero_grad()
            for _ in range(step.accumulate):
                cast = torch.autocast("cuda", step.autocast) if step.autocast else nullcontext()
                with torch.set_grad_enabled(step.backward), cast:
                    y = self.model(*step.inputs, **step.kwargs)
                    loss = step.loss(y) if step.loss else None
                if loss is not None:
                    loss.backward()
            if steps:
                steps()


def use_cublas() -> None:
    """Makes the workspaces of both threads, as earlier parts of a script did."""
    x = torch.empty(1, 1, requires_grad=True, device="cuda")
    (x @ x).backward()


def predict_script(script: Script, place: Place, iterations: int = 3) -> Prediction:
    """The prediction of the last iteration, with what the ones before it left."""
    return doubted(predicted_at(place.resolved(), script, iterations - 1, make=continued), *script.doubts)


def continued(script: Script, iterations: int) -> Step:
    """The next iteration, after so many others."""
    for _ in range(iterations):
        script()
    # A measurement of the module would set its gradients aside, where the next iteration adds to them.
    return Step((lambda: script()) if iterations else script, backward=False)


def doubted(prediction: Prediction, *sentences: str) -> Prediction:
    """The prediction with further doubts, before its own: what is assumed of the program."""
    doubts = (*(Doubt(words, UNKNOWN) for words in sentences), *prediction.record.doubts)
    return dataclasses.replace(prediction, record=dataclasses.replace(prediction.record, doubts=doubts))


def at_its_end(prediction: Prediction) -> Prediction:
    """The same with the bytes that are allocated at the end of the step as its figure."""
    record = prediction.record
    return dataclasses.replace(
        prediction, record=dataclasses.replace(record, max_allocated_bytes=record.forward_end_allocated_bytes)
    )

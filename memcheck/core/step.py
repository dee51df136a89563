"""A step of training: what measuring and predicting one have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memcheck.core.arguments import whole_number


def check_step(
    steps: int, accumulate: int, backward: bool, optimizer: Any, clip_grad_norm: float | None, set_to_none: bool
) -> None:
    """ValueError: the arguments of a step do not fit together."""
    for name, count in (("steps", steps), ("accumulate", accumulate)):
        whole_number(name, count)
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, int | float) and clip_grad_norm >= 0):
        raise ValueError(f"clip_grad_norm must be a number that is not negative, got {clip_grad_norm!r}")
    if not backward and (optimizer is not None or accumulate > 1):
        name = "accumulate" if optimizer is None else "optimizer"
        raise ValueError(f"{name} needs the gradients of a backward, got backward=False")
    if optimizer is None and (clip_grad_norm is not None or not set_to_none):
        name = "set_to_none=False" if clip_grad_norm is None else "clip_grad_norm"
        raise ValueError(f"{name} needs an optimizer")


def clipped_step(optimizer: torch.optim.Optimizer, clip_grad_norm: float | None) -> Callable[[], Any]:
    """The optimizer's step, after its parameters' gradients were clipped to the norm."""
    if clip_grad_norm is None:
        return optimizer.step
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, parameters, clip_grad_norm)

    def step() -> None:
        clip()
        optimizer.step()

    return step

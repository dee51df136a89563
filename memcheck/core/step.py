"""A step of training: what measuring and predicting one have in common."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch

from memcheck.core.arguments import whole_number


def check_step(
    accumulate: int,
    backward: bool,
    optimizer: Any,
    clip_grad_norm: float | None,
    set_to_none: bool,
    keeps_outputs: bool,
) -> None:
    """ValueError: the arguments of a step do not fit together."""
    whole_number("accumulate", accumulate)
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, int | float) and clip_grad_norm >= 0):
        raise ValueError(f"clip_grad_norm must be a number that is not negative, got {clip_grad_norm!r}")
    if not backward and (optimizer is not None or accumulate > 1):
        name = "accumulate" if optimizer is None else "optimizer"
        raise ValueError(f"{name} needs the gradients of a backward, got backward=False")
    if not backward and not keeps_outputs:
        raise ValueError("keeps_outputs=False needs a backward, got backward=False")
    if optimizer is None and (clip_grad_norm is not None or not set_to_none):
        name = "set_to_none=False" if clip_grad_norm is None else "clip_grad_norm"
        raise ValueError(f"{name} needs an optimizer")


def number_of_steps(steps: int | None, has_optimizer: bool) -> int:
    """The number, which is 2 by default. ValueError: it is below 1, or above 1 without an optimizer."""
    number = 2 if steps is None else whole_number("steps", steps)
    if steps is not None and number > 1 and not has_optimizer:
        raise ValueError(f"steps={number} needs an optimizer: without one, a later step is like the first")
    return number


def clipped_step(optimizer: Any, clip_grad_norm: float | None) -> Callable[[], Any]:
    """The optimizer's step, after its parameters' gradients were clipped to the norm.

    ValueError: the step needs a closure.
    """
    if needs_closure(optimizer):
        raise ValueError(f"{type(optimizer).__name__}.step needs a closure: {INSTEAD_OF_A_CLOSURE}")
    if clip_grad_norm is None:
        return cast(Callable[[], Any], optimizer.step)
    groups = [group for found in optimizers_in(optimizer) or [optimizer] for group in found.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, parameters, clip_grad_norm)

    def step() -> None:
        clip()
        optimizer.step()

    return step


INSTEAD_OF_A_CLOSURE = (
    "it runs the model as often as it decides. Measure a program with memcheck run, or give an optimizer whose step() "
    "passes a closure to it"
)


def needs_closure(optimizer: Any) -> bool:
    """Whether the optimizer, such as LBFGS, cannot step without a closure."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):  # A function without a signature.
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


# How far optimizers are searched for: an object, its method, the closure of that, and what it holds.
DEEPEST = 4


def optimizers_in(thing: Any, depth: int = DEEPEST) -> list[torch.optim.Optimizer]:
    """The optimizers that an object with a step() holds, such as one that steps by a torch.amp.GradScaler."""
    if isinstance(thing, torch.optim.Optimizer):
        return [thing]
    found = (inner for part in _held_by(thing) for inner in optimizers_in(part, depth - 1)) if depth else ()
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _held_by(thing: Any) -> list[Any]:
    """What a container, an object, or a function with its closure and the globals that it names holds."""
    if isinstance(thing, torch.Tensor | torch.nn.Module | type | ModuleType):
        return []
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        return cells + [thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType):
        return [thing.__self__]
    return list(vars(thing).values()) if hasattr(thing, "__dict__") else []

"""Optimizers: what makes one, what its step calls, and those that an object holds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch

from memcheck.core.converters import OPTIMIZERS
from memcheck.core.tensors import hooks_of


def optimizer_factory(value: Any, **options: Any) -> Callable[[Any], Any] | None:
    """What makes an optimizer of parameters: the function that is given, or that of a name with these options.

    None for None and "none".
    """
    if not isinstance(value, str):
        return cast(Callable[[Any], Any] | None, value)
    if (found := OPTIMIZERS[value]) is None:
        return None
    kind, own = found
    return functools.partial(getattr(torch.optim, kind), **{**own, **options})


def takes_model(makes: Callable[..., Any]) -> bool:
    """Whether the function makes an optimizer of a model: its first parameter is named model, or annotated as a Module.

    Every other function gets the model's parameters.
    """
    try:
        signature = inspect.signature(makes, eval_str=True)
    except (NameError, TypeError, ValueError):  # An annotation without a meaning here, or a function of C.
        with suppress(TypeError, ValueError):
            return next(iter(inspect.signature(makes).parameters), "") == "model"
        return False
    first = next(iter(signature.parameters.values()), None)
    if first is None:
        return False
    is_module = isinstance(first.annotation, type) and issubclass(first.annotation, torch.nn.Module)
    return first.name == "model" or is_module


def optimizer_made(makes: Callable[..., Any], module: torch.nn.Module | None) -> Any:
    """What the function makes of the module or, unless it takes a model, of the list of its parameters."""
    if takes_model(makes):
        return makes(module)
    return makes(list(module.parameters()) if module is not None else [])


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


def optimizers_in_hooks(module: torch.nn.Module | None) -> list[torch.optim.Optimizer]:
    """The optimizers that hooks of the module's parameters hold, which step while the backward runs."""
    return optimizers_in([hooks_of(parameter) for parameter in module.parameters()]) if module is not None else []


def _held_by(thing: Any) -> list[Any]:
    """The objects in a container, in an object, or in a function's closure and the globals that it names."""
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

"""What is around a step: optimizers, activation checkpoints, and Python's garbage collector at rest."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from memcheck.core.converters import OPTIMIZERS
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.tensors import hooks_of, module_called


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


class Users:
    """How many blocks need the collector at rest, and whether it was enabled before the first of them."""

    lock = threading.Lock()
    count = 0
    enabled = False


@contextmanager
def collector_at_rest(generation: int = 2) -> Iterator[None]:
    """Inside, the garbage collector is disabled, so that figures do not depend on when it runs.

    Blocks of several threads may overlap. The first one collects up to the generation, and the end of the last one
    restores what the first one found. Objects made meanwhile stay in the first two generations.
    """
    with Users.lock:
        is_first = Users.count == 0
        if is_first:
            Users.enabled = gc.isenabled()
        Users.count += 1
        gc.disable()
    try:
        if is_first:
            gc.collect(generation)
        yield
    finally:
        with Users.lock:
            Users.count -= 1
            if Users.count == 0 and Users.enabled:
                gc.enable()


# How models of transformers, of timm and memcheck's own turn their checkpoints on and off.
SWITCHES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "activation_checkpointing_enable": ({}, "activation_checkpointing_disable", {}),
    "gradient_checkpointing_enable": (
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        "gradient_checkpointing_disable",
        {},
    ),
    "set_grad_checkpointing": ({}, "set_grad_checkpointing", {"enable": False}),
    "set_checkpointing": ({"on": True}, "set_checkpointing", {"on": False}),
}


@contextmanager
def arranged(model: Any, checkpointing: bool, training: bool | None) -> Iterator[None]:
    """Inside, the called module has checkpoints if asked, and is in the mode that is asked for."""
    module = module_called(model)
    modes = {} if module is None else {part: part.training for part in module.modules()}
    undo = arrange(model, checkpointing, training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        undo()


def arrange(model: Any, checkpointing: bool, training: bool | None) -> Callable[[], object]:
    """Turns on the checkpoints of the called module, and sets its mode. Returns what puts the checkpoints back.

    UsageError: it has no switch for checkpoints and no list of layers.
    """
    module = module_called(model)
    undo = turned_on(module) if checkpointing else dict
    if undo is None:
        title = type(model if module is None else module).__name__
        raise UsageError(f"{named('checkpointing')}: {title} has no switch for it and no list of layers")
    if training is not None and module is not None:
        module.train(training)
    return undo


def turned_on(model: torch.nn.Module | None) -> Callable[[], object] | None:
    """Turns on the model's activation checkpoints, and returns what puts them back. None: it has none.

    The model's own switch does it, else torch.utils.checkpoint around each layer of its lists of equal layers.
    """
    if model is None:
        return None
    before = attributes_of(model)
    off: Callable[[], object] = dict
    if (switch := next((name for name in SWITCHES if hasattr(model, name)), None)) is not None:
        on, turns_off, how = SWITCHES[switch]
        try:
            getattr(model, switch)(**on)
        except (ValueError, NotImplementedError, AssertionError):  # Not every model of the packages has them.
            return None
        off = functools.partial(getattr(model, turns_off, dict), **how)
    elif layers := list(repeated_layers(model)):
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    else:
        return None
    changed = changed_since(before)

    def undo() -> None:
        if not changed:  # They were on.
            return
        now = attributes_of(model)
        off()
        for part, name in changed | changed_since(now):
            if name in before[part]:
                vars(part)[name] = before[part][name]
            else:
                vars(part).pop(name, None)

    return undo


def attributes_of(model: torch.nn.Module) -> dict[torch.nn.Module, dict[str, Any]]:
    return {part: dict(vars(part)) for part in model.modules()}


@contextmanager
def attributes_kept(model: torch.nn.Module | None) -> Iterator[None]:
    """Afterwards the modules have the attributes that they had before, the same objects."""
    before = attributes_of(model) if model is not None else {}
    try:
        yield
    finally:
        for part, values in before.items():
            vars(part).clear()
            vars(part).update(values)


def changed_since(before: dict[torch.nn.Module, dict[str, Any]]) -> set[tuple[torch.nn.Module, str]]:
    """The modules and the names of their attributes that are others now."""
    pairs = ((part, name) for part, values in before.items() for name in values.keys() | vars(part).keys())
    return {(part, name) for part, name in pairs if before[part].get(name, before) is not vars(part).get(name, before)}


def repeated_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of lists of layers of one class, which have layers of their own; the outermost lists only."""
    for child in model.children():
        members = list(child.children())
        is_list = isinstance(child, torch.nn.ModuleList | torch.nn.Sequential) and len(members) > 1
        if is_list and len(set(map(type, members))) == 1 and any(True for _ in members[0].children()):
            yield from members
        else:
            yield from repeated_layers(child)

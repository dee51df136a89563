"""Activation checkpoints: a layer keeps its input for the backward, and runs again in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.workload import module_called

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

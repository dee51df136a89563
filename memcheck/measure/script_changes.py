"""Changes of a script from outside that may lower its memory. Each is begun before the script runs.

A change returns a function that says afterwards whether it had an effect, as many scripts have it already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from memcheck.core.optimizers import turned_on

Effect = Callable[[], bool]
# Options of Adam that Adafactor does not take, or means otherwise.
OF_ADAM = ("betas", "eps", "amsgrad", "foreach", "fused", "capturable", "differentiable")


def allocator_setting(text: str) -> Effect:
    """A setting of PYTORCH_ALLOC_CONF."""
    torch.cuda.memory._set_allocator_settings(text)
    return lambda: True


def autocast() -> Effect:
    """bfloat16 autocast around forwards of modules with parameters in float32, outside of any other autocast."""
    used, depth, entered = list[bool](), [0], list[Any]()

    def begin(module: torch.nn.Module, _inputs: Any) -> None:
        depth[0] += 1
        is_wide = any(each.dtype == torch.float32 for each in module.parameters())
        if depth[0] == 1 and is_wide and not torch.is_autocast_enabled("cuda"):
            entered.append(torch.autocast("cuda", torch.bfloat16))
            entered[-1].__enter__()
            used.append(True)

    def end(*_: Any) -> None:
        depth[0] -= 1
        if depth[0] == 0 and entered:
            entered.pop().__exit__(None, None, None)

    module_hooks.register_module_forward_pre_hook(begin)
    module_hooks.register_module_forward_hook(end, always_call=True)
    return lambda: bool(used)


def checkpointing() -> Effect:
    """Activation checkpoints of the repeated layers, or by the switch that the model has."""
    tried, used = set[int](), list[bool]()

    def begin(module: torch.nn.Module, _inputs: Any) -> None:
        if not tried and module.training and any(True for _ in module.parameters()):
            tried.add(id(module))  # Of the outermost module, which is called first.
            used.append(turned_on(module) is not None)

    module_hooks.register_module_forward_pre_hook(begin)
    return lambda: any(used)


def optimizer_steps(fused: bool) -> Effect:
    """Optimizers that step in fused kernels, or else parameter by parameter, where they step in lists of parameters."""
    used = list[bool]()

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            has_option = "foreach" in group and (not fused or "fused" in group)
            if has_option and not group.get("fused") and (fused or group["foreach"] is not False):
                group.update(foreach=False, fused=fused)
                used.append(True)

    optimizer_hooks.register_optimizer_step_pre_hook(begin)
    return lambda: bool(used)


def gradients_to_none() -> Effect:
    """zero_grad() that gives gradients up, where the script asks it to keep them."""
    used = list[bool]()

    def replaced(zero_grad: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(zero_grad)
        def to_none(owner: Any, set_to_none: bool = True) -> None:
            if not set_to_none:
                used.append(True)
            zero_grad(owner, True)

        return to_none

    for kind in (torch.optim.Optimizer, torch.nn.Module):
        kind.zero_grad = replaced(kind.zero_grad)  # type: ignore[method-assign]
    return lambda: bool(used)


def factored_state() -> Effect:
    """Adafactor, whose state is two vectors for a matrix, in place of Adam and AdamW."""
    used = list[bool]()

    def replaced(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(optimizer: Any, params: Any, lr: Any = 1e-3, *args: Any, **options: Any) -> None:
            if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
                return init(optimizer, params, lr, *args, **options)
            used.append(True)
            optimizer.__class__ = torch.optim.Adafactor
            groups = [
                {name: value for name, value in each.items() if name not in OF_ADAM} if isinstance(each, dict) else each
                for each in params
            ]
            own = {name: options[name] for name in ("weight_decay", "maximize") if name in options}
            return torch.optim.Adafactor.__init__(optimizer, groups, float(lr), **own)

        return made

    for kind in (torch.optim.Adam, torch.optim.AdamW):
        kind.__init__ = replaced(kind.__init__)  # type: ignore[method-assign]
    return lambda: bool(used)


CHANGES: dict[str, Callable[[], Effect]] = {
    "expandable_segments:True": lambda: allocator_setting("expandable_segments:True"),
    "max_split_size_mb:128": lambda: allocator_setting("max_split_size_mb:128"),
    "autocast to bfloat16": autocast,
    "activation checkpointing": checkpointing,
    "optimizer with foreach=False": lambda: optimizer_steps(False),
    "optimizer with fused=True": lambda: optimizer_steps(True),
    "zero_grad(set_to_none=True)": gradients_to_none,
    "Adafactor in place of Adam": factored_state,
}

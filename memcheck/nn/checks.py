"""Checks of the modules' arguments. Errors name the module, the argument, the rule and the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from memcheck.ops.checks import check_floating, check_plain, is_symbolic


def check_positive(module: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{module}: {name} must be positive, got {size}")


def check_divides(module: str, divisor: str, part: int, dividend: str, whole: int) -> None:
    if whole % part:
        raise ValueError(f"{module}: {divisor} must divide {dividend} = {whole}, got {part}")


def check_decay(module: str, decay: object, kv_heads: int, causal: bool, learned: bool) -> None:
    """TypeError or ValueError unless decay is None or a number for each key head in (0, 1], below 1 if learned."""
    if decay is None:
        if learned:
            raise ValueError(f"{module}: learned_decay needs a decay, from which it starts, got decay=None")
        return
    if isinstance(decay, str) or not isinstance(decay, Sequence):
        raise TypeError(f'{module}: decay must be numbers, "retnet" or None, got {decay!r}')
    if not causal:
        raise ValueError(f"{module}: decay needs causal=True, got causal=False")
    if len(decay) != kv_heads:
        raise ValueError(f"{module}: decay must be kv_heads = {kv_heads} numbers, got {len(decay)}")
    for number in decay:
        if not 0 < number <= 1 or (learned and number == 1):
            raise ValueError(f"{module}: decay must be in {'(0, 1)' if learned else '(0, 1]'}, got {number}")


def check_tokens(module: str, x: Tensor, dim: int) -> None:
    """x (B,S,E)"""
    if is_symbolic(x):
        return
    check_plain(module, "x", x)
    check_floating(module, "x", x)
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"{module}: x must be (B,S,E) with E = {dim}, got {shape(x)}")


def check_step(module: str, x: Tensor, causal: bool) -> None:
    """x (B,n,E)"""
    if not causal:
        raise ValueError(f"{module}: step needs causal=True, got causal=False")
    if x.shape[1] == 0:
        raise ValueError(f"{module}: step needs at least one position, got x {shape(x)}")


def refuse_scripting(self: object) -> NoReturn:
    """Raises. torch.jit.script calls it as __prepare_scriptable__ before it compiles a module."""
    raise NotImplementedError(
        f"{type(self).__name__}: torch.jit.script does not compile it; use torch.export.export, torch.compile or "
        "torch.jit.trace"
    )


def shape(x: Tensor) -> str:
    return "(" + ",".join(map(str, x.shape)) + ")"

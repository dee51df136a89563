"""Checks of the modules' arguments. Errors name the module, the argument, the rule and the value."""

from __future__ import annotations

from torch import Tensor


def check_positive(module: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{module}: {name} must be positive, got {size}")


def check_divides(module: str, divisor: str, part: int, dividend: str, whole: int) -> None:
    if whole % part:
        raise ValueError(f"{module}: {divisor} must divide {dividend} = {whole}, got {part}")


def check_tokens(module: str, x: Tensor, dim: int) -> None:
    """x (B,S,E)"""
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"{module}: x must be (B,S,E) with E = {dim}, got {shape(x)}")


def check_step(module: str, x: Tensor, causal: bool) -> None:
    """x (B,n,E)"""
    if not causal:
        raise ValueError(f"{module}: step needs causal=True, got causal=False")
    if x.shape[1] == 0:
        raise ValueError(f"{module}: step needs at least one position, got x {shape(x)}")


def shape(x: Tensor) -> str:
    return "(" + ",".join(map(str, x.shape)) + ")"

"""The combinator in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.ops.reference.softplus_attention import SMALLEST, softplus


def combinator(x: Tensor, weight: Tensor) -> Tensor:
    """x (...,E), weight (2,E,E) -> y (...,E), with autograd. See memcheck.combinator."""
    return softplus(x @ weight[0].mT) * (x @ weight[1].mT)


def combinator_bounds(grad_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What rounding errors of y (...,E), grad_x (...,E) and grad_weight (2,E,E) are in proportion to.

    The pre-activations a and b are sums of products, whose errors are in proportion to the same sums without signs;
    what follows from them is the derivative of each formula with every factor's absolute value.
    """
    a, b = x @ weight[0].mT, (x @ weight[1].mT).abs()  # (...,E)
    of_a, of_b = x.abs() @ weight[0].abs().mT, x.abs() @ weight[1].abs().mT
    gate, slope = softplus(a).clamp(min=SMALLEST), torch.sigmoid(a).clamp(min=SMALLEST)
    g = grad_y.abs()
    of_y = gate * of_b + slope * b * of_a
    of_da = g * (slope * of_b + slope * (1 - slope) * b * of_a)
    of_db = g * (gate + slope * of_a)
    of_x = of_da @ weight[0].abs() + of_db @ weight[1].abs()
    of_weight = torch.stack([torch.einsum("...i,...j->ij", of_pair, x.abs()) for of_pair in (of_da, of_db)])
    return of_y, of_x, of_weight

"""The combinator in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

from torch import Tensor

from memcheck.ops.reference.softplus_attention import softplus


def combinator(x: Tensor, weight: Tensor) -> Tensor:
    """x (...,E), weight (2,E,E) -> y (...,E), with autograd. See memcheck.combinator."""
    return softplus(x @ weight[0].mT) * (x @ weight[1].mT)

"""The combinator as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memcheck.nn.layers import DeviceLike, Weighted, check_positive
from memcheck.ops.combinator import combinator


class Combinator(Weighted):
    """A gated linear unit without a bottleneck, in place of a position-wise feed-forward layer: x (..,E) -> y (..,E).

    Args:
        dim: E. The weight is (2,E,E), and there is no bias.
        low_memory: keep only x for backward, and recompute the two pre-activations.
        device, dtype: of the weight, as in torch.nn.Linear.

    Raises:
        ValueError: dim is not positive; in the forward, the shapes and devices that memcheck.combinator refuses.

    Equivalent to:
        >>> gate, value = x @ module.weight[0].T, x @ module.weight[1].T
        >>> y = torch.logaddexp(gate, gate.new_zeros(())) * value
    """

    def __init__(
        self, dim: int, low_memory: bool = False, device: DeviceLike = None, dtype: torch.dtype | None = None
    ) -> None:
        check_positive("Combinator", dim=dim)
        super().__init__(2, dim, dim, device=device, dtype=dtype)
        self.dim, self.low_memory = dim, low_memory

    def sizes(self) -> dict[str, int]:
        return {"dim": self.dim}

    def forward(self, x: Tensor) -> Tensor:
        return combinator(x, self.weight, low_memory=self.low_memory)

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

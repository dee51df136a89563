"""The projections of softplus attention as modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memcheck.nn.layers import DeviceLike, Weighted, check_positive
from memcheck.ops.projection import linear_l, linear_r


class Projection(Weighted):
    """From dim to core_dim: weight (E,R)."""

    def __init__(self, dim: int, core_dim: int, device: DeviceLike = None, dtype: torch.dtype | None = None) -> None:
        check_positive(type(self).__name__, dim=dim, core_dim=core_dim)
        super().__init__(*self.weight_shape(dim, core_dim), device=device, dtype=dtype)
        self.dim, self.core_dim = dim, core_dim

    @staticmethod
    def weight_shape(dim: int, core_dim: int) -> tuple[int, int]:
        return dim, core_dim

    def sizes(self) -> dict[str, int]:
        return {"dim": self.dim, "core_dim": self.core_dim}


class QueryProjection(Projection):
    """Token-major queries: x (B,S,E) -> q (B,S,R), with a weight (E,R) and no bias.

    Args:
        dim: E.
        core_dim: R.
        device, dtype: of the weight, as in torch.nn.Linear.

    Raises:
        ValueError: a size that is not positive; in the forward, the shapes and devices that linear_r refuses.

    Equivalent to:
        >>> y = x @ module.weight
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear_r(x, self.weight)

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward


class ChannelMajorProjection(Projection):
    def forward(self, x: Tensor) -> Tensor:
        return linear_l(x, self.weight)

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward


class KeyProjection(ChannelMajorProjection):
    """Channel-major keys: x (B,S,E) -> k (B,R,S), with a weight (E,R) and no bias.

    `dim`, `core_dim`, `device`, `dtype` and errors are as of QueryProjection.

    Equivalent to:
        >>> y = (x @ module.weight).transpose(1, 2).contiguous()
    """


class ValueProjection(ChannelMajorProjection):
    """Channel-major values: x (B,S,E) -> v (B,R,S), with a weight (E,R) and no bias.

    `dim`, `core_dim`, `device`, `dtype` and errors are as of QueryProjection.

    Equivalent to:
        >>> y = (x @ module.weight).transpose(1, 2).contiguous()
    """


class OutProjection(Projection):
    """Back to tokens: x (B,S,R) -> y (B,S,E), with a weight (R,E) and no bias.

    `dim`, `core_dim`, `device`, `dtype` and errors are as of QueryProjection.

    Equivalent to:
        >>> y = x @ module.weight
    """

    @staticmethod
    def weight_shape(dim: int, core_dim: int) -> tuple[int, int]:
        return core_dim, dim

    def forward(self, x: Tensor) -> Tensor:
        return linear_r(x, self.weight)

    if TYPE_CHECKING:  # torch.nn.Module's own returns Any.
        __call__ = forward

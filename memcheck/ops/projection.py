"""Projections of tokens to token-major queries and channel-major keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck._extension import _C  # noqa: F401  (registers torch.ops.memcheck)


def linear_r(x: Tensor, w: Tensor) -> Tensor:
    """Token-major projection: queries, and outputs with the roles of E and R exchanged.

    Args:
        x: (B,S,E) tokens.
        w: (E,R) weight.

    float64, float32, float16, bfloat16; the products are the library's GEMM. A run with the same number of threads
    gives the same bits again; with another number GEMM may sum in another order. Where the gradient of a 16-bit w is a
    sum of several products, it is summed in float32 and rounded once.

    Returns:
        y (B,S,R), contiguous. Kept for backward: x where w needs a gradient (or where x is not contiguous,
        for its strides), w where x does.

    Raises:
        ValueError: a shape or device. TypeError: a dtype.

    Equivalent to:
        >>> y = x @ w
    """
    y: Tensor = torch.ops.memcheck.linear_r(x, w)
    return y


def linear_l(x: Tensor, w: Tensor) -> Tensor:
    """Channel-major projection: keys and values as softplus attention takes them, written in place of a transpose.

    Args:
        x: (B,S,E) tokens.
        w: (E,R) weight.

    Returns:
        y (B,R,S), contiguous. Otherwise as linear_r. The gradient of w is a sum of products, one for each batch entry.

    Equivalent to:
        >>> y = (x @ w).transpose(1, 2).contiguous()
    """
    y: Tensor = torch.ops.memcheck.linear_l(x, w)
    return y

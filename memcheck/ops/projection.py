"""Projections of tokens to token-major queries and channel-major keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memcheck.ops import checks, derivatives

_linear_r = torch.ops.memcheck.linear_r.default
_linear_l = torch.ops.memcheck.linear_l.default


def linear_r(x: Tensor, w: Tensor) -> Tensor:
    """Token-major projection, for queries, and with E and R exchanged for outputs.

    Args:
        x: (B,S,E) tokens.
        w: (E,R) weight.

    float64, float32, float16, bfloat16. The products are the library's GEMM. Results are reproducible to the bit with
    the same number of threads; with another number GEMM may sum in another order. If the gradient of a 16-bit w is a
    sum of several products, it is summed in float32 and rounded once.

    Returns:
        y (B,S,R), contiguous. Kept for backward: x if w needs a gradient, w if x does, and each for its strides if it
        is not contiguous.

    Raises:
        ValueError: a shape or device. TypeError: a dtype.

    Equivalent to:
        >>> y = x @ w
    """
    return _project("linear_r", _linear_r, x, w)


def linear_l(x: Tensor, w: Tensor) -> Tensor:
    """Channel-major projection, for keys and values of softplus attention, without a separate transpose.

    Args:
        x: (B,S,E) tokens.
        w: (E,R) weight.

    Returns:
        y (B,R,S), contiguous. Otherwise as linear_r. The gradient of w is a sum of one product for each batch entry.

    Equivalent to:
        >>> y = (x @ w).transpose(1, 2).contiguous()
    """
    return _project("linear_l", _linear_l, x, w)


def _project(op: str, operator: Any, x: Tensor, w: Tensor) -> Tensor:
    checks.prepare_input(op, "x", x)
    if derivatives.transformed():
        return derivatives.call(op, (x, w))
    try:
        y: Tensor = operator(x, w)
    except checks.REFUSALS:
        checks.explain_refusal(op, x=x, w=w)
        raise
    return y

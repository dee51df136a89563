"""Combinator: a gated linear unit without a bottleneck, in place of the position-wise feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.ops import derivatives
from memcheck.ops.checks import REFUSALS, changed_options, explain_refusal, prepare_input

_forward = torch.ops.memcheck.combinator.default


def combinator(x: Tensor, weight: Tensor, *, low_memory: bool = False) -> Tensor:
    """One projection of the tokens, gated by the softplus of another.

    Args:
        x: (...,E) tokens, any number of leading dimensions.
        weight: (2,E,E), the gate's weight W0 and the value's weight W1.
        low_memory: keep only x and weight for backward, and recompute the pre-activations in chunks of rows. The
            results are the same; on CUDA up to rounding, because a GEMM of fewer rows may sum in another order.

    float64, float32, float16, bfloat16. The products are the library's GEMM in that dtype, except the gradient of a
    16-bit weight, which is summed over the rows in float32 and rounded once. Results are reproducible to the bit with
    the same number of threads; with another number GEMM may sum in another order.

    Returns:
        y (...,E), contiguous. Kept for backward: the pre-activations (...,2E) in the dtype of x (not with
        low_memory), x if weight needs a gradient, weight if x does. Scratch: chunks of at most a sixteenth of x's
        bytes (on CUDA half of them), or 4 MiB if that is more, and a copy of x or of the gradient of y if its leading
        dimensions do not merge. A gradient has its input's strides if these are dense, else it is contiguous.

    Raises:
        ValueError: a shape or device. TypeError: a dtype.

    Equivalent to:
        >>> def softplus(x):
        ...     return torch.logaddexp(x, x.new_zeros(()))
        >>> y = softplus(x @ weight[0].mT) * (x @ weight[1].mT)
    """
    prepare_input("combinator", "x", x)
    if derivatives.transformed():
        return derivatives.call("combinator", (x, weight), low_memory=low_memory)
    try:
        y: Tensor = _forward(x, weight, **changed_options(x, {"low_memory": low_memory}, {"low_memory": False}))[0]
    except REFUSALS:
        explain_refusal("combinator", x=x, weight=weight)
        raise
    return y

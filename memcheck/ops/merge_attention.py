"""Merges attentions of the same queries to different keys, by their lses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memcheck.ops.checks import check_floating, check_like, check_plain, check_rank, described


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Softmax attention over everything that several attentions of the same queries saw, and its lse.

    For example compressed attention merged with attention to a window or to selected blocks. Every key should be seen
    by one of the attentions only, and at most one of them should have a sink.

    Args:
        outputs: y of each attention, (B,H,S,D).
        lses: lse of each, (B,H,S): the natural logarithm of the sum of exp(score) over what a query saw.

    float64, float32, float16, bfloat16; sums are in the accumulation type, float32 (float64 for float64).

    Returns:
        y (B,H,S,D) in the dtype of the outputs, rounded once, and lse (B,H,S) in the accumulation type. Both have
        gradients. An attention with lse = -inf adds nothing, whatever its y; if all have, y = 0 and lse = -inf. Kept
        for backward: the outputs and the lses.

    Raises:
        ValueError: no output, another number of lses, a shape or a device.
        TypeError: a dtype; an input that is no tensor.

    Equivalent to:
        >>> lse = torch.logsumexp(torch.stack(lses), 0)
        >>> y = sum(y * torch.exp(its_lse - lse)[..., None] for y, its_lse in zip(outputs, lses))
    """
    op = "merge_attention"
    for name, given in (("outputs", outputs), ("lses", lses)):
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(f"{op}: {name} must be a sequence of tensors, got {described(given)}")
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"{op}: lses must be as many as outputs, one or more, got {len(lses)} and {len(outputs)}")
    like = outputs[0]
    check_rank(op, "outputs[0]", like, "(B,H,S,D)", 4)
    check_floating(op, "outputs[0]", like)
    accumulation = torch.promote_types(like.dtype, torch.float32)
    for i, (y, lse) in enumerate(zip(outputs, lses, strict=True)):
        for name, x, letters, shape, dtype in (
            (f"outputs[{i}]", y, "(B,H,S,D)", like.shape, like.dtype),
            (f"lses[{i}]", lse, "(B,H,S)", like.shape[:3], accumulation),
        ):
            check_plain(op, name, x)
            if x.shape != shape:
                raise ValueError(
                    f"{op}: {name} must be {letters} = {list(shape)} to match outputs[0], got {list(x.shape)}"
                )
            check_like(op, name, x, dtype, like, "outputs[0]")
    merged: tuple[Tensor, Tensor] = _Merged.apply(len(outputs), *outputs, *lses)
    return merged


class _Merged(torch.autograd.Function):
    """merge_attention. With the weights w_i = exp(lse_i - lse) and g_i = grad_y . y_i,

    grad_y_i = w_i grad_y and grad_lse_i = w_i (g_i - sum of w_j g_j over j + grad_lse).
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        outputs, lses = tensors[:count], tensors[count:]
        lse = torch.stack(lses).logsumexp(0)
        total = torch.zeros_like(outputs[0], dtype=lse.dtype, memory_format=torch.contiguous_format)
        for y, weight in zip(outputs, _weights(lses, lse), strict=True):
            total += _weighted(y, weight)
        ctx.count = count
        ctx.save_for_backward(lse, *tensors)
        ctx.set_materialize_grads(False)
        # torch.compile of torch 2.11 gives no gradient to an output that is also a tensor on the way to it.
        return total.to(outputs[0].dtype, copy=torch.compiler.is_compiling()), lse

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        lse, *tensors = ctx.saved_tensors
        outputs, lses = tensors[: ctx.count], tensors[ctx.count :]
        weights = _weights(lses, lse)
        of_sum = torch.zeros_like(lse) if grad_lse is None else grad_lse
        if grad_y is None:
            return (None, *[None] * ctx.count, *(_weighted(of_sum, weight) for weight in weights))
        wide = grad_y.to(lse.dtype)
        of_weights = [(wide * y).sum(3).masked_fill(weight == 0, 0) for y, weight in zip(outputs, weights, strict=True)]
        of_sum = of_sum - sum(weight * g for weight, g in zip(weights, of_weights, strict=True))
        grad_outputs = [_weighted(grad_y, weight).to(grad_y.dtype) for weight in weights]
        grad_lses = [_weighted(g + of_sum, weight) for weight, g in zip(weights, of_weights, strict=True)]
        return (None, *grad_outputs, *grad_lses)


def _weights(lses: Sequence[Tensor], lse: Tensor) -> list[Tensor]:
    """exp(lse_i - lse), 0 where all are -inf"""
    shift = lse.masked_fill(lse == -torch.inf, 0)
    return [torch.exp(x - shift) for x in lses]


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """x (B,H,S,D) or (B,H,S) times weight (B,H,S), and 0 where the weight is 0, whatever x is"""
    weight = weight[..., None] if x.dim() == 4 else weight
    return (x * weight).masked_fill_(weight == 0, 0)

"""Softplus attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """log(exp(x) + exp(0)), right to the last digit, as is its derivative; F.softplus is 1e-10 off in float64."""
    return torch.logaddexp(x, x.new_zeros(()))


def softplus_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6) -> Tensor:
    """q (B,S,R), k and v (B,R,T) -> y (B,S,R), with autograd. See memcheck.softplus_attention."""
    weights = softplus(k)
    weighted = weights * v
    if causal:
        offset = k.shape[2] - q.shape[1]
        z = weights.cumsum(2)[:, :, offset:].transpose(1, 2)
        a = weighted.cumsum(2)[:, :, offset:].transpose(1, 2)
    else:
        z = weights.sum(2)[:, None]
        a = weighted.sum(2)[:, None]
    return softplus(q) * a / (z + eps)


# float32's smallest normal number. The error of a smaller one is in proportion to this, so bounds have none smaller.
SMALLEST = 2.0**-126


def softplus_attention_bound(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6) -> Tensor:
    """What rounding errors of y are in proportion to: the same formula with |v|. softplus is positive as it is."""
    weights, gate = softplus(k), softplus(q).clamp(min=SMALLEST)
    z, a = _sums(weights, q, causal), _sums(weights.clamp(min=SMALLEST) * v.abs(), q, causal)
    return gate * (a / (z + eps)).transpose(1, 2)


def softplus_attention_gradient_bounds(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the gradients: their formulas with |g|, |v| and every minus a plus.

    grad_y (B,S,R), q, k, v as above -> for grad_q (B,S,R), grad_k and grad_v (B,R,T).
    """
    g, gate = grad_y.abs().transpose(1, 2), q.transpose(1, 2)  # (B,R,S)
    weights, slopes = softplus(k).clamp(min=SMALLEST), torch.sigmoid(k).clamp(min=SMALLEST)  # (B,R,T)
    z, a = _sums(softplus(k), q, causal), _sums(weights * v.abs(), q, causal)
    m = a / (z + eps)
    w = g * softplus(gate).clamp(min=SMALLEST) / (z + eps)
    later_w, later_wm = _later_sums(w, k, causal), _later_sums(w * m, k, causal)
    grad_q = g * m * torch.sigmoid(gate).clamp(min=SMALLEST)
    return grad_q.transpose(1, 2), slopes * (v.abs() * later_w + later_wm), weights * later_w


def _sums(x: Tensor, q: Tensor, causal: bool) -> Tensor:
    """(B,R,T) -> (B,R,S) or (B,R,1): over the keys that each query sees."""
    if not causal:
        return x.sum(2, keepdim=True)
    return x.cumsum(2)[:, :, x.shape[2] - q.shape[1] :]


def _later_sums(x: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(B,R,S) -> (B,R,T) or (B,R,1): over the queries that see each key."""
    if not causal:
        return x.sum(2, keepdim=True)
    # A key before the first query is seen by all of them.
    return torch.nn.functional.pad(x, (k.shape[2] - x.shape[2], 0)).flip(2).cumsum(2).flip(2)

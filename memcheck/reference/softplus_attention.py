"""Softplus attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), right to the last digit: F.softplus turns into the identity above 20, which is 1e-10 off in float64."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


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


def softplus_attention_bound(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6) -> Tensor:
    """The same formula with |v|: rounding errors of y are in proportion to it. softplus is positive, so q and k stay."""
    return softplus_attention(q, k, v.abs(), causal=causal, eps=eps)


def softplus_attention_gradient_bounds(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas of the gradients with |g|, |v| and every minus a plus: rounding errors are in proportion to them.

    grad_y (B,S,R), q, k, v as above -> bounds of grad_q (B,S,R), grad_k, grad_v (B,R,T).
    """
    weights, offset = softplus(k), k.shape[2] - q.shape[1]
    z, a = weights, weights * v.abs()  # (B,R,T)
    if causal:
        z, a = z.cumsum(2)[:, :, offset:], a.cumsum(2)[:, :, offset:]  # (B,R,S)
    else:
        z, a = z.sum(2, keepdim=True), a.sum(2, keepdim=True)  # (B,R,1)
    g, gate = grad_y.abs().transpose(1, 2), q.transpose(1, 2)  # (B,R,S)
    w = g * softplus(gate) / (z + eps)
    wm = w * a / (z + eps)
    if causal:
        # A key before the first query is seen by all of them.
        w, wm = (torch.nn.functional.pad(x, (offset, 0)).flip(2).cumsum(2).flip(2) for x in (w, wm))
    else:
        w, wm = w.sum(2, keepdim=True), wm.sum(2, keepdim=True)
    grad_q = (g * a / (z + eps) * torch.sigmoid(gate)).transpose(1, 2)
    return grad_q, torch.sigmoid(k) * (v.abs() * w + wm), weights * w

"""Softplus attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memcheck.ops.reference.sequences import sequences_of


def softplus(x: Tensor) -> Tensor:
    """log(exp(x) + exp(0)), right to the last digit, as is its derivative; F.softplus is 1e-10 off in float64."""
    return torch.logaddexp(x, x.new_zeros(()))


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    eps: float = 1e-6,
    initial_state: tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
    **sequences: Any,
) -> Any:
    """q (B,S,R), k and v (B,R,T) -> y (B,S,R), or (y, (Z, A)), with autograd. See memcheck.softplus_attention."""
    if not sequences:
        y, state = attend(q, k, v, causal, eps, initial_state)
        return (y, state) if return_state else y
    y, states = torch.zeros_like(q), []
    for n, (row, queries, keys) in enumerate(sequences_of(len(q), q.shape[1], k.shape[2], causal=causal, **sequences)):
        before = None if initial_state is None else (initial_state[0][n : n + 1], initial_state[1][n : n + 1])
        y[row, queries], after = attend(q[row, queries], k[row, :, keys], v[row, :, keys], causal, eps, before)
        states.append(after)
    return (y, tuple(torch.cat(x) for x in zip(*states, strict=True))) if return_state else y


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    eps: float,
    state: Sequence[Tensor] | None,
    softplus: Callable[[Tensor], Tensor] = softplus,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """y and the state after, within one sequence, or a batch of sequences of one length."""
    weights = softplus(k)
    weighted = weights * v
    z_before, a_before = (0, 0) if state is None else (x[:, None] for x in state)
    if causal:
        offset = k.shape[2] - q.shape[1]
        z = z_before + weights.cumsum(2)[:, :, offset:].transpose(1, 2)
        a = a_before + weighted.cumsum(2)[:, :, offset:].transpose(1, 2)
    else:
        z = z_before + weights.sum(2)[:, None]
        a = a_before + weighted.sum(2)[:, None]
    after = weights.sum(2), weighted.sum(2)
    if state is not None:
        after = after[0] + state[0], after[1] + state[1]
    return softplus(q) * a / (z + eps), after

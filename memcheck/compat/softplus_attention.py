"""The names that client code imports from `bluewalm.softplus_attention`: memcheck.nn's modules, by default on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck import nn
from memcheck.nn import heuristic_core_dim
from memcheck.nn.layers import DeviceLike, Weighted
from memcheck.ops.softplus_attention import softplus_attention

__all__ = [
    "Combinator",
    "KeyProjection",
    "OutProjection",
    "QueryProjection",
    "ValueProjection",
    "attention_operator",
    "heuristic_core_dim",
]


def attention_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softplus attention: q (B,S,R), k and v (B,R,T) with S <= T, y (B,S,R)."""
    return softplus_attention(q, k, v)


class DefaultDeviceModule(Weighted):
    """With device=None the weight is on the current CUDA device, else on the CPU, or on torch's default device."""

    def __init__(self, *shape: int, device: DeviceLike, dtype: torch.dtype | None) -> None:
        if device is None and torch.get_default_device().type == "cpu" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(*shape, device=device, dtype=dtype)


# `DefaultDeviceModule` stands between each module and Weighted in the method resolution order.
class QueryProjection(nn.QueryProjection, DefaultDeviceModule):
    """QueryProjection(dim, core_dim, device=None, dtype=None): x (B,S,E) -> q (B,S,R)"""


class KeyProjection(nn.KeyProjection, DefaultDeviceModule):
    """KeyProjection(dim, core_dim, device=None, dtype=None): x (B,S,E) -> k (B,R,S)"""


class ValueProjection(nn.ValueProjection, DefaultDeviceModule):
    """ValueProjection(dim, core_dim, device=None, dtype=None): x (B,S,E) -> v (B,R,S)"""


class OutProjection(nn.OutProjection, DefaultDeviceModule):
    """OutProjection(dim, core_dim, device=None, dtype=None): x (B,S,R) -> y (B,S,E)"""


class Combinator(nn.Combinator, DefaultDeviceModule):
    """Combinator(dim, low_memory=False, device=None, dtype=None): x (..,E) -> y (..,E)"""

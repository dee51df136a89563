"""The operators `torch.ops.bluewalm_extension`, composed of ours, from which they inherit autograd and autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.ops.combinator import combinator
from memcheck.ops.projection import linear_l, linear_r


def check_weight(op: str, w: Tensor, names: str, sizes: tuple[int, ...]) -> None:
    if tuple(w.shape) != sizes:
        expected, given = (",".join(map(str, shape)) for shape in (sizes, w.shape))
        raise ValueError(f"{op}: w must be {names} = ({expected}), got ({given})")


def linear_operator_r(w: Tensor, x: Tensor, dim: int, core_dim: int) -> Tensor:
    """x (B,S,dim) -> (B,S,core_dim), w (dim,core_dim)"""
    check_weight("linear_operator_r", w, "(dim,core_dim)", (dim, core_dim))
    return linear_r(x, w)


def linear_operator_l(w: Tensor, x: Tensor, dim: int, core_dim: int) -> Tensor:
    """x (B,S,dim) -> (B,core_dim,S), w (dim,core_dim)"""
    check_weight("linear_operator_l", w, "(dim,core_dim)", (dim, core_dim))
    return linear_l(x, w)


def combinator_operator(w: Tensor, x: Tensor, dim: int, low_memory: bool) -> Tensor:
    """x (..,dim) -> (..,dim), w (2,dim,dim)"""
    check_weight("combinator_operator", w, "(2,dim,dim)", (2, dim, dim))
    return combinator(x, w, low_memory=low_memory)


# The registration lasts as long as this object.
LIBRARY = torch.library.Library("bluewalm_extension", "FRAGMENT")
for function, arguments in (
    (linear_operator_r, "Tensor w, Tensor x, SymInt dim, SymInt core_dim"),
    (linear_operator_l, "Tensor w, Tensor x, SymInt dim, SymInt core_dim"),
    (combinator_operator, "Tensor w, Tensor x, SymInt dim, bool low_memory"),
):
    LIBRARY.define(f"{function.__name__}({arguments}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")

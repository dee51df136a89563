"""Gradient checks as clients of the closed bluewalm module write them, on the module's default device."""

import bluewalm
import torch
from torch.autograd.gradcheck import gradcheck

DEVICE = bluewalm.softplus_attention.Combinator(8).weight.device


def leaf(*shape):
    x = torch.zeros(shape, device=DEVICE).uniform_(-1.0, 1.0).double()
    x.requires_grad = True
    return x


def check_attention():
    attention_operator = bluewalm.softplus_attention.attention_operator
    return gradcheck(lambda q, k, v: attention_operator(q, k, v), (leaf(2, 4, 3), leaf(2, 3, 9), leaf(2, 3, 9)))


def check_linear_r():
    w = bluewalm.softplus_attention.QueryProjection(8, 4).weight.double()
    return gradcheck(lambda w, x: torch.ops.bluewalm_extension.linear_operator_r(w, x, 8, 4), (w, leaf(2, 3, 8)))


def check_linear_l():
    w = bluewalm.softplus_attention.KeyProjection(8, 4).weight.double()
    return gradcheck(lambda w, x: torch.ops.bluewalm_extension.linear_operator_l(w, x, 8, 4), (w, leaf(2, 3, 8)))


def check_combinator(low_memory):
    w = bluewalm.softplus_attention.Combinator(8).weight.double()
    operator = torch.ops.bluewalm_extension.combinator_operator
    return gradcheck(lambda w, x: operator(w, x, 8, low_memory), (w, leaf(2, 3, 8)))


def main():
    for check in (check_attention, check_linear_r, check_linear_l):
        print(check.__name__, check())
    for low_memory in (True, False):
        print("check_combinator", low_memory, check_combinator(low_memory))


if __name__ == "__main__":
    main()

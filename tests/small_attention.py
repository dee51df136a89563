"""An attention small enough to count its bytes by hand."""

import torch

N = 2 * 3 * 17 * 5 * 4  # bytes of a query, (B, H, N, D) = (2, 3, 17, 5), float32
S = 2 * 3 * 17 * 17 * 4  # bytes of its scores, (B, H, N, N)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def heads():
    return leaf(2, 3, 17, 5), leaf(2, 3, 17, 5), leaf(2, 3, 17, 5)


def naive_attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

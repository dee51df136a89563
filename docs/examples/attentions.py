"""Two implementations of attention, to be compared by `memcheck profile-attention --plugin`."""

import torch

from memcheck.bench.catalog import register


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def scaled_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scales the queries, which are smaller than the scores."""
    return (q / q.shape[-1] ** 0.5 @ k.mT).softmax(-1) @ v


register("mine/plain", plain)
register("mine/scaled-first", scaled_first)

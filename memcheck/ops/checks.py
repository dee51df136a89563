"""Checks that come before the dispatcher, which would refuse an argument without a name, or find nothing wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PLAIN_ATTENTION = torch._C._nn.scaled_dot_product_attention
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"


def check_rank(op: str, name: str, x: Tensor, letters: str, dimensions: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {described(x)}")
    if x.dim() != dimensions:
        raise ValueError(f"{op}: {name} must be {letters}, of {dimensions} dimensions, got {list(x.shape)}")


def check_state(op: str, state: object, names: tuple[str, str]) -> None:
    """Two tensors. Their shapes, dtypes and devices are checked by the operator."""
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(f"{op}: state must be a pair of tensors ({', '.join(names)}) or None, got {described(state)}")
    for name, x in zip(names, state, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {described(x)}")


def described(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of length {len(x)}"
    return repr(x)


def refuse_context_parallel(op: str) -> None:
    """Raises inside torch.distributed's context_parallel, which shards sequences over processes.

    It replaces F.scaled_dot_product_attention by a function of its own module, which exchanges keys between processes.
    Every other attention gets the keys of its own process alone, and would be wrong without an error.
    """
    attention = functional.scaled_dot_product_attention
    if attention is not PLAIN_ATTENTION and attention.__module__.startswith(CONTEXT_PARALLEL):
        raise NotImplementedError(
            f"{op}: attends only within the local shard of a sequence that context_parallel has split; "
            "call it outside of context_parallel, on the whole sequence"
        )

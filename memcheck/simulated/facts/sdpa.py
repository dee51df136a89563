"""Which backend F.scaled_dot_product_attention chooses on a GPU.

The conditions are those of sdp_utils.cpp and sdp_utils_cpp.cpp in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memcheck.core.devices import CUDNN_FIRST
from memcheck.simulated.scratch import Target


@dataclass(frozen=True)
class Attention:
    """One call, on meta tensors: q (B,H,S,D), k and v (B,H,T,D), or of other ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    dropout: float
    grouped: bool = False  # Keys and values may have fewer heads than queries.

    @property
    def trains(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]


def takes(name: str, call: Attention, target: Target) -> bool:
    """Whether the backend is enabled and accepts the call."""
    is_enabled, accepts = BACKENDS[name]
    return is_enabled() and accepts(call, target)


def cuda_order(target: Target) -> tuple[str, ...]:
    """Backends in order of preference."""
    fused = ("flash", "efficient")
    major = target.architecture[0] if target.architecture else 0
    prefers_cudnn = major in (9, 10) and target.has(CUDNN_FIRST)
    return ("cudnn", *fused, "math") if prefers_cudnn else (*fused, "math", "cudnn")


def is_dense(call: Attention) -> bool:
    """Whether the inputs have four non-empty dimensions, the last of which is contiguous."""
    tensors = (call.q, call.k, call.v)
    return all(x.dim() == 4 and x.numel() and x.stride(-1) in (1, x.shape[-1]) for x in tensors)


def has_fitting_heads(call: Attention, takes_groups: bool) -> bool:
    """Whether a fused kernel of CUDA takes these numbers of sequences and heads."""
    (batch, heads), (_, kv_heads) = call.q.shape[:2], call.k.shape[:2]
    if call.v.shape[:2] != call.k.shape[:2] or call.k.shape[0] != batch:
        return False
    return heads == kv_heads or (takes_groups and call.grouped and heads % kv_heads == 0)


def flash_takes(call: Attention, target: Target) -> bool:
    architecture = target.architecture or (8, 0)
    wide_in_training = architecture in ((8, 6), (8, 9), (12, 0), (12, 1)) and call.trains and 192 < call.head_dim <= 224
    square = call.q.shape[-2] == call.k.shape[-2] or not call.causal
    return (
        is_dense(call)
        and has_fitting_heads(call, takes_groups=True)
        and call.mask is None
        and is_half(call, target)
        and architecture >= (8, 0)
        and call.head_dim <= 256
        and not wide_in_training
        and square
    )


def efficient_takes(call: Attention, target: Target) -> bool:
    architecture = target.architecture or (8, 0)
    half = call.q.dtype in (torch.float16, torch.bfloat16)
    alignment = 8 if half and architecture >= (7, 0) else 4 if architecture >= (8, 0) else 1
    wanted = is_half(call, target) or call.q.dtype == torch.float32
    return is_dense(call) and has_fitting_heads(call, False) and wanted and call.head_dim % alignment == 0


def cudnn_takes(call: Attention, target: Target) -> bool:
    architecture = target.architecture or (8, 0)
    fits = call.head_dim <= 128 and call.head_dim % 8 == 0 and call.k.shape[-2] != 1
    fits = fits and is_dense(call) and has_fitting_heads(call, takes_groups=True)
    return fits and is_half(call, target) and architecture >= (8, 0)


def is_half(call: Attention, target: Target) -> bool:
    ampere = (target.architecture or (8, 0)) >= (8, 0)
    return call.q.dtype == torch.float16 or (ampere and call.q.dtype == torch.bfloat16)


# Whether a backend is switched on, and whether it accepts a call.
BACKENDS: dict[str, tuple[Callable[[], bool], Callable[[Attention, Target], bool]]] = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, flash_takes),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, efficient_takes),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, cudnn_takes),
    "math": (torch.backends.cuda.math_sdp_enabled, lambda call, target: True),
}

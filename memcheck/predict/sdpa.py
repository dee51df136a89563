"""F.scaled_dot_product_attention as a target would run it: the choice of the backend, and the backend's operators.

On meta tensors torch always runs the math backend. The conditions here are those of sdp_utils.cpp and sdp_utils_cpp.cpp
in torch 2.13.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memcheck.core.devices import ATTENTION_OF_THREE_DIMENSIONS, CUDNN_FIRST
from memcheck.predict.scratch import Target

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

aten = torch.ops.aten


@dataclass(frozen=True)
class Attention:
    """One call, on meta tensors: q (B,H,S,D), k and v (B,H,T,D), or of other ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    dropout: float
    scale: float | None
    lower_right: bool = False  # Causal with the last query aligned to the last key, as CausalBias can be.
    grouped: bool = False  # Keys and values may have fewer heads than queries.

    @property
    def trains(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]


@dataclass(frozen=True)
class Backend:
    """A backend: whether it is switched on, whether it accepts a call, and its operators."""

    is_enabled: Callable[[], bool]
    takes: Callable[[Attention, Target], bool]
    run: Callable[[Attention], Any]


def attention(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | CausalBias | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs the operators that torch's function would run on the target, in the target's torch version."""
    mask, bias = attn_mask, causal_bias(attn_mask)
    if bias is not None:
        square = bias.seq_len_q == bias.seq_len_kv or bias.variant.name == "UPPER_LEFT"
        mask, bias, is_causal = None, None if square else bias, square
    call = Attention(query, key, value, mask, is_causal, dropout_p, scale, bias is not None, enable_gqa)
    if bias is not None:
        # The first that accepts the call without an explicit mask.
        backend = first_taking(call, target, () if target.kind == "cpu" else ("flash", "efficient"))
        if backend is not None:
            y: Tensor = backend.run(call)
            return y
        call = dataclasses.replace(call, mask=bias._materialize(query.device), lower_right=False)
    if not (target.has(ATTENTION_OF_THREE_DIMENSIONS) and all(x.dim() == 3 for x in (query, key, value))):
        return dispatched(call, target)
    q, k, v = (x.unsqueeze(0) for x in (query, key, value))
    while call.mask is not None and call.mask.dim() < 4:
        call = dataclasses.replace(call, mask=call.mask.unsqueeze(0))
    return dispatched(dataclasses.replace(call, q=q, k=k, v=v), target).squeeze(0)


def dispatched(call: Attention, target: Target) -> Tensor:
    """Calls the first enabled backend of the target that accepts the call."""
    order = ("flash (cpu)", "math") if target.kind == "cpu" else cuda_order(target)
    if (backend := first_taking(call, target, order)) is not None:
        y: Tensor = backend.run(call)
        return y
    on_cpu = target.kind == "cpu"
    error = "No viable backend for scaled_dot_product_attention was found" if on_cpu else "No available kernel"
    raise RuntimeError(f"{error}: of {', '.join(order)}, those that are switched on do not take it")


def causal_bias(mask: Tensor | None) -> CausalBias | None:
    """The mask, if it is one of torch's bias classes."""
    # An import would load all of torch.compile. Without it nobody can have made such a mask.
    module = sys.modules.get("torch.nn.attention.bias")
    return mask if module is not None and isinstance(mask, module.CausalBias) else None


def first_taking(call: Attention, target: Target, names: tuple[str, ...]) -> Backend | None:
    """The first enabled backend of these that accepts the call."""
    return next((BACKENDS[name] for name in names if takes(name, call, target)), None)


def takes(name: str, call: Attention, target: Target) -> bool:
    """Whether the backend is enabled and accepts the call."""
    return BACKENDS[name].is_enabled() and BACKENDS[name].takes(call, target)


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


def cpu_flash_takes(call: Attention, target: Target) -> bool:
    alike = len({x.shape[-1] for x in (call.q, call.k, call.v)}) == 1
    mask = call.mask
    plain = mask is None or (mask.dim() in (2, 4) and not (mask.requires_grad and torch.is_grad_enabled()))
    return is_dense(call) and alike and plain and call.dropout == 0


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


def additive(call: Attention) -> Tensor | None:
    """The mask as an additive one. The numbers that a boolean mask is converted with are CPU tensors."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    hidden = torch.scalar_tensor(-torch.inf, dtype=call.q.dtype, device=call.q.device)
    return torch.where(call.mask, 0.0, hidden)


def math_attention(call: Attention) -> Tensor:
    """The math backend, called directly so that the choice of the running torch does not matter."""
    operator = aten._scaled_dot_product_attention_math
    more = {"scale": call.scale, "enable_gqa": call.grouped}
    y: Tensor = operator(call.q, call.k, call.v, additive(call), call.dropout, call.causal, **more)[0]
    return y


def cpu_flash(call: Attention) -> Any:
    operator = aten._scaled_dot_product_flash_attention_for_cpu
    return operator(call.q, call.k, call.v, call.dropout, call.causal, attn_mask=additive(call), scale=call.scale)[0]


def flash(call: Attention) -> Any:
    """Heads are padded to multiples of 8."""
    missing = -call.head_dim % 8
    q, k, v = (pad(x, (0, missing)) if missing else x for x in (call.q, call.k, call.v))
    causal = call.causal or call.lower_right
    y = aten._scaled_dot_product_flash_attention(q, k, v, call.dropout, causal, False, scale=call.scale)[0]
    return y[..., : call.head_dim] if missing else y


def efficient(call: Attention) -> Any:
    if call.lower_right:
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        more = {"custom_mask_type": 2, "compute_log_sumexp": call.trains, "scale": call.scale}
        y = aten._efficient_attention_forward(q, k, v, None, None, None, None, None, call.dropout, **more)[0]
        return y.transpose(1, 2)
    operator = aten._scaled_dot_product_efficient_attention
    more = {"is_causal": call.causal, "scale": call.scale}
    return operator(call.q, call.k, call.v, padded(additive(call), call), call.trains, call.dropout, **more)[0]


def padded(mask: Tensor | None, call: Attention) -> Tensor | None:
    """The mask, with rows padded to multiples of 16 elements, and expanded."""
    if mask is None:
        return None
    missing = -mask.shape[-1] % 16
    wide = pad(mask, (0, missing))[..., : mask.shape[-1]] if missing else mask
    return wide.expand(*call.q.shape[:3], call.k.shape[2])


def cudnn(call: Attention) -> Any:
    operator = aten._scaled_dot_product_cudnn_attention
    more = {"scale": call.scale}
    return operator(call.q, call.k, call.v, additive(call), call.trains, call.dropout, call.causal, False, **more)[0]


BACKENDS = {
    "flash (cpu)": Backend(torch.backends.cuda.flash_sdp_enabled, cpu_flash_takes, cpu_flash),
    "flash": Backend(torch.backends.cuda.flash_sdp_enabled, flash_takes, flash),
    "efficient": Backend(torch.backends.cuda.mem_efficient_sdp_enabled, efficient_takes, efficient),
    "cudnn": Backend(torch.backends.cuda.cudnn_sdp_enabled, cudnn_takes, cudnn),
    "math": Backend(torch.backends.cuda.math_sdp_enabled, lambda call, target: True, math_attention),
}

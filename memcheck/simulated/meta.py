"""Kernels for meta tensors that torch lacks, or that give other results than CUDA's kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

KERNELS: dict[str, Callable[..., Any]] = {}
LIBRARIES: list[torch.library.Library] = []  # As long as torch: a library that ends takes its kernels with it.


def on_meta(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the kernel of operators for meta tensors."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS.update(dict.fromkeys(names, function))
        return function

    return add


@on_meta("log_sigmoid_forward")
def log_sigmoid_forward(x: Any) -> tuple[Any, Any]:
    """CUDA keeps no buffer: log_sigmoid_forward_out_cuda of cuda/Activation.cpp."""
    return torch.empty_like(x), x.new_empty(0)


@on_meta("_thnn_fused_gru_cell")
def gru_cell(_igates: Any, _hgates: Any, hx: Any, _b_ih: Any = None, _b_hh: Any = None) -> tuple[Any, Any]:
    """cuda/RNN.cu: the workspace has 5 numbers for each of the state."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


@on_meta("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    batch, hidden = grad.shape
    gates = [workspace.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden if has_bias else 0) for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


@on_meta("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def gradient_like_input(_grad: Any, x: Any, *_: Any, **__: Any) -> Any:
    return torch.empty_like(x)


@on_meta("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor")
def without_cudnn(*_: Any) -> bool:
    return False


@on_meta("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(_grad: Any, log_probs: Any, *_: Any, **__: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@on_meta("_fused_sgd_", "_fused_adagrad_", "_fused_sgd_.tensor_lr", "_fused_adagrad_.tensor_lr")
@on_meta("_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr", "_cummax_helper", "_cummin_helper")
def writes_only(*_: Any, **__: Any) -> None:
    """Writes to its operands alone."""


# torch 2.11 lacks the first.
@on_meta("_standard_gamma", "_standard_gamma_grad", "_sample_dirichlet")
@on_meta("_dirichlet_grad", "_logcumsumexp", "binomial")
def like_first(x: Any, *_: Any, **__: Any) -> Any:
    return torch.empty_like(x)


@on_meta("cudnn_convolution")
def cudnn_convolution(
    x: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any, **__: Any
) -> Any:
    no = [0] * len(padding)
    return torch.ops.aten.convolution.default(x, weight, None, stride, padding, dilation, False, no, groups)


@on_meta("_cudnn_rnn_backward")
def cudnn_rnn_backward(
    x: Any, weight: Any, _stride: int, _buffer: Any, hx: Any, cx: Any, *more: Any
) -> tuple[Any, ...]:
    """The gradients of all weights are parts of one buffer: _cudnn_rnn_backward_weight of cudnn/RNN.cpp."""
    wanted = weight if more[-1][3] else ()
    buffer = torch.empty(sum(w.numel() for w in wanted), dtype=x.dtype, device="meta")
    gradients, offset = [], 0
    for w in wanted:
        gradients.append(torch.as_strided(buffer, w.shape, w.stride(), offset))
        offset += w.numel()
    return torch.empty_like(x), torch.empty_like(hx), None if cx is None else torch.empty_like(cx), gradients


@on_meta("_cudnn_init_dropout_state")
def dropout_state(_dropout: float, _train: bool, _seed: int, **_: Any) -> Any:
    """cudnnDropoutGetStatesSize: 48 bytes for each of 36,864 threads."""
    return torch.empty(442368 * 4, dtype=torch.uint8, device="meta")


@on_meta("_grouped_mm")
def grouped_product(left: Any, right: Any, offs: Any = None, *_: Any, **__: Any) -> Any:
    """Of any dtype, as CUDA multiplies matrix by matrix where the kernel for meta tensors refuses.

    Groups are the first dimension of an operand with three, else the parts of a common one that offsets (G) end.
    """
    sizes = (left.shape[-2], right.shape[-1])
    if left.dim() != right.dim():
        return left.new_empty(sizes)
    groups = len(left) if left.dim() == 3 or offs is None else len(offs)
    return left.new_empty((groups, *sizes))


def statistics(x: Any) -> Any:
    """A number for each channel: as the input, and float32 for 16 bits."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty(x.shape[1], dtype=dtype, device="meta")


# Of SyncBatchNorm: cuda/Normalization.cu.
@on_meta("batch_norm_stats")
def batch_norm_stats(x: Any, _eps: float) -> tuple[Any, Any]:
    return statistics(x), statistics(x)


@on_meta("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats(x: Any, *_: Any) -> tuple[Any, Any]:
    return statistics(x), statistics(x)


@on_meta("batch_norm_elemt")
def batch_norm_elemt(x: Any, *_: Any) -> Any:
    return torch.empty_like(x)


@on_meta("batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    _grad: Any, x: Any, mean: Any, _invstd: Any, weight: Any, of_input: bool, of_weight: bool, of_bias: bool
) -> tuple[Any, ...]:
    sums = [torch.empty_like(mean) if of_input else None for _ in range(2)]
    like = mean if weight is None else weight
    return *sums, *(like.new_empty(x.shape[1]) if wanted else None for wanted in (of_weight, of_bias))


@on_meta("batch_norm_backward_elemt")
def batch_norm_backward_elemt(_grad: Any, x: Any, *_: Any) -> Any:
    return torch.empty_like(x)


def register() -> None:
    """Registers the kernels with torch."""
    library = torch.library.Library("aten", "IMPL")
    LIBRARIES.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some replace kernels of torch, as they shall.
        for name, kernel in KERNELS.items():
            own, _, overload = name.partition(".")
            if torch._C._dispatch_has_kernel(f"aten::{name}") and hasattr(
                getattr(torch.ops.aten, own), overload or "default"
            ):
                library.impl(name, kernel, "Meta", allow_override=True)

"""Normalization over groups and batches, pooling and resampling on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memcheck.predict.operators.convolutions import suggests_channels_last
from memcheck.predict.operators.facts import Facts, add, doubt, nothing
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown


def group_norm(call: OperatorCall) -> Iterator[Scratch]:
    """Factor and summand of each channel; 16 bits also have mean and rstd in float32: GroupNormKernelImplInternal."""
    x, wide = call.input, torch.promote_types(call.input.dtype, torch.float32).itemsize
    if x.dtype.itemsize < 4:
        yield Scratch("mean and rstd in float32", 2 * call.N * call.group * wide)
    if call.HxW != 1 and (call.weight is not None or call.bias is not None):
        yield Scratch("factor and summand of each channel", 2 * call.N * call.C * wide)


def group_norm_backward(call: OperatorCall) -> Iterator[Scratch]:
    """ds, db and c1 (N,C), c2 and c3 (N,G): GroupNormBackwardKernelImplInternal, GroupNorm1dBackward."""
    wide = torch.promote_types(call.input.dtype, torch.float32).itemsize
    if call.HxW != 1:
        yield Scratch("ds and db", 2 * call.N * call.C * wide)
    if call.output_mask[0]:
        yield Scratch("c2 and c3", 2 * call.N * call.group * wide)
        if call.HxW != 1 and call.weight is not None:
            yield Scratch("c1", call.N * call.C * wide)


def copies_in_one_format(call: OperatorCall) -> Iterator[Scratch]:
    """Operands are copied unless they are contiguous in the memory format that the input has."""
    x: Tensor = call.arguments["input" if "input" in call.arguments else "self"]
    like = torch.contiguous_format
    if suggests_channels_last(x):
        like = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    for name in ("input", "self", "grad_out", "grad_output", "indices"):
        operand = call.arguments.get(name)
        if isinstance(operand, Tensor) and not operand.is_contiguous(memory_format=like):
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)


def gradient_in_its_format(call: OperatorCall) -> Iterator[Scratch]:
    """The gradient of the output is copied unless it is contiguous in its own memory format."""
    if not (call.grad_output.is_contiguous() or suggests_channels_last(call.grad_output)):
        yield Scratch("grad output, laid out", call.grad_output.nbytes, first=True)


def batch_norm(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """cuDNN normalizes what has a weight and a bias, in training: _batch_norm_impl_index.

    What it takes in channels_first is too little to be seen in nvidia-smi's figures of timm's models.
    """
    yield from copies_in_one_format(call)
    if call.arguments.get("training", call.arguments.get("train")) and call.weight is not None:
        yield Unknown("the reserve and the workspace of cuDNN's batch norm")
    elif suggests_channels_last(call.input):
        yield Unknown("the partial sums of batch norm in channels_last")


GROUP: Facts = {"source": "group_norm.cpp cuda/group_norm_kernel.cu"}
GROUPS = "F.group_norm(batch, 1, batch.new_ones(batch.shape[1]))"
add("native_group_norm", GROUPS, cuda=group_norm, **GROUP)
add("native_group_norm_backward", GROUPS, cuda=group_norm_backward, **GROUP)
BATCH: Facts = {"cuda": batch_norm, "source": "Normalization.cpp cuda/Normalization.cu cudnn/BatchNorm.cpp"}
add("native_batch_norm native_batch_norm_backward", "F.batch_norm(batch, None, None, training=True)", **BATCH)

POOLING: Facts = {"cuda": copies_in_one_format}
MAXIMA = "F.max_pool2d(batch[None], 2)"
add("max_pool2d_with_indices max_pool2d_with_indices_backward", MAXIMA, source="cuda/DilatedMaxPool2d.cu", **POOLING)
add("avg_pool2d avg_pool2d_backward", "F.avg_pool2d(batch[None], 2)", source="cuda/AveragePool2d.cu", **POOLING)
ADAPTIVE = "F.adaptive_avg_pool2d(batch[None], 3)"
ADAPTIVE_SOURCE = "cuda/AdaptiveAveragePooling.cu"
add("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward", ADAPTIVE, source=ADAPTIVE_SOURCE, **POOLING)

unread = doubt(
    Unknown("whether {} copies what is not contiguous"),
    lambda call: not call.arguments["grad_output" if "grad_output" in call.arguments else "self"].is_contiguous(),
)
RESAMPLED = {"nearest": "UpSampleNearest2d.cu", "bicubic": "UpSampleBicubic2d.cu"}
for kind, source in RESAMPLED.items():
    names = f"upsample_{kind}2d upsample_{kind}2d_backward"
    add(names, f"F.interpolate(batch[None], scale_factor=2, mode='{kind}')", cuda=unread, source=f"cuda/{source}")
BILINEAR = "ops.upsample_bilinear2d(batch[None], [6, 6], False)"
RESAMPLING: Facts = {"source": "cuda/UpSampleBilinear2d.cu"}
add("upsample_bilinear2d", BILINEAR, cuda=nothing, **RESAMPLING)
add("upsample_bilinear2d_backward", BILINEAR, cuda=gradient_in_its_format, **RESAMPLING)
PADS = "reflection_pad2d reflection_pad2d_backward"
add(PADS, "F.pad(batch[None], (1, 1, 1, 1), mode='reflect')", cuda=unread, source="cuda/ReflectionPad.cu")
PRELU = "_prelu_kernel _prelu_kernel_backward"
add(PRELU, "F.prelu(batch, x.new_ones(1))", cuda=nothing, source="cuda/ActivationPreluKernel.cu")

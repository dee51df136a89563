"""Convolutions on CUDA: copies that are read in sources, and an estimate of what cuDNN's algorithms need.

How many bytes an algorithm needs is known to cuDNN alone, and which one it takes depends on a search or on heuristics.
The estimates are learned, not read: they are what fits nvidia-smi's figures of 260 models of timm that trained in
float32 on an A100 (benchmarks/published/timm.py), and were compared with as many others. Both halves are 1.3 % off at
the median. Nothing was learned about other types, GPUs and dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memcheck.predict.operators.facts import Facts, add
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

LEARNED = Unknown("what cuDNN's algorithms need in convolutions, of which an estimate is included")


@dataclass(frozen=True)
class Need:
    """The workspace of an algorithm, in multiples of the bytes of the convolution's input and output."""

    inputs: float = 0
    outputs: float = 0


NOTHING = Need()
# As if tensors were laid out anew once, or transformed to twice as much.
ONCE, TWICE, INPUTS_TWICE = Need(1, 1), Need(2, 2), Need(inputs=2)


def needed(call: OperatorCall) -> Need:
    """The workspace that was learned. None was seen in groups, kernels of one point and channels_last."""
    size, is_forward = tuple(call.weight.shape[-2:]), call.name == "aten::convolution"
    if call.groups > 1 or size == (1, 1) or is_channels_last(call):
        return NOTHING
    if call.input.shape[1] <= 4:  # An image.
        return TWICE if not is_forward and size[0] >= 7 and max(call.stride) == 2 else NOTHING
    if max(call.stride) > 1:
        return INPUTS_TWICE
    if size != (3, 3):
        return NOTHING
    return ONCE if is_forward else TWICE


def convolution(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Operands are laid out as cuDNN reads them, and its algorithm has a workspace.

    Depthwise convolutions of 32 bits in channels_first run in a kernel of torch's own: use_cudnn_depthwise.
    """
    x, w, y = call.input, call.weight, call.arguments.get("grad_output", call.outputs[0])
    if 0 in (x.numel(), w.numel(), y.numel()):
        return
    yield from laid_out(call)
    if is_depthwise(call) and not is_channels_last(call):
        if x.element_size() < 4:
            yield Unknown("whether cuDNN runs depthwise convolutions of 16 bits")
        return
    need, search = needed(call), ""
    if call.target.searches:
        sizes = (tuple(x.shape), tuple(w.shape), tuple(call.stride), tuple(call.padding), tuple(call.dilation))
        search = f"{call.name} {x.dtype} {sizes} {call.groups}"
    workspace = int(need.inputs * x.nbytes + need.outputs * y.nbytes) + (w.nbytes if need != NOTHING else 0)
    yield Scratch("cuDNN's workspace, estimated", workspace, search=search)
    yield LEARNED


def laid_out(call: OperatorCall) -> Iterator[Scratch]:
    """Copies of operands that are not contiguous in the convolution's memory format: _convolution, and its backward."""
    like = torch.contiguous_format
    if is_channels_last(call):
        like = torch.channels_last if call.input.dim() == 4 else torch.channels_last_3d
    for name in ("input", "weight", "grad_output"):
        operand = call.arguments.get(name)
        if operand is not None and not operand.is_contiguous(memory_format=like):
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)


def is_channels_last(call: OperatorCall) -> bool:
    """cudnn_conv_suggest_memory_format: the input or the weight is in channels_last."""
    return any(suggests_channels_last(operand) for operand in (call.input, call.weight))


def suggests_channels_last(x: Tensor) -> bool:
    """Tensor::suggest_memory_format, which takes shapes that fit both for contiguous ones."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def is_depthwise(call: OperatorCall) -> bool:
    channels = call.input.shape[1]
    return not call.transposed and call.groups == channels > 1 and call.weight.shape[0] % channels == 0


CONVOLUTION: Facts = {"cuda": convolution, "source": "Convolution.cpp cudnn/Conv_v8.cpp cudnn/ConvShared.cpp"}
EXAMPLE = "F.conv2d(batch[:, None], batch.new_ones(4, 1, 3, 3)), F.conv1d(batch, batch.new_ones(2, batch.shape[1], 3))"
add("convolution convolution_backward", EXAMPLE, **CONVOLUTION)

"""torch.lstm, gru, rnn_tanh and rnn_relu by the operators that the CPU runs.

On meta tensors torch runs others. Read in aten/src/ATen/native/RNN.cpp and aten/src/ATen/native/mkldnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# Tensors, or None where there is none: of the input, of the hidden state, their biases, and of a projection.
Weights = Sequence[Any]
Cell = Callable[[Tensor, Any, Weights], Any]


def simple_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(gates: Tensor, h: Tensor, weights: Weights) -> Tensor:
        """gates (B,H), h (B,H)"""
        return activation(linear(h, weights[1], weights[3]).add_(gates))

    return step


def gru_cell(gates: Tensor, h: Tensor, weights: Weights) -> Tensor:
    """gates (B,3H), h (B,H)"""
    of_input = gates.unsafe_chunk(3, 1)
    of_hidden = linear(h, weights[1], weights[3]).unsafe_chunk(3, 1)
    reset = of_hidden[0].add_(of_input[0]).sigmoid_()
    update = of_hidden[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_hidden[2].mul_(reset)).tanh_()
    return (h - new).mul_(update).add_(new)


def lstm_cell(gates: Tensor, hidden: tuple[Tensor, Tensor], weights: Weights) -> tuple[Tensor, Tensor]:
    """gates (B,4H), hidden (B,H) and (B,H)"""
    h, c = hidden
    chunks = linear(h, weights[1], weights[3]).add_(gates).unsafe_chunk(4, 1)
    i, f, g, o = chunks[0].sigmoid_(), chunks[1].sigmoid_(), chunks[2].tanh_(), chunks[3].sigmoid_()
    c = (f * c).add_(i * g)
    h = o * c.tanh()
    return (h if weights[4] is None else torch.matmul(h, weights[4].t())), c


CELLS: dict[str, Cell] = {
    "rnn_tanh": simple_cell(torch.tanh),
    "rnn_relu": simple_cell(torch.relu),
    "gru": gru_cell,
    "lstm": lstm_cell,
}


def run_direction(cell: Cell, gates: Tensor, hidden: Any, weights: Weights, reverse: bool) -> tuple[Tensor, Any]:
    """gates (S,B,..) of the input -> (S,B,H) and the last hidden state"""
    steps = list(gates.unbind(0))
    outputs = []
    for step in reversed(steps) if reverse else steps:
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return torch.stack(outputs[::-1] if reverse else outputs, 0), hidden


def parts_of(hidden: Any, start: int, end: int) -> Any:
    """The hidden state, one tensor or two, of these sequences."""
    return tuple(x[start:end] for x in hidden) if isinstance(hidden, tuple) else hidden[start:end]


def joined(hiddens: Sequence[Any]) -> Any:
    if isinstance(hiddens[0], tuple):
        return tuple(torch.cat(list(parts), 0) for parts in zip(*hiddens, strict=True))
    return torch.cat(list(hiddens), 0)


def run_packed(cell: Cell, gates: Tensor, hidden: Any, weights: Weights, sizes: Sequence[int]) -> tuple[Tensor, Any]:
    """gates (N,..) of packed sequences, of which step i has sizes[i] -> (N,H) and the last hidden states"""
    outputs, ended, offset = [], [], 0
    for before, size in zip([sizes[0], *sizes], sizes, strict=False):
        step, offset = gates.narrow(0, offset, size), offset + size
        if size < before:
            ended.append(parts_of(hidden, size, before))
            hidden = parts_of(hidden, 0, size)
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return torch.cat(outputs, 0), joined([hidden, *ended[::-1]])


def run_packed_backwards(
    cell: Cell, gates: Tensor, first: Any, weights: Weights, sizes: Sequence[int]
) -> tuple[Tensor, Any]:
    """The same from the last step to the first. Sequences begin at their ends."""
    outputs, offset = [], len(gates)
    hidden = parts_of(first, 0, sizes[-1])
    for before, size in zip([sizes[-1], *sizes[::-1]], sizes[::-1], strict=False):
        if size > before:
            hidden = joined([hidden, parts_of(first, before, size)])
        offset -= size
        hidden = cell(gates.narrow(0, offset, size), hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return torch.cat(outputs[::-1], 0), hidden


class Pack(torch.autograd.Function):
    """torch._pack_padded_sequence, with a backward that needs no contents: x (S,B,..), or (B,S,..), -> (N,..)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, batch_first: bool, counts: Sequence[int]) -> Any:
        data, sizes = torch.ops.aten._pack_padded_sequence(x, lengths, batch_first)
        ctx.mark_non_differentiable(sizes)
        ctx.save_for_backward(sizes)
        ctx.shape, ctx.batch_first, ctx.counts = x.shape, batch_first, counts
        return data, sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first, second, *rest = ctx.shape
        steps = (second, first) if ctx.batch_first else (first, second)
        gradient, offset = torch.zeros(*steps, *rest, dtype=gradients[0].dtype, device=gradients[0].device), 0
        for step, count in enumerate(ctx.counts):
            gradient[step][:count].copy_(gradients[0][offset : offset + count])
            offset += count
        return gradient.transpose(0, 1) if ctx.batch_first else gradient, None, None, None


def padded(
    data: Tensor, sizes: Sequence[int], batch_first: bool, padding: float, length: int
) -> tuple[Tensor, list[int]]:
    """What torch._pad_packed_sequence returns: data (N,..) -> (S,B,..), or (B,S,..), and the lengths."""
    steps = length if length > 0 else len(sizes)
    y = torch.full((steps, sizes[0], *data.shape[1:]), padding, dtype=data.dtype, device=data.device)
    offset, begin, lengths = 0, 0, []
    for end in range(1, len(sizes) + 1):
        size, following = sizes[end - 1], sizes[end] if end < len(sizes) else 0
        if following != size:
            count = (end - begin) * size
            part = data.narrow(0, offset, count).view(end - begin, size, *data.shape[1:])
            y.narrow(0, begin, end - begin).narrow(1, 0, size).copy_(part)
            offset, begin = offset + count, end
            lengths += [end] * (size - following)
    return y.transpose(0, 1) if batch_first else y, lengths[::-1]


def recurrent(
    name: str,
    x: Tensor,
    hx: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """What the function of that name returns: x (S,B,E), or (B,S,E), -> (S,B,H), and the last hidden states.

    sizes: of the steps of packed sequences: x (N,E) -> (N,H).
    """
    states: Sequence[Tensor] = hx if name == "lstm" else (hx,)
    each = weights_of_each(weights, has_biases, name == "lstm" and states[0].shape != states[1].shape)
    x = x.transpose(0, 1) if batch_first else x
    unbound = [state.unbind(0) for state in states]
    hiddens = list(zip(*unbound, strict=True)) if name == "lstm" else list(unbound[0])
    directions = 2 if bidirectional else 1
    ends: list[Any] = []
    for layer in range(layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            # Those of the one direction are there until the other's are, and these until both are done.
            gates = linear(x, each[index][0], each[index][2])
            how = (CELLS[name], gates, hiddens[index], each[index])
            is_reversed = index % directions == 1
            if sizes is None:
                y, end = run_direction(*how, is_reversed)
            else:
                y, end = (run_packed_backwards if is_reversed else run_packed)(*how, sizes)
                del gates, how  # Before the other direction.
            outputs.append(y)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        del outputs, y
        if sizes is None:
            del gates, how
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    last = [torch.stack(list(parts), 0) for parts in (zip(*ends, strict=True) if name == "lstm" else [ends])]
    return x.transpose(0, 1) if batch_first else x, *last


def weights_of_each(weights: Sequence[Tensor], has_biases: bool, has_projection: bool) -> list[Weights]:
    """The weights of every layer and direction."""
    count = 2 + 2 * has_biases + has_projection
    found: list[Weights] = []
    for begin in range(0, len(weights), count):
        own: list[Any] = list(weights[begin : begin + count])
        projection = own.pop() if has_projection else None
        found.append([*own, *([None, None] if not has_biases else []), projection])
    return found


def onednn_lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch.lstm by oneDNN's operator for each layer and direction."""
    directions = 2 if bidirectional else 1
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    h, c = (state.contiguous() for state in hx)
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights_of_each(weights, has_biases, False)[index][:4]
            # Zeros as large as the weights stand in for biases.
            filled = [torch.zeros_like(own[place - 2]) if w is None else w for place, w in enumerate(own)]
            how: Any = (direction > 0, [], 2, h.shape[-1], layers, has_biases, bidirectional, batch_first, train)
            y, hy, cy, _ = torch.ops.aten.mkldnn_rnn_layer(x, *filled, h[index], c[index], *how)
            outputs.append(y)
            ends.append((hy, cy))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    last_h, last_c = (torch.stack(list(parts), 0) for parts in zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, last_h, last_c


def is_packed(args: Sequence[Any]) -> bool:
    """Whether the call is one for packed sequences: (data, batch_sizes, hx, weights, has_biases, ..)."""
    return isinstance(args[3], list | tuple)


def takes_onednn(args: Sequence[Any]) -> bool:
    """Whether torch.lstm runs oneDNN's operator: not for projections or float64, nor float16 where gradients count."""
    x, (h, c) = args[0], args[1]
    if not torch.backends.mkldnn.enabled or x.numel() == 0 or h.shape != c.shape:
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if x.dtype == torch.float16 and not torch.is_grad_enabled():
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return x.dtype == torch.float32


def run(name: str, args: Any, sizes: Sequence[int] | None = None) -> Any:
    """The function "lstm", "gru" or another with these arguments, as the CPU runs it. sizes: of packed sequences."""
    if sizes is not None:
        data, _, *others = args
        return recurrent(name, *(data, *others, False, sizes))
    return onednn_lstm(*args) if name == "lstm" and takes_onednn(args) else recurrent(name, *args)

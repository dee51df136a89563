"""torch.lstm, gru, rnn_tanh and rnn_relu by the operators that the CPU runs.

On meta tensors torch runs others. Read in aten/src/ATen/native/RNN.cpp and aten/src/ATen/native/mkldnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Weights = Sequence[
    Any
]  # tensors, or None where there is none: of the input, of the hidden state, their biases, and of a projection
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
) -> tuple[Tensor, ...]:
    """What the function of that name returns: x (S,B,E), or (B,S,E), -> (S,B,H), and the last hidden states."""
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
            y, end = run_direction(CELLS[name], gates, hiddens[index], each[index], index % directions == 1)
            outputs.append(y)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        del outputs, gates, y
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
    """Whether torch.lstm runs oneDNN's operator: not for projections or float64."""
    x, (h, c) = args[0], args[1]
    return bool(torch.backends.mkldnn.enabled) and x.dtype == torch.float32 and x.numel() > 0 and h.shape == c.shape


def run(name: str, args: Any) -> Any:
    """The function "lstm", "gru" or another with these arguments, as the CPU runs it."""
    return onednn_lstm(*args) if name == "lstm" and takes_onednn(args) else recurrent(name, *args)

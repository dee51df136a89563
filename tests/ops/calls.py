"""Calls of sequences, from states, with decays, lses, sinks and windows: what tests of all such calls share.

They are configurations of `memcheck gradcheck`, and a few that only tests need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from ops.checks import DEVICE, ON_HOST
from torch import Tensor

from memcheck import compressed_attention, linear_attention
from memcheck.ops.gradcheck import CONFIGURATIONS, Configuration, case, softplus_attention_from_state

Results = tuple[Tensor, ...]
SEQUENCES = {"cu_seqlens", "cu_seqlens_q", "lengths"}


def flat(result: Any) -> Results:
    """All tensors of a result, however they are nested."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(x for part in result if part is not None and not isinstance(part, int) for x in flat(part))


def linear_attention_from_sums(q: Tensor, k: Tensor, v: Tensor, M: Tensor, logits: Tensor, **options: Any) -> Any:
    """Not normalized, so that the state is M alone."""
    options |= {"decay": logits.sigmoid(), "initial_state": (M, None), "return_state": True}
    return flat(linear_attention(q, k, v, causal=True, normalize=False, **options))


def linear_attention_from_resets(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    g = -g.square().index_fill(2, torch.tensor([0, 3]), torch.inf)
    return flat(linear_attention(q, k, v, log_decay=g, causal=True, return_state=True, **options))


def compressed_attention_from_pieces(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Two calls with the states between."""
    y, states = compressed_attention(q, k, v, return_state=True, **options)
    again, states = compressed_attention(v, k, q[:, :1], initial_state=states, return_state=True, **options)
    return (y, again, *flat(states))


def compressed_attention_from_seen(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **options: Any) -> Any:
    """Without the lse of queries that see nothing, which is that of the sink alone."""
    y, lse = compressed_attention(q, k, v, sink=sink, return_lse=True, **options)
    return y, lse.masked_fill(lse == -torch.inf, 0)


HEADS = "q:BHSD k:BGTD v:BGTV"
PACKED = {"cu_seqlens": torch.tensor([0, 3, 3, 8])}
LEFT = {"lengths": torch.tensor([2, 4]), "padding": "left"}
CHANNELS = {"B": 1, "S": 8, "T": 8, "R": 2, "N": 3}
ONE = {"B": 1, "H": 2, "G": 1, "S": 8, "T": 8, "D": 2}
ROWS = {"B": 2, "H": 2, "G": 1, "S": 5, "T": 5, "D": 2}
MORE = (
    case(softplus_attention_from_state, "q:BSR k:BRT v:BRT Z:NR A:NR", {"Z": 5.0}, **CHANNELS, causal=False, **PACKED),
    case(linear_attention, HEADS, **ROWS, V=3, lengths=torch.tensor([5, 2])),
    case(linear_attention_from_sums, f"{HEADS} M:BGDV logits:BGT", **ROWS, V=3),
    case(linear_attention_from_resets, f"{HEADS} g:BGT", **ROWS, V=3),
    case(linear_attention_from_resets, f"{HEADS} g:BGT", **ONE, V=3, **PACKED),
    case(compressed_attention, "q:BHSD k:BGTD v:BGTD", **ONE, factor=2, causal=False, **PACKED),
    case(compressed_attention_from_seen, "q:BHSD k:BGTD v:BGTD sink:H", **ROWS, factor=2, **LEFT),
    *(
        case(compressed_attention_from_pieces, "q:BGSD k:BGSD v:BGSD", B=1, G=1, S=8, D=2, factor=2, **options)
        for options in ({}, PACKED, {"window": 3}, {"window": 3, **PACKED})
    ),
)


def text_of(it: Configuration) -> str:
    return f"{it.function.__name__}: {it.text}"


CALLS = {
    text_of(it): it
    for it in (*CONFIGURATIONS, *MORE)
    if "_from_" in it.function.__name__ or (SEQUENCES | {"return_lse", "window"}) & it.options.keys()
}
TIMES = 8 if ON_HOST else 40


def longer(it: Configuration, times: int = TIMES) -> Configuration:
    """The same call with sequences so many times as long, of several chunks and tiles, and with wider heads."""
    of_window = it.function.__name__.endswith("_from_window")  # which has few positions in its state
    sizes = {
        name: size * times if name == "S" or (name == "T" and not of_window) else size
        for name, size in it.sizes.items()
    }
    sizes |= {name: size for name, size in {"D": 20, "V": 9, "R": 35}.items() if name in sizes}
    options = {name: x * times if isinstance(x, Tensor) or name == "kv_len" else x for name, x in it.options.items()}
    if "kv_len" in options:
        sizes["C"] = -(-options["kv_len"] // options["factor"])
    return replace(it, sizes=sizes, options=options)


def narrow(it: Configuration) -> list[tuple[Tensor, bool]]:
    """The inputs, and whether each has the dtype of q: what has positions or blocks, not decays, sinks and sums."""
    names = ("q", "k", "v", "kc", "vc", "old_k", "old_v")
    return [(x, name in names) for name, x in zip(it.names, it.inputs(DEVICE), strict=True)]

"""The look of one operator's lines in plots, and the colours of kinds of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# One colour for each kind of memory, in every picture: of the colour-blind-safe palettes of Okabe and Ito and of Tol.
KINDS = {
    "parameters": "#0072B2",
    "buffers": "#56B4E9",
    "inputs": "#332288",
    "optimizer state": "#009E73",
    "gradients": "#CC79A7",
    "forward": "#E69F00",  # And what it keeps for the backward.
    "backward": "#D55E00",
    "optimizer": "#44AA99",  # Its step.
    "elsewhere": "#999933",
    "others": "#BBBBBB",
}
OTHER_NAMES = {"kept for backward": "forward", "kept": "forward", "optimizer step": "optimizer", "other": "others"}


def colour_of(kind: str) -> str | None:
    """The colour of a kind of memory: "parameters", "from forward", "3 others". None if it is none."""
    word = kind.removeprefix("from ")
    word = "others" if word.rpartition(" ")[2] == "others" else word
    return KINDS.get(OTHER_NAMES.get(word, word))


@dataclass(frozen=True)
class Style:
    """Colour, marker and dash of an operator's lines, in matplotlib's words. The marker is a shape, not a letter."""

    colour: str
    marker: Any
    dash: Any = "-"

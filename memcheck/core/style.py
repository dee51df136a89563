"""The look of one operator's lines in plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Style:
    """Colour, marker and dash of an operator's lines, in matplotlib's words. The marker is a shape, not a letter."""

    colour: str
    marker: Any
    dash: Any = "-"

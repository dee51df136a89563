"""What tests of pictures share: records made by hand, and what is drawn of them."""

from __future__ import annotations

from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import Style

STYLES = {"naive": Style("#D55E00", "s", "--"), "softplus": Style("#009E73", "o", "-")}
MIB = 2**20


def record(operator: str, length: int, forward: int | None, backward: int | None, **fields: Any) -> Record:
    values = {"query_len": length, "kv_len": length, "mode": "train", "dtype": "float32", "dim": 64, **fields}
    return Record(operator=operator, forward_peak_bytes=forward, backward_peak_bytes=backward, **values)


def prediction(operator: str, length: int, forward: int | None, backward: int | None, **fields: Any) -> Record:
    """On a device that a catalog names, and a driver otherwise."""
    return record(operator, length, forward, backward, source="predicted", **fields)


def grid(operators: dict[str, int], lengths: list[int], dims: list[int], **fields: Any) -> list[Record]:
    """Each operator's peak is so many bytes a token and channel, and twice that with the backward."""
    return [
        record(name, length, size * length * dim, 2 * size * length * dim, dim=dim, **fields)
        for dim in dims
        for length in lengths
        for name, size in operators.items()
    ]


def texts(ax) -> set[str]:
    return {text.get_text() for text in ax.texts} - {""}


def points(ax) -> dict[str, list[tuple[float, float]]]:
    """The marks of each operator."""
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in lines}


def key(figure) -> list[str]:
    """The names in the legend."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def labelled(ax, label: str) -> list[list[tuple[float, float]]]:
    return [list(zip(*line.get_data(), strict=True)) for line in ax.get_lines() if line.get_label() == label]

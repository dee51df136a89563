"""The tree of a predicted model's modules as a table, as `memcheck predict --layers` and notebooks show it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from memcheck.core import trace, units
from memcheck.core.layers import Layer, Layers
from memcheck.report.tables import BYTES, COUNT, Cell, Column, Table

FIGURES = ("parameters", "parameter_bytes", "saved_bytes", "peak_bytes")
UNCALLED = "not called"
NOTE = "A module's figures include those of the modules below it."


def layers_table(layers: Layers) -> Table:
    """One row per module, those in a module below it. Repeated blocks with equal figures are one row."""
    columns = [
        Column("module", "module"),
        Column("class", "class", rank=2),
        Column("outputs", "output"),
        Column("parameters", "params", format=COUNT, rank=3),
        Column("parameter_bytes", "bytes of params", format=BYTES, rank=1),
        Column("saved_bytes", "kept for backward", format=BYTES),
        Column("peak_bytes", "at the peak", format=BYTES),
    ]
    model = layers[""]
    rows, notes = [row_of(model, model.kind, None), *rows_below(model, 1)], [NOTE]
    if any(outside := model.without_parts().values()) and model.parts:
        rows.append([f" {trace.OUTSIDE}", None, None, *(size or None for size in outside)])
        notes.append(f"{trace.OUTSIDE}: the model's own code, its inputs, the loss.")
    if model.parts and not any(layer.calls for layer in layers.values() if layer.path):
        rows = [[None if cell == UNCALLED else cell for cell in row] for row in rows]
        notes.append("No call of a module was seen, as in compiled code, which does not tell them apart.")
    labels, outputs = ([str(row[place]) for row in rows] for place in (0, 2))
    if any(label.endswith("x)") for label in labels):
        notes.append("(Nx): N blocks with these figures each.")
    if any("+" in words for words in outputs):
        notes.append("+1: and another tensor, of which the largest is shown.")
    if any("calls" in words for words in outputs):
        notes.append("Of several calls, the output of the last is shown.")
    notes.append(f"kept for backward: by the forward. The peak is in the {layers.phase}.")
    title = f"{model.kind} by module: {units.counted(model.parameters, 'parameter')}"
    return Table("layers", title, columns, rows, [" ".join(notes)])


def row_of(layer: Layer, label: str, kind: str | None) -> list[Cell]:
    figures: list[Cell] = [getattr(layer, name) or None for name in FIGURES]
    return [label, kind, output_words(layer), *figures]


def output_words(layer: Layer) -> str | None:
    """ "8x1024x768", of several tensors the largest "8x1024x768 +1"; "not called"; None without a tensor."""
    if not layer.calls:
        return UNCALLED if layer.path else None
    times = f" ({layer.calls} calls)" if layer.calls > 1 else ""
    if not layer.outputs:
        return times.strip(" ()") or None
    words = "x".join(map(str, max(layer.outputs, key=math.prod))) or "scalar"
    return words + (f" +{len(layer.outputs) - 1}" if len(layer.outputs) > 1 else "") + times


def rows_below(layer: Layer, depth: int) -> Iterator[list[Cell]]:
    """The rows of the modules in a module."""
    begin = len(layer.path) + 1 if layer.path else 0
    for blocks in folded([*parts_shown(layer)]):
        first, last = blocks[0].path[begin:], blocks[-1].path.rpartition(".")[2]
        many = f" to {'.' if '.' in first else ''}{last} ({len(blocks)}x)" if len(blocks) > 1 else ""
        yield row_of(blocks[0], f"{' ' * depth}{first}{many}", blocks[0].kind)
        yield from rows_below(blocks[0], depth + 1)


def parts_shown(layer: Layer) -> Iterator[Layer]:
    """The modules in a module. Of those that are never called and have nothing themselves, such as lists, the parts."""
    for part in layer.parts:
        if part.parts and not part.calls and not any(part.without_parts().values()):
            yield from parts_shown(part)
        else:
            yield part


def folded(parts: Sequence[Layer]) -> Iterator[list[Layer]]:
    """The parts in runs of neighbours in a list that have equal figures."""
    run: list[Layer] = []
    for part in parts:
        if run and place_in_list(part) == place_in_list(run[-1], 1) and figures(part) == figures(run[-1]):
            run.append(part)
            continue
        if run:
            yield run
        run = [part]
    if run:
        yield run


def place_in_list(layer: Layer, further: int = 0) -> Any:
    """The path of the list and the number in it. What is in no list has a place of its own."""
    owner, _, name = layer.path.rpartition(".")
    return (owner, int(name) + further) if name.isdecimal() else object()


def figures(layer: Layer) -> tuple[Any, ...]:
    """All but the path, of the module and of those in it."""
    begin = len(layer.path)
    parts = tuple((part.path[begin:], figures(part)) for part in layer.parts)
    return layer.kind, layer.calls, layer.outputs, *(getattr(layer, name) for name in FIGURES), parts

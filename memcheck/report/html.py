"""Records, predictions and modules of a model as HTML, which a notebook shows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from memcheck.core import html
from memcheck.core.layers import Layers
from memcheck.core.prediction import Prediction, certainty, verdict
from memcheck.core.record import UNKNOWN, Record, sentence
from memcheck.report.layers import layers_table
from memcheck.report.tables import to_html


@functools.singledispatch
def html_of(value: Any) -> str:
    """The output of a cell that ends in the value."""
    raise TypeError(f"{value!r} is shown as text")


@html_of.register
def _(layers: Layers) -> str:
    return html.fragment(to_html(layers_table(layers)) if layers else "")


@html_of.register
def _(prediction: Prediction) -> str:
    layers = prediction.layers
    parts = [to_html(layers_table(layers))] if len(layers) > 1 else []
    words = [verdict(prediction), certainty(prediction)]
    return html_of_record(prediction.record, words=words, steps=prediction.timeline, parts=parts)


@html_of.register(Record)
def html_of_record(
    record: Record,
    *,
    words: Sequence[str] = (),
    steps: Sequence[tuple[str, int]] = (),
    parts: Sequence[str] = (),
) -> str:
    """The record: how it ended, its peaks, what was alive at the highest, and its doubts.

    words: sentences about the result; by default its headline. steps: (phase, bytes alive), for a picture over time.
    parts: HTML in place of the list of what was alive.
    """
    bars, paragraphs = record.bars(), html.macros().paragraphs
    shown = [paragraphs([*filter(None, words or [record.headline(), record.start_sentence()])])]
    shown += [html.bars(bars)] if bars else []
    steps = steps or [(phase, size) for phase, sizes in (record.over_time or {}).items() for size in sizes]
    shown += [html.timeline(steps), *parts]
    if not parts and (alive := record.alive_then()) is not None:
        shown += [paragraphs([f"Alive {alive[0]}:"]), html.sizes_table(alive[1])]
    doubts = [sentence(f"Not known: {doubt}" if doubt.kind == UNKNOWN else doubt) for doubt in record.doubts]
    return html.fragment(*filter(None, shown), paragraphs(doubts, "note"))

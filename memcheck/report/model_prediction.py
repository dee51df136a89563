"""The prediction of a model: the verdict in a sentence, a table of modules, and what other settings would need."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.core.options import named
from memcheck.core.units import format_bytes
from memcheck.core.verdict import OUTSIDE, largest_words, need_of
from memcheck.report.script_tables import by_size, size_cells, unit_of
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.predict.api import Largest
    from memcheck.predict.replay import Prediction

MOST_ROWS = 16
# Kinds of memory that a table of modules tells apart.
KINDS = ("parameters", "gradients", "optimizer state", "kept for backward", "other")
NOTE = "name.*: layers with the same place in a list. kept for backward: by the forward. other: everything else."


def tensors_of(prediction: Prediction) -> int | None:
    """The highest sum of tensors that is alive at once, whether it fits or not. None if it is not predicted."""
    return prediction.peak.bytes if prediction.peak is not None and prediction.terms else None


def buffers_words(prediction: Prediction) -> str:
    """The buffers of collectives at the peak, in a sentence; "" if there are none."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.buffers.items())
    return f"Collectives hold at the peak: {parts}." if parts else ""


def modules_table(prediction: Prediction, kinds: Mapping[str, str]) -> Table:
    """What is alive at the peak by module and kind. Layers of a list are one row.

    kinds: the class of each module by its path.
    """
    trace, peak = prediction.trace, prediction.peak
    assert trace is not None
    assert peak is not None
    members = dict.fromkeys(trace.saved, "kept for backward")
    members |= dict.fromkeys([*trace.first_gradients, *trace.gradients], "gradients")
    members |= dict.fromkeys(trace.optimizer, "optimizer state")
    members |= dict.fromkeys(trace.parameters, "parameters")
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    paths: dict[tuple[str, str], set[str]] = defaultdict(set)
    for piece in peak.alive:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", piece.module)  # "layers.*.mlp" for "layers.3.mlp".
        group = (pattern, kinds.get(piece.module, "") if piece.module else "")
        sums[group][members.get(piece, "other")] += piece.bytes
        paths[group].add(piece.module)
    names, rest = by_size(sums, MOST_ROWS)
    unit = unit_of(peak.bytes)

    def row(label: str, kind: str | None, members: Sequence[tuple[str, str]], *, count: bool = True) -> list[Cell]:
        modules = sum(len(paths[name]) for name in members) if count else None
        return [label, kind, modules, *size_cells(sums, members, KINDS, unit)]

    rows = [row(name[0] or OUTSIDE, name[1] or None, [name]) for name in names]
    rows += [row("others", None, rest)] if rest else []
    rows.append(row("all", None, [*sums], count=False))
    columns = [Column("module", "module"), Column("class", "class", rank=5), Column("count", "modules", rank=4)]
    columns += [Column(kind.replace(" ", "_"), kind, "", ",.2f", rank=3 - (kind in KINDS[3:])) for kind in KINDS]
    columns.append(Column("sum", "sum", "", ",.2f"))
    title = f"Alive at the peak, in the {peak.phase}, by module, {unit}"
    return Table("modules", title, columns, rows, [NOTE])


def changes_table(base: Prediction, changes: Mapping[str, Prediction]) -> Table:
    """What each change would need, beside what is needed without any. changes: by the flags that make them."""
    columns = [
        Column("change", "one change"),
        Column("need", "needs"),
        Column("share", "% of current", format=".0f", rank=1),
        Column("fits", "fits"),
        Column("runs_out_in", "runs out in", rank=2),
    ]
    current = need_of(base)
    rows: list[list[Cell]] = []
    for flags, found in {"as it is": base, **changes}.items():
        need, limited = need_of(found), found.place.room_bytes is not None
        share = None if need is None or current is None else 100 * need.bytes / current.bytes
        words = str(need) if need is not None else None
        rows.append([flags, words, share, found.fits if limited else None, found.record.oom_phase])
    helping = base.fits is False
    title = "What would help, one change at a time" if helping else "What other settings would need"
    notes = ["Each line was predicted in the same way."]
    if helping and not any(found.fits for found in changes.values()):
        notes.append("None of these is enough.")
    return Table("changes", title, columns, rows, notes)


SIZE_WORDS = {"bsz": "batch", "seq_len": "length"}


def edge_verdict(edge: Largest, axis: str) -> str:
    """The largest size that fits, what it needs, and why the next size does not fit."""
    words = largest_words(SIZE_WORDS[axis], edge.size, edge.step, edge.at, edge.beyond)
    return words.replace("more may fit.", f"more may fit ({named('up_to')}).")


def edges_table(edges: Mapping[str, Largest], axis: str) -> Table:
    """The largest size in each setting, and both sides of the edge. The first row is the setting without a change."""
    word = SIZE_WORDS[axis]
    columns = [
        Column("change", "one change"),
        Column("largest", f"largest {word}", format=","),
        Column("need", "needs", rank=1),
        Column("next", f"next {word}", format=",", rank=2),
        Column("next_need", "needs", rank=2),
        Column("runs_out_in", "runs out in", rank=3),
    ]
    rows: list[list[Cell]] = []
    for flags, edge in edges.items():
        needs = [None if side is None else need_of(side) for side in (edge.at, edge.beyond)]
        sides = [None if need is None else str(need) for need in needs]
        phase = edge.beyond.record.oom_phase or edge.beyond.record.status if edge.beyond else None
        rows.append([flags, edge.size, sides[0], edge.size + edge.step if edge.beyond else None, sides[1], phase])
    several = len(rows) > 1
    title = f"What would allow another {word}" if several else f"The largest {word} that fits, and the next"
    return Table("edges", title, columns, rows, ["Each line was searched in the same way."] if several else [])

"""The prediction of a model: the verdict in a sentence, a table of modules, and what other settings would need."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcheck.core.devices import Device
from memcheck.core.options import named
from memcheck.core.ranks import RESERVED_MORE
from memcheck.core.record import Record
from memcheck.core.units import counted, format_bytes
from memcheck.report.predictions import BASES, TO_THE_BYTE, UNCOMPARED
from memcheck.report.script_tables import by_size, size_cells, unit_of
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.predict.replay import Prediction

MOST_ROWS = 16
OUTSIDE = "outside of submodules"
# Kinds of memory that a table of modules tells apart.
KINDS = ("parameters", "gradients", "optimizer state", "kept for backward", "other")
NOTE = "name.*: layers with the same place in a list. kept for backward: by the forward. other: everything else."


@dataclass(frozen=True)
class SettingChange:
    """A setting that was predicted: the flags that choose it, and its prediction."""

    flags: str
    prediction: Prediction


def room_of(device: Device, limit_bytes: int | None) -> int | None:
    """The bytes that torch's allocator can get; None if there is no limit."""
    rooms = [room for room in (device.usable_bytes, limit_bytes) if room is not None]
    return min(rooms, default=None)


def need_of(prediction: Prediction) -> int | None:
    """The highest sum that is alive at once, whether it fits or not. None if it is not predicted."""
    return prediction.peak.bytes if prediction.peak is not None and prediction.terms else None


def need_words(prediction: Prediction) -> str:
    """ "12.3 GiB", or "at least 12.3 GiB" if that is a bound."""
    peak = prediction.peak
    return f"{'at least ' if peak and peak.is_bound else ''}{format_bytes(peak.bytes if peak else 0)}"


def verdict(prediction: Prediction, limit_bytes: int | None = None) -> str:
    """Whether it fits, the claim, and what the backward starts from."""
    record, device = prediction.record, prediction.device
    if prediction.peak is None or prediction.fits is None:
        return f"{record.operator} is not predicted: {(record.reason or '').removeprefix('not predicted: ')}."
    if room_of(device, limit_bytes) is None:
        return f"{record.operator} on the {device.name}, which has no limit: {claim(prediction)}{start_words(record)}"
    fits = "fits" if prediction.fits else "does not fit"
    return f"{record.operator} {fits} {device.name}: {claim(prediction, limit_bytes)}{start_words(record)}"


def start_words(record: Record) -> str:
    """ " Backward from the second output, a scalar; the first stays alive.", or "" without a backward."""
    return f" Backward from {record.backward_from}." if record.backward_from else ""


def claim(prediction: Prediction, limit_bytes: int | None = None) -> str:
    """The bytes that a step needs, the bytes that are usable, and where the peak is or memory runs out."""
    record, peak, refused = prediction.record, prediction.peak, prediction.refused
    assert peak is not None
    room = room_of(prediction.device, limit_bytes)
    step = f"{'a training step' if record.mode == 'train' else 'a forward'} needs {need_words(prediction)}"
    place = place_words(peak.phase, peak.module, peak.operator)
    segments = f" ({segments_words(prediction)})" if record.reserved_bytes else ""
    if record.status == "ok":
        usable = "" if room is None else f", and {format_bytes(room)} are usable"
        return f"{step}{segments}{usable}. The peak is {place}."
    more = ", more in the allocator's segments" if room is not None and peak.bytes <= room else ""
    where = "with its inputs alone"
    if record.oom_phase and refused is not None:
        where = place_words(record.oom_phase, refused.module, refused.name)
    return f"{step}{more}, and {format_bytes(room or 0)} are usable. It runs out {where}. The peak would be {place}."


def segments_words(prediction: Prediction) -> str:
    """ "12.3 GiB in the allocator's segments", for FSDP2 with what published runs had more."""
    reserved, ranks = prediction.record.reserved_bytes or 0, prediction.place.ranks
    words = f"{format_bytes(reserved)} in the allocator's segments"
    if ranks is None or ranks.kind != "fsdp":
        return words
    return f"{words}, up to {format_bytes(int(reserved * (1 + RESERVED_MORE)))} as in published runs of FSDP2"


def nvidia_smi_words(prediction: Prediction) -> str:
    """What nvidia-smi would show of the process, in a sentence; "" if it is not known."""
    record, context = prediction.record, prediction.device.context_bytes
    if record.status != "ok" or record.process_bytes is None or context is None:
        return ""
    source = "as given" if prediction.place.cuda_context is not None else f"an estimate: see {named('cuda_context')}"
    shown = f"nvidia-smi would show {format_bytes(record.process_bytes)}"
    return f"{shown}, of which {format_bytes(context)} are the CUDA context ({source})."


def place_words(phase: str, module: str, operator: str) -> str:
    """ "in the backward, in layers.3.mlp (GeluBackward0)"."""
    return f"in the {phase}, {f'in {module}' if module else OUTSIDE} ({operator})"


def certainty(prediction: Prediction) -> str:
    """How the figures are known, in a line."""
    if not prediction.terms:
        return ""
    doubts = len(prediction.record.doubts)
    words = f"{prediction.basis}: {BASES[prediction.basis]}"
    if doubts:
        words += f", but for {counted(doubts, 'doubt')} (--doubts)"
    elif prediction.exact:
        words += TO_THE_BYTE
    evidence = prediction.evidence
    return f"{words.replace(UNCOMPARED, '')}; {evidence}" if evidence is not None and evidence.rows else words


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


def changes_table(base: Prediction, changes: Sequence[SettingChange], limit_bytes: int | None = None) -> Table:
    """What each change would need, beside what is needed without any."""
    columns = [
        Column("change", "one change"),
        Column("need", "needs"),
        Column("share", "% of current", format=".0f", rank=1),
        Column("fits", "fits"),
        Column("runs_out_in", "runs out in", rank=2),
    ]
    current = need_of(base) or 1
    rows: list[list[Cell]] = []
    for change in [SettingChange("as it is", base), *changes]:
        found = change.prediction
        need, limited = need_of(found), room_of(found.device, limit_bytes) is not None
        share = None if need is None else 100 * need / current
        words = need_words(found) if need is not None else None
        rows.append([change.flags, words, share, found.fits if limited else None, found.record.oom_phase])
    helping = base.fits is False
    title = "What would help, one change at a time" if helping else "What other settings would need"
    notes = ["Each line was predicted in the same way."]
    if helping and not any(change.prediction.fits for change in changes):
        notes.append("None of these is enough.")
    return Table("changes", title, columns, rows, notes)


@dataclass(frozen=True)
class Edge:
    """The largest size that fits in one setting. at: None if no size fits. beyond: None if every allowed size fits."""

    flags: str
    size: int
    at: Prediction | None
    beyond: Prediction | None


SIZE_WORDS = {"bsz": "batch", "seq_len": "length"}


def edge_verdict(edge: Edge, axis: str, step: int, limit_bytes: int | None = None) -> str:
    """The largest size that fits, what it needs, and why the next size does not fit."""
    word, at, beyond, after = SIZE_WORDS[axis], edge.at, edge.beyond, f"{edge.size + step:,}"
    if beyond is not None and beyond.fits is None:
        return verdict(beyond)
    past = "" if beyond is None else claim(beyond, limit_bytes)
    if at is None:
        start = start_words(beyond.record) if beyond else ""
        return f"Not even {word} {after} fits {beyond.device.name}: {past}{start}" if beyond else ""
    past = f"With {word} {after}, {past}" if beyond else "The search ended there: more may fit (--up-to)."
    largest = f"The largest {word} that fits {at.device.name} is {edge.size:,}"
    return f"{largest}: {claim(at, limit_bytes)} {past}{start_words(at.record)}"


def edges_table(edges: Sequence[Edge], axis: str, step: int) -> Table:
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
    for edge in edges:
        sides = [need_words(side) if side is not None and side.peak else None for side in (edge.at, edge.beyond)]
        phase = edge.beyond.record.oom_phase or edge.beyond.record.status if edge.beyond else None
        rows.append([edge.flags, edge.size, sides[0], edge.size + step if edge.beyond else None, sides[1], phase])
    several = len(rows) > 1
    title = f"What would allow another {word}" if several else f"The largest {word} that fits, and the next"
    return Table("edges", title, columns, rows, ["Each line was searched in the same way."] if several else [])

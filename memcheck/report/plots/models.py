"""Stacked bars of a model's peak memory in training: parameters, gradients, AdamW, activations, the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memcheck.core.model_record import ModelRecord
from memcheck.core.style import KINDS
from memcheck.core.units import format_bytes
from memcheck.report.plots.style import GREY, in_house_style, is_narrow, new_figure, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MIB = 2**30, 2**20
PARTS = {
    "parameter_bytes": ("parameters", KINDS["parameters"], ""),
    "gradient_bytes": ("gradients", KINDS["gradients"], "///"),
    "optimizer_bytes": ("optimizer state", KINDS["optimizer state"], "xx"),
    "saved_bytes": ("kept for backward", KINDS["forward"], "\\\\\\"),
}
OOM = "#AA0000"
FLAGS = {"autocast": "autocast {}", "checkpointing": "checkpoints", "compiled": "compiled"}
ABSENT = {"autocast": "no autocast", "checkpointing": "no checkpoints", "compiled": "eager"}
REST = ("the rest of the peak", KINDS["others"], "---")


@in_house_style
def model_bars(records: Sequence[ModelRecord], *, title: str, subtitle: str) -> Figure:
    """Draws one bar per record with known figures, and marks records that ran out of memory with OOM."""
    drawn = [record for record in records if record.peak_bytes or record.status == "oom"]
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = new_figure(7.6, 1.7 + 0.34 * max(len(drawn), 2), title, subtitle)
    ax = figure.subplots()
    unit, name = (GIB, "GiB") if max((record.peak_bytes or 0 for record in drawn), default=0) >= GIB else (MIB, "MiB")
    for place, record in enumerate(drawn):
        draw_bar(ax, place, record, unit)
    ax.set_yticks(range(len(drawn)), labels_of(drawn))
    ax.invert_yaxis()
    ax.set_xlabel(f"bytes, {name}")
    ax.grid(axis="x")
    parts = [part for field, part in PARTS.items() if any(getattr(record, field) for record in drawn)]
    known = [record for record in drawn if record.status != "oom"]
    parts += [REST] if any(rest_of(record) > 0 for record in known) else []
    handles: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=part) for part, colour, hatch in parts
    ]
    peak = Line2D([], [], marker="D", color="black", ls="none", markersize=5, label="peak, not all at once")
    handles += [peak] if known else []
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if is_narrow() else 3, frameon=False)
    draw_capacities(ax, drawn, unit)
    if not drawn:
        ax.text(0.5, 0.5, "no case has a peak", ha="center", color=GREY, transform=ax.transAxes)
    return figure


plot_models = written(model_bars)


def rest_of(record: ModelRecord) -> int:
    """The bytes of the peak beyond its parts; negative if these are not all alive at once."""
    return (record.peak_bytes or 0) - sum(getattr(record, field) or 0 for field in PARTS)


def draw_bar(ax: Axes, place: int, record: ModelRecord, unit: int) -> None:
    left = 0.0
    for field, (_, colour, hatch) in PARTS.items():
        width = (getattr(record, field) or 0) / unit
        ax.barh(place, width, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        left += width
    if record.status == "oom":
        ax.text(left, place, f"  OOM in {record.oom_phase or 'the model itself'}", va="center", color=OOM)
        return
    peak = (record.peak_bytes or 0) / unit
    if peak > left:
        ax.barh(place, peak - left, left=left, color=REST[1], hatch=REST[2], edgecolor="white", linewidth=0)
    ax.plot([peak], [place], marker="D", color="black", markersize=5, ls="none")


def draw_capacities(ax: Axes, records: Sequence[ModelRecord], unit: int) -> None:
    """Draws a line at the memory of each GPU. One that is far beyond all bars is only named below them."""
    on_gpu = [record for record in records if record.device == "cuda" and record.device_total_bytes]
    sizes = {record.device_name or "the GPU": record.device_total_bytes or 0 for record in on_gpu}
    longest = ax.dataLim.x1 or 1
    far = []
    for name, size in sizes.items():
        if size / unit > 3 * longest:
            far.append(f"{name} has {format_bytes(size)}, {size / unit / longest:.0f} times as much as the longest bar")
            continue
        ax.axvline(size / unit, color=OOM, lw=1.2, ls="--", label="_capacity")
        text = f"memory of {name}: {format_bytes(size)}"
        ax.annotate(
            text,
            (size / unit, 1),
            (-3, 2),
            ha="right",
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=OOM,
        )
    if sizes:
        ax.set_xlim(0, 1.05 * max([longest, *(size / unit for size in sizes.values() if size / unit <= 3 * longest)]))
    ax.set_xlabel("\n".join([ax.get_xlabel(), *far]))


def labels_of(records: Sequence[ModelRecord]) -> list[str]:
    """Labels that show only the fields in which the records differ."""
    fields = ("size", "operator", "query_len", "mode", "dtype", "autocast", "checkpointing", "compiled", "source")
    varying = [name for name in fields if len({getattr(record, name) for record in records}) > 1] or ["operator"]
    labels = (", ".join(filter(None, (word(name, getattr(record, name)) for name in varying))) for record in records)
    return [label or ", ".join(ABSENT[name] for name in varying) for label in labels]


def word(field: str, value: Any) -> str:
    if field in FLAGS:
        return FLAGS[field].format(value) if value else ""
    return f"S {value}" if field == "query_len" else str(value)

"""Records as pictures. Lines differ in colour, marker and dash, so that greyscale and colour-blind readers can follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.quantities import format_bytes
from memcheck.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#666666"
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "ooo")


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    dash: Any = "-"


UNKNOWN_STYLE = Style(GREY, "x", ":")
# What the panels are called, and the record fields whose maximum they show.
PANELS = {
    "forward": ("Forward", ("forward_peak_bytes",)),
    "backward": ("Forward + backward", ("forward_peak_bytes", "backward_peak_bytes")),
}


def plot_memory(records: Sequence[Record], path: Path, *, styles: Mapping[str, Style], title: str) -> Figure:
    """Peak memory against sequence length, or bars for a single length, written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [name for name in PANELS if name == "forward" or any(record.mode == "train" for record in records)]
    figure, axes = plt.subplots(
        1, len(panels), sharey=True, squeeze=False, figsize=(1.5 + 4.5 * len(panels), 4.9), layout="constrained"
    )
    single = len({length(record, records) for record in records}) == 1
    for panel, ax in zip(panels, axes[0], strict=True):
        (draw_bars if single else draw_lines)(ax, records, panel, styles)
        ax.set_title(PANELS[panel][0], fontsize=12)
    axes[0][0].set_ylabel("peak memory, inputs and output included")
    figure.suptitle(title, fontsize=12)
    if note := missing_note(records):
        figure.supxlabel(note, fontsize=8.5, color=GREY)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return figure


def length(record: Record, records: Sequence[Record]) -> int:
    """The x of a record: the key length, or the query length where only that one varies."""
    varying = "kv_len" if len({other.kv_len for other in records}) > 1 else "query_len"
    return int(getattr(record, varying) or 0)


def peak(record: Record, panel: str) -> int | None:
    sizes = [getattr(record, field) for field in PANELS[panel][1]]
    return None if any(size is None for size in sizes) else max(sizes)


def out_of_memory(record: Record, panel: str) -> bool:
    return record.status == "oom" and (panel == "backward" or record.oom_phase != "backward")


def by_operator(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: length(record, records)):
        groups.setdefault(record.operator or "?", []).append(record)
    return groups


def missing_note(records: Sequence[Record]) -> str:
    missing = sorted(
        {f"{record.operator} ({record.status})" for record in records if record.status not in ("ok", "oom")}
    )
    return f"not drawn: {', '.join(missing)}" if missing else ""


def draw_lines(ax: Axes, records: Sequence[Record], panel: str, styles: Mapping[str, Style]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    labels = []
    for operator, rows in by_operator(records).items():
        style = styles.get(operator, UNKNOWN_STYLE)
        points = [(length(row, records), size) for row in rows if (size := peak(row, panel)) is not None]
        if points:
            ax.plot(*zip(*points, strict=True), color=style.colour, marker=style.marker, ls=style.dash, label=operator)
            labels.append((points[-1][1], f"{operator}  {format_bytes(points[-1][1])}", style.colour))
        mark_out_of_memory(ax, [length(row, records) for row in rows if out_of_memory(row, panel)], style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    lengths = sorted({length(record, records) for record in records})
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    ax.yaxis.set_major_locator(LogLocator(base=4))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("sequence length")
    ax.grid(color="#dddddd", lw=0.7)
    ax.spines[["top", "right"]].set_visible(False)
    label_ends(ax, labels)


def mark_out_of_memory(ax: Axes, lengths: Sequence[int], style: Style) -> None:
    """A cross at the top edge: the memory it would have taken is not known."""
    top = ax.get_xaxis_transform()
    for x in lengths:
        ax.plot([x], [1.0], transform=top, color=style.colour, marker="X", ms=10, clip_on=False, ls="none", label="OOM")
        ax.annotate(
            "OOM",
            (x, 1.0),
            (0, -9),
            xycoords=top,
            textcoords="offset points",
            ha="center",
            va="top",
            color=style.colour,
        )


def label_ends(ax: Axes, labels: list[tuple[int, str, str]]) -> None:
    """Names lines at their last point, in the margin, pushed apart where lines meet."""
    from matplotlib.transforms import ScaledTranslation

    figure = ax.figure
    gap, previous = 13.0, float("-inf")
    for size, text, colour in sorted(labels):
        y = float(ax.transData.transform((1, size))[1]) * 72 / figure.dpi
        shift = max(0.0, previous + gap - y)
        previous = y + shift
        offset = ScaledTranslation(0, shift / 72, figure.dpi_scale_trans)
        ax.text(1.03, size, text, transform=ax.get_yaxis_transform() + offset, va="center", color=colour, fontsize=10)


def draw_bars(ax: Axes, records: Sequence[Record], panel: str, styles: Mapping[str, Style]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rows = [row for row in records if peak(row, panel) is not None or out_of_memory(row, panel)]
    for position, row in enumerate(rows):
        style = styles.get(row.operator or "?", UNKNOWN_STYLE)
        size = peak(row, panel)
        if size is None or out_of_memory(row, panel):
            mark_out_of_memory(ax, [position], style)
            continue
        hatch = HATCHES[position % len(HATCHES)]
        ax.bar(position, size, width=0.6, color=style.colour, edgecolor="white", hatch=hatch, label=row.operator)
        ax.annotate(format_bytes(size), (position, size), (0, 3), textcoords="offset points", ha="center")
    ax.set_xticks(range(len(rows)), [row.operator or "?" for row in rows])
    ax.set_xlim(-0.7, len(rows) - 0.3)
    ax.set_xlabel(f"at sequence length {length(records[0], records)}")
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 4, 8, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))
    ax.grid(axis="y", color="#dddddd", lw=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)

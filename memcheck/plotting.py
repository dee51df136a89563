"""Records as pictures. Lines differ in colour, marker and dash: in greyscale and to the colour-blind they still do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.quantities import format_bytes
from memcheck.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

GREY = "#666666"
# The height of a row of out-of-memory marks, as a share of the axes.
OOM_ROW = 0.065
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


def plot_memory(
    records: Sequence[Record], path: Path, *, styles: Mapping[str, Style], title: str, subtitle: str
) -> Figure:
    """Peak memory against sequence length, or bars for a single length, written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [name for name in PANELS if name == "forward" or any(record.mode == "train" for record in records)]
    figure, (axes,) = plt.subplots(
        1, len(panels), sharey=True, squeeze=False, figsize=(10 if len(panels) > 1 else 7, 4.8), layout="constrained"
    )
    single = len({length(record, records) for record in records}) == 1
    for panel, ax in zip(panels, axes, strict=True):
        (draw_bars if single else draw_lines)(ax, records, panel, styles)
        ax.set_title(PANELS[panel][0], fontsize=12)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("peak memory, inputs and output included")
    figure.suptitle(f"{title}\n{subtitle}", fontsize=12)
    if note := missing_note(records):
        figure.supxlabel(note, fontsize=9, color=GREY)
    if single:
        set_linear_bytes(axes[0], records)
    else:
        set_log_bytes(axes[0], records)
        label_ends(figure)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return figure


def length(record: Record, records: Sequence[Record]) -> int:
    """The x of a record: the key length, or the query length where only that one varies."""
    varying = "kv_len" if len({other.kv_len for other in records}) > 1 else "query_len"
    return int(getattr(record, varying) or 0)


def length_label(records: Sequence[Record]) -> str:
    queries, keys = ({getattr(record, field) for record in records} for field in ("query_len", "kv_len"))
    if all(record.kv_len in (record.query_len, None) for record in records):
        return "sequence length" if len(queries) > 1 else f"at sequence length {records[0].query_len}"
    if len(queries) == len(keys) == 1:
        return f"at query length {records[0].query_len}, key length {records[0].kv_len}"
    if len(keys) == 1:
        return f"query length, at key length {records[0].kv_len}"
    return "key length" + (f", at query length {records[0].query_len}" if len(queries) == 1 else "")


def peak(record: Record, panel: str) -> int | None:
    sizes = [getattr(record, field) for field in PANELS[panel][1]]
    return None if any(size is None for size in sizes) else max(sizes)


def out_of_memory(record: Record, panel: str) -> bool:
    return record.status == "oom" and (panel == "backward" or record.oom_phase != "backward")


def by_operator(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.operator or "?", []).append(record)
    return {name: sorted(group, key=lambda record: length(record, records)) for name, group in groups.items()}


def missing_note(records: Sequence[Record]) -> str:
    missing = sorted(
        {f"{record.operator} ({record.status})" for record in records if record.status not in ("ok", "oom")}
    )
    return f"not drawn: {', '.join(missing)}" if missing else ""


def draw_lines(ax: Axes, records: Sequence[Record], panel: str, styles: Mapping[str, Style]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for operator, rows in by_operator(records).items():
        style = styles.get(operator, UNKNOWN_STYLE)
        points = [(length(row, records), size) for row in rows if (size := peak(row, panel)) is not None]
        if points:
            ax.plot(*zip(*points, strict=True), color=style.colour, marker=style.marker, ls=style.dash, label=operator)
    for row_number, operator in enumerate(oom_operators(records)):
        failed = [length(row, records) for row in by_operator(records)[operator] if out_of_memory(row, panel)]
        if failed:
            mark_out_of_memory(ax, operator, failed, row_number, styles.get(operator, UNKNOWN_STYLE))
    ax.set_xticks(x_ticks({length(record, records) for record in records}))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel(length_label(records))
    ax.grid(color="#dddddd", lw=0.7)


def x_ticks(lengths: set[int]) -> list[int]:
    """The lengths that ran, from the longest down, less those too close to the one before to be read."""
    ticks: list[int] = []
    for x in sorted(lengths, reverse=True):
        if not ticks or math.log(ticks[-1] / x) > math.log(max(lengths) / min(lengths)) / 7:
            ticks.append(x)
    return ticks


def set_log_bytes(ax: Axes, records: Sequence[Record]) -> None:
    """Ticks at powers of two, as decades of bytes read badly in MiB; above them room for the rows of OOM marks."""
    from matplotlib.ticker import FuncFormatter

    sizes = sizes_of(records)
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)) + 0.1)
    share = OOM_ROW * len(oom_operators(records))
    room = (high - low) * share / (1 - share)
    ax.set_ylim(2.0 ** (low - 0.2), 2.0 ** (high + room))
    ax.set_yticks([2.0**power for power in range(low, high + 1, math.ceil((high - low) / 8))])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))


def set_linear_bytes(ax: Axes, records: Sequence[Record]) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    highest = max(sizes_of(records))
    ax.set_ylim(0, 1.12 * highest)
    ax.yaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(highest / 5))))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))


def sizes_of(records: Sequence[Record]) -> list[int]:
    sizes = [peak(record, panel) for record in records for panel in PANELS]
    return [size for size in sizes if size] or [2**20]


def oom_operators(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.operator or "?" for record in records if record.status == "oom"))


def named_lines(ax: Axes) -> list[Line2D]:
    return [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]


def mark_out_of_memory(ax: Axes, operator: str, lengths: Sequence[int], row: int, style: Style) -> None:
    """Crosses in a row of their own at the top edge: the memory it would have taken is not known."""
    top = ax.get_xaxis_transform()
    y = 1 - OOM_ROW * (row + 0.5)
    ax.plot(lengths, [y] * len(lengths), transform=top, color=style.colour, marker="X", ms=9, ls="none", label="_oom")
    leftmost = lengths[0] <= ax.dataLim.x0
    ax.annotate(
        f"{operator} OOM",
        (lengths[-1] if leftmost else lengths[0], y),
        (9 if leftmost else -9, 0),
        xycoords=top,
        textcoords="offset points",
        ha="left" if leftmost else "right",
        va="center",
    )


def label_ends(figure: Figure) -> None:
    """Names lines at the height of their last point, in the margin, pushed apart where lines meet."""
    from matplotlib.transforms import ScaledTranslation

    # The layout must be settled for distances in points to hold.
    figure.draw_without_rendering()
    for ax in figure.axes:
        lowest = float("-inf")
        for line in sorted(named_lines(ax), key=last_size):
            size = last_size(line)
            points = float(ax.transData.transform((1, size))[1]) * 72 / figure.dpi
            shift = max(0.0, lowest - points)
            lowest = points + shift + 13
            place = ax.get_yaxis_transform() + ScaledTranslation(0, shift / 72, figure.dpi_scale_trans)
            ax.text(1.07, size, f"{line.get_label()} {format_bytes(size)}", transform=place, va="center", fontsize=10)
            key = ax.plot([1.04], [size], transform=place, clip_on=False, label="_key")[0]
            key.set(color=line.get_color(), marker=line.get_marker())


def last_size(line: Line2D) -> float:
    return float(line.get_ydata()[-1])  # type: ignore[index, arg-type]


def draw_bars(ax: Axes, records: Sequence[Record], panel: str, styles: Mapping[str, Style]) -> None:
    rows = [row for row in records if peak(row, panel) is not None or out_of_memory(row, panel)]
    for position, row in enumerate(rows):
        style, hatch = styles.get(row.operator or "?", UNKNOWN_STYLE), HATCHES[position % len(HATCHES)]
        size = 0 if out_of_memory(row, panel) else peak(row, panel) or 0
        ax.bar(position, size, width=0.6, color=style.colour, edgecolor="white", hatch=hatch, label=row.operator)
        text = format_bytes(size) if size else "OOM"
        ax.annotate(text, (position, size), (0, 3), textcoords="offset points", ha="center")
    ax.set_xticks(range(len(rows)), [row.operator or "?" for row in rows], rotation=0 if len(rows) < 5 else 30)
    ax.set_xlim(-0.7, max(len(rows), 1) - 0.3)
    ax.set_xlabel(length_label(records))
    ax.grid(axis="y", color="#dddddd", lw=0.7)
    ax.set_axisbelow(True)


def write_plots(
    records: Sequence[Record],
    folder: Path,
    *,
    styles: Mapping[str, Style],
    title: str,
    formats: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Every picture that these records make sense of."""
    paths = [folder / f"memory.{extension}" for extension in formats]
    for path in paths:
        plot_memory(records, path, styles=styles, title=title, subtitle="")
    return paths

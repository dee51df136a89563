"""Tables, sentences and a picture of runs of a script with different values or changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memcheck.core.script_record import ScriptRecord
from memcheck.core.units import format_bytes
from memcheck.report.plots.style import GREY, add_note, distinct_styles, in_house_style, new_figure, set_ticks
from memcheck.report.script_tables import at
from memcheck.report.tables import BYTES, Cell, Column, Table

FITS, OUT, FAILED = "fits", "out of memory", "failed"
GIB = 2**30


def outcome(record: ScriptRecord) -> str:
    """How the run ended. A refused allocation counts, even if the script caught its error."""
    return OUT if record.ran_out or record.refusals else FAILED if record.exit_code else FITS


def place_of(record: ScriptRecord) -> str:
    """Where memory ran out, or why it failed; else where the peak is."""
    if outcome(record) == FAILED:
        return record.error or f"exit code {record.exit_code}"
    moment = record.refusal.moment if outcome(record) == OUT and record.refusal is not None else record.peak
    return at(moment.place)


def trials_table(
    titles: Sequence[str], runs: Mapping[tuple[Any, ...], ScriptRecord], notes: Sequence[str] = ()
) -> Table:
    """A row for each run: its values, its peak, what the allocator reserved, whether it fits, and where it peaks."""
    columns = [
        *(Column(title.replace("-", "_"), title) for title in titles),
        Column("peak_bytes", "peak", format=BYTES),
        Column("reserved_bytes", "reserved", format=BYTES),
        Column("outcome", "result"),
        Column("place", "where", rank=1),
    ]
    rows: list[list[Cell]] = []
    for values, record in runs.items():
        ended = outcome(record) == FITS
        figures: list[Cell] = [record.peak.bytes, record.reserved_bytes] if ended else [None, None]
        numbers = (int(value) if isinstance(value, str) and value.isdecimal() else value for value in values)
        rows.append([*numbers, *figures, outcome(record), place_of(record)])
    return Table("runs", f"Runs on {next(iter(runs.values())).device_words}", columns, rows, list(notes))


def changes_table(base: ScriptRecord, runs: Mapping[str, ScriptRecord], notes: Sequence[str]) -> Table:
    """What each change gives. The first row is the script as it is."""

    def difference(run: ScriptRecord) -> int | None:
        ended = outcome(run) == outcome(base) == FITS
        return (run.reserved_bytes or 0) - (base.reserved_bytes or 0) if ended else None

    columns = [
        Column("change", "one change", read=lambda row: row[0]),
        Column("peak_bytes", "peak", format=BYTES, read=lambda row: row[1].peak.bytes if row[2] == FITS else None),
        Column(
            "reserved_bytes",
            "reserved",
            format=BYTES,
            read=lambda row: row[1].reserved_bytes if row[2] == FITS else None,
        ),
        Column("difference_mib", "difference", "MiB", "+,.0f", read=lambda row: row[3] and row[3] / 2**20, rank=1),
        Column("outcome", "result", read=lambda row: row[2]),
        Column("place", "where", read=lambda row: place_of(row[1]), rank=2),
    ]
    rows = [(name, run, outcome(run), difference(run)) for name, run in {"as it is": base, **runs}.items()]
    return Table.of("changes", "What would help: each row is a run of the script", columns, rows, notes)


def edge_sentences(title: str, value: int, step: int, runs: Mapping[int, ScriptRecord]) -> list[str]:
    """The largest value that fits, what it needs, and where the next one runs out. value: 0 if none fits."""
    beyond, device = runs.get(value + step), next(iter(runs.values())).device_words
    lines = []
    if value:
        one = runs[value]
        lines.append(
            f"The largest {title} that fits {device} is {value:,}: the peak is {format_bytes(one.peak.bytes)} of "
            "tensors, "
            f"with {format_bytes(one.reserved_bytes or 0)} of {format_bytes(one.usable_bytes or 0)} reserved, "
            f"{at(one.peak.place)}."
        )
    else:
        lines.append(f"Not even {title} {step:,} fits {device}.")
    if beyond is None:
        lines.append("The search ended there: more may fit.")
    elif beyond.refusal is not None:
        refusal = beyond.refusal
        lines.append(
            f"With {value + step:,} memory runs out {at(refusal.moment.place)}: "
            f"{format_bytes(refusal.requested_bytes)} requested with {format_bytes(refusal.moment.bytes)} in use."
        )
    if any(run.refusals and not run.ran_out for run in runs.values()):
        lines.append(
            "The script catches torch.OutOfMemoryError itself: a run in which an allocation was refused counts as one "
            "that does not fit."
        )
    return lines


@in_house_style
def trials_figure(titles: Sequence[str], runs: Mapping[tuple[str, ...], ScriptRecord], title: str) -> Any:
    """What the allocator reserved against the values of the first title that are numbers; a line for the others."""
    figure = new_figure(7.6, 4.6, title)
    ax = figure.subplots()
    usable = (next(iter(runs.values())).usable_bytes or 0) / GIB
    x = next((place for place in range(len(titles)) if all(values[place].isdecimal() for values in runs)), None)
    lines: dict[str, list[tuple[float, ScriptRecord]]] = {}
    for number, (values, record) in enumerate(runs.items()):
        others = [
            f"{name} {value}" for place, (name, value) in enumerate(zip(titles, values, strict=True)) if place != x
        ]
        lines.setdefault(", ".join(others) if x is not None else "runs", []).append(
            (number if x is None else int(values[x]), record)
        )
    styles = distinct_styles(lines, {})
    for name, points in lines.items():
        look: dict[str, Any] = {"color": styles[name].colour, "marker": styles[name].marker}
        fitting = sorted((at, (run.reserved_bytes or 0) / GIB) for at, run in points if outcome(run) == FITS)
        ax.plot(*(zip(*fitting, strict=True) if fitting else ([], [])), ls=styles[name].dash, label=name, **look)
        out = [at for at, run in points if outcome(run) == OUT]
        ax.plot(out, [usable] * len(out), **{**look, "marker": "x", "ls": "none", "mew": 2.2}, label="_out")
    ax.axhline(usable, color=GREY, lw=1, ls="--")
    ax.set_ylim(0, usable * 1.08)
    ax.set_ylabel("reserved by torch's allocator, GiB")
    if x is None:
        ax.set_xticks(range(len(runs)), [" ".join(values) for values in runs])
    else:
        ax.set_xlabel(titles[x])
        ax.set_xscale("log", base=2)
        set_ticks(ax.xaxis, sorted({int(values[x]) for values in runs}), str)
    ax.grid()
    if len(lines) > 1 or next(iter(lines), ""):
        figure.legend(loc="outside right center", handlelength=3)
    ran_out = any(outcome(run) == OUT for run in runs.values())
    add_note(figure, f"dashed: the {usable:.1f} GiB that torch can get", "x: memory runs out" if ran_out else "")
    return figure

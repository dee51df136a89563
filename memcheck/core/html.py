"""Small pieces of HTML for notebooks: no scripts, and the colours of the page around them, light or dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from memcheck.core.units import format_bytes

if TYPE_CHECKING:
    from memcheck.core.record import Record

STYLE = """<style>
.memcheck { max-width: 75em; overflow-wrap: anywhere; }
.memcheck .scroll { overflow: auto; max-height: 48em; margin: .5em 0; }
.memcheck table { border-collapse: collapse; margin: 0; font-variant-numeric: tabular-nums; }
.memcheck td, .memcheck th { padding: .2em .6em; text-align: left; white-space: nowrap; vertical-align: top; }
.memcheck td.number, .memcheck th.number { text-align: right; }
.memcheck thead th { vertical-align: bottom; border-bottom: 1px solid; white-space: normal; overflow-wrap: normal; }
.memcheck p, .memcheck li { margin: .3em 0; }
.memcheck ul { padding-left: 1.2em; margin: .3em 0; }
.memcheck .title { font-weight: bold; }
.memcheck .note { opacity: .75; font-size: .9em; }
.memcheck .bar { display: inline-block; height: .8em; min-width: 1px; }
.memcheck td.bars { min-width: 12em; }
.memcheck .picture { overflow-x: auto; }
.memcheck .picture img { min-width: 32em; max-width: 100%; background: #fff; }
.memcheck svg { display: block; width: 100%; max-width: 45em; height: 6em; margin: .5em 0; }
</style>"""
COLOURS = {"forward": "#0072B2", "kept": "#999999", "backward": "#D55E00", "optimizer": "#009E73"}
PEAKS = {
    "forward_peak_bytes": ("peak forward", "forward"),
    "saved_bytes": ("kept for backward", "kept"),
    "backward_peak_bytes": ("peak backward", "backward"),
    "optimizer_peak_bytes": ("peak optimizer", "optimizer"),
}
MOST_ROWS = 10  # Of a list of tensors or modules.
MOST_STEPS = 400  # Of a timeline; with more, each column shows its maximum.


def fragment(*parts: str) -> str:
    """The parts as one output of a cell."""
    return f'<div class="memcheck">{STYLE}\n' + "\n".join(parts) + "\n</div>"


def paragraphs(sentences: Iterable[str], kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return "\n".join(f"<p{attribute}>{escape(sentence)}</p>" for sentence in sentences)


def listed(sentences: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "\n</ul>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool]) -> str:
    """A table that scrolls where it is larger than the page. The cells are text; numeric columns are aligned right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ['class="number"' if number else "" for number in numeric]
        parts = (f"<{tag} {kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(parts)}</tr>".replace(" >", ">")

    body = "\n".join(line("td", row) for row in rows)
    head = f"<thead>{line('th', headings)}</thead>\n" if any(headings) else ""
    return f'<div class="scroll"><table>\n{head}<tbody>\n{body}\n</tbody></table></div>'


def bars(rows: Sequence[tuple[str, int, str]]) -> str:
    """A bar for each (name, bytes, kind); the kind has the colour."""
    highest = max((size for _, size, _ in rows), default=0) or 1
    lines = [
        f'<tr><td>{escape(name)}</td><td class="number">{format_bytes(size)}</td><td class="bars"><span class="bar" '
        f'style="width:{100 * size / highest:.1f}%;background:{COLOURS[kind]}"></span></td></tr>'
        for name, size, kind in rows
    ]
    return "<table><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"


def largest_first(sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    """(bytes, name) as text, with what is beyond the longest list in one row."""
    rows = sorted(sizes.items(), key=lambda row: -row[1])
    rest = rows[MOST_ROWS:]
    more = [(f"{len(rest)} more", sum(size for _, size in rest))] if rest else []
    return [(format_bytes(size), name) for name, size in [*rows[:MOST_ROWS], *more] if size]


def timeline(steps: Sequence[tuple[str, int]]) -> str:
    """A small picture of (phase, bytes alive) over the allocations and releases, in order. Empty without any."""
    highest = max((size for _, size in steps), default=0)
    if not highest:
        return ""
    few = -(-len(steps) // MOST_STEPS)
    groups = [steps[first : first + few] for first in range(0, len(steps), few)]
    columns = [max(group, key=lambda step: step[1]) for group in groups]
    areas = []
    for phase in dict.fromkeys(phase for phase, _ in columns):
        path = "".join(
            f"M{x} 100V{100 - 100 * size / highest:.1f}h1V100z"
            for x, (name, size) in enumerate(columns)
            if name == phase
        )
        areas.append(f'<path d="{path}" fill="{COLOURS.get(phase, COLOURS["kept"])}"/>')
    label = f"memory over time, up to {format_bytes(highest)}"
    box = f'viewBox="0 0 {len(columns)} 100" preserveAspectRatio="none" shape-rendering="crispEdges"'
    return f'<svg {box} role="img" aria-label="{label}">{"".join(areas)}</svg>'


def record_html(
    record: Record,
    *,
    words: Sequence[str] = (),
    steps: Sequence[tuple[str, int]] = (),
    modules: Mapping[str, Mapping[str, int]] | None = None,
) -> str:
    """A record as a notebook shows it: how it ended, its peaks, what was alive at the highest, and its doubts.

    words: further sentences about the result. steps: (phase, bytes alive), for a picture over time. modules: path ->
    its bytes at the "peak" and "saved" for backward.
    """
    peaks = [
        (name, size, kind) for field, (name, kind) in PEAKS.items() if (size := getattr(record, field)) is not None
    ]
    start = [f"Backward from {record.backward_from}."] if record.backward_from else []
    parts = [paragraphs([headline(record), *start, *words]), bars(peaks) if peaks else ""]
    steps = steps or [(phase, size) for phase, sizes in (record.over_time or {}).items() for size in sizes]
    if picture := timeline(steps):
        before = "; grey: the inputs, and the step before" if {phase for phase, _ in steps} - {*COLOURS} else ""
        parts += [picture, paragraphs([f"Bytes alive, over the allocations and releases in order{before}."], "note")]
    if modules and set(modules) != {""}:
        largest = sorted(modules.items(), key=lambda row: -row[1]["peak"])[:MOST_ROWS]
        cells = [
            (path or "outside of modules", format_bytes(sizes["peak"]), format_bytes(sizes["saved"]))
            for path, sizes in largest
        ]
        parts.append(table(("module", "at the peak", "kept for backward"), cells, (False, True, True)))
    parts += [
        paragraphs([f"Alive {when}:"]) + table(("", ""), largest_first(sizes), (True, False))
        for when, sizes in alive(record)
    ]
    about = "Not known: " if record.source == "predicted" and record.exact is False else ""
    doubts = [f"{about}{doubt}" if doubt.startswith("what ") else doubt for doubt in record.doubts]
    return fragment(*filter(None, parts), paragraphs(map(sentence, doubts), "note"))


def headline(record: Record) -> str:
    """ "Measured on cpu: the peak is 107 MiB, in the backward." """
    how = "Predicted for" if record.source == "predicted" else "Measured on"
    place = f"{how} {record.device_name or record.device}"
    case = f"{record.operator}. " if record.operator else ""
    if record.status != "ok":
        asked, used, more = record.oom_requested_bytes, record.oom_in_use_bytes, record.reason or ""
        if record.oom_phase is not None and asked is not None and used is not None:
            more = f"{format_bytes(asked)} requested, {format_bytes(used)} in use"
        phase = f" in the {record.oom_phase}" if record.oom_phase else ""
        status = "out of memory" if record.status == "oom" else record.status
        return sentence(f"{case}{place}: {status}{phase}{f': {more}' if more else ''}")
    phases = {name: getattr(record, f"{name}_peak_bytes") for name in ("forward", "backward", "optimizer")}
    known_peaks = {name: size for name, size in phases.items() if size is not None}
    if not known_peaks:
        return f"{case}{place}."
    highest = max(known_peaks, key=lambda name: known_peaks[name])
    return f"{case}{place}: the peak is {format_bytes(known_peaks[highest])}, in the {highest}."


def sentence(text: str) -> str:
    return text if text.endswith((".", "!")) else f"{text}."


def alive(record: Record) -> Iterator[tuple[str, dict[str, int]]]:
    """When, and the bytes alive then by name: at the highest peak, or when there was no room, as far as it is known."""
    phases = {name: getattr(record, f"{name}_peak_bytes") or 0 for name in ("forward", "backward", "optimizer")}
    highest = max(phases, key=lambda name: phases[name])
    terms = record.terms or {}
    if record.status == "oom" and "oom_in_use_bytes" in terms:
        yield "when there was no room", terms["oom_in_use_bytes"]
    elif rows := [row for row in record.alive_at_peak or () if row.get("phase") == highest]:
        counts = Counter(row["name"] for row in rows)
        sizes: dict[str, int] = {}
        for row in rows:
            name = f"{row['name']} ({counts[row['name']]} tensors)" if counts[row["name"]] > 1 else row["name"]
            sizes[name] = sizes.get(name, 0) + row["bytes"]
        yield f"at the peak of the {highest}", sizes
    elif record.status == "ok" and f"{highest}_peak_bytes" in terms:
        yield f"at the peak of the {highest}", terms[f"{highest}_peak_bytes"]

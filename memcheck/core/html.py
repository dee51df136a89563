"""Small pieces of HTML for notebooks: no scripts, and the colours of the page around them, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from memcheck.core.style import KINDS, colour_of
from memcheck.core.units import format_bytes, largest_first

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


def bars(rows: Sequence[tuple[str, str, int]]) -> str:
    """A bar for each (name, kind, bytes); the kind has the colour."""
    highest = max((size for *_, size in rows), default=0) or 1
    lines = [
        f'<tr><td>{escape(name)}</td><td class="number">{format_bytes(size)}</td><td class="bars"><span class="bar" '
        f'style="width:{100 * size / highest:.1f}%;background:{colour_of(kind)}"></span></td></tr>'
        for name, kind, size in rows
    ]
    return "<table><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"


def sizes_table(sizes: Mapping[str, int]) -> str:
    """A table of bytes and names, with what is beyond the longest list in one row."""
    rows = largest_first(((size, name) for name, size in sizes.items()), MOST_ROWS)
    return table(("", ""), [(format_bytes(size), name) for size, name in rows if size], (True, False))


def timeline(steps: Sequence[tuple[str, int]]) -> str:
    """A small picture of (phase, bytes alive) over the allocations and releases, and what it shows. "" without any."""
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
        areas.append(f'<path d="{path}" fill="{colour_of(phase) or KINDS["others"]}"/>')
    label = f"memory over time, up to {format_bytes(highest)}"
    box = f'viewBox="0 0 {len(columns)} 100" preserveAspectRatio="none" shape-rendering="crispEdges"'
    before = "; grey: the inputs, and the step before" if any(colour_of(phase) is None for phase, _ in steps) else ""
    note = paragraphs([f"Bytes alive, over the allocations and releases in order{before}."], "note")
    return f'<svg {box} role="img" aria-label="{label}">{"".join(areas)}</svg>\n{note}'


def modules(sizes: Mapping[str, Mapping[str, int]]) -> str:
    """The modules with the most bytes. sizes: path -> its bytes at the "peak" and "saved" for backward."""
    largest = sorted(sizes.items(), key=lambda row: -row[1]["peak"])[:MOST_ROWS]
    rows = [
        (path or "outside of modules", *(format_bytes(one[moment]) for moment in ("peak", "saved")))
        for path, one in largest
    ]
    return table(("module", "at the peak", "kept for backward"), rows, (False, True, True))


def sentence(text: str) -> str:
    return text if text.endswith((".", "!")) else f"{text}."

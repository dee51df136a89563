"""HTML by jinja2: templates beside their callers, and the parts of what a notebook shows."""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memcheck.core.units import KINDS, colour_of, format_bytes, highest, largest_first

MOST_ROWS = 10  # Of a list of tensors.
MOST_STEPS = 400  # Of a timeline; with more, each column shows its maximum.


@functools.cache
def template(path: Path) -> Any:
    """The jinja2 template in a file. What it inserts is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_function"] = to_json
    return environment.get_template(path.name)


def to_json(data: Any, **_: Any) -> str:
    """The data without spaces. A template escapes what HTML would read."""
    return json.dumps(data, separators=(",", ":"))


def macros() -> Any:
    """The macros of result.html: each returns the HTML of one part."""
    return template(Path(__file__).with_name("result.html")).module


def fragment(*parts: str) -> str:
    """The parts as one output of a cell."""
    return str(macros().fragment(parts))


def bars(rows: Sequence[tuple[str, str, int]]) -> str:
    """A bar for each (name, kind, bytes); the kind has the colour."""
    return str(macros().bars([(name, colour_of(kind), size, format_bytes(size)) for name, kind, size in rows]))


def sizes_table(sizes: Mapping[str, int]) -> str:
    """A table of bytes and names, with what is beyond the longest list in one row."""
    rows = largest_first(((size, name) for name, size in sizes.items()), MOST_ROWS)
    return str(macros().table((), [(format_bytes(size), name) for size, name in rows if size], (True, False)))


def timeline(steps: Sequence[tuple[str, int]]) -> str:
    """A small picture of (phase, bytes alive) over the allocations and releases, and what it shows. "" without any."""
    most = max((size for _, size in steps), default=0)
    if not most:
        return ""
    columns = [steps[place] for place in highest([size for _, size in steps], MOST_STEPS)]
    paths: dict[str, str] = {}
    for x, (phase, size) in enumerate(columns):
        paths[phase] = f"{paths.get(phase, '')}M{x} 100V{100 - 100 * size / most:.1f}h1V100z"
    areas = [(path, colour_of(phase) or KINDS["others"]) for phase, path in paths.items()]
    has_before = any(colour_of(phase) is None for phase, _ in steps)
    return str(macros().timeline(areas, len(columns), format_bytes(most), has_before))


def html_of(value: Any) -> str:
    """The HTML of a value. Reports are above this package, so the function is found by its name."""
    return str(pkgutil.resolve_name("memcheck.report.html:html_of")(value))

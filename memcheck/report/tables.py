"""Tables: columns with units and number formats, and rows, as text, Markdown, LaTeX, HTML, CSV or JSON."""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from memcheck.core import errors, files, html, units

# Number formats besides format specifications.
THREE_DIGITS = "three digits"
TIME = "time"  # Milliseconds, shown with three digits and their unit.
SPREAD = "spread"  # A share of the value before, shown as "±5%".
BYTES = "bytes"  # Shown with their unit.
COUNT = "count"  # Shown as "163M".
Cell = str | int | float | bool | None
GAP = "  "
SHORT = 8  # The most letters of a heading that is never wrapped.
NOTE_WIDTH = 120  # Of notes, where the width of the output is not limited.
BOLD, RED, PLAIN = "\033[1m", "\033[31m", "\033[0m"


class Verdict(str):
    """Text in place of a number: "OOM". Omitted from data formats if another column holds the status."""


@dataclass(frozen=True)
class Column:
    key: str  # Name in CSV and JSON, with the unit: "forward_peak_mib".
    title: str  # Title in text formats.
    unit: str = ""
    format: str = ""  # Of numbers: a format specification, or one of the names above.
    # Who sees the column: everybody, "people" (text formats) or "programs" (data formats).
    audience: str = "all"  # or "people", "programs"
    read: Callable[[Any], Cell] | None = None  # Reads the cell from a row; by default its item or attribute `key`.
    rank: int = 0  # Where width is limited, the columns of the highest rank are left out first; 0: never.

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def cell(self, row: Any) -> Cell:
        """The column's cell of a row."""
        if self.read is not None:
            return self.read(row)
        value: Cell = row[self.key] if isinstance(row, Mapping) else getattr(row, self.key)
        return value


@dataclass
class Table:
    name: str  # File name of the table.
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, name: str, title: str, columns: Sequence[Column], items: Iterable[Any], notes: Iterable[str] = ()
    ) -> Table:
        """The table whose columns read their cells from the items."""
        rows = [[column.cell(item) for column in columns] for item in items]
        return cls(name, title, list(columns), rows, list(notes))

    def to_people(self) -> Table:
        """The table for text formats: without columns for programs and without empty columns."""
        return self.with_columns(
            column.audience != "programs" and any(row[place] is not None for row in self.rows)
            for place, column in enumerate(self.columns)
        )

    def with_columns(self, keep: Iterable[bool]) -> Table:
        """The table with some of its columns."""
        keep = list(keep)
        rows = [list(itertools.compress(row, keep)) for row in self.rows]
        return Table(self.name, self.title, list(itertools.compress(self.columns, keep)), rows, self.notes)

    def numeric(self) -> list[bool]:
        """For each column, whether it holds a number."""
        return [any(is_number(row[place]) for row in self.rows) for place in range(len(self.columns))]

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """The headings and the rows as text."""
        rows = [[text_of(*pair) for pair in zip(row, self.columns, strict=True)] for row in self.rows]
        return [column.heading for column in self.columns], rows

    def __repr__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return html.fragment(to_html(self))


class Tables(list[Table]):
    """Tables, which a notebook shows one below the other."""

    def __repr__(self) -> str:
        return render(self, "table")

    def _repr_html_(self) -> str:
        return html.fragment(*map(to_html, self))

    def to_pandas(self) -> Any:
        """The rows of all tables as a DataFrame, unrounded."""
        import pandas as pd

        return pd.DataFrame([row for table in self for row in data_rows(table)])


class Sentences(list[str]):
    """Sentences, which a notebook shows as a list."""

    def __repr__(self) -> str:
        return "\n\n".join(self)

    def _repr_html_(self) -> str:
        return html.fragment(html.macros().listed(self))


def text_of(cell: Cell, column: Column) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return " " * (len(cell) - len(cell.lstrip(" "))) + " ".join(cell.split())
    if column.format in (THREE_DIGITS, TIME):
        return units.three_digits(cell) if column.format == THREE_DIGITS else units.format_time(cell)
    if column.format in (BYTES, COUNT):
        return units.format_bytes(cell) if column.format == BYTES else units.short_count(int(cell))
    if column.format == SPREAD:
        return f"±{cell:.0%}"
    text = format(cell, column.format)
    # A small number is not shown as 0.
    return "<0.01" if text == "0.00" and cell else text


def is_number(cell: Cell) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


@dataclass(frozen=True)
class Screen:
    """What text is written for: its width in characters, None if unlimited, and whether it may have colours."""

    width: int | None = None
    colour: bool = False

    @classmethod
    def of(cls, out: TextIO | None) -> Screen:
        """COLUMNS, else the width of the terminal; a pipe or a file has no limit. Colours only on a terminal."""
        terminal = out is not None and out.isatty()
        width = int(columns) if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns) else None
        if terminal and width is None:
            assert out is not None
            try:
                width = os.get_terminal_size(out.fileno()).columns or 80
            except OSError:
                width = 80
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(width, terminal and not plain)

    def paint(self, text: str, code: str) -> str:
        return f"{code}{text}{PLAIN}" if self.colour and text else text

    def fill(self, text: str) -> str:
        """The text in lines of the screen's width."""
        return textwrap.fill(text, min(self.width or NOTE_WIDTH, NOTE_WIDTH), break_on_hyphens=False)


def to_text(table: Table, screen: Screen | None = None) -> str:
    """The table for a terminal. Columns that do not fit the screen are named below it."""
    whole, screen = table.to_people(), screen or Screen()
    shown, ranks = whole, sorted({column.rank for column in whole.columns} - {0})
    while screen.width and sum(widths := widths_of(shown)) + len(GAP) * (len(widths) - 1) > screen.width and ranks:
        last = ranks.pop()
        shown = shown.with_columns([column.rank != last for column in shown.columns])
    missing = dict.fromkeys(column.heading for column in whole.columns if column not in shown.columns)
    notes = [*table.notes, *([f"Not shown in {screen.width} columns: {'; '.join(missing)}."] if missing else [])]
    parts = [screen.paint(screen.fill(table.title), BOLD), *(["", grid(shown, screen)] if shown.columns else [])]
    return "\n".join([*parts, *([""] if notes else []), *map(screen.fill, notes)])


def widths_of(table: Table) -> list[int]:
    """The width of each column: of its widest cell and of its heading's longest word, or of a short heading."""
    _, rows = table.texts()
    return [
        max(
            *(len(row[place]) for row in rows),
            len(column.unit),
            *(map(len, column.title.split() if len(column.title) > SHORT else [column.title])),
        )
        for place, column in enumerate(table.columns)
    ]


def grid(table: Table, screen: Screen) -> str:
    """The headings, wrapped, with the units below them; a line; and the rows."""
    widths, numeric, (_, rows) = widths_of(table), table.numeric(), table.texts()
    has_units = any(column.unit for column in table.columns)
    stacks = [textwrap.wrap(column.title, width) for column, width in zip(table.columns, widths, strict=True)]
    stacks = [stack + [column.unit] * bool(column.unit) for stack, column in zip(stacks, table.columns, strict=True)]
    height = max(map(len, stacks), default=has_units)
    heads = zip(*([""] * (height - len(stack)) + stack for stack in stacks), strict=True)

    def line(cells: Iterable[str]) -> list[str]:
        triples = zip(cells, numeric, widths, strict=True)
        return [f"{text:{'>' if number else '<'}{width}}" for text, number, width in triples]

    def painted(texts: list[str], row: list[Cell]) -> list[str]:
        pairs = zip(line(texts), row, strict=True)
        return [screen.paint(text, RED) if isinstance(cell, Verdict) else text for text, cell in pairs]

    lines = [screen.paint(GAP.join(line(head)).rstrip(), BOLD) for head in heads]
    lines.append(GAP.join("-" * width for width in widths))
    return "\n".join([*lines, *(GAP.join(painted(*pair)).rstrip() for pair in zip(rows, table.rows, strict=True))])


def to_html(table: Table) -> str:
    table = table.to_people()
    return str(html.macros().titled(table.title, *table.texts(), table.numeric(), table.notes))


def tabulated(table: Table, form: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table in a format of tabulate."""
    from tabulate import tabulate

    sides = ["right" if number else "left" for number in table.numeric()]
    text: str = tabulate(rows, headings, form, colalign=sides or None, disable_numparse=True, preserve_whitespace=True)
    return text


def to_markdown(table: Table) -> str:
    table = table.to_people()
    headings, rows = table.texts()
    escaped = [list(map(escape_markdown, row)) for row in [headings, *rows]]
    body = tabulated(table, "pipe", escaped[0], escaped[1:])
    return "\n\n".join([f"### {escape_markdown(table.title)}", body, *map(escape_markdown, table.notes)])


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\|<>*_`])", r"\\\1", text)


def to_latex(table: Table) -> str:
    """A LaTeX table environment; it needs the booktabs package. The notes stand below the table."""
    from tabulate import LATEX_ESCAPE_RULES

    table = table.to_people()
    escapes = str.maketrans(LATEX_ESCAPE_RULES)
    notes = (note.translate(escapes) for note in table.notes)
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{table.title.translate(escapes)}}}",
        tabulated(table, "latex_booktabs", *table.texts()),
        *(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {note}}}" for note in notes),
        r"\end{table}",
    ]
    return "\n".join(lines).replace("±", r"\ensuremath{\pm}")


def data_rows(table: Table) -> list[dict[str, Cell]]:
    """Rows with unrounded values. An unknown value is None if another column tells the reason, else the verdict."""
    table = table.with_columns(column.audience != "people" for column in table.columns)
    keys = [column.key for column in table.columns]
    hidden = Verdict if "status" in keys else ()
    return [
        {key: None if isinstance(cell, hidden) else cell for key, cell in zip(keys, row, strict=True)}
        for row in table.rows
    ]


def to_csv(table: Table) -> str:
    import pandas as pd

    keys = [column.key for column in table.columns if column.audience != "people"]
    text: str = pd.DataFrame(data_rows(table), columns=keys, dtype=object).to_csv(index=False)
    return text.rstrip("\n")


def to_object(table: Table) -> dict[str, Any]:
    columns = [
        {"key": column.key, "title": column.title, "unit": "ms" if column.format == TIME else column.unit or None}
        for column in table.columns
        if column.audience != "people"
    ]
    head = {"name": table.name, "title": table.title, "columns": columns}
    return {**head, "rows": data_rows(table), "notes": table.notes}


def render(tables: Sequence[Table], form: str, out: TextIO | None = None) -> str:
    """All tables as one text in the form table, markdown, latex, csv or json. out: sets the width of "table"."""
    if form == "json":
        return json.dumps([to_object(table) for table in tables], indent=1)
    if form == "csv":
        # A single table is a plain CSV file; several are separated by lines with their names.
        several = len(tables) > 1
        return "\n\n".join(f"# {table.title}\n{to_csv(table)}" if several else to_csv(table) for table in tables)
    if form == "table":
        screen = Screen.of(out) if out else Screen()
        return "\n\n\n".join(to_text(table, screen) for table in tables)
    texts = {"markdown": to_markdown, "latex": to_latex}
    if form not in texts:
        raise errors.unknown_name("form", form, ("table", *texts, "csv", "json"))
    return "\n\n".join(map(texts[form], tables))


def write_files(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Writes tables.md and tables.json with all tables, and each table as tables/NAME.csv and .tex."""
    texts = {"tables.md": render(tables, "markdown"), "tables.json": render(tables, "json")}
    for table in tables:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", table.name)
        texts |= {f"tables/{name}.csv": to_csv(table), f"tables/{name}.tex": to_latex(table)}
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        files.write_text(folder / name, text + "\n")
    return [folder / name for name in texts]

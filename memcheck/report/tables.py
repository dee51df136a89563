"""Tables as data. The same columns make rows that appear one by one, and whole tables as text, Markdown, LaTeX, CSV or
JSON.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from memcheck.core import html
from memcheck.core.errors import unknown_name
from memcheck.core.files import write_text
from memcheck.core.units import format_time, three_digits

# Number formats besides format specifications.
THREE_DIGITS = "three digits"
TIME = "time"  # Milliseconds, shown with three digits and their unit.
SPREAD = "spread"  # A share of the value before, shown as "±5%".
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
    title: str  # Title in text formats. Neighbours with the same title share it.
    unit: str = ""
    format: str = ""  # Of numbers: a format specification, or one of the names above.
    # Who sees the column: everybody, "people" (text formats) or "programs" (data formats).
    audience: str = "all"  # or "people", "programs"
    read: Callable[[Any], Cell] | None = None  # Reads the cell from a row; by default its item or attribute `key`.
    rank: int = 0  # Where width is limited, the columns of the highest rank are left out first; 0: never.
    width: int = 0  # Of cells that are not known when the first row is printed.

    @property
    def heading(self) -> str:
        unit = "±" if self.format == SPREAD else self.unit
        return f"{self.title}, {unit}" if unit else self.title

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
        return self._columns(
            column.audience != "programs" and any(row[position] is not None for row in self.rows)
            for position, column in enumerate(self.columns)
        )

    def to_programs(self) -> Table:
        return self._columns(column.audience != "people" for column in self.columns)

    def numeric(self) -> list[bool]:
        """For each column, whether it holds a number."""
        return [any(is_number(row[position]) for row in self.rows) for position in range(len(self.columns))]

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """The headings and the rows as text."""
        rows = [[text_of(*pair) for pair in zip(row, self.columns, strict=True)] for row in self.rows]
        return [column.heading for column in self.columns], rows

    def __repr__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return html.fragment(to_html(self))

    def _columns(self, keep: Iterable[bool]) -> Table:
        keep = list(keep)
        rows = [list(itertools.compress(row, keep)) for row in self.rows]
        return Table(self.name, self.title, list(itertools.compress(self.columns, keep)), rows, self.notes)


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
        return html.fragment(html.listed(self))


def text_of(cell: Cell, column: Column) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return " " * (len(cell) - len(cell.lstrip(" "))) + " ".join(cell.split())
    if column.format in (THREE_DIGITS, TIME):
        return three_digits(cell) if column.format == THREE_DIGITS else format_time(cell)
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


class Layout:
    """Columns side by side as text: the columns that fit the screen, with their widths.

    cell_widths: of the widest cell of each column. numeric: whether a column's cells are aligned to the right.
    """

    def __init__(
        self, columns: Sequence[Column], cell_widths: Sequence[int], numeric: Sequence[bool], screen: Screen
    ) -> None:
        self.columns, self.cell_widths, self.numeric, self.screen = columns, cell_widths, numeric, screen
        kept = list(range(len(columns)))
        while screen.width is not None and self._line_width(kept) > screen.width:
            droppable = [place for place in kept if columns[place].rank]
            if not droppable:
                break
            last = max(columns[place].rank for place in droppable)
            kept = [place for place in kept if columns[place].rank != last]
        self.kept, self.widths = kept, self._widths(kept)
        self.left_out = [column for place, column in enumerate(columns) if place not in kept]

    def _groups(self, kept: Sequence[int]) -> Iterator[list[int]]:
        """Neighbours with the same title."""
        for _, places in itertools.groupby(kept, key=lambda place: self.columns[place].title or place):
            yield list(places)

    def _widths(self, kept: Sequence[int]) -> dict[int, int]:
        """The width of each column, with room for the longest word of its heading, or for a short heading."""
        widths = {place: max(self.cell_widths[place], len(self.columns[place].unit)) for place in kept}
        for group in self._groups(kept):
            title = self.columns[group[0]].title
            taken = sum(widths[place] for place in group) + len(GAP) * (len(group) - 1)
            longest = max(map(len, title.split() if len(title) > SHORT else [title]), default=0)
            widths[group[-1]] += max(0, longest - taken)
        return widths

    def _line_width(self, kept: Sequence[int]) -> int:
        return sum(self._widths(kept).values()) + len(GAP) * (len(kept) - 1)

    def header(self) -> str:
        """The titles, wrapped to the width of their columns, the units below them, and a line."""
        blocks = []
        for group in self._groups(self.kept):
            width = sum(self.widths[place] for place in group) + len(GAP) * (len(group) - 1)
            align = "^" if len(group) > 1 else ">" if self.numeric[group[0]] else "<"
            title = self.columns[group[0]].title
            lines = [f"{line:{align}{width}}" for line in textwrap.wrap(title, width, break_on_hyphens=False)]
            if any(self.columns[place].unit for place in group):
                lines.append(GAP.join(self._padded(self.columns[place].unit, place) for place in group))
            blocks.append((width, lines))
        height = max((len(lines) for _, lines in blocks), default=0)
        filled = [[" " * width] * (height - len(lines)) + lines for width, lines in blocks]
        lines = [self.screen.paint(GAP.join(parts).rstrip(), BOLD) for parts in zip(*filled, strict=True)]
        return "\n".join([*lines, GAP.join("-" * self.widths[place] for place in self.kept)])

    def row(self, cells: Sequence[Cell]) -> str:
        """A line of the cells, one for each of all columns."""
        parts = []
        for place in self.kept:
            text = self._padded(text_of(cells[place], self.columns[place]), place)
            parts.append(self.screen.paint(text, RED) if isinstance(cells[place], Verdict) else text)
        return GAP.join(parts).rstrip()

    def _padded(self, text: str, place: int) -> str:
        return f"{text:{'>' if self.numeric[place] else '<'}{self.widths[place]}}"

    def notes(self) -> list[str]:
        """Names the columns that are left out."""
        names = dict.fromkeys(column.heading for column in self.left_out)
        return [f"Not shown in {self.screen.width} columns: {'; '.join(names)}."] if names else []


def to_text(table: Table, screen: Screen | None = None) -> str:
    table, screen = table.to_people(), screen or Screen()
    _, rows = table.texts()
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(len(table.columns))]
    layout = Layout(table.columns, widths, table.numeric(), screen)
    notes = [screen.fill(note) for note in [*table.notes, *layout.notes()]]
    title = screen.paint(screen.fill(table.title), BOLD)
    lines = ["", layout.header(), *map(layout.row, table.rows)] if table.columns else []
    return "\n".join([title, *lines, *([""] if notes else []), *notes])


def to_html(table: Table) -> str:
    table = table.to_people()
    body = html.table(*table.texts(), table.numeric())
    return "\n".join([html.paragraphs([table.title], "title"), body, html.paragraphs(table.notes, "note")])


def to_markdown(table: Table) -> str:
    table = table.to_people()
    headings, rows = table.texts()
    lines = [f"| {' | '.join(map(escape_markdown, row))} |" for row in [headings, *rows]]
    lines.insert(1, f"| {' | '.join('---:' if number else '---' for number in table.numeric())} |")
    return "\n\n".join([f"### {escape_markdown(table.title)}", "\n".join(lines), *map(escape_markdown, table.notes)])


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\|<>*_`])", r"\\\1", text)


LATEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"<": r"\textless{}", ">": r"\textgreater{}", "±": r"\textpm{}"},
    }
)


def to_latex(table: Table) -> str:
    """A LaTeX table environment; it needs the booktabs package. The notes stand below the table."""
    table = table.to_people()
    headings, rows = table.texts()
    head, *body = [rf"{' & '.join(cell.translate(LATEX) for cell in row)} \\" for row in [headings, *rows]]
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{table.title.translate(LATEX)}}}",
        rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in table.numeric())}}}",
        *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
        r"\end{tabular}",
        *(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {note.translate(LATEX)}}}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines)


def data_rows(table: Table) -> list[dict[str, Cell]]:
    """Rows with unrounded values. An unknown value is None if another column tells the reason, else the verdict."""
    table = table.to_programs()
    keys = [column.key for column in table.columns]
    hidden = Verdict if "status" in keys else ()
    return [
        {key: None if isinstance(cell, hidden) else cell for key, cell in zip(keys, row, strict=True)}
        for row in table.rows
    ]


def to_csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.key for column in table.to_programs().columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(data_rows(table))
    return text.getvalue().rstrip("\n")


def to_object(table: Table) -> dict[str, Any]:
    columns = [
        {"key": column.key, "title": column.title, "unit": "ms" if column.format == TIME else column.unit or None}
        for column in table.to_programs().columns
    ]
    head = {"name": table.name, "title": table.title, "columns": columns}
    return {**head, "rows": data_rows(table), "notes": table.notes}


TEXTS = {"markdown": to_markdown, "latex": to_latex}


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
    if form not in TEXTS:
        raise unknown_name("form", form, ("table", *TEXTS, "csv", "json"))
    return "\n\n".join(map(TEXTS[form], tables))


def write_files(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Writes tables.md and tables.json with all tables, and each table as tables/NAME.csv and .tex."""
    texts = {"tables.md": render(tables, "markdown"), "tables.json": render(tables, "json")}
    for table in tables:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", table.name)
        texts |= {f"tables/{name}.csv": to_csv(table), f"tables/{name}.tex": to_latex(table)}
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text + "\n")
    return [folder / name for name in texts]

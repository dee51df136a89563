"""Tables as data, rendered as text, Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THREE_DIGITS = "three digits"
Cell = str | int | float | bool | None


class Verdict(str):
    """Text in place of a number: "OOM". Omitted from data formats if another column holds the status."""


@dataclass(frozen=True)
class Column:
    key: str  # Name in CSV and JSON, with the unit: "forward_peak_mib".
    title: str  # Title in text formats.
    unit: str = ""
    format: str = ""  # Number format: a format specification, or THREE_DIGITS.
    # Who sees the column: everybody, "people" (text formats) or "programs" (data formats).
    audience: str = "all"  # or "people", "programs"

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass
class Table:
    name: str  # File name of the table.
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def to_people(self) -> Table:
        """The table for text formats: without columns for programs and without empty columns."""
        keep = [
            position
            for position, column in enumerate(self.columns)
            if column.audience != "programs" and any(row[position] is not None for row in self.rows)
        ]
        return self._columns(keep)

    def to_programs(self) -> Table:
        keep = [position for position, column in enumerate(self.columns) if column.audience != "people"]
        return self._columns(keep)

    def _columns(self, keep: Sequence[int]) -> Table:
        rows = [[row[position] for position in keep] for row in self.rows]
        return Table(self.name, self.title, [self.columns[position] for position in keep], rows, self.notes)


def shown(cell: Cell, column: Column) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return " ".join(cell.split())
    return three_digits(cell) if column.format == THREE_DIGITS else format(cell, column.format)


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: "0.0123", "1.23", "12.3", "1234"."""
    whole = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, 2 - whole)}f}"


def is_number(cell: Cell) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


Heading = Callable[[Column, Column | None], str]  # Space before a column.


def tabulated(table: Table, style: str, heading: Heading, escape: Callable[[str], str] = str) -> str:
    from tabulate import tabulate

    numeric = [any(is_number(row[position]) for row in table.rows) for position in range(len(table.columns))]
    cells = [
        [escape(shown(cell, column)) for cell, column in zip(row, table.columns, strict=True)] for row in table.rows
    ]
    return tabulate(
        cells,
        headers=[escape(heading(*pair)) for pair in zip(table.columns, [None, *table.columns], strict=False)],
        tablefmt=style,
        colalign=["right" if number else "left" for number in numeric] if cells else None,
        disable_numparse=True,
    )


def to_text(table: Table) -> str:
    table = table.to_people()
    notes = [textwrap.fill(note, NOTE_WIDTH) for note in table.notes]
    return "\n".join([table.title, "", tabulated(table, "simple", stacked), *([""] if notes else []), *notes])


NOTE_WIDTH = 150


def stacked(column: Column, before: Column | None) -> str:
    """Column titles with the unit on a second line, printed once for neighbours that share it."""
    shared = before is not None and before.title == column.title
    return f"{'' if shared else column.title}\n{column.unit}" if column.unit else column.title


def in_one_line(column: Column, before: Column | None) -> str:
    return column.heading


def to_markdown(table: Table) -> str:
    table = table.to_people()
    body = tabulated(table, "pipe", in_one_line, escape_markdown)
    return "\n\n".join([f"### {escape_markdown(table.title)}", body, *map(escape_markdown, table.notes)])


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\|<>*_`])", r"\\\1", text)


def to_latex(table: Table) -> str:
    """A LaTeX table environment; it needs the booktabs package."""
    from tabulate import LATEX_ESCAPE_RULES

    table = table.to_people()
    body = tabulated(table, "latex_booktabs", in_one_line)
    caption = "".join(LATEX_ESCAPE_RULES.get(letter, letter) for letter in " ".join([table.title, *table.notes]))
    lines = [r"\begin{table}[htbp]", r"\centering", rf"\caption{{{caption}}}", body, r"\end{table}"]
    return "\n".join(lines)


def data_rows(table: Table) -> list[dict[str, Cell]]:
    """Rows with unrounded values. An unknown value is None if another column tells the reason, else the verdict."""
    table = table.to_programs()
    keys = [column.key for column in table.columns]
    return [
        {
            key: None if isinstance(cell, Verdict) and "status" in keys else cell
            for key, cell in zip(keys, row, strict=True)
        }
        for row in table.rows
    ]


def to_csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.key for column in table.to_programs().columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(data_rows(table))
    return text.getvalue().rstrip("\n")


def to_object(table: Table) -> dict[str, Any]:
    columns = [{"key": c.key, "title": c.title, "unit": c.unit or None} for c in table.to_programs().columns]
    return {
        "name": table.name,
        "title": table.title,
        "columns": columns,
        "rows": data_rows(table),
        "notes": table.notes,
    }


def render(tables: Sequence[Table], form: str) -> str:
    """All tables as one text, in the given form: table, markdown, latex, csv or json."""
    if form == "json":
        return json.dumps([to_object(table) for table in tables], indent=1)
    if form == "csv":
        # A single table is a plain CSV file; several are separated by lines with their names.
        return (
            "\n\n".join(f"# {table.title}\n{to_csv(table)}" for table in tables)
            if len(tables) > 1
            else to_csv(tables[0])
        )
    one = {"table": to_text, "markdown": to_markdown, "latex": to_latex}[form]
    return ("\n\n\n" if form == "table" else "\n\n").join(map(one, tables))


def write_files(tables: Sequence[Table], folder: Path, stem: str = "tables") -> list[Path]:
    """Writes STEM.md and STEM.json with all tables, and each table as STEM/NAME.csv and .tex."""
    texts = {f"{stem}.md": render(tables, "markdown"), f"{stem}.json": render(tables, "json")}
    for table in tables:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", table.name)
        texts |= {f"{stem}/{name}.csv": to_csv(table), f"{stem}/{name}.tex": to_latex(table)}
    (folder / stem).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return [folder / name for name in texts]

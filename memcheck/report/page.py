"""Writes one self-contained HTML page: summary, plots, sortable tables, environment, command. It needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from memcheck.core import html
from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.report.accounting import accounting_table, summary
from memcheck.report.cases import is_model, models_among, size_of, values_in_order
from memcheck.report.memory import MemoryPicture
from memcheck.report.models import parts_tables
from memcheck.report.records import growth_tables, main_tables
from memcheck.report.tables import Table, is_number

BEFORE_A_UNIT = re.compile(r"(?<=\d) (?=([KMGT]i)?B\b|bytes\b)")  # A number stays on the line of its unit.
FACTS = {
    "device": "device",
    "device_name": "device name",
    "device_uuid": "device UUID",
    "device_total_bytes": "device memory",
    "torch_version": "torch",
    "memcheck_version": "memcheck",
    "allocator": "allocator",
    "threads": "threads",
}


def html_page(
    records: Sequence[Record],
    *,
    title: str,
    plots: Sequence[tuple[str, str]] = (),
    sweeps: Sequence[Mapping[str, Any]] = (),
    tables: Sequence[Table] | None = None,
) -> str:
    """The page as HTML.

    plots: (caption, <img> or inline SVG). sweeps: the contents of each DIR/sweep.json. tables: replace the usual ones.
    """
    first, folded = page_tables(records) if tables is None else (list(tables), [])
    return render_page(
        title=title,
        paragraphs=summary(records),
        plots=plots,
        tables=first,
        folded=folded,
        facts=environment_facts(records),
        sweeps=[sweep_object(sweep) for sweep in sweeps],
    )


def render_page(
    *,
    title: str,
    paragraphs: Sequence[str],
    plots: Sequence[tuple[str, str]] = (),
    pictures: Sequence[MemoryPicture] = (),
    tables: Sequence[Table],
    folded: Sequence[Table] = (),
    facts: Mapping[str, str],
    sweeps: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A page of these parts. folded: tables that are collapsed at first. sweeps: commands and where they ran."""
    sources = {name: text for picture in pictures for name, text in picture.sources.items()}
    paragraphs = [BEFORE_A_UNIT.sub("\N{NO-BREAK SPACE}", text) for text in paragraphs]
    parts = {"title": title, "paragraphs": paragraphs, "plots": plots, "pictures": pictures, "facts": facts}
    shown = {
        "tables": [table_object(table, sources) for table in tables],
        "folded": [table_object(table, {}) for table in folded],
    }
    return str(html.template(Path(__file__).with_name("page.html")).render(**parts, **shown, sweeps=sweeps))


def page_tables(records: Sequence[Record]) -> tuple[list[Table], list[Table]]:
    """The main tables, and the tables that are collapsed at first: growth, accounting of the largest cases, parts."""
    growth = growth_tables(records)
    scaling = [table for table in growth if table.name == "scaling"]
    known = [record for record in records if record.status == "ok" and (record.terms or record.alive_at_peak)]
    known = [record for record in known if record.mode != "decode" and not is_model(record)]
    largest = {record.operator: record for record in sorted(known, key=size_of)}
    parts = parts_tables(models_among(records))
    return main_tables(records) + scaling, [*growth[len(scaling) :], *map(accounting_table, largest.values()), *parts]


def table_object(table: Table, sources: Mapping[str, str]) -> dict[str, Any]:
    """A table in the form the template needs: headings, and cells with text, sort keys and the source of a line."""
    table = table.to_people()
    headings, texts = table.texts()
    columns = [
        {"heading": heading, "numeric": number} for heading, number in zip(headings, table.numeric(), strict=True)
    ]
    rows = [
        [
            {"text": text, "number": cell if is_number(cell) else None, "source": sources.get(str(cell))}
            for text, cell in zip(line, row, strict=True)
        ]
        for line, row in zip(texts, table.rows, strict=True)
    ]
    return {"title": table.title, "columns": columns, "rows": rows, "notes": table.notes}


def sweep_object(sweep: Mapping[str, Any]) -> dict[str, Any]:
    environment = sweep.get("environment") or {}
    facts = {str(name): str(value) for name, value in environment.items() if value is not None}
    return {"command": sweep.get("command"), "started": when(sweep.get("started")), "facts": facts}


def environment_facts(records: Sequence[Record]) -> dict[str, str]:
    """The environment of the records: name -> values."""
    facts = {}
    for field, words in FACTS.items():
        values = values_in_order(records, field)
        if values:
            facts[words] = ", ".join(format_bytes(value) if field.endswith("bytes") else str(value) for value in values)
    return facts


def when(text: str | None) -> str | None:
    """Formats an ISO time for reading. None if the text is not an ISO time."""
    try:
        return datetime.fromisoformat(text or "").strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return None

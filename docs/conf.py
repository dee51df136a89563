"""Sphinx: the pages beside this file, the API from docstrings, and tables that are generated from the code."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

from memcheck.__main__ import Parser, command_names
from memcheck.core.record import Record
from memcheck.core.version import __version__

project = "memcheck"
author = "the memcheck authors"
version = release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"memcheck {__version__}"
nb_execution_mode = "off"
smartquotes = False
myst_heading_anchors = 3
autodoc_typehints = "none"
# Notebooks and result files are linked where they lie, outside this folder.
suppress_warnings = ["myst.xref_missing"]

DOCS = Path(__file__).parent
GENERATED = DOCS / "generated"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def flag_table(parser: argparse.ArgumentParser) -> str:
    """A row per option of a command: its flags, its default, and its help."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        flags = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.dest}`"
        default = "" if action.default in (None, False, argparse.SUPPRESS, []) else f"`{action.default}`"
        rows.append(f"| {flags} | {cell(default)} | {cell((action.help or '').replace('%%', '%'))} |")
    return "\n".join(rows)


def command_page() -> str:
    """Every command with its options, as `memcheck COMMAND --help` lists them."""
    parts = ["# Commands and flags", "This page is generated from the command line's own parsers."]
    for name in command_names():
        module = importlib.import_module(f"memcheck.cli.commands.{name.replace('-', '_')}")
        parser = Parser(prog=f"memcheck {name}", description=module.__doc__, allow_abbrev=False)
        module.add_arguments(parser)
        parts += [f"## memcheck {name}", (module.__doc__ or "").strip(), flag_table(parser)]
    return "\n\n".join(parts) + "\n"


def record_page() -> str:
    """The fields of a record, with the comments that stand beside them in the source."""
    rows = ["| field | type | meaning |", "| --- | --- | --- |"]
    comments = dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(Record), re.MULTILINE))
    for field in dataclasses.fields(Record):
        rows.append(f"| `{field.name}` | `{cell(str(field.type))}` | {cell(comments.get(field.name, ''))} |")
    intro = "One record per case, in `records.jsonl`. Sizes are bytes; unknown is null, never 0."
    return f"# Fields of a record\n\n{intro}\n\n" + "\n".join(rows) + "\n"


def as_written(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Shows docstrings as they are written: a first line, and the rest as preformatted text."""
    if lines:
        first = re.sub(r"([*_`|\\])", r"\\\1", lines[0])
        rest = [f"    {line}".rstrip() for line in lines[1:]]
        lines[:] = [first, "", "::", "", *rest, ""] if any(rest) else [first, ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_written)
    (GENERATED / "notebooks").mkdir(parents=True, exist_ok=True)
    for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
        shutil.copyfile(notebook, GENERATED / "notebooks" / notebook.name)
    for name, text in (("commands", command_page()), ("records", record_page())):
        path = GENERATED / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")

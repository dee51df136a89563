"""Sphinx: the pages beside this file, the API from docstrings, and reference pages that are generated from the code.

python docs/conf.py writes the reference pages only.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from docutils import nodes

from memcheck.cli.flags import parser_of, split_help
from memcheck.cli.requests import COMMANDS
from memcheck.core.arguments import documented
from memcheck.core.options import options_of
from memcheck.core.ranks import Ranks
from memcheck.core.record import Record
from memcheck.core.step import Place, Step
from memcheck.core.version import __version__

project = "memcheck"
author = "the memcheck authors"
version = release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"memcheck {__version__}"
nb_execution_mode = "off"
smartquotes = False
myst_heading_anchors = 3
autodoc_typehints = "none"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
OPTIONS = [f"Options of the {title}" for title in ("step", "place", "ranks")]  # Sections of generated docstrings.
described = [(title, "params_style") for title in ("Attributes", "Keywords", *OPTIONS)]
napoleon_custom_sections = ["Equivalent to", "Returns", *described]
nitpicky = True

DOCS = Path(__file__).parent
html_search_scorer = str(DOCS / "_static/search.js")
BACKSLASH = "\\"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def flag_rows(name: str) -> dict[str, tuple[str, str]]:
    """The options of a command: name -> its flags with their values, and its help."""
    rows = {}
    for action in parser_of(name, COMMANDS[name])._actions:
        if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            value = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
            words = [f"{flag} {value}" if action.nargs != 0 else flag for flag in action.option_strings] or [value]
            flags = ", ".join(f"`{cell(word)}`" for word in words)
            rows[action.dest] = flags, cell((action.help or "").replace("%%", "%"))
    return rows


def flag_table(rows: Iterable[tuple[str, str]]) -> str:
    lines = ["| flag | meaning |", "| --- | --- |", *(f"| {flags} | {meaning} |" for flags, meaning in rows)]
    return "\n".join(lines) if len(lines) > 2 else ""


def command_page() -> str:
    """Every command with its options and examples, as `memcheck COMMAND --help` lists them. What several commands share
    is explained once, in the last table.
    """
    tables = {name: flag_rows(name) for name in COMMANDS}
    uses = [(option, meaning) for rows in tables.values() for option, (_, meaning) in rows.items()]
    common = dict(sorted({use for use in uses if uses.count(use) > 1}, key=lambda use: (uses.count(use), len(use[1]))))
    last: dict[str, tuple[str, str]] = {}
    opening = "Look up here what a command does and what its flags mean; `--help` says the same."
    parts = ["# Commands and flags", opening]
    for name, rows in tables.items():
        description, examples = split_help(COMMANDS[name])
        shown = "\n".join(["```console", *(f"$ {example}" for example in examples), "```"])
        shared = {option: row for option, row in rows.items() if common.get(option) == row[1]}
        last = shared | last
        own = [row for option, row in rows.items() if option not in shared]
        names = [re.sub(" [^`]+`", "`", row[0]) if row == last[option] else row[0] for option, row in shared.items()]
        parts += [f"## memcheck {name}", description, shown, flag_table(own)]
        parts += ["[Common flags](#common-flags): " + ", ".join(names).replace("\\|", "|")] * bool(names)
    return "\n\n".join(filter(None, [*parts, "## Common flags", flag_table(sorted(last.values()))])) + "\n"


def option_page() -> str:
    """The options of a step, a place and split models, as the functions, the flags and the notebook take them."""
    intro = (
        "Look up here what a step, a place and split models can be told: fields of `memcheck.Step`, `memcheck.Place` "
        "and `memcheck.Ranks`, keywords of functions, or flags of commands (`memory_limit` is `--memory-limit`)."
    )
    parts = ["# Options of a step and a place", intro]
    for kind in (Step, Place, Ranks):
        rows = ["| option | default | meaning |", "| --- | --- | --- |"]
        for name, option in options_of(kind).items():
            rows.append(f"| `{name}` | `{cell(repr(option.default))}` | {cell(option.help)} |")
        parts += [f"## {kind.__name__}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def record_page() -> str:
    """The fields of a record by section, with the comments that stand beside or above them in the source."""
    intro = "Look up here what a field of a record means. Sizes are bytes; unknown is null, never 0."
    lines = ["# Fields of a record", "", intro]
    types = {field.name: field.type for field in dataclasses.fields(Record)}
    above: list[str] = []  # Comment lines since the last field.
    for line in inspect.getsource(Record).splitlines():
        code, _, comment = line.partition("  # ")
        name = code.strip().partition(":")[0]
        if line.strip().startswith("# "):
            above.append(line.strip().removeprefix("# "))
        elif name in types and code.startswith(f"    {name}: "):
            if above and not comment and len(above) > 1:
                comment, above = " ".join(above), []
            if above:
                lines += ["", f"## {above[0].rstrip('.')}", "", "| field | type | meaning |", "| --- | --- | --- |"]
            lines.append(f"| `{name}` | `{cell(str(types[name]))}` | {cell(comment)} |")
            above = []
    return "\n".join(lines) + "\n"


def links_within_the_site(app: Any, page: str, source: list[str]) -> None:
    """On GitHub links lead to files. The site has notebooks and names of the API itself, other pages as files."""
    source[0] = re.sub(r"\]\(api/\w+\.md#(memcheck\.[\w.]+)\)", r"](#\1)", source[0])
    text = re.sub(r"\]\(\.\./(notebooks/\w+\.ipynb)", r"](generated/\1", source[0])
    beside_code = r"\]\(((?:\.\./)+(?:benchmarks|csrc|memcheck|tests)/[\w./]+\.md)(?:#[\w-]+)?"
    source[0] = re.sub(beside_code, r"](path:\1", text)


def without_links_back(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Pages of source have no links to the API: those of viewcode are dead where a module has two public names."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def sized_tables(app: Any, page: nodes.document) -> None:
    """Marks tables of a terminal with more columns than fit, which get smaller letters, and cells that do not wrap."""
    for block in page.findall(nodes.literal_block):
        rules = re.findall(r"^-+(?: +-+)+$", block.astext(), re.MULTILINE)
        columns = max(map(len, rules), default=0)
        block["classes"] += ["wide"] * (columns > 120) + ["wider"] * (columns > 140)
    for entry in page.findall(nodes.entry):
        entry["classes"] += ["number"] * bool(re.fullmatch(r"\W?\d\S*( \S{1,3})?", entry.astext()))


def field_lines(kind: type) -> list[str]:
    """A docstring's section of the fields of a class, with the comments beside them in the source."""
    source = inspect.getsource(kind).replace(kind.__doc__ or "", "")
    fields = re.findall(r"^    (\w+): ([^=#\n]+?)(?: = [^#\n]+?)?(?:  # (.*))?$", source, re.MULTILINE)
    return ["Attributes:", *(f"    {name}: `{hint}`. {comment}" for name, hint, comment in fields), ""]


def to_markup(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes the plain text of docstrings reStructuredText, before napoleon reads their sections."""
    if obj in (Step, Place, Ranks):
        lines += documented("", {obj.__name__.lower(): options_of(obj)}).splitlines()
    if is_result(obj) and obj is not Record and "Attributes:" not in lines:
        lines += field_lines(obj)
    lines[:] = re.sub(r"`[^`\n]+\n +[^`\n]+`", lambda code: " ".join(code[0].split()), "\n".join(lines)).split("\n")
    for index, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            escaped = re.sub(r"[*_|\\]", r"\\\g<0>", line)
            lines[index] = re.sub(r"`([^`]+)`", lambda code: f"``{code[1].replace(BACKSLASH, '')}``", escaped)
    if obj is Record:
        lines += ["Its fields: see :doc:`/reference/records`.", ""]


def is_result(kind: Any) -> bool:
    """Whether it is a class of fields which only memcheck makes."""
    fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    return inspect.isclass(kind) and fields and kind not in (Step, Place, Ranks)


def without_arguments(app: Any, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, str] | None:
    """Nobody calls the class of a result."""
    return ("", "") if is_result(obj) else None


def undocumented(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out fields, which the page of the class explains, and methods of torch's modules."""
    is_field = not callable(obj) and not isinstance(obj, property | classmethod | staticmethod)
    return True if is_field or inspect.getdoc(obj) == inspect.getdoc(getattr(torch.nn.Module, name, None)) else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", to_markup, priority=400)
    app.connect("autodoc-process-signature", without_arguments)
    app.connect("autodoc-skip-member", undocumented)
    app.connect("source-read", links_within_the_site)
    app.connect("doctree-read", sized_tables)
    app.connect("html-page-context", without_links_back)
    notebooks = DOCS / "generated" / "notebooks"
    notebooks.mkdir(parents=True, exist_ok=True)
    for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
        (notebooks / notebook.name).write_text(notebook.read_text("utf-8").replace("](../", "](../../../"), "utf-8")
    write_reference()


def write_reference() -> None:
    """Writes the generated pages to docs/reference/. They are committed, so that links to them work on GitHub."""
    for name, text in (("commands", command_page()), ("options", option_page()), ("records", record_page())):
        path = DOCS / "reference" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":  # python docs/conf.py
    write_reference()

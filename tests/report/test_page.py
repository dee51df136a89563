"""The page: whole without a network, every row in it, nothing in a record taken for HTML; in a browser it sorts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from json_lines import write_json_lines

from memcheck.__main__ import main
from memcheck.core.record import Doubt, Record
from memcheck.report.page import html_page

HOSTILE = '</td></table><script>alert("x")</script><img src=x onerror=alert(1)> & "quoted"'
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements and their attributes; whether what opens closes; the text of cells and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def record(operator: str, length: int = 256, **fields: object) -> Record:
    values = {"bsz": 1, "query_len": length, "kv_len": length, "dim": 64, "dtype": "float32", "mode": "train"}
    sizes = {"forward_peak_bytes": length * 4096, "backward_peak_bytes": length * 8192, "saved_bytes": 0}
    where = {"device": "cpu", "device_name": "a CPU", "torch_version": "2.13.0", "input_bytes": 1, "output_bytes": 1}
    return Record(operator=operator, **{**values, **sizes, **where, **fields})  # type: ignore[arg-type]


NOTHING = {"forward_peak_bytes": None, "backward_peak_bytes": None, "saved_bytes": None}
RECORDS = [
    record("naive", 2048, status="oom", oom_phase="forward", **NOTHING),
    *(record(operator, length) for length in (1024, 256, 512) for operator in ("naive", "softplus")),
    record("softmax/cudnn", status="unsupported", reason=HOSTILE, doubts=(Doubt(HOSTILE),), **NOTHING),
    record("flex", mode="decode", query_len=1, state_bytes=4096, state_bytes_per_token=16.0),
]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M0 0"/></svg>'
SWEEP = {
    "command": "memcheck sweep --preset quick --output 'a<b'",
    "environment": {"torch": "2.13.0", "threads": 2, "gpu": None},
    "started": "2026-03-01T12:30:00+00:00",
}


@pytest.fixture(scope="module")
def text() -> str:
    return html_page(RECORDS, title="What <attention> costs", plots=[("Memory & length.", SVG)], sweeps=[SWEEP])


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_it_is_one_whole_document(text: str, page: Page) -> None:
    assert text.startswith("<!doctype html>")
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        assert attributes.get("aria-labelledby", ids[0]) in ids
        assert (attributes.get("href") or f"#{ids[0]}")[1:] in ids


def test_it_needs_no_network(text: str, page: Page) -> None:
    """Names of XML namespaces are no references."""
    assert not re.search(r"url\(|@import", text)
    assert not any("src" in attributes for _, attributes in page.elements)
    assert page.all("link") == []
    outside = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    assert "http" not in outside


def test_every_row_is_there(page: Page) -> None:
    for operator in {row.operator for row in RECORDS}:
        # Once in a table of all rows, or of those that decode.
        assert page.cells.count(operator) >= sum(row.operator == operator for row in RECORDS)
    assert page.cells.count("OOM") >= 3
    assert "unsupported" in page.cells


def test_what_records_say_is_text(text: str, page: Page) -> None:
    assert HOSTILE not in text
    assert HOSTILE in " ".join(page.text.split())
    assert "What <attention> costs" in page.text
    assert len(page.all("script")) == 1
    assert page.all("img") == []


def test_it_says_where_and_how(page: Page) -> None:
    assert SWEEP["command"] in page.text
    assert "started 2026-03-01 12:30 UTC" in " ".join(page.text.split())
    for words in ("a CPU", "2.13.0", "Memory & length.", "1 oom", "x least"):
        assert words in page.text


def test_numbers_sort_as_numbers_and_headings_are_buttons(page: Page) -> None:
    assert len(page.all("button")) == len(page.all("th"))
    numbers = [attributes["data-number"] for attributes in page.all("td") if "data-number" in attributes]
    assert len(numbers) > 30
    assert all(float(number) >= 0 for number in numbers if number)


def test_a_page_without_plots_or_sweeps(tmp_path: Path) -> None:
    bare = Page(html_page([Record(operator="naive", status="error", reason="no")], title="One"))
    assert "Plots" not in bare.text
    assert "no" in bare.text


def test_the_command_writes_it(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("memcheck.report.plots.pictures.inline_pictures", lambda *args: [("A picture.", SVG)])
    write_json_lines(RECORDS, tmp_path / "records.jsonl")
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "new" / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().err
    written = Page((tmp_path / "new" / "page.html").read_text())
    assert "A picture." in written.text
    assert SWEEP["command"] in written.text
    (tmp_path / "sweep.json").write_text("{half")
    assert main(["report", str(tmp_path), "--html", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


# Clicks on a heading, and leaves what came out where --dump-dom shows it.
CLICK = """<script>
const buttons = Array.from(document.querySelectorAll("table")[0].querySelectorAll("thead button"));
const column = buttons.findIndex((button) => button.textContent === "HEADING");
for (let click = 0; click < CLICKS; click++) buttons[column].click();
const body = document.querySelector("tbody");
const cells = Array.from(body.rows, (row) => row.cells[column].textContent);
const sorted = buttons[column].parentElement.getAttribute("aria-sort");
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.title = JSON.stringify([sorted, cells, wide]);
</script></body>"""


def in_browser(browser: str, page: Path, *flags: str) -> str:
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.ci
@pytest.mark.parametrize(
    ("heading", "clicks", "order"),
    [
        ("peak forward, MiB", 1, ["1.00", "1.00", "2.00", "2.00", "4.00", "4.00", "unsupported", "OOM"]),
        ("peak forward, MiB", 2, ["4.00", "4.00", "2.00", "2.00", "1.00", "1.00", "unsupported", "OOM"]),
        ("operator", 1, ["naive"] * 4 + ["softmax/cudnn"] + ["softplus"] * 3),
    ],
)
def test_tables_sort_in_a_browser(
    text: str, tmp_path: Path, heading: str, clicks: int, order: list[str], require_tool: Callable[[str], str]
) -> None:
    script = CLICK.replace("HEADING", heading).replace("CLICKS", str(clicks))
    (tmp_path / "page.html").write_text(text.replace("</body>", script))
    dumped = in_browser(
        require_tool("chromium"), tmp_path / "page.html", "--screen-info={400x900}", "--start-maximized"
    )
    found = re.search("<title>(.*?)</title>", dumped)
    assert found
    direction, cells, overflow = json.loads(found[1])
    assert cells == order
    assert direction == ("ascending" if clicks == 1 else "descending")
    # However narrow the window, only the tables' own boxes scroll.
    assert overflow <= 0

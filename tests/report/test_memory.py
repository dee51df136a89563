"""The picture of memory over time on a page: its bytes are the record's, and in a browser it shows any moment."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcheck.__main__ import main
from memcheck.core.script_record import Alive, Course, Line, Moment, Origin, Point, ScriptRecord
from memcheck.core.units import highest
from memcheck.report.alive import line_of
from memcheck.report.memory import MOST_BYTES, MemoryPicture, path_of
from memcheck.report.script_tables import script_page, script_picture
from memcheck.snapshot import Snapshot
from memcheck.snapshot.files import calls_of

HISTORIES = sorted((Path(__file__).parents[1] / "data" / "histories").glob("*.json.gz"))
HOSTILE = '</script><img src=x onerror=alert(1)>&"\u2028'
MIB = 2**20


def line(number: int, text: str | None = None, file: str = "/home/me/train.py") -> Line:
    return Line(file, number, "forward", text)


ATTENTION = Origin("aten::softmax", "forward", None, "Net.layers.0.attention", line(10, "y = softmax(x)"))
HEAD = Origin("aten::addmm", "forward", None, "Net.head", line(20, HOSTILE))
LOSS = Origin("NllLossBackward0", "backward", None, None, line(30, file=f"/{HOSTILE}.py"))
WEIGHT = Origin("aten::empty", "elsewhere", "parameters", "Net.head", None)
ROWS = [(1, 0.1, [0, 0, 0, 8 * MIB]), (2, 0.2, [4 * MIB, 0, 0, 8 * MIB])]
ROWS += [(3, 0.3, [4 * MIB, 3 * MIB, 1234, 8 * MIB]), (4, 0.4, [0, 0, 0, 8 * MIB])]


@pytest.fixture
def record() -> ScriptRecord:
    course = Course.of([ATTENTION, HEAD, LOSS, WEIGHT], ROWS)
    alive = [Alive(place, size, 1) for place, size in zip(course.places, ROWS[2][2], strict=True)]
    peak = Moment(sum(ROWS[2][2]), 3, 0.3, 1, HEAD)
    return ScriptRecord(
        command=["train.py"], device="cpu", limit_bytes=None, peak=peak, alive=alive, phase_peaks={}, left_bytes=0,
        other_peaks={}, events=4, steps=0, seconds=1.0, refusals=0, refusal=None, least_bytes=4096, exit_code=0,
        error=None, ran_out=False, course=course,
    )  # fmt: skip


def shown(data: dict[str, Any]) -> dict[int, Counter[int]]:
    """Event -> site -> bytes, as the page's script reads them."""
    sizes, states = Counter[int](), {}
    for event, _, changes in data["points"]:
        sizes.update({site: size - sizes[site] for site, size in zip(changes[::2], changes[1::2], strict=True)})
        states[event] = Counter(sizes)
    return states


def by(data: dict[str, Any], view: str, event: int) -> dict[str, int]:
    sums, place = Counter[str](), data["views"].index(view)
    for site, size in shown(data)[event].items():
        sums[data["names"][data["sites"][site][0][place]][0]] += size
    return {name: size for name, size in sums.items() if size}


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_bytes_are_those_of_the_record(record: ScriptRecord) -> None:
    data = script_picture(record).data()
    assert {event: sum(sizes.values()) for event, sizes in shown(data).items()} == {
        event: sum(sizes) for event, _, sizes in ROWS
    }
    place, label, words = data["marks"][0]
    assert (data["points"][place][0], label, words) == (3, "peak 15 MiB", "at the peak")
    assert by(data, "line of Python", 3) == {line_of(each.place): each.bytes for each in record.alive}
    assert by(data, "module", 3) == {
        "Net.layers.0.attention": 4 * MIB,
        "Net.head": 11 * MIB,
        "outside of modules": 1234,
    }
    assert by(data, "what it holds", 2) == {"from forward": 4 * MIB, "parameters": 8 * MIB}
    path = [data["names"][name][0] for name in data["sites"][0][1]]
    assert path == ["Net.layers.0.attention", str(ATTENTION.line), "aten::softmax"]
    assert {text for _, text, _ in data["names"] if text} == {"y = softmax(x)", HOSTILE}


def test_a_record_of_an_earlier_version_has_no_picture(record: ScriptRecord) -> None:
    record.course = Course([], [])
    assert "figure" not in script_page(record).partition("<body>")[2].partition('<section aria-labelledby="tables"')[0]


def test_a_long_course_keeps_its_highest_points_and_its_whole() -> None:
    places = [Origin(f"aten::op{number}", "forward", None, None, line(number)) for number in range(700)]
    points = [Point(n, n / 7, [(n % 700, 10**10 + n), ((n + 350) % 700, 0)]) for n in range(3000)]
    points[1111] = Point(1111, 0.0, [(5, 10**14)])
    points[1112] = Point(1112, 0.0, [(5, 0)])
    views = {"what it holds": lambda place: place.layer, "line of Python": line_of}
    picture = MemoryPicture("", "", Course(places, points), views, [(1111, "peak", "at the peak")], "operator")
    data = picture.data()
    assert len(json.dumps(data)) <= MOST_BYTES
    assert len(data["points"]) > 100
    exact, sums = Counter[int](), {}
    for point in points:
        exact.update({place: size - exact[place] for place, size in point.changes})
        sums[point.event] = sum(exact.values())
    assert all(sum(sizes.values()) == sums[event] for event, sizes in shown(data).items())
    assert {1111, 2999} <= shown(data).keys()
    assert set(by(data, "what it holds", 1111)) == {"from forward"}
    assert highest([], 5, []) == []


def test_a_snapshot_has_the_calls_of_python(tmp_path: Path) -> None:
    snapshot = Snapshot.load(next(path for path in HISTORIES if "snapshot-1" in path.name))
    assert main(["snapshot", str(snapshot.record.file), "--html", str(tmp_path / "page.html")]) == 0
    data, record = data_in(tmp_path / "page.html"), snapshot.record
    states = shown(data)
    assert [mark[2] for mark in data["marks"]] == ["when memory ran out", "at the peak"]
    assert sum(states[record.peak.event].values()) == record.peak.allocated_bytes
    assert max(sum(sizes.values()) for sizes in states.values()) == record.peak.allocated_bytes
    assert max(data["lines"][0][1]) == record.peak_reserved_bytes
    frames = [
        {"filename": "/env/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
        {"filename": "/home/me/model.py", "line": 41, "name": "forward"},
        {"filename": "/env/site-packages/torch/nn/modules/module.py", "line": 2, "name": "_call_impl"},
        {"filename": "/home/me/train.py", "line": 12, "name": "main"},
    ]
    assert path_of(HEAD, calls_of(frames)) == [
        "/home/me/train.py:12 (main)",
        "/home/me/model.py:41 (forward)",
        "aten::addmm",
    ]


def test_a_prediction_has_what_its_peak_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)]\n"
        "    return torch.nn.Sequential(*layers), (torch.zeros(128, 64),)\n"
    )
    model, page = f"{tmp_path / 'f.py'}:make", tmp_path / "page.html"
    words = ["predict", "--model", model, "--device", "T4", "--memory-limit", "2MiB", "--no-changes"]
    assert main([*words, "--html", str(page), "--format", "json"]) == 0
    predicted, data = json.loads(capsys.readouterr().out), data_in(page)
    (ran_out, _, _), (peak, *_) = data["marks"]
    assert data["points"][ran_out][0] < data["points"][peak][0]
    sums = by(data, "module", data["points"][peak][0])
    assert sums == {
        path or "outside of modules": sizes["peak"] for path, sizes in predicted["modules"].items() if sizes["peak"]
    }
    assert data["lines"] == [["room 2 MiB", [2 * MIB] * len(data["points"])]]
    assert {"parameters", "optimizer state", "inputs"} < by(data, "what it holds", data["points"][peak][0]).keys()


def test_nothing_of_the_program_is_html(record: ScriptRecord) -> None:
    page = script_page(record)
    assert "<img" not in page
    assert page.count("</script>") == page.count("<script") == 3
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&amp;" in page


def test_a_source_is_read_of_python_alone(tmp_path: Path, record: ScriptRecord) -> None:
    for name in ("model.py", "secret.txt"):
        (tmp_path / name).write_text("first\nsecond <b>\n")
    lines = [line(2, None, str(tmp_path / name)) for name in ("model.py", "secret.txt", "missing.py")]
    places = [Origin("aten::empty", "forward", None, None, each) for each in lines]
    record.alive = [Alive(place, MIB, 1) for place in places]
    record.course = Course.of(places, [(3, 0.3, [MIB] * 3)])
    page = script_page(record)
    assert page.count("<code>second &lt;b&gt;</code>") == 1


# Leaves where --dump-dom shows it: what the page says, and whether more than the tables' own boxes scroll.
ASK = """<script>
ACTIONS
const part = (name) => document.querySelector(`.memory .${name}`);
const texts = (name, inner) => Array.from(part(name).querySelectorAll(inner), (one) => one.textContent);
const wide = Math.max(document.documentElement.scrollWidth, innerWidth) - innerWidth;
const answer = [innerWidth, wide, part("moment").textContent, texts("views", "div"), part("heading").textContent];
document.title = JSON.stringify([...answer, texts("graph", "button"), part("node").textContent, location.hash]);
</script></body>"""


@pytest.fixture
def browse(tmp_path: Path, require_tool: Callable[[str], str]) -> Callable[..., list[Any]]:
    """Opens a page in chromium, and returns what ASK found after the actions. place: after # of its address."""
    browser = require_tool("chromium")

    def browsed(text: str, place: str = "", actions: str = "", width: int = 1200) -> list[Any]:
        (tmp_path / "page.html").write_text(text.replace("</body>", ASK.replace("ACTIONS", actions)))
        window = [f"--screen-info={{{width}x900}}", "--start-maximized"]
        address = f"{(tmp_path / 'page.html').as_uri()}{place}"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", *window, "--dump-dom", address]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        found = re.search("<title>(.*?)</title>", dumped)
        assert found
        return json.loads(
            found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", " ").replace("&amp;", "&")
        )

    return browsed


@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_the_peak_without_a_wide_page(
    record: ScriptRecord, browse: Callable[..., list[Any]], width: int
) -> None:
    inner, wide, moment, rows, heading, boxes, _, _ = browse(script_page(record), width=width)
    assert (inner, wide) == (width, 0)
    assert moment == f"15 MiB ({15 * MIB + 1234:,} bytes) alive after event 3, 0.3 s: peak 15 MiB"
    assert rows[:3] == ["parameters8 MiB", "from forward7 MiB", "from backward1.21 KiB"]
    assert "/home/me/train.py:10 (forward)4 MiBy = softmax(x)" in rows
    assert f"/home/me/train.py:20 (forward)3 MiB{HOSTILE}" in rows
    assert heading == "Alive at the peak, by module, line and operator"
    assert boxes[:3] == ["all", "Net", "head"]


def test_a_link_a_click_and_keys_move_to_a_moment(record: ScriptRecord, browse: Callable[..., list[Any]]) -> None:
    page = script_page(record)
    _, _, moment, rows, heading, boxes, *_ = browse(page, "#t=2")
    assert moment == f"12 MiB ({12 * MIB:,} bytes) alive after event 2, 0.2 s"
    assert "Net.layers.0.attention4 MiB" in rows
    assert heading == "Alive after event 2, 0.2 s, by module, line and operator"
    keys = """
    const chart = document.querySelector(".memory .chart");
    const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
    ["End", "ArrowLeft", "ArrowLeft", "Enter"].forEach(press);
    const layers = [...document.querySelectorAll(".memory .graph button")].find((one) => one.textContent === "layers");
    layers.click();"""
    _, _, moment, _, _, boxes, node, place = browse(page, "", keys)
    assert (moment.partition(",")[0], place) == (f"12 MiB ({12 * MIB:,} bytes".partition(",")[0], "#t=2")
    assert boxes == ["all", "Net", "layers", "0", "attention", "train.py:10 (forward)", "aten::softmax"]
    assert node == f"layers: 4 MiB ({4 * MIB:,} bytes), 33.3 %"


def test_dragging_enlarges_a_part_and_the_pointer_shows_its_moments(
    record: ScriptRecord, browse: Callable[..., list[Any]]
) -> None:
    """The chart goes from 66 pixels, event 0, to 8 pixels before its end, event 5; the later half is enlarged."""
    drag = """
    const chart = document.querySelector(".memory .chart"), box = chart.getBoundingClientRect();
    chart.setPointerCapture = () => {};
    const point = (type, share) => chart.dispatchEvent(
        new PointerEvent(`pointer${type}`, { clientX: box.left + 66 + share * (box.width - 74) }));
    point("down", 0.5); point("move", 0.9); point("up", 1); point("move", 0.5);"""
    back = 'chart.dispatchEvent(new Event("dblclick")); point("move", 0.5);'
    page = script_page(record)
    assert "after event 3," in browse(page, "", drag)[2]
    assert "after event 2," in browse(page, "", drag + back)[2]

"""memcheck snapshot, and files of snapshots given to memcheck report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memcheck.__main__ import main
from memcheck.report.snapshots import overview_table
from memcheck.report.tables import to_markdown
from memcheck.snapshot import Snapshot

ROOT = Path(__file__).parents[2]
HISTORIES = sorted((ROOT / "tests" / "data" / "histories").glob("*.json.gz"))
RAN_OUT = next(path for path in HISTORIES if "snapshot-1" in path.name)


def test_the_answer_is_printed_as_the_page_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    page = (ROOT / "docs" / "snapshots.md").read_text(encoding="utf-8")
    found = re.search(r"```console\n\$ memcheck (snapshot tests\S+)\n(.*?)\n\.\.\.\n```", page, re.DOTALL)
    assert found is not None
    assert main(found[1].split()) == 0
    assert found[2] in capsys.readouterr().out


def test_the_table_of_the_page_is_that_of_the_histories() -> None:
    records = [record for path in HISTORIES for record in Snapshot.load(path).records]
    table = to_markdown(overview_table(records)).partition("\n\n")[2]
    assert table in (ROOT / "docs" / "snapshots.md").read_text(encoding="utf-8")


def test_the_cost_of_a_large_file_is_that_of_the_results() -> None:
    (row,) = json.loads((ROOT / "benchmarks" / "results" / "snapshots.json").read_text(encoding="utf-8"))["rows"]
    shown = (
        f"A file of {row['events'] / 1e6:.1f} million events, {row['file_bytes'] / 1e9:.2f} GB, takes "
        f"{row['seconds']:.0f} s and {row['peak_bytes'] / 1e9:.1f} GB of memory"
    )
    assert shown in (ROOT / "docs" / "snapshots.md").read_text(encoding="utf-8")


def test_json_has_the_fields_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(RAN_OUT), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = (ROOT / "docs" / "snapshots.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(\w+)`", page))
    assert found.keys() - names <= {"file", "settings", "events", "before_recording", "steps", "doubts"}
    assert found["replay"] == {
        "allocations": 199,
        "at_recorded_address": 199,
        "peak_reserved_bytes": 84_202_749_952,
        "exact": True,
        "reason": None,
    }
    assert (found["oom"]["requested_bytes"], found["oom"]["free_bytes"], found["oom"]["event"]) == (
        5_308_694_528,
        95_682_560,
        421,
    )
    assert sum(line["bytes"] for line in found["alive_at_peak"]) == found["peak_allocated_bytes"]
    assert [case["settings"] for case in found["what_if"]][:2] == ["as recorded", "expandable_segments:False"]
    assert main(["snapshot", str(RAN_OUT), str(HISTORIES[2]), "--format", "json"]) == 0
    assert [each["device"] for each in json.loads(capsys.readouterr().out)] == [1, 0]


def test_two_files_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (next(path for path in HISTORIES if size in path.name) for size in ("128_training", "256_training"))
    assert main(["snapshot", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Reserved at most: ")
    (total,) = (line.split() for line in out.splitlines() if line.startswith("all "))
    assert total[1] == "6,701.09"
    assert total[3] == "+1,990.10"
    assert "Alive at the peaks, by line" in out
    assert out.count("The model of the allocator replayed") == 2


def test_a_page_and_a_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "a" / "page.html", tmp_path / "b" / "picture.png"
    assert main(["snapshot", str(RAN_OUT), "--html", str(page), "--plot", str(picture)]) == 0
    text = page.read_text(encoding="utf-8")
    assert all(part in text for part in ('<figure class="memory"', "Memory ran out on cuda:1", "memcheck snapshot"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"Wrote {page}, {picture}" in capsys.readouterr().err


def test_report_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RAN_OUT), "--html", str(tmp_path / "page.html")]) == 0
    assert "Memory ran out on cuda:1" in capsys.readouterr().out
    assert (tmp_path / "page.html").exists()

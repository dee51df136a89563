"""Two runs of a script: the figures and places that changed, and paths of other kinds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from json_lines import write_json_lines

from memcheck.__main__ import main
from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.core.script_record import Alive, Growth, Line, Moment, Origin, Refusal, ScriptRecord
from memcheck.report.script_changes import by_line, matched, run_sentences, run_tables
from memcheck.report.tables import data_rows

FILE = "/home/me/train.py"
MIB = 2**20


def line(number: int, text: str | None, function: str = "forward", file: str = FILE) -> Line:
    return Line(file, number, function, text)


def run_of(*places: tuple[Line | None, str | None, int], **more: object) -> ScriptRecord:
    """A run with these lines, modules and bytes alive at its peak."""
    alive = [Alive(Origin("aten::add", "forward", None, module, where), size, 1) for where, module, size in places]
    peak = Moment(sum(each.bytes for each in alive), 1, 0.5, 1, alive[0].place)
    fields: dict[str, object] = {
        "command": ["train.py"], "device": "cpu", "limit_bytes": None, "peak": peak, "alive": alive,
        "phase_peaks": {"forward": peak.bytes}, "left_bytes": 0, "other_peaks": {},
        "events": 2, "steps": 4, "seconds": 1.0, "refusals": 0, "refusal": None,
        "least_bytes": 4096, "exit_code": 0, "error": None, "ran_out": False, "environment": {"torch": "2.13.0"},
        **more,
    }  # fmt: skip
    return ScriptRecord(**fields)  # type: ignore[arg-type]


BEFORE = run_of(
    (line(10, "y = softmax(x)"), "Net.attention", 16 * MIB),
    (line(12, "x = f(x)"), "Net.layer", 4 * MIB),
    (line(13, "x = f(x)"), "Net.layer", 2 * MIB),
    (line(20, "y = g(x)"), "Net.head", 7 * MIB),
    (None, None, 5),
)
NOW = run_of(
    (line(11, "x = f(x)"), "Net.layer", 4 * MIB),
    (line(12, "x = f(x)"), "Net.layer", 5 * MIB),
    (line(20, "y = g(x, 2)"), "Net.head", 8 * MIB),
    (line(30, "more()"), None, MIB),
    (None, None, 5),
)


def test_lines_that_moved_are_the_same() -> None:
    assert by_line(BEFORE, NOW) == {
        "/home/me/train.py:10 (forward)": (16 * MIB, 0),
        # The first of two equal lines is the one of the same number.
        "/home/me/train.py:12 (forward)": (4 * MIB, 5 * MIB),
        "/home/me/train.py:11 (forward), was 13": (2 * MIB, 4 * MIB),
        "/home/me/train.py:20 (forward)": (7 * MIB, 8 * MIB),  # its text was edited
        "/home/me/train.py:30 (forward)": (0, MIB),
        "no line of Python": (5, 5),
    }


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (line(1, "a()"), line(9, "a()"), True),
        (line(1, "a()"), line(9, "a()", file="/home/me/other/train.py"), True),
        (line(1, "a()"), line(9, "a()", file="/home/me/model.py"), False),
        (line(1, "a()"), line(9, "a()", function="backward"), False),
        (line(1, "a()"), line(1, "b()"), True),
        (line(1, "a()"), line(2, "b()"), False),
        (line(1, None), line(1, None), True),
        (line(1, None), line(2, None), False),
    ],
)
def test_lines_match_by_text_and_else_by_number(old: Line, new: Line, same: bool) -> None:
    assert matched([old], [new]) == ({old: new} if same else {})


def test_the_largest_change_comes_first_and_columns_add_up() -> None:
    figures, lines, modules = run_tables(BEFORE, NOW, 2)
    assert [row["figure"] for row in data_rows(figures)] == ["peak", "highest, forward"]
    rows = data_rows(lines)
    assert [row["change_mib"] for row in rows] == [-16, 2, 3, -11]
    assert [row["line"] for row in rows][-2:] == ["4 others", "all"]
    assert rows[-1]["now_mib"] == sum(row["now_mib"] for row in rows[:-1])  # type: ignore[misc]
    assert [row["module"] for row in data_rows(modules)] == ["Net.attention", "Net.layer", "2 others", "all"]


def test_the_sentences_name_a_failure_and_other_settings() -> None:
    failed = dataclasses.replace(NOW, command=["train.py", "--fast"], steps=3, error="ValueError: no", exit_code=1)
    assert run_sentences(BEFORE, failed) == [
        "Now it failed: ValueError: no.",
        "These differ: command: train.py -> train.py --fast; optimizer steps: 4 -> 3.",
    ]
    assert run_sentences(BEFORE, BEFORE) == []


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, record in (("before", BEFORE), ("now", NOW)):
        Path(name).mkdir()
        Path(name, "run.json").write_text(json.dumps(dataclasses.asdict(record), indent=1))
    Path("cases").mkdir()
    write_json_lines([Record(operator="mine", device="cpu")], Path("cases/records.jsonl"))


def test_a_record_is_read_as_it_was_written(folders: None) -> None:
    refusal = Refusal(5, NOW.peak, NOW.alive)
    record = dataclasses.replace(NOW, refusal=refusal, ran_out=True)
    Path("run.json").write_text(json.dumps({**dataclasses.asdict(record), "of_a_later_version": 1}))
    read = ScriptRecord.read(Path("run.json"))
    assert read == record
    assert read.alive[0].place.line is not None
    assert read.alive[0].place.line.text == "x = f(x)"
    Path("run.json").write_text('{"command": ["train.py"], "device": "cpu"}')
    with pytest.raises(UsageError, match=r"run.json is no report of memcheck run that this version reads: it has no "):
        ScriptRecord.read(Path("run.json"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("before now", 0),
        ("before/run.json now --fail-on-growth", 0),
        ("now before --fail-on-growth", 1),
        ("now before --fail-on-growth 50%", 1),
        ("now before --fail-on-growth 11534336B", 0),
    ],
)
def test_runs_are_compared(folders: None, capsys, words: str, code: int) -> None:
    assert main(["compare", *words.split()]) == code
    out, err = capsys.readouterr()
    assert err == ""
    sizes = ["29.00", "18.00", "-11.00"] if words.startswith("before") else ["18.00", "29.00", "+11.00"]
    assert out.startswith("Figures, MiB\n")
    assert ["peak", *sizes] in [row.split() for row in out.splitlines()]
    assert ("The peak grew by more than " in out) == bool(code)
    assert max(map(len, out.splitlines())) <= 120


def test_a_failure_that_is_new_is_growth(folders: None, capsys) -> None:
    failed = dataclasses.replace(NOW, error="ValueError: no", exit_code=1)
    Path("now/run.json").write_text(json.dumps(dataclasses.asdict(failed)))
    assert main(["compare", "before", "now", "--fail-on-growth"]) == 1
    assert capsys.readouterr().out.endswith("It fails now: ValueError: no.\n")
    assert main(["compare", "now", "now", "--fail-on-growth"]) == 0


def test_growth_from_step_to_step_is_compared(folders: None, capsys) -> None:
    leaking = dataclasses.replace(BEFORE, growing=[Growth(BEFORE.alive[0].place, 3 * MIB, 1.0, 9 * MIB)])
    Path("now/run.json").write_text(json.dumps(dataclasses.asdict(leaking)))
    assert main(["compare", "before", "now", "--fail-on-growth", "5%"]) == 1
    out = capsys.readouterr().out
    assert ["growth", "per", "step", "0.00", "3.00", "+3.00"] in [row.split() for row in out.splitlines()]
    assert out.endswith("The growth per step grew by more than 5 %: 0 B -> 3 MiB, +3,145,728 B.\n")


def test_programs_read_the_tables(folders: None, capsys) -> None:
    assert main(["compare", "before", "now", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert [table["name"] for table in json.loads(out)] == ["figures", "lines", "modules"]
    assert err == ""


def test_a_run_is_reported_again(folders: None, capsys) -> None:
    assert main(["report", "before", "--html", "page.html", "--output", "tables"]) == 0
    out = capsys.readouterr().out
    assert "The peak was 29 MiB (30,408,709 bytes)" in out
    assert "Alive at the peak, by line of Python\n" in out
    assert "memcheck run train.py" in Path("page.html").read_text()
    assert {path.name for path in Path("tables/tables").iterdir()} >= {"lines.csv", "modules.tex"}
    assert main(["report", "before/run.json", "now", "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("# Alive at the peak, by module") == 2


def test_a_folder_of_both_kinds_counts_as_cases(folders: None, capsys) -> None:
    Path("cases/run.json").write_bytes(Path("now/run.json").read_bytes())
    assert main(["report", "cases"]) == 0
    out, err = capsys.readouterr()
    assert "mine" in out
    assert "note: cases also holds a run: cases/run.json\n" in err
    assert main(["compare", "before", "cases/run.json"]) == 0
    assert main(["compare", "before", "cases"]) == 0
    assert capsys.readouterr().out.count("Figures, MiB") == 2

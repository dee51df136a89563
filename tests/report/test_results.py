"""What compare and report read: records of operators, of whole models, and of a caller's own callables."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forked import run_python
from pinned import assert_pinned

import memcheck
from memcheck.__main__ import main
from memcheck.bench.sweep.store import Store, read_records
from memcheck.core.record import Record
from memcheck.report.accounting import summary
from memcheck.report.cases import case_and_place
from memcheck.report.models import models_table
from memcheck.report.plots.pictures import pictures_of
from memcheck.report.tables import data_rows

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "benchmarks/results/model"
QUICK = ROOT / "benchmarks/results/quick"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(MODELS / "records.jsonl", tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(list(map(str, words)))
    return code, *capsys.readouterr()


def test_a_report_of_whole_models(folder: Path, capsys) -> None:
    code, out, err = run(capsys, "report", folder)
    assert (code, err) == (0, "")
    assert_pinned(Path(__file__).with_name("expected") / "models.txt", out)


def test_a_report_of_a_folder_that_holds_both(folder: Path, capsys) -> None:
    with (folder / "records.jsonl").open("a") as both:
        both.write((QUICK / "records.jsonl").read_text())
    code, out, _ = run(capsys, "report", folder, "--html", folder / "page.html", "--output", folder / "tables")
    assert code == 0
    assert out.count("25 cases") == 1
    assert out.count("5 cases of whole models") == 1
    assert "28.4" in next(line for line in out.splitlines() if line.startswith("naive") and " 4096 " in line)
    page = (folder / "page.html").read_text()
    assert "models: peak memory; cpu" in page
    assert "small, softmax, S 128, train, fp32" in page
    (rows,) = [
        table["rows"] for table in json.loads((folder / "tables/tables.json").read_text()) if table["name"] == "models"
    ]
    assert [row["operator"] for row in rows] == ["naive", "softmax", "linear (causal)", "compressed", "softplus"]
    assert "25 cases" not in run(capsys, "report", folder, "--case", "size=small")[1]


def test_other_tables_of_whole_models(folder: Path, capsys) -> None:
    code, out, _ = run(capsys, "report", folder, "--accounting", "--case", "operator=softmax")
    assert code == 0
    assert out.startswith("small, softmax, S 128, train, fp32\n")
    for flags in (["--scaling"], ["--pivot", "saved_bytes"], ["--cs336"]):
        code, out, err = run(capsys, "report", folder, *flags)
        assert (code, out) == (2, "")
        assert "need cases of operators: these folders hold none" in err


def test_pictures_of_whole_models(folder: Path, capsys) -> None:
    code, _, err = run(capsys, "report", folder, "--plot", "memory.svg")
    assert (code, err) == (0, f"\nWrote {folder / 'memory.svg'}\n")
    assert "With the optimizer" in (folder / "memory.svg").read_text()
    names = [picture.name for picture in pictures_of([*read_records(QUICK), *read_records(folder)], styles={})]
    assert {"memory-attention", "memory-models", "savings-attention"} <= set(names)


def test_a_prediction_of_a_model_says_what_it_is() -> None:
    measured, predicted, *_ = read_records(MODELS)
    assert (measured.source, predicted.source) == ("measured", "predicted")
    assert summary([predicted])[0].startswith("1 case of whole models (cpu, ")
    assert summary([predicted])[0].endswith(", train, predicted): 1 ok.")
    assert [row["source"] for row in data_rows(models_table([measured, predicted]))] == ["measured", "predicted"]


def own_record(rows: int = 8) -> Record:
    return memcheck.measure_memory(torch.nn.Linear(4, 4), torch.ones(rows, 4, requires_grad=True))


@pytest.mark.extension
def test_a_record_of_a_callable_is_written_and_read(tmp_path: Path, capsys) -> None:
    model, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    record = memcheck.measure_memory(model, x)
    before, after = tmp_path / "before", tmp_path / "after"
    assert memcheck.write_record(before, record, name="linear") == before / "records.jsonl"
    step = memcheck.measure_memory(model, x, optimizer=lambda parameters: torch.optim.AdamW(parameters))
    memcheck.write_record(before, step, name="a step")
    assert [read.operator for read in read_records(before)] == ["linear", "a step"]
    assert record.operator is None  # The caller's record is not changed.

    _, out, err = run(capsys, "report", before)
    assert err == ""
    assert out.startswith("2 cases: cpu, ")
    least, most = (line.split()[-1] for line in out.splitlines() if line.startswith(("linear", "a step")))
    assert least == "1.00"  # x least
    assert float(most) > 1.5  # It has the optimizer's state.
    assert "None" not in out
    assert run(capsys, "report", before, "--html", before / "page.html", "--output", before)[0] == 0
    assert "<h1>Peak memory</h1>" in (before / "page.html").read_text()
    assert run(capsys, "report", before, "--plot", "memory.svg")[0] == 0
    assert "With the optimizer" in (before / "memory.svg").read_text()

    memcheck.write_record(after, memcheck.measure_memory(model, torch.randn(64, 64, requires_grad=True)), name="linear")
    memcheck.write_record(after, step, name="a step")
    assert run(capsys, "compare", before, before, "--fail-on-growth")[0] == 0
    code, out, _ = run(capsys, "compare", before, after, "--fail-on-growth", "5%")
    assert code == 1
    assert "1 of 2 cases grew by more than 5 %" in out
    assert "\n  linear: peak forward" in out


@pytest.mark.extension
def test_a_record_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    names = ["one", "two", "three"]
    for name in names:
        memcheck.write_record(tmp_path, own_record(), name=name)
    before = (tmp_path / "records.jsonl").read_bytes().splitlines()
    memcheck.write_record(tmp_path, own_record(16), name="two")
    after = (tmp_path / "records.jsonl").read_bytes().splitlines()
    assert [read.operator for read in read_records(tmp_path)] == names
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]
    assert list(tmp_path.iterdir()) == [tmp_path / "records.jsonl"]


def test_commands_and_write_record_lose_no_line_of_each_other(tmp_path: Path) -> None:
    """One process replaces rows by name while another appends rows and drops replaced ones, as commands do."""
    script = (
        "import memcheck\nfrom memcheck.core.record import Record\nprint('ready', flush=True)\ninput()\n"
        f"for number in range(60): memcheck.write_record({str(tmp_path)!r}, Record(), name=f'named {{number}}')"
    )
    store = Store(tmp_path)
    store.begin()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        print(file=other.stdin, flush=True)
        for number in range(60):
            store.append(Record(operator=f"case {number}"))
            store.keep_newest(case_and_place)
        other.stdin.close()
    assert other.returncode == 0
    named = {f"{kind} {number}" for kind in ("named", "case") for number in range(60)}
    assert {record.operator for record in read_records(tmp_path)} == named
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


@pytest.mark.extension
def test_a_prediction_stands_beside_the_measurement(tmp_path: Path, capsys) -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(8, 4, requires_grad=True)
    for record in (memcheck.measure_memory(model, x), memcheck.predict_memory(model, x).record):
        memcheck.write_record(tmp_path, record, name="linear")
    assert [read.source for read in read_records(tmp_path)] == ["measured", "predicted"]
    assert "figures are as predicted, to the byte" in run(capsys, "report", tmp_path)[1]


@pytest.mark.extension
def test_a_record_joins_those_of_a_sweep(tmp_path: Path, capsys) -> None:
    words = ["--attention-type", "softplus", "--seq-len", "16", "--dim", "8", "--no-time", "--output", tmp_path]
    assert run(capsys, "sweep", *words)[0] == 0
    memcheck.write_record(tmp_path, own_record(), name="linear")
    code, _, err = run(capsys, "sweep", *words)
    assert code == 0, err
    assert [read.operator for read in read_records(tmp_path)] == ["softplus", "linear"]


def test_what_write_record_refuses(tmp_path: Path) -> None:
    prediction = memcheck.predict_memory(torch.nn.Linear(4, 4), torch.ones(8, 4))
    with pytest.raises(TypeError, match=r"prediction\.record, got Prediction"):
        memcheck.write_record(tmp_path, prediction, name="linear")  # type: ignore[arg-type]
    for name in ("", " ", "two\nlines"):
        with pytest.raises(ValueError, match="one line of text"):
            memcheck.write_record(tmp_path, prediction.record, name=name)
    assert list(tmp_path.iterdir()) == []


WRITE = """
import sys
import torch
from memcheck import measure_memory, write_record
record = measure_memory(torch.nn.Linear(4, 4), torch.ones(8, 4))
for number in range(40):
    write_record(sys.argv[1], record, name=f"{sys.argv[2]} {number}")
"""


@pytest.mark.extension
def test_processes_write_to_one_folder(tmp_path: Path) -> None:
    def write(name: str) -> None:
        run_python("-c", WRITE, tmp_path, name, timeout=120).check_returncode()

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, ("one", "two")))
    assert len(read_records(tmp_path)) == 80
